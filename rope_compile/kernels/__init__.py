"""Kernels behind the operators: a readable reference, a Triton kernel, a CPU path."""

from __future__ import annotations

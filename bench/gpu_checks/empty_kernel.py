"""The floor of a launch: a Triton kernel without arguments and without work."""

from __future__ import annotations

import triton


@triton.jit
def nothing():
    """Return at once."""
    return

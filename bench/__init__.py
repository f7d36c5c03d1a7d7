"""Benchmarks and audits, run from the repository root; no part of the installed package."""

"""Page faults, and the size of allocations that cause them."""

from __future__ import annotations

__all__ = ["FRESH_PAGES_BYTES", "page_faults"]

# glibc maps fresh pages for every allocation from this size on, unless it happens to have a hole of
# that size, and gives them back when it is freed: a call then pays a fault for each page of its
# outputs. Below, a process that has run for a while gets pages that it used before.
FRESH_PAGES_BYTES = 32 * 2**20


def page_faults() -> int | None:
    """Page faults of this process so far that needed no disk; None where they are not counted."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

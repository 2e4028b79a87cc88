"""Keep freed memory for the next micro-batch instead of returning it to the system.

glibc serves large tensors by mmap and unmaps them when freed, so each forward and backward touches gigabytes of fresh
pages: 1.2 million page faults in an update that has 2 without it. The price is that the process keeps its peak.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Set the allocator of this process so; False where it isn't glibc's. Harmless to call twice."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(*setting) == 1 for setting in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1))
    )

"""The largest resident memory of this process."""

from __future__ import annotations

import sys


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

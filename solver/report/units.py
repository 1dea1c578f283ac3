"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """Return microseconds, milliseconds or seconds with three significant digits."""
    if seconds is None:
        return "n/a"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s"


def size(nbytes: float | None) -> str:
    """Return GiB, MiB or, where that would be 0.0, KiB."""
    if nbytes is None:
        return "n/a"
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    small = 0 < nbytes < 0.1 * 2**20
    return f"{nbytes / 2**10:.1f} KiB" if small else f"{nbytes / 2**20:.1f} MiB"


def energy(joules: float | None) -> str:
    """Return joules or millijoules."""
    if joules is None:
        return "n/a"
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.1f} mJ"


def gain(new_s: float, old_s: float) -> str:
    """Return how much faster something is, as the paper says it (+24 %)."""
    if not new_s:
        return "n/a"
    return f"{100 * (old_s / new_s - 1):+.0f} %"


def rate(per_s: float) -> str:
    """Return a rate a second with three or four digits, thousands separated, no exponents."""
    if per_s >= 100:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2f}"

"""Packages that a part of hetero needs and `pip install hetero` alone does not bring."""

from __future__ import annotations

from importlib.util import find_spec


def is_here(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # taken out of `sys.modules`
        return False

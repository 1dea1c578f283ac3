"""Packages that a part of hetero needs and `pip install hetero` alone does not bring."""

from __future__ import annotations

from importlib.util import find_spec

from hetero.backends.errors import UserError


def require(package: str, extra: str, why: str) -> None:
    """Raise `UserError`, with the command that installs it, where `package` is missing."""
    if not is_here(package):
        raise UserError(f"{why}, and it is not installed: pip install 'hetero[{extra}]'")


def is_here(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # taken out of `sys.modules`
        return False

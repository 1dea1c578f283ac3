"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from typing import Final

_LINE: Final = re.compile(r"^Version:\s*(\S+)", re.MULTILINE | re.IGNORECASE)


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a package, None where it is not installed.

    The same as `importlib.metadata.version`, which parses the whole description as an e-mail.
    """
    try:
        text = importlib.metadata.distribution(name).read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        return None
    match = _LINE.search((text or "").partition("\n\n")[0])
    return match.group(1) if match else importlib.metadata.version(name)

"""Notices: what is worth a line on standard error and is no error.

That a machine has no profile is said once a day; `hetero --quiet`, or `HETERO_NOTICES=off`, says
nothing, `HETERO_NOTICES=always` says it every time.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from hetero.backends.host.folders import cache_folder
from hetero.errors import UserError, one_sentence

VARIABLE: Final = "HETERO_NOTICES"
CHOICES: Final = ("daily", "always", "off")
DAY_S: Final = 86400.0
NO_PROFILE: Final = "this machine has no profile yet"


def tell(notice: str) -> None:
    """Print a notice, unless it was said today or none are wanted. Raises `UserError` for a value
    of the variable that is not one.
    """
    choice = os.environ.get(VARIABLE, "").strip().lower() or CHOICES[0]
    if choice not in CHOICES:
        raise UserError(f"{VARIABLE} is one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "off":
        return
    if choice == "daily" and notice.startswith(NO_PROFILE) and not _first_today():
        return
    print(f"hetero: {one_sentence(notice)}", file=sys.stderr)


@cache
def tell_once(notice: str) -> None:
    """Print a notice that this process has not printed yet, as `tell` does."""
    tell(notice)


def quiet() -> None:
    """No notices in this process, nor in those that it starts."""
    os.environ[VARIABLE] = "off"


def stamp_path() -> Path:
    """Its time is when the notice was last said."""
    return cache_folder() / "said-no-profile"


def _first_today() -> bool:
    """Whether a day has passed; the clock may have been put back. Where nothing can be kept, it is
    said every time.
    """
    path = stamp_path()
    with suppress(OSError):
        if 0 <= time.time() - path.stat().st_mtime < DAY_S:
            return False
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return True

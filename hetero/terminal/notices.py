"""Notices: lines on standard error that are no errors.

That a machine has no profile is printed once a day; `hetero --quiet`, or `HETERO_NOTICES=off`,
prints no notices, `HETERO_NOTICES=always` prints that one every time.
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


def notify(notice: str) -> None:
    """Print a notice, unless it was printed today or notices are off.

    Raises `UserError` for an unknown value of the variable.
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
def notify_once(notice: str) -> None:
    """Print a notice that this process has not printed yet, as `notify` does."""
    notify(notice)


def quiet() -> None:
    """Turn notices off in this process and its children."""
    os.environ[VARIABLE] = "off"


def stamp_path() -> Path:
    """Return the file whose time is when the notice was last printed."""
    return cache_folder() / "said-no-profile"


def _first_today() -> bool:
    """Return whether a day has passed; the clock may have been set back.

    Without a cache folder the notice is printed every time.
    """
    path = stamp_path()
    with suppress(OSError):
        if 0 <= time.time() - path.stat().st_mtime < DAY_S:
            return False
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return True

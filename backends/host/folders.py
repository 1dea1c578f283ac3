"""The folders of hetero's files on a machine."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from hetero.backends.errors import UserError


def cache_folder() -> Path:
    """Return the folder of what can be made again (`XDG_CACHE_HOME`).

    A temporary one for a user without a home.
    """
    return _folder(platformdirs.user_cache_dir, "cache")


def data_folder() -> Path:
    """Return the folder of what cannot, or takes long (`XDG_DATA_HOME`); else as above."""
    return _folder(platformdirs.user_data_dir, "data")


def data_is_temporary() -> bool:
    """Return whether the system may empty `data_folder`."""
    return not _exists(platformdirs.user_data_dir)


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` expanded, or unchanged where that has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _folder(platform_folder: Callable[..., str], kind: str) -> Path:
    try:
        return Path(platform_folder("hetero", appauthor=False))
    except RuntimeError:  # no HOME, and no entry for this user id
        return _temporary_folder() / kind


def _exists(platform_folder: Callable[..., str]) -> bool:
    try:
        return bool(platform_folder("hetero", appauthor=False))
    except RuntimeError:
        return False


@functools.cache
def _temporary_folder() -> Path:
    """Return this user's folder for temporary files, which no other user can have made."""
    user = os.getuid() if hasattr(os, "getuid") else os.getpid()
    try:
        path = Path(tempfile.gettempdir()) / f"hetero-{user}"
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
        private = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o022
        owned = not hasattr(os, "getuid") or state.st_uid == user
        return path if private and owned else Path(tempfile.mkdtemp(prefix="hetero-"))
    except OSError as error:
        raise UserError(
            f"this user has no home folder, and none for temporary files can be made ({error}): "
            "name a writable folder in XDG_CACHE_HOME"
        ) from error

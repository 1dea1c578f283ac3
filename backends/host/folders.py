"""Where hetero keeps files on a machine."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """What can be made again; `XDG_CACHE_HOME` moves it."""
    return Path(platformdirs.user_cache_dir("hetero", appauthor=False))


def data_folder() -> Path:
    """What cannot, or takes long; `XDG_DATA_HOME` moves it."""
    return Path(platformdirs.user_data_dir("hetero", appauthor=False))

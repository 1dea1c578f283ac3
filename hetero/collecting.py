"""Garbage collections that would only look at what stays: imports and models make some hundred
thousand objects at once, and Python looks through all of them every time there are a quarter more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Nothing is collected inside. What was made inside counts as old afterwards."""
    if not gc.isenabled():
        yield
        return
    try:  # around `disable` too: a signal handler may raise right after it
        gc.disable()
        yield
    finally:
        try:
            if gc.get_freeze_count() == 0:  # else what was frozen would be thawed
                gc.freeze()
                gc.unfreeze()
        finally:
            gc.enable()

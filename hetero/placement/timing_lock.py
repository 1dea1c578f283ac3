"""A lock that a process holds while it times this machine: others that compute wait for it.

Times that are taken while another process has the cores are wrong, and decide for every later
start. The lock is the operating system's, so it is gone when its holder ends, however that is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hetero.backends.host.folders import cache_folder

POLL_S: Final = 0.01
TAKEN_S: Final = 1.0  # until others have let go of it, who only look


def lock_path() -> Path:
    """Return the file of the lock."""
    return cache_folder() / "locks" / "timing.lock"


@contextmanager
def timing() -> Iterator[None]:
    """Let processes that compute wait inside, as far as they ask; without a cache none does."""
    from filelock import FileLock, Timeout  # with asyncio's modules, which few starts need

    lock = FileLock(lock_path())
    with suppress(OSError, Timeout):
        lock_path().parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=TAKEN_S, poll_interval=POLL_S / 2)
    try:
        yield
    finally:
        lock.release()


def wait_while_timed(limit_s: float) -> bool:
    """Return when no other process times this machine; whether that was before `limit_s`."""
    from filelock import FileLock, Timeout

    give_up_s = time.monotonic() + limit_s
    lock = FileLock(lock_path())
    while True:
        with suppress(OSError):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if time.monotonic() > give_up_s:
                    return False
                time.sleep(POLL_S)
                continue
            lock.release()
        return True

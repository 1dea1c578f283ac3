"""Order the host's loads and stores in memory that a running kernel reads and writes.

x86 keeps the order of its stores and that of its loads. Arm keeps neither: a flag may be seen
before the data stored in front of it. Python has no fence, but its locks are made of instructions
that order memory: what comes before a lock's release is complete before it, and nothing after the
next acquisition starts earlier. Arm also keeps a release in front of a later acquisition, so that
both together are a full fence.
"""

from __future__ import annotations

import functools
import platform
import threading
from typing import Final

ORDERED: Final = frozenset({"x86_64", "amd64", "x86", "i386", "i686"})


def fence() -> None:
    """Complete this thread's earlier loads and stores before its later ones; x86 needs nothing."""
    if not keeps_order():
        lock = threading.Lock()  # of this call alone: none waits for it, whatever interrupts it
        lock.acquire()
        lock.release()
        lock.acquire()


@functools.cache
def keeps_order() -> bool:
    """Return whether this processor keeps loads in order among each other, and stores."""
    return platform.machine().lower() in ORDERED

"""A disk of a given speed: chunk files take as long to read and to write as they would on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hetero.contexts.chunk_format import ChunkFormat

PAUSE_S = 2e-3  # between two requests: after a shorter one the disk has read on meanwhile
SHORTEST_S = 0.5e-3  # of a sleep, which returns 0.1 ms late


class SlowDisk:
    """Used by any thread; the disk does one thing after another.

    Requests that follow each other are as fast together as one of all their bytes: thousands of
    some KB, each waited for by itself, would take three times as long by late sleeps alone.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = self._last_s = 0.0  # when it has done what it was asked for; last returned

    def take(self, start_s: float, nbytes: int) -> None:
        """Wait until this many bytes, asked for at `start_s`, have passed."""
        with self._lock:
            if start_s - self._last_s > PAUSE_S:
                self._free_s = max(self._free_s, start_s)
            self._free_s += nbytes / self.bytes_per_s
            left_s = self._free_s - time.perf_counter()
        if left_s > SHORTEST_S:
            time.sleep(left_s)
        self._last_s = time.perf_counter()


@contextmanager
def slow_disk(bytes_per_s: float) -> Iterator[None]:
    """Slow down the chunk files of this process; 0 leaves them as they are."""
    if not bytes_per_s:
        yield
        return
    disk, read, write = SlowDisk(bytes_per_s), ChunkFormat.read_run, ChunkFormat.write

    def read_slowly(*arguments: Any) -> int:
        start_s = time.perf_counter()
        nbytes = read(*arguments)
        disk.take(start_s, nbytes)
        return nbytes

    def write_slowly(*arguments: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        file = write(*arguments, **options)
        disk.take(start_s, file.nbytes)
        return file

    with (
        patch.object(ChunkFormat, "read_run", read_slowly),
        patch.object(ChunkFormat, "write", write_slowly),
    ):
        yield

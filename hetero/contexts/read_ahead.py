"""Reading ahead: between two calls, chunks of the contexts that were used last come into memory.

Minutes lie between two calls, and the disk is idle. The next context is likely one of the last ones
(`bench/contexts.py next`: ranks by recency forecast it as well as a learned Markov chain does). The
text of the last call is in the model's own cache, so its chunks are the first that make room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final
from weakref import WeakSet

from hetero.backends.host.affinity import unpinned
from hetero.contexts.chunk_files import ChunkFiles, Reader
from hetero.contexts.chunk_format import ChunkError
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk
from hetero.contexts.codec import STATES, ChunkCodec, Codes
from hetero.contexts.eviction import victims
from hetero.contexts.swap_out import SwapOut, stalled

BATCH: Final = 16  # chunks that are read in one go
WAIT_S: Final = 0.1  # between two looks at what is still being written


class ReadAhead:
    """A thread that reads while no call runs, and then has all chunks to itself (`paused`).

    `cached` returns the logical times of the calls whose texts are in the devices' caches. All it
    changes is which chunks are in memory, within its budget: it evicts written chunks alone, first
    those of cached texts, then those used before what it reads. What cannot be read is left alone:
    the next load of it finds out, and computes it again.
    """

    def __init__(
        self,
        memory: ChunkMemory,
        codec: ChunkCodec,
        files: Callable[[str], ChunkFiles],
        swap: SwapOut,
        cached: Callable[[], Iterable[int]],
    ) -> None:
        self._memory, self._codec, self._files = memory, codec, files
        self._swap, self._cached = swap, cached
        self._changed = threading.Condition()
        self._calls, self._wanted, self._closed, self._reading = 0, False, False, False
        self._unreadable: WeakSet[Chunk] = WeakSet()
        self._thread = threading.Thread(target=self._run, name="hetero read-ahead", daemon=True)
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Read nothing inside the block, that of a call, and begin again after it.

        It waits for one layer of a batch at most. Raises `UserError` if the disk does not answer.
        """
        try:
            with self._changed:
                self._calls += 1
                if not self._changed.wait_for(lambda: not self._reading, self._swap.wait_s):
                    raise stalled("read", self._swap.wait_s)
            yield
        finally:
            with self._changed:
                self._calls, self._wanted = self._calls - 1, True
                self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until there is nothing left to read; return whether that was within the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._wanted or self._reading), limit_s)

    def close(self) -> None:
        """End the thread. Raises `UserError` if the disk does not answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._swap.wait_s)
        if self._thread.is_alive():
            raise stalled("read", self._swap.wait_s)

    def _run(self) -> None:
        unpinned()
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._wanted and not self._calls))
            if not self._swap.is_written(WAIT_S):
                continue
            with self._changed:
                if self._stopped:
                    continue
                self._wanted, self._reading = False, True
            try:
                self._fill()
            finally:
                with self._changed:
                    self._reading = False
                    self._changed.notify_all()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._calls > 0

    def _fill(self) -> None:
        """Read batches of absent chunks, those used last first, until memory is full of newer."""
        while not self._stopped:
            batch, codes = self._claimed()
            if not batch:
                return
            done = False
            try:
                done = self._read(batch, codes)
            finally:
                for chunk, each in zip(batch, codes, strict=True):
                    if done:
                        self._memory.keep(chunk, each)
                    else:
                        self._memory.budget.give(each.nbytes)

    def _read(self, batch: Sequence[Chunk], codes: Sequence[Codes]) -> bool:
        """Read chunks of one app; return whether all were, and no call has begun meanwhile."""
        reader: Reader | None = None
        try:
            with closing(self._files(batch[0].app).reader(batch)) as reader:
                for layer in range(self._codec.layers):
                    if self._stopped:
                        return False
                    reader.layer(layer, codes)
        except (ChunkError, OSError):
            self._unreadable.add(batch[0 if reader is None else reader.at])
            return False
        return True

    def _claimed(self) -> tuple[list[Chunk], list[Codes]]:
        """Return the next chunks of one app to read, with codes whose bytes are claimed."""
        batch: list[Chunk] = []
        codes: list[Codes] = []
        with self._memory.lock:
            cached = set(self._cached())
            absent = [
                chunk
                for chunk in self._memory.table
                if chunk.codes is None
                and chunk.place is not None
                and not (chunk.bits == STATES or chunk.used in cached or chunk in self._unreadable)
            ]
            absent.sort(key=lambda x: (-x.used, x.app, x.start))
            evictable = _evictable(self._memory.table, cached)
            for chunk in (x for x in absent[:BATCH] if x.app == absent[0].app):
                tokens, bits = len(chunk.tokens), chunk.readable_bits
                room = self._room(self._codec.nbytes(tokens, bits), chunk, evictable)
                if not room:
                    break
                batch.append(chunk)
                codes.append(self._codec.empty(tokens, bits))
        return batch, codes

    def _room(self, nbytes: int, chunk: Chunk, evictable: list[tuple[bool, Chunk]]) -> bool:
        """Take bytes for a chunk, evicting others that are cached, or used before it."""
        memory = self._memory
        while memory.budget.free < nbytes and evictable:
            cached, other = evictable[0]
            if not cached and other.used >= chunk.used:
                return False
            del evictable[0]
            memory.evict(other)
        return memory.budget.take(nbytes)


def _evictable(chunks: Iterable[Chunk], cached: set[int]) -> list[tuple[bool, Chunk]]:
    """Return written chunks in the order to evict them, and whether their text is cached."""
    written = ((x.used in cached, x) for x in victims(chunks, "lctru") if x.place is not None)
    return sorted(written, key=lambda x: not x[0])

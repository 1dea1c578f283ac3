"""Chunks in memory under one budget: Claim, Reclaim, and the lock of a working set.

The paper's words (LLMS, section 3.1): *Claim* takes bytes for a chunk, *Reclaim* frees those of
others. An evicted chunk is on the disk (it was written when its call returned), or only its text
remains; either way the loss is time only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunks import Chunk, ChunkTable
from hetero.contexts.codec import MIXED, Codes
from hetero.contexts.eviction import Policy, victims


class ChunkMemory:
    """The chunks of all contexts of all apps, and the bytes that their codes take.

    Any thread may use it. `lock` guards the table and its chunks' fields; `evictions` counts
    evicted chunks by where they are left ("disk" or "text"). `write_back`, if set, writes chunks
    that are only in memory before they are evicted.
    """

    def __init__(self, budget: ByteBudget, policy: Policy = "lctru") -> None:
        self.budget, self.policy = budget, policy
        self.table = ChunkTable()
        self.lock = threading.RLock()
        self.evictions: Counter[str] = Counter()
        self.write_back: Callable[[Sequence[Chunk]], None] | None = None

    def claim(self, nbytes: int) -> bool:
        """Take bytes from the budget, evicting chunks if needed; return whether they were taken.

        The caller gives them back.
        """
        with self.lock:
            return self.budget.take(nbytes) or (
                self.reclaim(nbytes - self.budget.free) and self.budget.take(nbytes)
            )

    def free(self, nbytes: int) -> None:
        """Evict chunks until that many bytes are free, if possible; sort the victims only once."""
        with self.lock:
            if self.budget.free < nbytes:
                self.reclaim(nbytes - self.budget.free)

    def reclaim(self, nbytes: int) -> bool:
        """Evict chunks until that many bytes were freed; return whether they were.

        Nothing is evicted if all victims together would not be enough.
        """
        with self.lock:
            order = list(victims(self.table, self.policy))
            if sum(chunk.codes.nbytes for chunk in order if chunk.codes is not None) < nbytes:
                return False
            evicted: list[Chunk] = []
            left = nbytes
            for chunk in order:
                same = self.policy == "context" and evicted and chunk.used == evicted[-1].used
                if left <= 0 and not same:
                    break
                left -= 0 if chunk.codes is None else chunk.codes.nbytes
                evicted.append(chunk)
            dirty = [chunk for chunk in evicted if chunk.dirty]
            if dirty and self.write_back is not None:
                self.write_back(dirty)
            for chunk in evicted:
                self.evict(chunk)
            return True

    def keep(self, chunk: Chunk, codes: Codes) -> None:
        """Store a chunk's codes, whose bytes were claimed.

        The bytes are given back if the chunk has no reference any more or is already in memory.
        """
        with self.lock:
            if chunk.refs and chunk.codes is None:
                chunk.codes = codes
            else:
                self.budget.give(codes.nbytes)

    def evict(self, chunk: Chunk) -> int:
        """Drop a chunk's codes from memory, and return the bytes freed."""
        with self.lock:
            if chunk.codes is None:
                return 0
            nbytes, chunk.codes = chunk.codes.nbytes, None
            self.budget.give(nbytes)
            self.evictions["disk" if chunk.place is not None else "text"] += 1
            return nbytes

    def lower(self, chunk: Chunk, bits: int) -> None:
        """Limit a chunk to `bits` bits, for good.

        Floats and mixed bits (16 and more) are left alone, and chunks that are not full, which are
        floats.
        """
        with self.lock:
            if max(bits, chunk.bits) > 8 or bits >= chunk.bits or not chunk.full:
                return
            chunk.bits = bits
            if chunk.codes is not None and chunk.codes.bits > bits:
                before, chunk.codes = chunk.codes.nbytes, chunk.codes.lowered(bits)
                self.budget.give(before - chunk.codes.nbytes)

    def release(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Drop references; return the chunks without any, whose codes are freed."""
        with self.lock:
            unreferenced = self.table.release(chunks)
            for chunk in unreferenced:
                if chunk.codes is not None:
                    self.budget.give(chunk.codes.nbytes)
                    chunk.codes = None
            return unreferenced

    @contextmanager
    def pinned(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Keep these chunks in memory inside the block: they are the working set of a call."""
        working_set = list(chunks)
        with self.lock:
            for chunk in working_set:
                chunk.pins += 1
        try:
            yield
        finally:
            with self.lock:
                for chunk in working_set:
                    chunk.pins -= 1

    def histogram(self, chunks: Iterable[Chunk]) -> dict[str, int]:
        """Count chunks by where they are: bits in memory, only on "disk", or only as "text".

        "mixed" are bits by layer.
        """
        counts: Counter[str] = Counter()
        with self.lock:
            for chunk in chunks:
                if chunk.codes is not None:
                    bits = chunk.codes.bits
                    counts["mixed" if bits >= MIXED else str(bits)] += 1
                else:
                    counts["text" if chunk.place is None else "disk"] += 1
        return dict(counts)

    def nbytes(self, chunks: Iterable[Chunk]) -> int:
        """Return the bytes in memory of these chunks."""
        with self.lock:
            return sum(chunk.codes.nbytes for chunk in chunks if chunk.codes is not None)

    def check(self) -> None:
        """Raise `AssertionError` where the accounts and chunks differ; for tests and idle times."""
        with self.lock:
            used = sum(c.codes.nbytes for c in self.table if c.codes is not None)
            assert used <= self.budget.used <= self.budget.limit, (used, self.budget.used)
            assert self.budget.peak <= self.budget.limit
            for chunk in self.table:
                assert chunk.refs > 0
                assert chunk.codes is None or chunk.codes.tokens == len(chunk.tokens)

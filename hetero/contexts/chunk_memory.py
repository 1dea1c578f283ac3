"""Chunks in memory under one budget: Claim, Reclaim, and the lock of a working set.

Paper's words (LLMS, section 3.1): *Claim* takes bytes for a chunk, *Reclaim* gives those of others
back. A chunk that leaves the memory is on the disk (it was written when its call returned), or is
text alone from then on; either way nothing is lost but time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunks import Chunk, ChunkTable
from hetero.contexts.codec import Codes
from hetero.contexts.eviction import Policy, victims


class ChunkMemory:
    """The chunks of all contexts of all apps, and the bytes that their codes take.

    Any thread. `lock` guards the table and what its chunks' fields say; `evictions` counts what
    left the memory, by where it then was ("disk" or "text"). `write_back`, if there is one, writes
    chunks that are in memory alone before they leave it.
    """

    def __init__(self, budget: ByteBudget, policy: Policy = "lctru") -> None:
        self.budget, self.policy = budget, policy
        self.table = ChunkTable()
        self.lock = threading.RLock()
        self.evictions: Counter[str] = Counter()
        self.write_back: Callable[[Sequence[Chunk]], None] | None = None

    def claim(self, nbytes: int) -> bool:
        """Take bytes from the budget, whose holder gives them back; whether that could be done."""
        with self.lock:
            return self.budget.take(nbytes) or (
                self.reclaim(nbytes - self.budget.free) and self.budget.take(nbytes)
            )

    def free(self, nbytes: int) -> None:
        """Let chunks go until so many bytes are free, if that can be: the order of leaving is
        looked for once.
        """
        with self.lock:
            if self.budget.free < nbytes:
                self.reclaim(nbytes - self.budget.free)

    def reclaim(self, nbytes: int) -> bool:
        """Let chunks go until so many bytes have come back; whether they have.

        Nothing goes where all that may would not be enough.
        """
        with self.lock:
            order = list(victims(self.table, self.policy))
            if sum(chunk.codes.nbytes for chunk in order if chunk.codes is not None) < nbytes:
                return False
            going: list[Chunk] = []
            left = nbytes
            for chunk in order:
                whole = self.policy == "context" and going and chunk.used == going[-1].used
                if left <= 0 and not whole:
                    break
                left -= 0 if chunk.codes is None else chunk.codes.nbytes
                going.append(chunk)
            dirty = [chunk for chunk in going if chunk.dirty]
            if dirty and self.write_back is not None:
                self.write_back(dirty)
            for chunk in going:
                self.evict(chunk)
            return True

    def keep(self, chunk: Chunk, codes: Codes) -> None:
        """A chunk's codes are in memory from here on; their bytes were claimed.

        Bytes of a chunk that nobody refers to any more, or that is there already, come back.
        """
        with self.lock:
            if chunk.refs and chunk.codes is None:
                chunk.codes = codes
            else:
                self.budget.give(codes.nbytes)

    def evict(self, chunk: Chunk) -> int:
        """Drop a chunk's codes from the memory, and return the bytes freed."""
        with self.lock:
            if chunk.codes is None:
                return 0
            nbytes, chunk.codes = chunk.codes.nbytes, None
            self.budget.give(nbytes)
            self.evictions["disk" if chunk.place is not None else "text"] += 1
            return nbytes

    def lower(self, chunk: Chunk, bits: int) -> None:
        """A chunk has at most so many bits from here on; it is never given some back. Floats (16
        bits and more) stay so.
        """
        with self.lock:
            if max(bits, chunk.bits) > 8 or bits >= chunk.bits:
                return
            chunk.bits = bits
            if chunk.codes is not None and chunk.codes.bits > bits:
                before, chunk.codes = chunk.codes.nbytes, chunk.codes.lowered(bits)
                self.budget.give(before - chunk.codes.nbytes)

    def release(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Give references up; the chunks that are gone, with what they had in memory."""
        with self.lock:
            gone = self.table.release(chunks)
            for chunk in gone:
                if chunk.codes is not None:
                    self.budget.give(chunk.codes.nbytes)
                    chunk.codes = None
            return gone

    @contextmanager
    def pinned(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """None of these leaves the memory inside the block: the working set of a call."""
        held = list(chunks)
        with self.lock:
            for chunk in held:
                chunk.pins += 1
        try:
            yield
        finally:
            with self.lock:
                for chunk in held:
                    chunk.pins -= 1

    def histogram(self, chunks: Iterable[Chunk]) -> dict[str, int]:
        """Return how many chunks are where: by bits in memory, "disk" alone, or "text" alone."""
        found: Counter[str] = Counter()
        with self.lock:
            for chunk in chunks:
                if chunk.codes is not None:
                    found[str(chunk.codes.bits)] += 1
                else:
                    found["text" if chunk.place is None else "disk"] += 1
        return dict(found)

    def nbytes(self, chunks: Iterable[Chunk]) -> int:
        """Return the bytes of chunks."""
        with self.lock:
            return sum(chunk.codes.nbytes for chunk in chunks if chunk.codes is not None)

    def check(self) -> None:
        """Raise `AssertionError` where accounts and chunks differ; for tests and idle times."""
        with self.lock:
            held = sum(c.codes.nbytes for c in self.table if c.codes is not None)
            assert held <= self.budget.used <= self.budget.limit, (held, self.budget.used)
            assert self.budget.peak <= self.budget.limit
            for chunk in self.table:
                assert chunk.refs > 0
                assert chunk.codes is None or chunk.codes.tokens == len(chunk.tokens)

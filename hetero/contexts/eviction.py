"""The order in which chunks are evicted from memory.

LCTRU (LLMS, section 3.4) has a queue for each number of bits, one after the other, heaviest first,
since the same bytes are then fewer chunks to compute again; within a queue the least recently used
chunk goes first. So a heavy chunk of the last call is evicted before a light one that was not used
in days. Reading costs by the byte, whatever the bits, and where chunks are read again that order is
worse than none (by a fifth on a slow disk). `lctru` therefore orders by call first, and by bits
within a call; `lctru-paper` is the paper's order. Of a call's chunks of equal bits the last of the
text goes first: the missing ones are then next to the next prompt and are computed in its call (not
in the paper).

A chunk that is on the disk is evicted before any that is only in memory, and the last, unfinished
chunk of a text after all others. Pinned chunks, those of the running call, stay.

`lru` ignores bits; `context` evicts all chunks of the least recent call at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from hetero.contexts.chunks import Chunk

Policy: TypeAlias = Literal["lctru", "lctru-paper", "lru", "context"]


def lctru(chunk: Chunk) -> tuple[Any, ...]:
    """Return the sort key of `lctru`; the smallest is evicted first."""
    return not chunk.full, chunk.dirty, chunk.used, -_bits(chunk), -chunk.start


def lctru_paper(chunk: Chunk) -> tuple[Any, ...]:
    """Return the sort key of the paper's order: a queue for each number of bits."""
    return not chunk.full, chunk.dirty, -_bits(chunk), chunk.used, -chunk.start


def _bits(chunk: Chunk) -> int:
    return chunk.codes.bits if chunk.codes is not None else 0


def lru(chunk: Chunk) -> tuple[Any, ...]:
    """Return the sort key of `lru`: that of `lctru` without the bits."""
    return not chunk.full, chunk.dirty, chunk.used, -chunk.start


def context(chunk: Chunk) -> tuple[Any, ...]:
    """Return the sort key of `context`: the last call of the chunk's context."""
    return chunk.used, -chunk.start


ORDERS: dict[Policy, Callable[[Chunk], tuple[Any, ...]]] = {
    "lctru": lctru,
    "lctru-paper": lctru_paper,
    "lru": lru,
    "context": context,
}


def victims(chunks: Iterable[Chunk], policy: Policy) -> Iterator[Chunk]:
    """Yield the chunks that may be evicted, in order."""
    yield from sorted((c for c in chunks if c.codes is not None and not c.pins), key=ORDERS[policy])

"""Which chunks leave the memory first.

LCTRU (LLMS, section 3.4): a queue for each number of bits, one behind the other, heaviest first,
since the same bytes are then fewer chunks to read or compute again; inside a queue the chunk whose
last call is longest ago. Of one call's chunks the last of the text goes first: what is missing is
then next to the next prompt and is computed in its call (not in the paper).

A chunk that is on the disk leaves before any that is in memory alone, and the last, unfinished
chunk of a text after all others. Pinned chunks stay: those of the call that runs.

`lru` has no queues, `context` lets all chunks of the call that is longest ago go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from hetero.contexts.chunks import Chunk

Policy: TypeAlias = Literal["lctru", "lru", "context"]


def lctru(chunk: Chunk) -> tuple[Any, ...]:
    """Smallest first."""
    bits = chunk.codes.bits if chunk.codes is not None else 0
    return not chunk.full, chunk.dirty, -bits, chunk.used, -chunk.start


def lru(chunk: Chunk) -> tuple[Any, ...]:
    """As `lctru`, without its queues."""
    return not chunk.full, chunk.dirty, chunk.used, -chunk.start


def context(chunk: Chunk) -> tuple[Any, ...]:
    """By the last call of its context alone."""
    return chunk.used, -chunk.start


ORDERS: dict[Policy, Callable[[Chunk], tuple[Any, ...]]] = {
    "lctru": lctru,
    "lru": lru,
    "context": context,
}


def victims(chunks: Iterable[Chunk], policy: Policy) -> Iterator[Chunk]:
    """Chunks that may leave the memory, in order."""
    yield from sorted((c for c in chunks if c.codes is not None and not c.pins), key=ORDERS[policy])

"""Which chunks leave the memory first.

LCTRU (LLMS, section 3.4) has a queue for each number of bits, one behind the other, heaviest
first, since the same bytes are then fewer chunks to compute again; inside a queue the chunk goes
whose last call is longest ago. So a heavy chunk of the call before goes ahead of a light one that
nobody has asked for in days. Reading costs by the byte, whatever bits they are, and where chunks
are read again that order is worse than having none (by a fifth on a slow disk). `lctru` therefore
looks at the call first, and at bits inside a call; `lctru-paper` is the order to the letter. Of a
call's chunks of equal bits the last of the text goes first: what is missing is then next to the
next prompt and is computed in its call (not in the paper).

A chunk that is on the disk leaves before any that is in memory alone, and the last, unfinished
chunk of a text after all others. Pinned chunks stay: those of the call that runs.

`lru` does not look at bits, `context` lets all chunks of the call that is longest ago go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from hetero.contexts.chunks import Chunk

Policy: TypeAlias = Literal["lctru", "lctru-paper", "lru", "context"]


def lctru(chunk: Chunk) -> tuple[Any, ...]:
    """Smallest first."""
    return not chunk.full, chunk.dirty, chunk.used, -_bits(chunk), -chunk.start


def lctru_paper(chunk: Chunk) -> tuple[Any, ...]:
    """Return a queue for each number of bits."""
    return not chunk.full, chunk.dirty, -_bits(chunk), chunk.used, -chunk.start


def _bits(chunk: Chunk) -> int:
    return chunk.codes.bits if chunk.codes is not None else 0


def lru(chunk: Chunk) -> tuple[Any, ...]:
    """Order as `lctru` does, whatever the bits."""
    return not chunk.full, chunk.dirty, chunk.used, -chunk.start


def context(chunk: Chunk) -> tuple[Any, ...]:
    """By the last call of its context alone."""
    return chunk.used, -chunk.start


ORDERS: dict[Policy, Callable[[Chunk], tuple[Any, ...]]] = {
    "lctru": lctru,
    "lctru-paper": lctru_paper,
    "lru": lru,
    "context": context,
}


def victims(chunks: Iterable[Chunk], policy: Policy) -> Iterator[Chunk]:
    """Yield chunks that may leave the memory, in order."""
    yield from sorted((c for c in chunks if c.codes is not None and not c.pins), key=ORDERS[policy])

"""Chunks of a context's text, and who refers to them.

A chunk is up to `CHUNK_TOKENS` tokens of a text, all layers. Its text is the truth; keys and values
are a cache of it that may be in memory (`codes`), on the disk (`place`), in both or in neither. A
chunk's key is a hash of everything that its keys and values depend on: an app's own salt, model and
codec (the root), then every token from the beginning of the text on. So equal beginnings of texts
of one app have equal keys and share chunks, and those of two apps never have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.contexts.codec import CHUNK_TOKENS, Codes


@dataclass(frozen=True)
class Place:
    """Where a chunk lies on the disk: its index in a file's batch, with `bits` bits."""

    file: int
    index: int
    bits: int


@dataclass(eq=False)
class Chunk:
    """One chunk: tokens [start, start + len(tokens)) of every text that begins like this.

    `bits` is what it may have at most; bits only fall, since a value's lower bits do not come back
    (a chunk that is computed again starts anew). `used` is the time of its last call, in
    milliseconds since 1970 and later than any call before; `density` is a mean over `seen` sampled
    rows; `pins` how many are at work on it, who must find it where it is.
    """

    app: str
    key: bytes
    start: int
    tokens: tuple[int, ...]
    bits: int
    refs: int = 0
    pins: int = 0
    used: int = 0
    density: float = 0.0
    seen: int = 0
    codes: Codes | None = None
    place: Place | None = None

    @property
    def stop(self) -> int:
        """Behind its last token."""
        return self.start + len(self.tokens)

    @property
    def full(self) -> bool:
        """Return whether it will not grow: all but a text's last chunk."""
        return len(self.tokens) == CHUNK_TOKENS

    @property
    def stored(self) -> bool:
        """Return whether its keys and values are in memory or on the disk."""
        return self.codes is not None or self.place is not None

    @property
    def dirty(self) -> bool:
        """Return whether they are in memory alone."""
        return self.codes is not None and self.place is None


def spans(tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Start and tokens of every chunk of a text."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield start, tuple(tokens[start : start + CHUNK_TOKENS])


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a chunk behind another (or behind an app's root)."""
    digest = hashlib.blake2b(parent, digest_size=32)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


class ChunkTable:
    """All chunks that a text refers to, by app and key. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[bytes, Chunk]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        for chunks in self._chunks.values():
            yield from chunks.values()

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def refer(self, app: str, root: bytes, tokens: Sequence[int], bits: int) -> list[Chunk]:
        """Return the chunks of a text, each with one reference more; those that are new are text
        alone.
        """
        known, parent, chunks = self._chunks.setdefault(app, {}), root, []
        for start, part in spans(tokens):
            parent = chained_key(parent, part)
            chunk = known.get(parent)
            if chunk is None:
                chunk = known[parent] = Chunk(app, parent, start, part, bits)
            assert chunk.tokens == part, "equal keys of unequal texts"
            chunk.refs += 1
            chunks.append(chunk)
        return chunks

    def known(self, app: str, root: bytes, tokens: Sequence[int]) -> int:
        """Return tokens at the beginning of a text whose chunks have keys and values somewhere."""
        chunks, parent, stop = self._chunks.get(app, {}), root, 0
        for _, part in spans(tokens):
            parent = chained_key(parent, part)
            chunk = chunks.get(parent)
            if chunk is None or not chunk.stored:
                break
            stop = chunk.stop
        return stop

    def release(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Give references up; the chunks that nobody refers to any more, which are gone."""
        gone = []
        for chunk in chunks:
            chunk.refs -= 1
            if chunk.refs == 0:
                del self._chunks[chunk.app][chunk.key]
                gone.append(chunk)
        return gone

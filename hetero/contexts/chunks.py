"""Chunks of a context's text, and their references.

A chunk is up to `CHUNK_TOKENS` tokens of a text, in all layers. Its text is the truth; its keys and
values are a cache that may be in memory (`codes`), on the disk (`place`), in both or in neither. A
chunk's key is a hash of everything that its keys and values depend on: the app's own salt, the
model and the codec (the root), then every token from the beginning of the text. So equal prefixes
of texts of one app have equal keys and share chunks, and those of two apps never do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetero.contexts.codec import CHUNK_TOKENS, MIXED, RAW, STATES, Codes


@dataclass(frozen=True)
class Place:
    """The place of a chunk on the disk: a file, its index in that file's batch, and its bits."""

    file: int
    index: int
    bits: int


@dataclass(eq=False)
class Chunk:
    """One chunk: tokens [start, start + len(tokens)) of every text with this prefix.

    `bits` is the most it may have; they only fall, since a value's lower bits cannot be restored (a
    chunk that is computed again starts over). `used` is the logical time of its last call, in
    milliseconds since 1970 and later than any call before; `density` is the mean over `seen`
    sampled rows; `pins` counts the users that need it to stay where it is.
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
        """Return the position after its last token."""
        return self.start + len(self.tokens)

    @property
    def full(self) -> bool:
        """Return whether it cannot grow: true for all but a text's last chunk, and for states."""
        return len(self.tokens) == CHUNK_TOKENS or self.bits == STATES

    @property
    def stored(self) -> bool:
        """Return whether its keys and values are in memory or on the disk."""
        return self.codes is not None or self.place is not None

    @property
    def readable_bits(self) -> int:
        """Return the bits to read from the disk: what is there, or fewer where it may have fewer.

        Floats and mixed bits (16 and more) are read as they are.
        """
        assert self.place is not None
        floats = max(self.place.bits, self.bits) > 8
        return self.place.bits if floats else min(self.place.bits, self.bits)

    @property
    def dirty(self) -> bool:
        """Return whether its keys and values are only in memory."""
        return self.codes is not None and self.place is None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states after a number of tokens, in a chunk without tokens of its own.

    `tail` has the keys and values of the tokens since the last full chunk, if there are any.
    """

    states: Chunk
    tail: Chunk | None

    @property
    def at(self) -> int:
        """Return the number of tokens that it is the state after."""
        return self.states.start

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks that it refers to."""
        return (self.states,) if self.tail is None else (self.states, self.tail)

    @property
    def stored(self) -> bool:
        """Return whether all that it refers to is in memory or on the disk."""
        return all(chunk.stored for chunk in self.chunks)


def first_bits(bits: int) -> int:
    """Return the bits of a text's first chunk where others have `bits`.

    Much of all attention rests on the first tokens, so what they lose, every token loses.
    """
    return bits if 8 < bits < MIXED else 8


def spans(tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the start and the tokens of every chunk of a text."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield start, tuple(tokens[start : start + CHUNK_TOKENS])


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the chunk that follows the one of key `parent` (or an app's root)."""
    digest = hashlib.blake2b(parent, digest_size=32)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


def end_keys(root: bytes, tokens: Sequence[int], places: Iterable[int]) -> dict[int, bytes]:
    """Return the keys of the last chunks of the texts that end at some places of a text."""
    keys = [root]
    for _, part in spans(tokens):
        keys.append(chained_key(keys[-1], part))
    ends = {}
    for at in (x for x in places if x <= len(tokens)):
        full, left = divmod(at, CHUNK_TOKENS)
        ends[at] = chained_key(keys[full], tokens[at - left : at]) if left else keys[full]
    return ends


class ChunkTable:
    """All referenced chunks, by app and key. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[bytes, Chunk]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        for chunks in self._chunks.values():
            yield from chunks.values()

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def refer(self, app: str, root: bytes, tokens: Sequence[int], bits: int) -> list[Chunk]:
        """Return the chunks of a text, each with one more reference.

        New ones have no keys and values yet, and so many bits, or 8: the first of a text
        (`first_bits`).
        """
        parent, chunks = root, []
        for start, part in spans(tokens):
            parent = chained_key(parent, part)
            chunks.append(self._referred(app, parent, start, part, bits))
        return chunks

    def _referred(
        self, app: str, key: bytes, start: int, part: tuple[int, ...], bits: int
    ) -> Chunk:
        known = self._chunks.setdefault(app, {})
        chunk = known.get(key)
        if chunk is None:
            chunk = known[key] = Chunk(app, key, start, part, bits if start else first_bits(bits))
        assert (chunk.start, chunk.tokens) == (start, part), "equal keys of unequal texts"
        chunk.refs += 1
        return chunk

    def refer_snapshot(self, app: str, root: bytes, tokens: Sequence[int]) -> Snapshot:
        """Return the snapshot after all of a text, each of its chunks with one more reference."""
        at, left = len(tokens), len(tokens) % CHUNK_TOKENS
        key, part = end_keys(root, tokens, [at])[at], tuple(tokens[at - left :])
        tail = self._referred(app, key, at - left, part, RAW) if left else None
        return Snapshot(self._referred(app, chained_key(key, ()), at, (), STATES), tail)

    def refer_snapshots(self, app: str, root: bytes, tokens: Sequence[int]) -> list[Snapshot]:
        """Return the known snapshots of a text and its beginnings, with one more reference."""
        known = self._chunks.get(app, {})
        keys = end_keys(root, tokens, {x.start for x in known.values() if x.bits == STATES})
        places = sorted(at for at, key in keys.items() if chained_key(key, ()) in known)
        return [self.refer_snapshot(app, root, tokens[:at]) for at in places]

    def known(self, app: str, root: bytes, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a text have keys and values in memory or on disk."""
        chunks, parent, stop = self._chunks.get(app, {}), root, 0
        for _, part in spans(tokens):
            parent = chained_key(parent, part)
            chunk = chunks.get(parent)
            if chunk is None or not chunk.stored:
                break
            stop = chunk.stop
        return stop

    def release(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Drop references, and return the chunks that have none left, removed from the table."""
        unreferenced = []
        for chunk in chunks:
            chunk.refs -= 1
            if chunk.refs == 0:
                del self._chunks[chunk.app][chunk.key]
                unreferenced.append(chunk)
        return unreferenced

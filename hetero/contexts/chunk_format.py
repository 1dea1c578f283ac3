"""Chunks on the disk: files that are written once, whole or not at all, with checksums.

A file holds the chunks of one batch (what a call left to write):

    magic, u32 length and u32 CRC of the header, header (JSON: key, tokens, bits, density of each)
    layer 0: chunk 0, chunk 1, …   layer 1: chunk 0, chunk 1, …

so that a layer of a whole batch is read in one go. A record is a plane of a chunk's layer, and its
CRC32, which also covers its place. Encrypted (`hetero.contexts.encryption`) the header is a salt
and the sealed JSON, and a record is sealed, with its tag in the place of the CRC32.

Keys say what a chunk's contents depend on (`hetero.contexts.chunks`), so a file is never used for
another model, format, codec or text. What cannot be read, is torn or was changed is an error of one
chunk, which is computed again.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from hetero.backends.host.files import atomic_writer
from hetero.contexts.chunks import Place
from hetero.contexts.codec import (
    CHUNK_TOKENS,
    HALF,
    NESTED,
    RAW,
    STATES,
    ChunkCodec,
    Codes,
)
from hetero.contexts.encryption import SALT_BYTES, TAG_BYTES, Box, SealError, Vault

MAGIC: Final = b"HTKV\x00\x00\x00\x01"
SEALED_MAGIC: Final = b"HTKV\x00\x00\x01\x01"
_HEAD: Final = struct.Struct("<8sII")
_CRC: Final = struct.Struct("<I")
_LONGEST_HEADER: Final = 16 << 20


class ChunkError(Exception):
    """A chunk on the disk, the `nth` requested, cannot be read: compute it again."""

    def __init__(self, text: str, nth: int = 0) -> None:
        super().__init__(text)
        self.nth = nth


@dataclass(frozen=True)
class Entry:
    """A chunk in a file's header. `tokens` of states are those that they are the states after."""

    key: bytes
    tokens: int
    bits: int
    density: float


@dataclass
class ChunkFile:
    """A file by its header. `live` are the chunks that something refers to."""

    path: Path
    nbytes: int
    data: int  # where the first block begins
    entries: tuple[Entry, ...]
    box: Box | None = None
    live: set[int] = field(default_factory=set)
    starts: dict[int, list[int]] = field(default_factory=dict)  # by kind of layers


class ChunkFormat:
    """The layout of files with chunks of one codec; with a `vault` all of it is sealed."""

    def __init__(self, codec: ChunkCodec, vault: Vault | None) -> None:
        self.codec, self._vault = codec, vault
        self._tail = _CRC.size if vault is None else TAG_BYTES  # after a block
        kinds = (*NESTED, HALF, RAW, *codec.mixed_bits)
        self._most = {STATES: 1 << 40} | dict.fromkeys(kinds, CHUNK_TOKENS)

    def room(self, entries: Sequence[Entry]) -> int:
        """Return how many bytes a file of these chunks takes at most."""
        return _HEAD.size + sum(220 + self._size(e.tokens, e.bits) for e in entries)

    def layer_bytes(self, tokens: int, bits: int, layer: int) -> int:
        """Return the bytes of a layer of a chunk, checksums included."""
        sizes = self.codec.plane_bytes(tokens, bits, layer)
        return sum(sizes) + self._tail * len(sizes)

    def _size(self, tokens: int, bits: int) -> int:
        counts = Counter(self.codec.kinds)
        return sum(n * self.layer_bytes(tokens, bits, layer) for layer, n in counts.items())

    def write(
        self, path: Path, entries: Sequence[Entry], planes: Iterator[bytes], *, durable: bool
    ) -> ChunkFile:
        """Write a file of these chunks, whole or not at all. Raises `OSError`."""
        header, box = self._header(entries)
        with atomic_writer(path, durable=durable) as file:
            file.write(_HEAD.pack(self._magic, len(header), zlib.crc32(header)) + header)
            for where, data in zip(self._order(entries), planes, strict=True):
                file.write(_block(box, data, *where))
            size = file.tell()
        return ChunkFile(path, size, _HEAD.size + len(header), tuple(entries), box)

    def open(self, path: Path) -> ChunkFile | None:
        """Return a file by its header, if that is whole and the file as long as it says."""
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD.size)
                magic, length, crc = _HEAD.unpack(head)
                header = file.read(min(length, _LONGEST_HEADER))
            if magic != self._magic or len(header) != length or zlib.crc32(header) != crc:
                return None
            box, text = None, header
            if self._vault is not None:
                box = self._vault.box("chunks", header[:SALT_BYTES])
                text = box.open(header[SALT_BYTES:], SEALED_MAGIC)
            entries = tuple(_entry(item, self._most) for item in json.loads(text))
            size = path.stat().st_size
        except (OSError, struct.error, ValueError, TypeError, RecursionError, SealError):
            return None
        data = _HEAD.size + length
        blocks = sum(self._size(entry.tokens, entry.bits) for entry in entries)
        return ChunkFile(path, size, data, entries, box) if size == data + blocks else None

    @property
    def _magic(self) -> bytes:
        return MAGIC if self._vault is None else SEALED_MAGIC

    def _header(self, entries: Sequence[Entry]) -> tuple[bytes, Box | None]:
        """Return a file's header, and the cipher of its planes."""
        text = json.dumps([[e.key.hex(), e.tokens, e.bits, e.density] for e in entries]).encode()
        if self._vault is None:
            return text, None
        salt = os.urandom(SALT_BYTES)
        box = self._vault.box("chunks", salt)
        return salt + box.seal(text, SEALED_MAGIC), box

    def _order(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, int, int, int]]:
        """Yield records in the order of a file: chunk, its number there, layer, plane."""
        counts = [len(self.codec.plane_bytes(x.tokens, x.bits, 0)) for x in entries]
        for layer in range(self.codec.layers):
            for index, entry in enumerate(entries):
                for plane in range(counts[index]):
                    yield entry, index, layer, plane

    def start(self, about: ChunkFile, index: int, layer: int) -> int:
        """Return where a chunk's layer begins in a file."""
        kinds = self.codec.kinds
        before = sum(self._starts(about, kind)[-1] for kind in kinds[:layer])
        return about.data + before + self._starts(about, kinds[layer])[index]

    def _starts(self, about: ChunkFile, kind: int) -> list[int]:
        """Return where each chunk begins in a layer of a kind, and where the layer ends."""
        if kind not in about.starts:
            sizes = (self.layer_bytes(x.tokens, x.bits, kind) for x in about.entries)
            about.starts[kind] = list(accumulate(sizes, initial=0))
        return about.starts[kind]

    def planes(self, file: BinaryIO, about: ChunkFile, index: int, layer: int) -> Iterator[bytes]:
        """Yield the planes of a chunk's layer, checked. Raises `ChunkError`."""
        entry, offset = about.entries[index], self.start(about, index, layer)
        for number, size in enumerate(self.codec.plane_bytes(entry.tokens, entry.bits, layer)):
            try:
                file.seek(offset)
                data = file.read(size + self._tail)
            except OSError as error:
                raise ChunkError(f"{about.path.name}: {error.strerror or error}") from error
            plane = _plane(about.box, memoryview(data), entry, index, layer, number)
            if plane is None or len(plane) != size:
                raise ChunkError(f"{about.path.name}: a block is damaged")
            offset += len(data)
            yield bytes(plane)

    def read_run(
        self,
        file: BinaryIO,
        about: ChunkFile,
        run: Sequence[tuple[Place, Codes]],
        layer: int,
        buffer: memoryview,
    ) -> int:
        """Fill a layer of neighbours' codes; return the bytes read (`ChunkFiles.read_run`).

        Raises `OSError`, and `ChunkError` for a damaged record.
        """
        sizes = [self.layer_bytes(x.tokens, x.bits, layer) for _, x in run]
        data = buffer[: sum(sizes)]
        file.seek(self.start(about, run[0][0].index, layer))
        count = file.readinto(data)  # type: ignore[attr-defined]
        at = 0
        for nth, (place, codes) in enumerate(run):
            entry = about.entries[place.index]
            for number, plane in enumerate(codes.planes):
                stop = at + len(plane[layer]) + self._tail
                whole = data[at : min(stop, count)]
                content = _plane(about.box, whole, entry, place.index, layer, number)
                if content is None:
                    raise ChunkError(f"{about.path.name}: a block is damaged", nth)
                plane[layer] = np.frombuffer(content, np.uint8)
                at = stop
        return len(data)


def _belongs(key: bytes, layer: int, plane: int) -> bytes:
    """Return a plane's place, with which its checksum begins, or for which it is sealed."""
    return key + bytes((layer & 255, layer >> 8, plane))


def _nth(index: int, layer: int, plane: int) -> int:
    """Return a distinct number for each record of a file."""
    return index << 32 | layer << 8 | plane


def _block(box: Box | None, data: bytes, entry: Entry, index: int, layer: int, plane: int) -> bytes:
    """Return a plane as it is stored in a file."""
    belongs = _belongs(entry.key, layer, plane)
    if box is not None:
        return box.seal_nth(_nth(index, layer, plane), data, belongs)
    return data + _CRC.pack(zlib.crc32(data, zlib.crc32(belongs)))


def _plane(
    box: Box | None, data: memoryview, entry: Entry, index: int, layer: int, plane: int
) -> bytes | memoryview | None:
    """Return a record's plane; None where it is damaged."""
    belongs = _belongs(entry.key, layer, plane)
    if box is not None:
        try:
            return box.open_nth(_nth(index, layer, plane), data, belongs)
        except SealError:
            return None
    body, crc = data[: -_CRC.size], data[-_CRC.size :]
    whole = len(crc) == _CRC.size and zlib.crc32(body, zlib.crc32(belongs)) == _CRC.unpack(crc)[0]
    return body if whole else None


def _entry(item: Any, most: Mapping[int, int]) -> Entry:
    """Return a header's entry; `most` are the tokens that it may have, by bits.

    Raises `ValueError` or `TypeError` for what is none.
    """
    key, tokens, bits, density = item
    if not (isinstance(tokens, int) and 0 < tokens <= most.get(bits, 0)):
        raise ValueError("no chunk")
    return Entry(bytes.fromhex(key), tokens, bits, float(density))

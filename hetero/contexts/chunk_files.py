"""Chunks on the disk: files that are written once, whole or not at all, and checked piece by piece.

A file holds the chunks of one batch (what a call left to write):

    magic, u32 length and u32 CRC of the header, header (JSON: key, tokens, bits, density of each)
    layer 0: chunk 0, chunk 1, …   layer 1: chunk 0, chunk 1, …

so that a layer of a whole batch is read in one go. A piece is a plane of a chunk's layer, and its
CRC32, which also covers where it belongs. Encrypted (`hetero.contexts.encryption`) the header is a
salt and the sealed JSON, and a piece is sealed, with its tag in the place of the CRC32.

Keys say what a chunk's contents depend on (`hetero.contexts.chunks`), so a file is never believed
for another model, format, codec or text. What cannot be read, is torn or was changed is an error of
one chunk, which is computed again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from hetero.backends.host.files import atomic_writer
from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunks import Chunk, Place
from hetero.contexts.codec import CHUNK_TOKENS, HALF, RAW, ChunkCodec, Codes
from hetero.contexts.encryption import SALT_BYTES, TAG_BYTES, Box, SealError, Vault

MAGIC: Final = b"HTKV\x00\x00\x00\x01"
SEALED_MAGIC: Final = b"HTKV\x00\x00\x01\x01"
_HEAD: Final = struct.Struct("<8sII")
_CRC: Final = struct.Struct("<I")
_LONGEST_HEADER: Final = 16 << 20


class ChunkError(Exception):
    """A chunk on the disk, `nth` of those that were asked for, cannot be had: compute it again."""

    def __init__(self, text: str, nth: int = 0) -> None:
        super().__init__(text)
        self.nth = nth


@dataclass(frozen=True)
class Entry:
    """A chunk in a file's header."""

    key: bytes
    tokens: int
    bits: int
    density: float


@dataclass
class _File:
    path: Path
    nbytes: int
    data: int  # where the first piece begins
    entries: tuple[Entry, ...]
    box: Box | None = None
    live: set[int] = field(default_factory=set)
    starts: list[int] = field(default_factory=list)


class ChunkFiles:
    """The files of one app's chunks, in a folder of its own, which any thread reads and writes.

    Bytes on the disk are taken from `budget` before they are written; a file goes when none of its
    chunks is referred to any more. With a `vault` all are encrypted.
    """

    def __init__(
        self, folder: Path, codec: ChunkCodec, budget: ByteBudget, vault: Vault | None = None
    ) -> None:
        self.folder, self.codec, self._budget, self._vault = folder, codec, budget, vault
        self._tail = _CRC.size if vault is None else TAG_BYTES  # behind a piece
        self._files: dict[int, _File] = {}
        self._next, self._numbering = 0, threading.Lock()

    def scan(self) -> dict[bytes, tuple[Place, float]]:
        """Return the chunks in the folder by key, with densities; files with a broken header, and
        those that the budget has no room for, are removed. Nothing is live yet.
        """
        found: dict[bytes, tuple[Place, float]] = {}
        for path in sorted(self.folder.glob("*.kv")):
            number = int(path.stem) if path.stem.isdecimal() else -1
            file = None if number < 0 else self._opened(path)
            if file is None or not self._budget.take(file.nbytes):
                path.unlink(missing_ok=True)
                continue
            self._files[number] = file
            self._next = max(self._next, number + 1)
            for index, entry in enumerate(file.entries):
                found[entry.key] = Place(number, index, entry.bits), entry.density
        return found

    def adopt(self, place: Place) -> None:
        """A chunk refers to it."""
        self._files[place.file].live.add(place.index)

    def drop(self, place: Place) -> None:
        """No chunk does any more; its file goes with its last one."""
        file = self._files.get(place.file)
        if file is not None:
            file.live.discard(place.index)
            if not file.live:
                self._remove(place.file)

    def sweep(self) -> None:
        """Remove the files that nobody refers to."""
        for number in [n for n, file in self._files.items() if not file.live]:
            self._remove(number)

    def nbytes(self, chunks: Sequence[tuple[Chunk, Codes]]) -> int:
        """At most what a file of them takes."""
        return self._room([Entry(c.key, x.tokens, x.bits, 0.0) for c, x in chunks])

    def _room(self, entries: Sequence[Entry]) -> int:
        return _HEAD.size + sum(220 + self._size(e.tokens, e.bits) for e in entries)

    def write(self, chunks: Sequence[tuple[Chunk, Codes]], *, durable: bool = True) -> list[Place]:
        """Return a new file of these chunks, on the disk (`durable`) when this returns. Raises
        `OSError`, and leaves nothing, where that cannot be.
        """
        entries = [Entry(c.key, x.tokens, x.bits, c.density) for c, x in chunks]
        return self._write(entries, _planes(chunks, self.codec.layers), durable=durable)

    def _write(
        self, entries: Sequence[Entry], planes: Iterator[bytes], *, durable: bool = True
    ) -> list[Place]:
        room = self._room(entries)
        if not self._budget.take(room):
            raise OSError(errno.ENOSPC, "the contexts' share of the disk is used up")
        with self._numbering:
            number, self._next = self._next, self._next + 1
        path = self.folder / f"{number:08d}.kv"
        header, box = self._header(entries)
        try:
            with atomic_writer(path, durable=durable) as file:
                file.write(_HEAD.pack(self._magic, len(header), zlib.crc32(header)) + header)
                for where, data in zip(self._order(entries), planes, strict=True):
                    file.write(_piece(box, data, *where))
                size = file.tell()
        except BaseException:
            self._budget.give(room)
            raise
        assert size <= room
        self._budget.give(room - size)
        file_of = _File(path, size, _HEAD.size + len(header), tuple(entries), box)
        file_of.live |= set(range(len(entries)))
        self._files[number] = file_of
        return [Place(number, index, entry.bits) for index, entry in enumerate(entries)]

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
        """Yield pieces as they lie: chunk, its number in the file, layer, plane."""
        counts = [len(self.codec.plane_bytes(entry.tokens, entry.bits)) for entry in entries]
        for layer in range(self.codec.layers):
            for index, entry in enumerate(entries):
                for plane in range(counts[index]):
                    yield entry, index, layer, plane

    def reader(self, chunks: Sequence[Chunk]) -> Reader:
        """Reads layers of chunks that are on the disk. Raises `ChunkError` as it does."""
        return Reader(self, [(chunk, self._place(chunk)) for chunk in chunks])

    def copy(self, number: int, chunks: Sequence[Chunk]) -> dict[Chunk, Place]:
        """Return chunks of a file in a new one, checked, piece by piece: no more than one of them
        is in memory. Those that are damaged, or that nobody refers to any more, are left out.
        Raises `OSError` or `ChunkError` where that cannot be, and leaves nothing.
        """
        about = self._files.get(number)  # whose last chunk another thread may drop meanwhile
        if about is None or not chunks:
            return {}
        with self._open(number) as source:
            sound = []
            for chunk in chunks:
                place = chunk.place
                if place is not None and place.file == number and place.index in about.live:
                    with contextlib.suppress(ChunkError):
                        for layer in range(self.codec.layers):
                            for _ in self._planes_of(source, about, place.index, layer):
                                pass
                        sound.append((chunk, place.index))
            if not sound:
                return {}
            old = [about.entries[index] for _, index in sound]
            pairs = zip(old, sound, strict=True)
            entries = [replace(entry, density=chunk.density) for entry, (chunk, _) in pairs]

            def planes() -> Iterator[bytes]:
                for layer in range(self.codec.layers):
                    for _, index in sound:
                        yield from self._planes_of(source, about, index, layer)

            places = self._write(entries, planes())
        return {chunk: place for (chunk, _), place in zip(sound, places, strict=True)}

    def entry(self, place: Place) -> Entry:
        """Return the header's record of a chunk."""
        return self._files[place.file].entries[place.index]

    def garbage(self, *, everything: bool = False) -> Iterator[int]:
        """Yield files of which less than half is referenced; with `everything` less than all."""
        for number, file in list(self._files.items()):
            if len(file.live) < len(file.entries) / (1 if everything else 2):
                yield number

    def scrub(self, number: int) -> bool:
        """Overwrite, in a file, the chunks without references; return whether that could be done.
        Takes no room on the disk.
        """
        about = self._files.get(number)
        if about is None:
            return True
        starts = self._starts(about)
        dead = [i for i in range(len(about.entries)) if i not in about.live]
        try:
            with about.path.open("r+b") as file:
                for layer in range(self.codec.layers):
                    for index in dead:
                        file.seek(about.data + layer * starts[-1] + starts[index])
                        file.write(bytes(starts[index + 1] - starts[index]))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return False
        return True

    def remove(self, number: int) -> None:
        """A file is not there any more."""
        if number in self._files:
            self._remove(number)

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[BinaryIO]:
        try:
            file = self._files[number].path.open("rb", buffering=0)
        except (OSError, KeyError) as error:
            raise ChunkError(f"file {number} cannot be opened: {error}") from error
        with file:
            yield file

    def read_run(
        self,
        file: BinaryIO,
        run: Sequence[tuple[Place, Codes]],
        layer: int,
        buffer: memoryview,
    ) -> int:
        """Fill a layer of neighbours' codes, of which the last may have fewer bits than there are,
        by way of a buffer that holds them; bytes that were read. Raises `ChunkError`.
        """
        about = self._files.get(run[0][0].file)
        if about is None:
            raise ChunkError(f"file {run[0][0].file} is not there any more")
        starts, first = self._starts(about), run[0][0].index
        offset = about.data + layer * starts[-1] + starts[first]
        sizes = [self.run_bytes(x.tokens, x.bits) for _, x in run]
        data = buffer[: sum(sizes)]
        try:
            file.seek(offset)
            count = file.readinto(data)  # type: ignore[attr-defined]
        except OSError as error:
            if len(run) > 1:  # which of them is it?
                return self._one_by_one(file, run, layer, buffer)
            raise ChunkError(f"{about.path.name}: {error.strerror or error}") from error
        at = 0
        for nth, (place, codes) in enumerate(run):
            entry = about.entries[place.index]
            for number, plane in enumerate(codes.planes):
                stop = at + plane.shape[1] + self._tail
                whole = data[at : min(stop, count)]
                found = _plane(about.box, whole, entry, place.index, layer, number)
                if found is None:
                    raise ChunkError(f"{about.path.name}: a piece is damaged", nth)
                plane[layer] = np.frombuffer(found, np.uint8)
                at = stop
        return len(data)

    def _one_by_one(
        self,
        file: BinaryIO,
        run: Sequence[tuple[Place, Codes]],
        layer: int,
        buffer: memoryview,
    ) -> int:
        count = 0
        for nth, each in enumerate(run):
            try:
                count += self.read_run(file, [each], layer, buffer)
            except ChunkError as error:
                error.nth = nth
                raise
        return count

    def run_bytes(self, tokens: int, bits: int) -> int:
        """That a layer of a chunk of so many bits takes in a file, checksums included."""
        return self._layer(tokens, bits)

    def _planes_of(self, file: BinaryIO, about: _File, index: int, layer: int) -> Iterator[bytes]:
        """Yield the planes of a chunk's layer, checked. Raises `ChunkError`."""
        entry, starts = about.entries[index], self._starts(about)
        offset = about.data + layer * starts[-1] + starts[index]
        for number, size in enumerate(self.codec.plane_bytes(entry.tokens, entry.bits)):
            try:
                file.seek(offset)
                data = file.read(size + self._tail)
            except OSError as error:
                raise ChunkError(f"{about.path.name}: {error.strerror or error}") from error
            found = _plane(about.box, memoryview(data), entry, index, layer, number)
            if found is None or len(found) != size:
                raise ChunkError(f"{about.path.name}: a piece is damaged")
            offset += len(data)
            yield bytes(found)

    def _starts(self, about: _File) -> list[int]:
        """Where each chunk begins in a layer, and where the layer ends."""
        if not about.starts:
            sizes = (self._layer(entry.tokens, entry.bits) for entry in about.entries)
            about.starts = list(accumulate(sizes, initial=0))
        return about.starts

    def _place(self, chunk: Chunk) -> Place:
        if chunk.place is None or chunk.place.file not in self._files:
            raise ChunkError("the chunk is not on the disk")
        if self.entry(chunk.place).key != chunk.key:
            raise ChunkError("the chunk's place holds another one")
        return chunk.place

    def _layer(self, tokens: int, bits: int) -> int:
        sizes = self.codec.plane_bytes(tokens, bits)
        return sum(sizes) + self._tail * len(sizes)

    def _size(self, tokens: int, bits: int) -> int:
        return self.codec.layers * self._layer(tokens, bits)

    def _opened(self, path: Path) -> _File | None:
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
            entries = tuple(_entry(item) for item in json.loads(text))
            size = path.stat().st_size
        except (OSError, struct.error, ValueError, TypeError, RecursionError, SealError):
            return None
        data = _HEAD.size + length
        pieces = sum(self._size(entry.tokens, entry.bits) for entry in entries)
        return _File(path, size, data, entries, box) if size == data + pieces else None

    def _remove(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)
        self._budget.give(file.nbytes)


class Reader:
    """Reads chunks layer by layer, neighbours in one go. Used by one thread; close it."""

    def __init__(self, files: ChunkFiles, chunks: Sequence[tuple[Chunk, Place]]) -> None:
        self._files, self._places = files, [place for _, place in chunks]
        self._stack = contextlib.ExitStack()
        self._open: dict[int, BinaryIO] = {}
        codec = files.codec
        raw = codec.nbytes(CHUNK_TOKENS, RAW)  # half of it: see `workspace_bytes`
        self._most = max(raw // 2, files.run_bytes(CHUNK_TOKENS, RAW))
        self._buffer = memoryview(bytearray(self._most))
        self.at = 0  # which chunk was read last
        self.nbytes = 0

    def layer(self, layer: int, codes: Sequence[Codes]) -> None:
        """Fill a layer of every chunk's codes. Raises `ChunkError`."""
        for start, stop in self._runs(codes):
            self.at, place = start, self._places[start]
            if place.file not in self._open:
                file = self._stack.enter_context(self._files._open(place.file))
                self._open[place.file] = file
            run = list(zip(self._places[start:stop], codes[start:stop], strict=True))
            try:
                read = self._files.read_run(self._open[place.file], run, layer, self._buffer)
            except ChunkError as error:
                self.at += error.nth
                raise
            self.nbytes += read

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def _runs(self, codes: Sequence[Codes]) -> Iterator[tuple[int, int]]:
        """Yield chunks that lie behind one another, all planes of all but the last wanted."""
        start, room = 0, self._most
        for i, (place, each) in enumerate(zip(self._places, codes, strict=True)):
            size = self._files.run_bytes(each.tokens, each.bits)
            before = self._places[i - 1]
            near = (place.file, place.index) == (before.file, before.index + 1)
            if i > start and not (near and codes[i - 1].bits == before.bits and size <= room):
                yield start, i
                start, room = i, self._most
            room -= size
        if codes:
            yield start, len(codes)


def _planes(chunks: Sequence[tuple[Chunk, Codes]], layers: int) -> Iterator[bytes]:
    """Yield the planes of chunks, in the order of a file."""
    for layer in range(layers):
        for _, codes in chunks:
            for plane in codes.planes:
                yield plane[layer].tobytes()


def _belongs(key: bytes, layer: int, plane: int) -> bytes:
    """Where a plane does: what its checksum begins with, or it is sealed for."""
    return key + bytes((layer & 255, layer >> 8, plane))


def _nth(index: int, layer: int, plane: int) -> int:
    """Return a number of its own for each piece of a file."""
    return index << 32 | layer << 8 | plane


def _piece(box: Box | None, data: bytes, entry: Entry, index: int, layer: int, plane: int) -> bytes:
    """Return a plane as it lies in a file."""
    belongs = _belongs(entry.key, layer, plane)
    if box is not None:
        return box.seal_nth(_nth(index, layer, plane), data, belongs)
    return data + _CRC.pack(zlib.crc32(data, zlib.crc32(belongs)))


def _plane(
    box: Box | None, data: memoryview, entry: Entry, index: int, layer: int, plane: int
) -> bytes | memoryview | None:
    """Return a piece's plane; None where it is damaged."""
    belongs = _belongs(entry.key, layer, plane)
    if box is not None:
        try:
            return box.open_nth(_nth(index, layer, plane), data, belongs)
        except SealError:
            return None
    body, crc = data[: -_CRC.size], data[-_CRC.size :]
    whole = len(crc) == _CRC.size and zlib.crc32(body, zlib.crc32(belongs)) == _CRC.unpack(crc)[0]
    return body if whole else None


def _entry(item: Any) -> Entry:
    """Raises `ValueError` or `TypeError` for what is none."""
    key, tokens, bits, density = item
    if not (isinstance(tokens, int) and 0 < tokens <= 16 and bits in (2, 4, 8, HALF, RAW)):
        raise ValueError("no chunk")
    return Entry(bytes.fromhex(key), tokens, bits, float(density))

"""The files of an app's chunks: their references and their bytes on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_format import ChunkError, ChunkFile, ChunkFormat, Entry
from hetero.contexts.chunks import Chunk, Place
from hetero.contexts.codec import CHUNK_TOKENS, RAW, STATES, ChunkCodec, Codes
from hetero.contexts.encryption import Vault


class ChunkFiles:
    """The files of one app's chunks, in a folder of its own, which any thread reads and writes.

    Bytes on the disk are taken from `budget` before they are written; a file is removed when none
    of its chunks is referenced any more. With a `vault` all are encrypted.
    """

    def __init__(
        self, folder: Path, codec: ChunkCodec, budget: ByteBudget, vault: Vault | None = None
    ) -> None:
        self.folder, self.codec, self._budget = folder, codec, budget
        self._format = ChunkFormat(codec, vault)
        self._files: dict[int, ChunkFile] = {}
        self._next, self._numbering = 0, threading.Lock()

    def scan(self) -> dict[bytes, tuple[Place, float]]:
        """Return the chunks in the folder by key, with densities.

        Files with a broken header, and those that the budget has no room for, are removed. Nothing
        is live yet.
        """
        places: dict[bytes, tuple[Place, float]] = {}
        for path in sorted(self.folder.glob("*.kv")):
            number = int(path.stem) if path.stem.isdecimal() else -1
            file = None if number < 0 else self._format.open(path)
            if file is None or not self._budget.take(file.nbytes):
                path.unlink(missing_ok=True)
                continue
            self._files[number] = file
            self._next = max(self._next, number + 1)
            for index, entry in enumerate(file.entries):
                places[entry.key] = Place(number, index, entry.bits), entry.density
        return places

    def states(self) -> set[int]:
        """Return the numbers of tokens that there are states after."""
        entries = (entry for file in self._files.values() for entry in file.entries)
        return {entry.tokens for entry in entries if entry.bits == STATES}

    def adopt(self, place: Place) -> None:
        """Add a chunk's reference to its file."""
        self._files[place.file].live.add(place.index)

    def drop(self, place: Place) -> None:
        """Drop a chunk's reference; its file is removed with the last one."""
        file = self._files.get(place.file)
        if file is not None:
            file.live.discard(place.index)
            if not file.live:
                self._remove(place.file)

    def sweep(self) -> None:
        """Remove the files without references."""
        for number in [n for n, file in self._files.items() if not file.live]:
            self._remove(number)

    def nbytes(self, chunks: Sequence[tuple[Chunk, Codes]]) -> int:
        """Return the most bytes that a file of these chunks takes."""
        return self._format.room([_entry_of(chunk, codes) for chunk, codes in chunks])

    def write(self, chunks: Sequence[tuple[Chunk, Codes]], *, durable: bool = True) -> list[Place]:
        """Write a new file of these chunks, which is on the disk (`durable`) when this returns.

        Raises `OSError`, and leaves nothing, where that fails.
        """
        entries = [_entry_of(chunk, codes) for chunk, codes in chunks]
        return self._write(entries, _planes(chunks, self.codec.layers), durable=durable)

    def _write(
        self, entries: Sequence[Entry], planes: Iterator[bytes], *, durable: bool = True
    ) -> list[Place]:
        room = self._format.room(entries)
        if not self._budget.take(room):
            raise OSError(errno.ENOSPC, "the contexts' share of the disk is used up")
        with self._numbering:
            number, self._next = self._next, self._next + 1
        path = self.folder / f"{number:08d}.kv"
        try:
            file = self._format.write(path, entries, planes, durable=durable)
        except BaseException:
            self._budget.give(room)
            raise
        assert file.nbytes <= room
        self._budget.give(room - file.nbytes)
        file.live |= set(range(len(entries)))
        self._files[number] = file
        return [Place(number, index, entry.bits) for index, entry in enumerate(entries)]

    def reader(self, chunks: Sequence[Chunk]) -> Reader:
        """Return a reader of layers of chunks on the disk. Raises `ChunkError` as it does."""
        return Reader(self, [(chunk, self._place(chunk)) for chunk in chunks])

    def copy(self, number: int, chunks: Sequence[Chunk]) -> dict[Chunk, Place]:
        """Copy chunks of a file to a new one, checked one by one, with one of them in memory.

        Damaged chunks, and those without references, are left out. Raises `OSError` or `ChunkError`
        where that fails, and leaves nothing.
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
                            for _ in self._format.planes(source, about, place.index, layer):
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
                        yield from self._format.planes(source, about, index, layer)

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
        """Overwrite, in a file, the chunks without references; return whether that succeeded.

        Takes no room on the disk.
        """
        about = self._files.get(number)
        if about is None:
            return True
        dead = [i for i in range(len(about.entries)) if i not in about.live]
        try:
            with about.path.open("r+b") as file:
                for layer in range(self.codec.layers):
                    for index in dead:
                        entry = about.entries[index]
                        file.seek(self._format.start(about, index, layer))
                        file.write(bytes(self.layer_bytes(entry.tokens, entry.bits, layer)))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return False
        return True

    def remove(self, number: int) -> None:
        """Remove a file."""
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
        """Fill a layer of neighbours' codes through a buffer; return the bytes read.

        The last chunk may be read with fewer bits than there are. Raises `ChunkError`.
        """
        about = self._files.get(run[0][0].file)
        if about is None:
            raise ChunkError(f"file {run[0][0].file} is not there any more")
        try:
            return self._format.read_run(file, about, run, layer, buffer)
        except OSError as error:
            if len(run) > 1:  # which of them is it?
                return self._one_by_one(file, run, layer, buffer)
            raise ChunkError(f"{about.path.name}: {error.strerror or error}") from error

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

    def layer_bytes(self, tokens: int, bits: int, layer: int) -> int:
        """Return the bytes of a layer of a chunk in a file, checksums included."""
        return self._format.layer_bytes(tokens, bits, layer)

    def _place(self, chunk: Chunk) -> Place:
        if chunk.place is None or chunk.place.file not in self._files:
            raise ChunkError("the chunk is not on the disk")
        if self.entry(chunk.place).key != chunk.key:
            raise ChunkError("the chunk's place holds another one")
        return chunk.place

    def _remove(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)
        self._budget.give(file.nbytes)


class Reader:
    """A reader of chunks layer by layer, neighbours in one go. Used by one thread; close it."""

    def __init__(self, files: ChunkFiles, chunks: Sequence[tuple[Chunk, Place]]) -> None:
        self._files, self._places = files, [place for _, place in chunks]
        self._stack = contextlib.ExitStack()
        self._open: dict[int, BinaryIO] = {}
        codec = files.codec
        raw = codec.nbytes(CHUNK_TOKENS, RAW)  # half of it: see `workspace_bytes`
        states = (files.layer_bytes(0, x.bits, 0) for x in self._places if x.bits == STATES)
        layers = (files.layer_bytes(CHUNK_TOKENS, RAW, layer) for layer in set(codec.kinds))
        self._most = max(raw // 2, *layers, *states)
        self._buffer = memoryview(bytearray(self._most))
        self.at = 0  # which chunk was read last
        self.nbytes = 0

    def layer(self, layer: int, codes: Sequence[Codes]) -> None:
        """Fill a layer of every chunk's codes. Raises `ChunkError`."""
        for start, stop in self._runs(codes, layer):
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

    def _runs(self, codes: Sequence[Codes], layer: int) -> Iterator[tuple[int, int]]:
        """Yield runs of adjacent chunks, of which all planes of all but the last are wanted."""
        start, room = 0, self._most
        for i, (place, each) in enumerate(zip(self._places, codes, strict=True)):
            size = self._files.layer_bytes(each.tokens, each.bits, layer)
            before = self._places[i - 1]
            near = (place.file, place.index) == (before.file, before.index + 1)
            if i > start and not (near and codes[i - 1].bits == before.bits and size <= room):
                yield start, i
                start, room = i, self._most
            room -= size
        if codes:
            yield start, len(codes)


def _entry_of(chunk: Chunk, codes: Codes) -> Entry:
    """Return the header's record of a chunk with these codes."""
    tokens = chunk.start if codes.bits == STATES else codes.tokens
    return Entry(chunk.key, tokens, codes.bits, chunk.density)


def _planes(chunks: Sequence[tuple[Chunk, Codes]], layers: int) -> Iterator[bytes]:
    """Yield the planes of chunks, in the order of a file."""
    for layer in range(layers):
        for _, codes in chunks:
            for plane in codes.planes:
                yield plane[layer].tobytes()

"""A disk cache of the packed weights of GGUF files, so that a file is packed once.

A store is `~/.cache/hetero/packed/KEY.safetensors`, laid out as the weights of a quantised
directory. KEY is a hash of the file's size, header and samples of its bytes, and of how it is
packed. The header of the store has the SHA-256 of all bytes of the file (over the hashes of parts
of 16 MiB, which two threads compute), which is compared while the model is prepared: before the
first token it is known whether the store is of this very file, however it was copied or touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.host.background import Background, Latch, in_background
from hetero.backends.host.files import atomic_write, atomic_writer, hold
from hetero.backends.host.folders import cache_folder
from hetero.backends.host.mapped import prefetch
from hetero.backends.weights import (
    PackedWeight,
    data_dtype,
    data_shape,
    scales_dtype,
    scales_shape,
    stacked,
)
from hetero.errors import ModelError
from hetero.models.gguf.file import GgufFile, Shard
from hetero.models.layout import page_padded
from hetero.models.packed_file import PlannedTensor, file_header, matrix_arrays
from hetero.models.safetensors_file import SafetensorsFile

VERSION: Final = "2"  # of the layout and of how blocks are packed
SMALLEST_BYTES: Final = 64 << 20  # what is less is packed in a few tenths of a second
MAX_STORES: Final = 4
PART_BYTES: Final = 16 << 20
SAMPLES: Final = 64
STABLE_S: Final = 2.0
DEFERRED_BYTES: Final = 1 << 30
AFTER_S: Final = 2.0
WRITTEN_BYTES: Final = 1 << 24  # at once: a process that ends waits for no more
_TENSORS: Final = ("data", "scales")
_DTYPES: Final = {"uint32": "U32", "int8": "I8", "uint8": "U8", "float16": "F16", "float32": "F32"}


class PartShape(NamedTuple):
    """Rows of a matrix in one storage."""

    storage: StorageFormat
    n: int
    k: int


Shapes = Mapping[str, Sequence[PartShape]]  # matrices in the order in which they are packed


def folder() -> Path:
    """Return the folder of the stores."""
    return cache_folder() / "packed"


def path_of(file: GgufFile, weight_format: WeightFormat) -> Path:
    """Return the path of a file's store, in the storage of a format."""
    digest = hashlib.sha256(f"{VERSION}|{file.nbytes}|{weight_format.storage}|".encode())
    for shard in file.shards:
        digest.update(shard.bytes[: shard.header_bytes].data)
        for start in range(0, shard.nbytes, max(shard.nbytes // SAMPLES, 1)):
            digest.update(shard.bytes[start : start + 4096].data)
    return folder() / f"{digest.hexdigest()[:40]}.safetensors"


class Content:
    """The hash of a file's bytes, computed in the background."""

    def __init__(self, file: GgufFile) -> None:
        jobs = [partial(_part_digest, *part) for part in _part_offsets(file)]
        halves = [in_background("hetero-content", jobs[i::2]) for i in range(2)]
        self._found = [halves[i % 2][i // 2] for i in range(len(jobs))]

    def hexdigest(self) -> str:
        """Wait for the hash, and return it."""
        return _digest_of(x.result() for x in self._found)


class StoreReader:
    """An existing store; `check` raises unless it is the file's."""

    def __init__(self, path: Path, file: GgufFile, shapes: Shapes) -> None:
        self.file, self._shapes, self._gguf = SafetensorsFile(path, locked=True), shapes, file
        wanted = {x.name: x for x in _plan(shapes)}
        entries = self.file.entries
        if any(
            name not in entries or (entries[name].dtype, entries[name].shape) != (x.dtype, x.shape)
            for name, x in wanted.items()
        ):
            raise ModelError(f"{path}: is not laid out as this version does; remove it")
        self._identity = file.identity()  # from before its bytes are read
        self._stable = _is_stable(file)
        seen = _noted(path)[0] == self._identity.encode()
        self._content: Content | None = None if seen else Content(file)

    def matrix(self, name: str) -> list[PackedWeight]:
        """Return the parts of a matrix, views of the mapped store."""
        matrices = []
        for i, (storage, n, k) in enumerate(self._shapes[name]):
            scales = self.file.array(f"{name}.{i}.scales") if storage.quantised else None
            data = self.file.array(f"{name}.{i}.data")
            matrices.append(PackedWeight(storage, n, k, data, scales))
        return matrices

    def forget(self, name: str) -> None:
        """Drop the pages of a matrix from memory until they are read again."""
        prefix = f"{name}."
        self.file.forget([x for x in self.file.entries if x.startswith(prefix)])

    def prefetch(self) -> None:
        """Start a thread that maps all pages, which are used soon."""
        self.file.prefetch()

    def check(self) -> None:
        """Wait for the file's hash. Raises `ModelError` if the store is another file's."""
        content, self._content = self._content, None
        if content is None:
            return
        if content.hexdigest() == self.file.metadata.get("content"):
            _note_seen(self.file.path, self._identity if self._stable else "", self._gguf)
            return
        with contextlib.suppress(OSError):
            self.file.path.unlink()
        raise ModelError(
            f"{self._gguf.path}: has changed since it was packed; its packed copy "
            f"{self.file.path} is removed: run this again"
        )


class StoreWriter:
    """A new store, which takes matrices in any order and exists once it has them all.

    Matrices are packed straight into the file (`places`), whose pages devices then use: they are
    the system's to write back and to drop, so a model that is opened for the first time takes no
    more memory than later. The hash of a file of up to `DEFERRED_BYTES` is computed by a thread of
    low priority, from `AFTER_S` after `finish` or from `close` on: packing and the first answer
    need the processor more. That of a larger one is computed while it is packed and its pages are
    in memory. All is called by one thread, but places are filled by any.
    """

    def __init__(self, path: Path, file: GgufFile, shapes: Shapes) -> None:
        self.path, self._shapes, self._file = path, shapes, file
        self._identity = file.identity()  # from before its bytes are read
        self._stable = _is_stable(file)
        self._plan = _plan(shapes)
        self._header = self._made_header("0" * 64)
        self._at: dict[str, int] = {}
        at = len(self._header)
        for tensor in self._plan:
            self._at[tensor.name] = at
            at += page_padded(tensor.nbytes)
        self._content = None if at <= DEFERRED_BYTES else Content(file)
        self._missing = set(shapes)
        self._finishing: Background[None] | None = None
        self._now = Latch()
        self._stack = contextlib.ExitStack()
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < 2 * at:
            raise OSError(f"{path.parent} has no room for {at} bytes")
        self._out: BinaryIO = self._stack.enter_context(atomic_writer(path, durable=False))
        os.truncate(self._out.fileno(), at)
        self._map = mmap.mmap(self._out.fileno(), at, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def places(self, name: str) -> list[StorePlace]:
        """Return the places of a matrix's parts."""
        return [StorePlace(self, f"{name}.{i}", part) for i, part in enumerate(self._shapes[name])]

    def add(self, name: str) -> None:
        """Count a matrix as packed: all its places are filled and do not change from now on."""
        self._missing.discard(name)

    def matrix(self, name: str) -> list[PackedWeight] | None:
        """Return the parts of a matrix, views of the mapped file; None if it is not packed yet."""
        return None if name in self._missing else [x.packed() for x in self.places(name)]

    def forget(self, name: str) -> None:
        """Drop the pages of a matrix from memory until they are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for tensor in self._plan:
                if tensor.name.startswith(f"{name}."):
                    start, length = self._at[tensor.name], page_padded(tensor.nbytes)
                    self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def prefetch(self) -> None:
        """Start a thread that maps all pages, which are used soon."""
        prefetch(self._bytes)

    def check(self) -> None:
        """Finish the store; one that lacks a matrix is discarded."""
        if self._missing:
            self.abandon()
        elif self._finishing is None:
            (self._finishing,) = in_background("hetero-store", [self._finish])

    def close(self) -> None:
        """Wait until everything is written; discard a store that was not checked."""
        self._now.open()
        if self._finishing is None:
            self._drop()
        else:
            self._finishing.result()

    def abandon(self) -> None:
        """Remove the store unless it is complete; matrices that were packed into it stay."""
        self.close()
        self._missing = set(self._shapes)

    def write(self, array: npt.NDArray[Any], name: str, start: int = 0) -> None:
        """Write a part of a tensor from byte `start` of it on. Raises `OSError`."""
        self._write(array, self._at[name] + start)

    def view(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return a tensor, a view of the mapped file."""
        start = self._at[name]
        nbytes = math.prod(shape) * dtype.itemsize
        return self._bytes[start : start + nbytes].view(dtype).reshape(shape)

    def _drop(self) -> None:
        with contextlib.suppress(_AbandonedError, OSError), self._stack:
            raise _AbandonedError

    def _finish(self) -> None:
        """Write the header with the file's hash, on the thread."""
        if self._content is None:
            _be_last()
            self._now.wait(AFTER_S)
        try:
            self._write(np.frombuffer(self._made_header(self._hexdigest()), np.uint8), 0)
            if self._file.identity() != self._identity:
                raise OSError(f"{self._file.path} was written meanwhile")
            hold(self._out.fileno())  # as a reader's, from before it has its name
            self._stack.close()
            _keep_newest(self.path)
            _note_seen(self.path, self._identity if self._stable else "", self._file)
        except OSError:
            self._drop()

    def _hexdigest(self) -> str:
        content, self._content = self._content, None
        if content is not None:
            return content.hexdigest()
        return _digest_of(_part_digest(*part) for part in _part_offsets(self._file))

    def _write(self, array: npt.NDArray[Any], at: int) -> None:
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        while left:
            done = os.pwrite(self._out.fileno(), left[:WRITTEN_BYTES], at)
            left, at = left[done:], at + done

    def _made_header(self, content: str) -> bytes:
        return file_header(
            self._plan, {"format": "hetero-packed", "version": VERSION, "content": content}
        )


class StorePlace:
    """The place of rows of one storage in a store, a `packing.Destination`."""

    def __init__(self, writer: StoreWriter, name: str, part: PartShape) -> None:
        self._writer, self._name, self._part = writer, name, part

    def put(self, first: int, chunk: PackedWeight) -> None:
        """Write blocks of rows from number `first` on. Raises `OSError`."""
        for kind, array in zip(_TENSORS, matrix_arrays(chunk), strict=False):
            start = first * (array.nbytes // len(array))
            self._writer.write(array, f"{self._name}.{kind}", start)

    def packed(self) -> PackedWeight:
        """Return the rows, views of the mapped file."""
        storage, n, k = self._part
        view, name = self._writer.view, self._name
        data = view(f"{name}.data", data_dtype(storage), data_shape(storage, n, k))
        if not storage.quantised:
            return PackedWeight(storage, n, k, data)
        scales = view(f"{name}.scales", scales_dtype(storage), scales_shape(storage, n, k))
        return PackedWeight(storage, n, k, data, scales)


class _AbandonedError(Exception):
    """The end of a writer that was abandoned."""


def open_store(
    file: GgufFile, weight_format: WeightFormat, shapes: Shapes
) -> StoreReader | StoreWriter | None:
    """Return the store of a file, or one to fill; None where it would not pay or cannot be."""
    if file.nbytes < SMALLEST_BYTES or not hasattr(os, "pwrite"):
        return None
    try:
        path = path_of(file, weight_format)
        if path.is_file():
            os.utime(path)
            with contextlib.suppress(ModelError):
                return StoreReader(path, file, shapes)
        return StoreWriter(path, file, shapes)
    except OSError:
        return None


def _keep_newest(path: Path) -> None:
    """Keep the most recently used stores, of which this is one."""
    stores = sorted(path.parent.glob("*.safetensors"), key=lambda x: x.stat().st_mtime)
    for old in stores[:-MAX_STORES]:
        old.unlink()
        old.with_suffix(".seen").unlink(missing_ok=True)


class Origin(NamedTuple):
    """The source of a store: its last known GGUF file, and whether this version reads the store."""

    file: Path | None
    readable: bool


def origin_of(store: Path) -> Origin:
    """Return the file that the store and its note name, unchecked."""
    try:
        readable = SafetensorsFile(store).metadata.get("version") == VERSION
    except ModelError:
        readable = False
    name = _noted(store)[1]
    return Origin(Path(os.fsdecode(name)) if name else None, readable)


def _noted(store: Path) -> tuple[bytes, bytes]:
    """Return identity and path of the store's last known file; empty if unknown."""
    try:
        identity, _, name = store.with_suffix(".seen").read_bytes().partition(b"\n")
    except OSError:
        return b"", b""
    return identity, name


def _is_stable(file: GgufFile) -> bool:
    """Return whether a file is old enough that a new write would change its mtime."""
    changed = max(shard.path.stat().st_ctime for shard in file.shards)
    return os.name != "nt" and time.time() - changed > STABLE_S


def _note_seen(path: Path, identity: str, file: GgufFile) -> None:
    """Note that the store at `path` is of this file; without an identity it is compared again."""
    noted = identity.encode() + b"\n" + os.fsencode(file.path.absolute())
    with contextlib.suppress(OSError):
        atomic_write(path.with_suffix(".seen"), noted, durable=False)


def _be_last() -> None:
    """Give this thread the lowest priority, where a thread can have one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _plan(shapes: Shapes) -> list[PlannedTensor]:
    plan = []
    for name, parts in shapes.items():
        for i, (storage, n, k) in enumerate(parts):
            kind = _DTYPES[data_dtype(storage).name]
            plan.append(PlannedTensor(f"{name}.{i}.data", kind, data_shape(storage, n, k)))
            if storage.quantised:
                kind = _DTYPES[scales_dtype(storage).name]
                shape = scales_shape(storage, n, k)
                plan.append(PlannedTensor(f"{name}.{i}.scales", kind, shape))
    return plan


def _digest_of(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _part_offsets(file: GgufFile) -> Iterator[tuple[Shard, int]]:
    """Yield the offsets of the hashed parts."""
    for shard in file.shards:
        for start in range(0, shard.nbytes, PART_BYTES):
            yield shard, start


def _part_digest(shard: Shard, start: int) -> bytes:
    digest = hashlib.sha256(shard.bytes[start : start + PART_BYTES].data).digest()
    shard.forget(start, start + PART_BYTES)
    return digest


def joined(weight_format: WeightFormat, parts: Sequence[PackedWeight]) -> PackedWeight:
    """Return a matrix of its parts."""
    return stacked(parts) if weight_format.of_file else parts[0]

"""A GGUF model: its metadata, and the places of its tensors in its mapped files.

The header is read with every count and length checked against the bytes that are there, so a broken
or hostile file costs no memory; the `gguf` library trusts them. Layout: `docs/gguf.md` of ggml.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.errors import ModelError
from hetero.models.gguf.kinds import SIZES, Kind
from hetero.models.split_files import split_names

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
KINDS: Final = frozenset(Kind)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4
MAX_NAME_BYTES: Final = 1 << 16
MAX_DEPTH: Final = 4  # of arrays of arrays

_STRING, _ARRAY = 8, 9
_SCALARS: Final = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_AGAIN: Final = "download the file again"
NO_UTF8: Final = "\ufffd<[89A-F][0-9A-F]>"  # how a byte that is no UTF-8 is written, a pattern
_LAST: dict[str, Any] = {}  # one entry, written in one step


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: its type, shape (rows first, as in safetensors), and bytes [start, stop)."""

    kind: Kind
    shape: tuple[int, ...]
    start: int
    stop: int


class Shard:
    """One file, checked and memory-mapped; `tensors` are the places of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.identity = identity_of(os.fstat(file.fileno()))
                self.nbytes = file.seek(0, 2)
                if self.nbytes < 24:
                    raise ModelError(
                        f"{path}: a GGUF file has at least 24 bytes, got {self.nbytes}; {_AGAIN}"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(
                f"{path}: cannot be read ({error.strerror or error}); check its permissions"
            ) from error
        reader = _Reader(path, self._map, self.nbytes)
        self.metadata, self.tensors, self.header_bytes = reader.read()
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def forget(self, start: int, stop: int) -> None:
        """Drop the whole pages of bytes [start, stop) from memory."""
        low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = min(stop, self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if low < high and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, low, high - low)


class GgufFile:
    """A checked and memory-mapped GGUF model, in one file or several (`shards`).

    Any of the shards may be named. Raises `ModelError` for a malformed model. `metadata` holds
    Python numbers, strings, lists of strings and numpy arrays of numbers.
    """

    def __init__(self, path: Path) -> None:
        self.shards = _shards(path)
        self.path = self.shards[0].path
        self.metadata = self.shards[0].metadata
        self.nbytes = sum(shard.nbytes for shard in self.shards)
        self._homes = {name: shard for shard in self.shards for name in shard.tensors}
        self.tensors = {name: shard.tensors[name] for name, shard in self._homes.items()}

    def renamed(self, names: Mapping[str, str]) -> GgufFile:
        """Return the same mapped model with some tensors alone, by other names (new: own)."""
        view = copy.copy(self)
        view.tensors = {new: self.tensors[name] for new, name in names.items()}
        view._homes = {new: self._homes[name] for new, name in names.items()}
        return view

    @classmethod
    def opened(cls, path: Path) -> GgufFile:
        """Return the model. The last one is cached while its files do not change.

        So one header is read for the metadata, the tokenizer and the weights.
        """
        last: GgufFile | None = _LAST.get("file")
        if last is not None and last.is_of(path) and last.is_current():
            return last
        file = cls(path)
        _LAST["file"] = file
        return file

    def release(self) -> None:
        """Drop it from the cache: it is unmapped when its last user drops it."""
        if _LAST.get("file") is self:
            _LAST.pop("file", None)

    def is_of(self, path: Path) -> bool:
        """Return whether this is one of the model's files."""
        return any(shard.path == path for shard in self.shards)

    def is_current(self) -> bool:
        """Return whether no file was written or replaced since it was opened."""
        try:
            return self.identity() == " ".join(shard.identity for shard in self.shards)
        except OSError:
            return False

    def identity(self) -> str:
        """Return what changes with any write to the files on disk: a file's ctime cannot be set."""
        return " ".join(identity_of(shard.path.stat()) for shard in self.shards)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor, a view of the mapped file."""
        info = self.tensors[name]
        return self._homes[name].bytes[info.start : info.stop]

    def forget(self, name: str) -> None:
        """Drop the pages of a tensor from memory; they are read again when touched."""
        info = self.tensors[name]
        self._homes[name].forget(info.start, info.stop)

    def fingerprint(self) -> str:
        """Return a hash of sizes, mtimes and headers; no weight is read."""
        digest = hashlib.sha256()
        for shard in self.shards:
            changed = shard.path.stat().st_mtime_ns
            digest.update(f"{shard.nbytes}|{changed}|".encode())
            digest.update(shard.bytes[: shard.header_bytes].data)
        return digest.hexdigest()


def identity_of(stat: os.stat_result) -> str:
    """Return what changes with any write to a file."""
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _shards(path: Path) -> list[Shard]:
    """Open all files of the model that `path` belongs to."""
    first = Shard(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return [first]
    names = split_names(path.name)
    if len(names) != count:
        raise ModelError(
            f"{path}: is one of {count} files of a model (split.count), which are named "
            f"NAME-00001-of-{count:05d}.gguf and so on; name them so, or make one file of them "
            "with llama-gguf-split --merge"
        )
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(
            f"{path}: the model has {count} files, of which {missing[0]} is not there{more}; "
            "download it into the same directory"
        )
    shards = [first if name == path.name else Shard(path.parent / name) for name in names]
    _check_shards(shards)
    return shards


def _check_shards(shards: list[Shard]) -> None:
    """Raise `ModelError` for files that do not belong together."""
    count, seen = len(shards), set[str]()
    for number, shard in enumerate(shards):
        numbers = (shard.metadata.get("split.no"), shard.metadata.get("split.count"))
        if numbers != (number, count):
            raise ModelError(
                f"{shard.path}: must be file {number} of {count} by its name (split.no, from 0, "
                f"and split.count), got {numbers[0]} of {numbers[1]}; {_AGAIN}"
            )
        twice = next((name for name in shard.tensors if name in seen), None)
        if twice is not None:
            raise ModelError(
                f"{shard.path}: tensor {twice} is in another of the {count} files as well; {_AGAIN}"
            )
        seen.update(shard.tensors)
    total = shards[0].metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise ModelError(
            f"{shards[0].path}: the {count} files must have {total} tensors (split.tensors.count), "
            f"got {len(seen)}; download them again"
        )


def _decoded(data: bytes) -> str:
    """Return UTF-8 text; an invalid byte X becomes U+FFFD<X>.

    So different bytes stay different names, and a tokenizer can make U+FFFD of it (`NO_UTF8`).
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
        return re.sub("[\udc80-\udcff]", lambda x: f"\ufffd<{ord(x[0]) - 0xDC00:02X}>", text)


class _Reader:
    """A reader of the header from start to end; `at` never passes `size`."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        """Return metadata, tensors, and the length of the header in bytes."""
        if self.take(4) != MAGIC:
            raise self.error("does not begin with GGUF")
        version = self.integer("<I")
        if version and not version & 0xFFFF:
            raise ModelError(
                f"{self.path}: GGUF file is big-endian, only little-endian ones are supported; "
                f"convert it with gguf-convert-endian {self.path} little"
            )
        if version not in VERSIONS:
            raise self.error(
                f"has version {version}, supported are {VERSIONS[0]} and {VERSIONS[1]}"
            )
        tensor_count, entry_count = self.integer("<Q"), self.integer("<Q")
        # The smallest entry has 13 bytes (an empty name, a type, a byte), the smallest tensor 24.
        self.check_count("metadata entries", entry_count, 13)
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            name = self.text("a metadata name", MAX_NAME_BYTES)
            if name in metadata:
                raise self.error(f"metadata entry {name} occurs twice")
            metadata[name] = self.value(name, self.integer("<I"), 0)
        self.check_count("tensors", tensor_count, 24)
        infos = self.infos(tensor_count)
        header = self.at
        return metadata, self.placed(infos, self.alignment(metadata)), header

    def infos(self, count: int) -> dict[str, tuple[Kind, tuple[int, ...], int]]:
        """Return type, shape and offset of every tensor."""
        infos: dict[str, tuple[Kind, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self.text("a tensor name", MAX_NAME_BYTES)
            if name in infos:
                raise self.error(f"tensor {name} occurs twice")
            dims = self.integer("<I")
            if not 1 <= dims <= MAX_DIMS:
                raise self.error(f"tensor {name} must have 1 to {MAX_DIMS} dimensions, got {dims}")
            shape = tuple(self.integer("<Q") for _ in range(dims))[::-1]
            kind = self.integer("<I")
            if kind not in KINDS:
                raise self.error(f"tensor {name} has the unknown type {kind}")
            infos[name] = (Kind(kind), shape, self.integer("<Q"))
        return infos

    def placed(
        self,
        infos: dict[str, tuple[Kind, tuple[int, ...], int]],
        alignment: int,
    ) -> dict[str, TensorInfo]:
        """Return the tensors with their bytes in the file, which must exist and not overlap."""
        base = -(-self.at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for name, (kind, shape, offset) in infos.items():
            start = base + offset
            stop = start + self.tensor_bytes(name, kind, shape)
            if offset % alignment or stop > self.size:
                raise self.error(
                    f"tensor {name} lies at bytes [{start}, {stop}) of a file of {self.size} bytes"
                )
            placed[name] = TensorInfo(kind, shape, start, stop)
        end = base
        for name, info in sorted(placed.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self.error(f"tensor {name} overlaps the one before it")
            end = info.stop
        return placed

    def tensor_bytes(self, name: str, kind: Kind, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor, whose rows are whole blocks."""
        block, nbytes = SIZES[kind]
        elements = 1
        for length in shape:
            elements *= length
        if elements < 1 or shape[-1] % block:
            raise self.error(
                f"tensor {name} of type {kind.name} must have rows of whole blocks of {block}, "
                f"got the shape {list(shape)}"
            )
        return int(elements // block * nbytes)

    def alignment(self, metadata: dict[str, Any]) -> int:
        """Return the alignment of the tensors in bytes."""
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 1 <= value <= 1 << 20 or value & (value - 1):
            raise self.error(f"general.alignment must be a power of two, got {value!r}")
        return value

    def value(self, name: str, kind: int, depth: int) -> Any:
        """Return one metadata value."""
        if kind == _STRING:
            return self.text(name)
        if kind == _ARRAY:
            return self.array(name, depth + 1)
        if kind not in _SCALARS:
            raise self.error(f"metadata entry {name} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        scalar = np.frombuffer(self.take(dtype.itemsize), dtype=dtype)[0]
        if dtype == np.float32:
            return float(str(scalar))  # 1e-06 as it was written, not as float32 rounds it
        return scalar.item()

    def array(self, name: str, depth: int) -> Any:
        """Return a list of strings or arrays, or an array of numbers."""
        kind, count = self.integer("<I"), self.integer("<Q")
        if depth > MAX_DEPTH:
            raise self.error(f"metadata entry {name} nests arrays deeper than {MAX_DEPTH}")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            self.check_count(name, count, dtype.itemsize)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        if kind == _STRING:
            return self.strings(name, count)
        self.check_count(name, count, 12)
        return [self.value(name, kind, depth) for _ in range(count)]

    def strings(self, name: str, count: int) -> list[str]:
        """Return consecutive strings; a vocabulary has hundreds of thousands."""
        self.check_count(name, count, 8)
        unpack, data, size, at = struct.Struct("<Q").unpack_from, self.data, self.size, self.at
        texts: list[str] = []
        add = texts.append
        for _ in range(count):
            if at + 8 > size:
                raise self.error(f"{name} extends beyond the end of the file")
            (length,) = unpack(data, at)
            at += 8
            if length > size - at:
                raise self.error(f"{name} has a string of {length} bytes beyond the file's end")
            add(_decoded(data[at : at + length]))
            at += length
        self.at = at
        return texts

    def text(self, name: str, limit: int | None = None) -> str:
        """Return a string; its length is checked before it is read.

        Names, which have a `limit`, are UTF-8.
        """
        length = self.integer("<Q")
        if length > self.size - self.at or (limit is not None and length > limit):
            raise self.error(f"{name} has {length} bytes, beyond the file's end or the rule")
        data = self.take(length)
        if limit is None:
            return _decoded(data)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{name} is not UTF-8 text ({error})") from error

    def integer(self, form: str) -> int:
        """Return a little-endian integer."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > self.size - self.at:
            raise self.error(f"ends at byte {self.size} in the middle of its header")
        data = self.data[self.at : self.at + count]
        self.at += count
        return data

    def check_count(self, what: str, count: int, smallest: int) -> None:
        """Raise `ModelError` for more elements than the rest of the file can hold."""
        if count > (self.size - self.at) // smallest:
            raise self.error(f"names {count} {what}, more than its {self.size} bytes can hold")

    def error(self, what: str) -> ModelError:
        """Return the error `path: what; remedy`."""
        return ModelError(f"{self.path}: GGUF file {what}; {_AGAIN}")

"""A GGUF file: its metadata, and where its tensors lie in the mapped bytes.

The header is read with every count and length checked against the bytes that are there, so a broken
or hostile file costs no memory; the `gguf` library trusts them. Layout: `docs/gguf.md` of ggml.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.errors import ModelError
from hetero.models.gguf.kinds import SIZES, Kind

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
_LAST: dict[str, Any] = {}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: its type, shape (rows first, as in safetensors), and bytes [start, stop)."""

    kind: Kind
    shape: tuple[int, ...]
    start: int
    stop: int


class GgufFile:
    """A checked and memory-mapped GGUF file. Raises `ModelError` for a malformed one.

    `metadata` holds Python numbers, strings, lists of strings and numpy arrays of numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
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
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def opened(cls, path: Path) -> GgufFile:
        """The file; the last one is remembered as long as it is the same on disk, so that those who
        want its metadata, its tokenizer and its weights read one header.
        """
        try:
            found = path.stat()
        except OSError:
            return cls(path)
        key = (path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if _LAST.get("key") != key:
            _LAST.update(key=key, file=cls(path))
        file: GgufFile = _LAST["file"]
        return file

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, a view of the mapped file."""
        info = self.tensors[name]
        return self._bytes[info.start : info.stop]

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of the mapped file."""
        return self._bytes

    def forget(self, name: str) -> None:
        """Let the pages of a tensor leave memory; they are read again when touched."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        info = self.tensors[name]
        low = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        high = info.stop // mmap.PAGESIZE * mmap.PAGESIZE
        if low < high:
            self._map.madvise(mmap.MADV_DONTNEED, low, high - low)

    def fingerprint(self) -> str:
        """Hash of size, time of change and header; no weight is read."""
        changed = self.path.stat().st_mtime_ns
        digest = hashlib.sha256(f"{self.nbytes}|{changed}|".encode())
        digest.update(self._bytes[: self.header_bytes].data)
        return digest.hexdigest()


class _Reader:
    """Reads the header from start to end; `at` never passes `size`."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        """Metadata, tensors, and the length of the header in bytes."""
        if self.take(4) != MAGIC:
            raise self.error("does not begin with GGUF")
        version = self.integer("<I")
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
        """Type, shape and offset of every tensor."""
        found: dict[str, tuple[Kind, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self.text("a tensor name", MAX_NAME_BYTES)
            if name in found:
                raise self.error(f"tensor {name} occurs twice")
            dims = self.integer("<I")
            if not 1 <= dims <= MAX_DIMS:
                raise self.error(f"tensor {name} must have 1 to {MAX_DIMS} dimensions, got {dims}")
            shape = tuple(self.integer("<Q") for _ in range(dims))[::-1]
            kind = self.integer("<I")
            if kind not in KINDS:
                raise self.error(f"tensor {name} has the unknown type {kind}")
            found[name] = (Kind(kind), shape, self.integer("<Q"))
        return found

    def placed(
        self,
        infos: dict[str, tuple[Kind, tuple[int, ...], int]],
        alignment: int,
    ) -> dict[str, TensorInfo]:
        """Tensors with their bytes in the file, which must be there and must not overlap."""
        base = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, (kind, shape, offset) in infos.items():
            start = base + offset
            stop = start + self.tensor_bytes(name, kind, shape)
            if offset % alignment or stop > self.size:
                raise self.error(
                    f"tensor {name} lies at bytes [{start}, {stop}) of a file of {self.size} bytes"
                )
            found[name] = TensorInfo(kind, shape, start, stop)
        end = base
        for name, info in sorted(found.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self.error(f"tensor {name} overlaps the one before it")
            end = info.stop
        return found

    def tensor_bytes(self, name: str, kind: Kind, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor, whose rows are whole blocks."""
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
        """Alignment of the tensors, bytes."""
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 1 <= value <= 1 << 20 or value & (value - 1):
            raise self.error(f"general.alignment must be a power of two, got {value!r}")
        return value

    def value(self, name: str, kind: int, depth: int) -> Any:
        """One metadata value."""
        if kind == _STRING:
            return self.text(name)
        if kind == _ARRAY:
            return self.array(name, depth + 1)
        if kind not in _SCALARS:
            raise self.error(f"metadata entry {name} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        found = np.frombuffer(self.take(dtype.itemsize), dtype=dtype)[0]
        if dtype == np.float32:
            return float(str(found))  # 1e-06 as it was written, not as float32 rounds it
        return found.item()

    def array(self, name: str, depth: int) -> Any:
        """A list of strings or arrays, or an array of numbers."""
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
        """Strings one after the other; a vocabulary has hundreds of thousands."""
        self.check_count(name, count, 8)
        unpack, data, size, at = struct.Struct("<Q").unpack_from, self.data, self.size, self.at
        found: list[str] = []
        add = found.append
        for _ in range(count):
            if at + 8 > size:
                raise self.error(f"{name} goes on beyond the end of the file")
            (length,) = unpack(data, at)
            at += 8
            if length > size - at:
                raise self.error(f"{name} has a string of {length} bytes beyond the file's end")
            add(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return found

    def text(self, name: str, limit: int | None = None) -> str:
        """A string; its length is checked before it is read."""
        length = self.integer("<Q")
        if length > self.size - self.at or (limit is not None and length > limit):
            raise self.error(f"{name} has {length} bytes, beyond the file's end or the rule")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{name} is not UTF-8 text ({error})") from error

    def integer(self, form: str) -> int:
        """A little-endian integer."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self.size - self.at:
            raise self.error(f"ends at byte {self.size} in the middle of its header")
        found = self.data[self.at : self.at + count]
        self.at += count
        return found

    def check_count(self, what: str, count: int, smallest: int) -> None:
        """Refuse more elements than the rest of the file can hold."""
        if count > (self.size - self.at) // smallest:
            raise self.error(f"names {count} {what}, more than its {self.size} bytes can hold")

    def error(self, what: str) -> ModelError:
        """`path: what; remedy`."""
        return ModelError(f"{self.path}: GGUF file {what}; {_AGAIN}")

"""A safetensors file as arrays over its memory-mapped bytes.

The `safetensors` library copies tensors out of its own mapping; here they are views, so that GPU
drivers can map the bytes in place and `forget` can return pages to the system. The header is
checked as strictly as by the library (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hetero.backends.host.files import hold
from hetero.backends.host.mapped import prefetch
from hetero.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "bfloat16",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
FLOAT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorEntry:
    """The bytes [start, stop) of a tensor, from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A checked and memory-mapped safetensors file. Raises `ModelError` for a malformed one.

    The mapping lives as long as an array of it does; there is nothing to close. Meanwhile a
    `locked` file shows as in use (`hetero.backends.host.files.is_in_use`).
    """

    def __init__(self, path: Path, *, locked: bool = False) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.nbytes = file.seek(0, 2)
                file.seek(0)
                header = _read_header(path, file, self.nbytes)
                if locked:
                    hold(file.fileno())
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(
                f"{path}: cannot be read ({error.strerror or error}); check its permissions"
            ) from error
        self.header_bytes = len(header)
        self.metadata, self.entries = _parse(path, header, self.nbytes)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only view of a tensor in the mapped file."""
        entry = self.entries[name]
        raw = self._bytes[entry.start : entry.stop]
        if entry.start % _dtype(entry.dtype).itemsize:
            raw = raw.copy()  # another program's file may leave tensors unaligned
        return raw.view(_dtype(entry.dtype)).reshape(entry.shape)

    def rows(self, name: str, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of some rows of a matrix; no others are read."""
        entry = self.entries[name]
        raw = self._bytes[entry.start : entry.stop].reshape(entry.shape[0], -1)
        chosen: npt.NDArray[Any] = raw[ids].view(_dtype(entry.dtype))
        return chosen

    def header(self) -> bytes:
        """Return the raw header, the eight length bytes excluded."""
        return bytes(self._map[8 : 8 + self.header_bytes])

    def prefetch(self) -> None:
        """Start a thread that maps all pages, which are used soon."""
        prefetch(self._bytes)

    def forget(self, names: list[str]) -> None:
        """Drop the pages of these tensors from memory; they are read again when touched."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for start, stop in self._runs(names):
            low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            high = self.nbytes if stop == self.nbytes else stop // mmap.PAGESIZE * mmap.PAGESIZE
            if low < high:
                self._map.madvise(mmap.MADV_DONTNEED, low, high - low)

    def _runs(self, names: list[str]) -> list[tuple[int, int]]:
        """Yield the byte ranges of tensors, neighbours merged."""
        runs: list[tuple[int, int]] = []
        for start, stop in sorted((self.entries[x].start, self.entries[x].stop) for x in names):
            if runs and start - runs[-1][1] < mmap.PAGESIZE:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs


def _dtype(name: str) -> np.dtype[Any]:
    """Return numpy's type of a tensor; one that numpy lacks is loaded where a file has it."""
    if name == "BF16":
        import ml_dtypes

        brain: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return brain
    return np.dtype(_DTYPES[name])


def _read_header(path: Path, file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelError(f"{path}: a safetensors file has at least 8 bytes, got {size}; {_AGAIN}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise ModelError(
            f"{path}: header of {length} bytes does not fit the file of {size} bytes; {_AGAIN}"
        )
    return file.read(length)


_AGAIN = "download the file again"


def _parse(path: Path, header: bytes, size: int) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also a number of more than 4300 digits
        raise ModelError(f"{path}: header is not valid JSON ({error}); {_AGAIN}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: header must be a JSON object; {_AGAIN}")
    metadata = raw.pop("__metadata__", {})
    base = 8 + len(header)
    entries = {name: _entry(path, name, value, base) for name, value in raw.items()}
    _check_extent(path, entries, base, size)
    return metadata if isinstance(metadata, dict) else {}, entries


class _DuplicateError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise _DuplicateError("a name occurs twice")
    return unique


def _entry(path: Path, name: str, raw: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = raw["dtype"], raw["shape"], raw["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: tensor {name} needs dtype, shape and data_offsets; {_AGAIN}"
        ) from error
    numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
    if any(not isinstance(x, int) or isinstance(x, bool) or x < 0 for x in numbers):
        raise ModelError(
            f"{path}: tensor {name} has the shape {shape} at bytes [{start}, {stop}), which are "
            f"not sizes; {_AGAIN}"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name} has the data type {dtype}, supported are "
            f"{', '.join(FLOAT_DTYPES)}; convert the model"
        )
    expected = _product(shape) * _dtype(dtype).itemsize
    if stop - start != expected:
        raise ModelError(
            f"{path}: tensor {name} of shape {shape} in {dtype} has {expected} bytes, "
            f"got {stop - start}; {_AGAIN}"
        )
    return TensorEntry(dtype, tuple(shape), base + start, base + stop)


def _check_extent(path: Path, entries: dict[str, TensorEntry], base: int, size: int) -> None:
    """Raise `ModelError` unless tensors cover the data without hole or overlap."""
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ModelError(
                f"{path}: tensor {name} starts at byte {entry.start} instead of {end}; {_AGAIN}"
            )
        end = entry.stop
    if end != size:
        raise ModelError(
            f"{path}: tensors end at byte {end}, but the file has {size} bytes; {_AGAIN}"
        )


def _product(shape: list[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total

"""Tensors of a GGUF file in other types, and a copy of the file with them.

The `gguf` library quantises, by the same rules as llama.cpp's reference, and writes the file.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from hetero.backends.host.files import scratch_directory, sync_directory
from hetero.backends.weights import Float32Array
from hetero.errors import ModelError
from hetero.models.gguf.file import DEFAULT_ALIGNMENT, GgufFile
from hetero.models.gguf.kinds import SIZES, Kind
from hetero.models.gguf.tensors import INPUTS, GgufTensor, rows_of
from hetero.models.packing import check_finite

Progress: TypeAlias = Callable[[int, int], None]
# What the library writes and the engine computes as stored, from the smallest.
WRITTEN: Final = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16)
PREDICTED: Final = "hetero.quantize.kl_predicted"  # an entry of files that are written here
_AT_ONCE: Final = 16  # rows that the library takes as one: it is slow on short ones
_FILE_TYPE: Final = "general.file_type"
_VERSION: Final = "general.quantization_version"
_FILE_TYPES: Final = {
    Kind.F32: gguf.LlamaFileType.ALL_F32,
    **{x: gguf.LlamaFileType[f"MOSTLY_{x.name}"] for x in (*WRITTEN, Kind.BF16, Kind.Q6_K)},
}


def tensor_bytes(shape: tuple[int, ...], kind: Kind) -> int:
    """Return the bytes of a tensor in a type."""
    rows, features = rows_of(shape)
    block, size = SIZES[kind]
    return rows * features // block * size


def fits(shape: tuple[int, ...], kind: Kind) -> bool:
    """Return whether the rows of a tensor are whole blocks of a type."""
    return shape[-1] % SIZES[kind][0] == 0


def quantised(rows: Float32Array, kind: Kind) -> npt.NDArray[Any]:
    """Return rows [n, k] as a type stores them."""
    n = len(rows)
    wide = rows.reshape(n // math.gcd(n, _AT_ONCE), -1)
    with np.errstate(all="ignore"):  # blocks of zeros have no scale to divide by
        stored = np.asarray(gguf.quants.quantize(wide, gguf.GGMLQuantizationType(kind)))
    return stored.reshape(n, -1)


def rounded(rows: Float32Array, kind: Kind) -> Float32Array:
    """Return rows [n, k] as they are read back from a type."""
    n, k = rows.shape
    stored = quantised(rows, kind).reshape(n // math.gcd(n, _AT_ONCE), -1)
    read = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(kind))
    return np.asarray(read, dtype=np.float32).reshape(n, k)


class _Verbatim(bytes):
    """The bytes of a metadata value, its type included."""


class _Writer(gguf.GGUFWriter):
    """The library's writer, which also takes metadata values as another file has them."""

    def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
        if isinstance(val, _Verbatim):
            return bytes(val)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


def check_copy(file: GgufFile, out: Path, *, overwrite: bool) -> None:
    """Raise `ModelError` unless `write_copy` may write there: nothing, or an earlier copy."""
    if out.suffix.lower() != ".gguf":
        raise ModelError(f"{out}: is to be a GGUF file; give a name that ends in .gguf")
    if not out.parent.is_dir():
        raise ModelError(f"{out.parent}: there is no such directory; create it first")
    if not out.exists():
        return
    if not out.is_file():
        raise ModelError(f"{out}: is no file; choose another name")
    if any(out.samefile(shard.path) for shard in file.shards):
        raise ModelError(f"{out}: is the model that is quantised; choose another name")
    if not overwrite:
        raise ModelError(f"{out}: exists already; choose another name, or use --overwrite")
    if PREDICTED not in GgufFile(out).metadata:
        raise ModelError(f"{out}: hetero quantize did not write it; choose another name")


def write_copy(
    file: GgufFile,
    out: Path,
    kinds: Mapping[str, Kind],
    entries: Mapping[str, float | str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model to one file, some tensors in other types, the others byte by byte.

    Its metadata are the source's, but for what counts files and names the most common type;
    `entries` are added. All or nothing is written. Raises `ModelError`.
    """
    try:
        with scratch_directory(out) as folder:
            partial = folder / out.name
            writer = _Writer(partial, file.metadata["general.architecture"])
            try:
                _copy_metadata(file, writer, kinds)
                for name, value in (entries or {}).items():
                    add = writer.add_string if isinstance(value, str) else writer.add_float32
                    add(name, value)  # type: ignore[arg-type]
                _write_tensors(file, writer, kinds, progress)
            finally:
                writer.close()
            with partial.open("rb+") as written:
                os.fsync(written.fileno())
            partial.replace(out)
        sync_directory(out.parent)
    except OSError as error:
        raise ModelError(
            f"{out}: cannot be written ({error.strerror or error}); choose another directory, or "
            "make room"
        ) from error


def _copy_metadata(file: GgufFile, writer: _Writer, kinds: Mapping[str, Kind]) -> None:
    for name, field in gguf.GGUFReader(file.path).fields.items():
        ours = (_FILE_TYPE, _VERSION, PREDICTED, INPUTS)
        own = name.startswith(("GGUF.", "split.")) or name in ours
        if own or name == "general.architecture":
            continue
        value = _Verbatim(b"".join(part.tobytes() for part in field.parts[2:]))
        writer.add_key_value(name, value, field.types[0])
    writer.data_alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    sizes = Counter[Kind]()
    for name, info in file.tensors.items():
        sizes[kinds.get(name, info.kind)] += info.stop - info.start
    most = sizes.most_common(1)[0][0]
    if most in _FILE_TYPES:
        writer.add_file_type(_FILE_TYPES[most])
    elif isinstance(given := file.metadata.get(_FILE_TYPE), int):
        writer.add_file_type(given)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_tensors(
    file: GgufFile, writer: _Writer, kinds: Mapping[str, Kind], progress: Progress | None
) -> None:
    total = 0
    for name, info in file.tensors.items():
        kind = kinds.get(name, info.kind)
        size = tensor_bytes(info.shape, kind)
        total += size
        as_is = np.dtype(np.float32)  # of the shape, which is not in bytes
        writer.add_tensor_info(name, info.shape, as_is, size, gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for name in file.tensors:
        data = _data(file, name, kinds.get(name))
        writer.write_tensor_data(data)
        file.forget(name)
        done += data.nbytes
        if progress is not None:
            progress(done, total)


def _data(file: GgufFile, name: str, kind: Kind | None) -> npt.NDArray[Any]:
    if kind is None or kind is file.tensors[name].kind:
        return file.raw(name)
    source = GgufTensor(file, name)
    rows = source.rows(0, source.shape[0])
    check_finite(name, rows)
    return quantised(rows, kind)

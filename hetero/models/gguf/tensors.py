"""Rows of GGUF tensors: as floats for any type, as codes where the type is one that we store.

In the formats of files (`gguf-a16`, `gguf-a8`) every type but Q2_K keeps its numbers
(`hetero.models.gguf.block_types`). In the others Q4_0 and Q8_0 are exactly `w4` and `w8`; every
other type is dequantised by the `gguf` library and quantised again, and the loss is measured on
the way (`Loss`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hetero.backends.blocks import BlockParts, words_of_halves
from hetero.backends.formats import GROUP_SIZE, StorageFormat, WeightFormat
from hetero.errors import ModelError
from hetero.models.gguf import block_types
from hetero.models.gguf.file import GgufFile, TensorInfo
from hetero.models.gguf.kinds import SIZES, Kind
from hetero.models.packing import check_finite
from hetero.models.row_tables import Ids, RowTable

FLOATS: Final[dict[Kind, np.dtype[Any]]] = {
    Kind.F32: np.dtype("<f4"),
    Kind.F16: np.dtype("<f2"),
    Kind.BF16: np.dtype(ml_dtypes.bfloat16),
}
INPUTS: Final = "hetero.quantize.inputs"  # an entry of files that `hetero quantize` wrote
INT8: Final = "int8"
ROUTER: Final = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # and a shared expert's gate
# What the library dequantises and people use; the others would be a guess.
QUANTISED: Final = (*block_types.STORED, Kind.Q2_K)


def stored_as(kind: Kind) -> StorageFormat:
    """Return the storage of a tensor in the formats of files.

    Q2_K is quantised again, to 8 bits.
    """
    if kind in FLOATS:
        half = kind is Kind.F16
        return StorageFormat.F16 if half else StorageFormat.F32
    return block_types.STORED.get(kind, StorageFormat.Q8)


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and features of a matrix, or of the matrices of all experts."""
    return math.prod(shape[:-1]), shape[-1]


def is_matrix(name: str, info: TensorInfo) -> bool:
    """Return whether a tensor is a matrix, or has those of all experts; their biases are none."""
    return len(info.shape) > 1 and not name.endswith(".bias")


def default_format(file: GgufFile) -> WeightFormat:
    """Return the format that keeps a file's numbers.

    It is that of the file's one type of matrices, if we have it; w4a16 of floats. (Routers of
    experts are always floats.) A file whose types were chosen for inputs of int8 says so.
    """
    int8 = file.metadata.get(INPUTS) == INT8
    kinds = {
        info.kind
        for name, info in file.tensors.items()
        if is_matrix(name, info) and not name.endswith(ROUTER)
    }
    if kinds == {Kind.Q8_0}:
        return WeightFormat.W8A16
    if kinds == {Kind.Q4_0}:
        return WeightFormat.W4A8 if int8 else WeightFormat.W4A16
    if kinds <= FLOATS.keys():
        return WeightFormat.W4A16
    return WeightFormat.GGUF_A8 if int8 else WeightFormat.GGUF_A16


@dataclass
class Loss:
    """Relative error of quantising again, by the file's type: root of Σ error² / Σ value²."""

    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, kind: str, exact: npt.NDArray[np.float32], stored: npt.NDArray[np.float32]
    ) -> None:
        """Count some values and what is stored for them."""
        difference = float(np.square(stored - exact, dtype=np.float64).sum())
        total = float(np.square(exact, dtype=np.float64).sum())
        with self._lock:
            before = self._sums.get(kind, (0.0, 0.0))
            self._sums[kind] = (before[0] + difference, before[1] + total)

    def by_kind(self) -> dict[str, float]:
        """Return the error of every type seen so far."""
        return {
            kind: (wrong / total) ** 0.5 if total else 0.0
            for kind, (wrong, total) in sorted(self._sums.items())
        }


def check_kind(where: str, name: str, info: TensorInfo) -> None:
    """Raise `ModelError` for a type that is not supported."""
    if info.kind not in FLOATS and info.kind not in QUANTISED:
        names = [x.name for x in (*FLOATS, *QUANTISED)]
        raise ModelError(
            f"{where}: tensor {name} has the type {info.kind.name}, supported are "
            f"{', '.join(names)}; download another quantisation of this model"
        )


def tensor_rows(file: GgufFile, name: str) -> RowTable:
    """Return the rows of a tensor, read from the file when they are asked for."""

    def rows(ids: Ids) -> npt.NDArray[np.float32]:
        values = GgufTensor(file, name, order=ids.astype(np.int64)).rows(0, len(ids))
        check_finite(name, values)
        return values

    return rows


def _check_halves(name: str, features: int, kind: Kind) -> None:
    block, _ = SIZES[kind]
    if features % (2 * block):
        raise ModelError(
            f"tensor {name} has {features} features in blocks of {block}, which cannot be halved; "
            "download another quantisation of this model"
        )


class GgufTensor:
    """A [rows, k] tensor as a source of `hetero.models.packing.pack_rows`.

    `order` lists its rows in the order of the packed weight, if the file has another; it may be of
    some of them. With `half` it is the left (0) or the right half (1) of its features.
    """

    def __init__(
        self,
        file: GgufFile,
        name: str,
        loss: Loss | None = None,
        order: npt.NDArray[np.int64] | None = None,
        half: int | None = None,
    ) -> None:
        self.name = name
        self.order = order
        info = file.tensors[name]
        self.kind = info.kind
        self.shape = rows_of(info.shape)
        self._rows = file.raw(name).reshape(self.shape[0], -1)  # [rows, bytes of a row]
        if order is not None:
            self.shape = len(order), self.shape[1]
        if half is not None:
            _check_halves(name, self.shape[1], self.kind)
            self._rows = np.split(self._rows, 2, axis=1)[half]
            self.shape = self.shape[0], self.shape[1] // 2
        self._loss = loss

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop) in order, as float32."""
        chosen = self._chosen(start, stop)
        if self.kind in FLOATS:
            values: npt.NDArray[np.float32] = chosen.view(FLOATS[self.kind]).astype(np.float32)
            return values
        import gguf  # heavy, and most files are read without

        kind = gguf.GGMLQuantizationType(self.kind)
        with np.errstate(all="ignore"):  # scales that are not finite are found by the caller
            return np.asarray(gguf.quants.dequantize(chosen, kind), dtype=np.float32)

    def codes(
        self, start: int, stop: int, storage: StorageFormat
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16]] | BlockParts | None:
        """Return codes and scales of rows, or None where only floats are possible.

        Codes are [rows, k / 32, 32], or the words of 4 bits, with scales [rows, k / 32], or the
        parts of blocks. Raises `ModelError` for a scale that is not finite.
        """
        if block_types.STORED.get(self.kind) is not storage:
            return None
        rows = self._chosen(start, stop)
        if storage.scales == "block":
            parts = block_types.block_parts(self.kind, rows)
            self._check_scales(parts.d if parts.e is None else np.stack([parts.d, parts.e]))
            return parts
        raw = rows.reshape(stop - start, self.shape[1] // GROUP_SIZE, -1)
        scales = block_types.half(raw, 0)
        self._check_scales(scales)
        if self.kind is Kind.Q4_0:
            return words_of_halves(raw, 2, 18, 16), scales
        values = np.ascontiguousarray(raw[..., 2:])
        if self.kind is Kind.Q8_0:
            return values.view(np.int8), scales
        return block_types.IQ4_NL_VALUES[block_types.nibbles(values)], scales

    def _check_scales(self, scales: npt.NDArray[np.float16]) -> None:
        if (scales.view(np.uint16) & 0x7C00 == 0x7C00).any():  # the exponent of what is not finite
            fault = "a value that is not finite; download the model again"
            if self.kind is Kind.MXFP4:
                fault = "scales beyond fp16's 2^-24 to 2^15; load it with --weights f32"
            raise ModelError(f"tensor {self.name} holds {fault}")

    @property
    def watch(self) -> Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], None] | None:
        """Return the observer that adds rounding errors to the loss, if there are any."""
        loss = self._loss
        if loss is None or self.kind in FLOATS:
            return None
        return lambda exact, stored: loss.add(self.kind.name, exact, stored)

    def _chosen(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        chosen = slice(start, stop) if self.order is None else self.order[start:stop]
        return np.ascontiguousarray(self._rows[chosen])

"""Rows of GGUF tensors: as floats for any type, as codes where the type is one of ours.

Q4_0 and Q8_0 are exactly `w4` and `w8` (groups of 32, one fp16 scale each), so their codes are laid
out anew and nothing is rounded. The other types are dequantised by the `gguf` library and quantised
again; how much that costs is measured on the way (`Loss`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.errors import ModelError
from hetero.models.gguf.file import GgufFile, TensorInfo

EXACT: Final = {
    GGMLQuantizationType.Q4_0: StorageFormat.Q4,
    GGMLQuantizationType.Q8_0: StorageFormat.Q8,
}
FLOATS: Final[dict[GGMLQuantizationType, np.dtype[Any]]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# What the library dequantises and people use; the others would be a guess.
REQUANTISED: Final = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)


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
        """Error of every type seen so far."""
        return {
            kind: (wrong / total) ** 0.5 if total else 0.0
            for kind, (wrong, total) in sorted(self._sums.items())
        }


def check_kind(where: str, name: str, info: TensorInfo) -> None:
    """Raise `ModelError` for a type that is not supported."""
    if info.kind not in FLOATS and info.kind not in REQUANTISED:
        names = [x.name for x in (*FLOATS, *REQUANTISED)]
        raise ModelError(
            f"{where}: tensor {name} has the type {info.kind.name}, supported are "
            f"{', '.join(names)}; download another quantisation of this model"
        )


class GgufTensor:
    """A [rows, k] tensor as a source of `hetero.models.packing.pack_rows`.

    `order` says which of its rows come first, where they lie in another order.
    """

    def __init__(
        self,
        file: GgufFile,
        name: str,
        loss: Loss | None = None,
        order: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.name = name
        self.order = order
        info = file.tensors[name]
        self.kind = info.kind
        self.shape = (int(np.prod(info.shape[:-1], dtype=np.int64)), info.shape[-1])
        self._rows = file.raw(name).reshape(self.shape[0], -1)  # [rows, bytes of a row]
        self._loss = loss

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) in order, as float32."""
        chosen = self._chosen(start, stop)
        if self.kind in FLOATS:
            found: npt.NDArray[np.float32] = chosen.view(FLOATS[self.kind]).astype(np.float32)
            return found
        with np.errstate(all="ignore"):  # scales that are not finite are found by the caller
            return np.asarray(gguf.quants.dequantize(chosen, self.kind), dtype=np.float32)

    def codes(
        self, start: int, stop: int, storage: StorageFormat
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16]] | None:
        """Codes [rows, k / 32, 32] and scales [rows, k / 32], None where floats must do.

        Raises `ModelError` for a scale that is not finite.
        """
        if EXACT.get(self.kind) is not storage:
            return None
        blocks = self._chosen(start, stop).reshape(stop - start, self.shape[1] // GROUP_SIZE, -1)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        if not np.isfinite(scales).all():
            raise ModelError(
                f"tensor {self.name} holds a value that is not finite; download the model again"
            )
        values = blocks[..., 2:]
        if storage is StorageFormat.Q8:
            return np.ascontiguousarray(values).view(np.int8), scales
        return np.concatenate([values & 15, values >> 4], axis=-1), scales

    @property
    def watch(self) -> Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], None] | None:
        """Takes values and what is stored for them, where the file's own rounding is rounded."""
        loss = self._loss
        if loss is None or self.kind in FLOATS:
            return None
        return lambda exact, stored: loss.add(self.kind.name, exact, stored)

    def _chosen(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        chosen = slice(start, stop) if self.order is None else self.order[start:stop]
        return np.ascontiguousarray(self._rows[chosen])

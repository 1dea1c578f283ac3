"""Matrices of a layer's experts that a checkpoint has in one tensor, [experts, rows, features].

gpt-oss has gate and up row by row in one tensor, of floats, or of MXFP4 (OCP Microscaling Formats,
version 1.0): `_blocks` of 32 codes, two in a byte, and `_scales`, a power of two for each block.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import E2M1, GROUP_SIZE, Blocks, StorageFormat
from hetero.errors import ModelError
from hetero.models.packing import Codes, Watch

Array = npt.NDArray[Any]
MXFP4_PARTS: Final = ("_blocks", "_scales")
_ZERO: Final = Blocks(bits=4, groups=1, zero=12, e2m1=True).zero
_VALUES: Final = ((np.array(E2M1) - _ZERO) / 2).astype(np.float32)
_BIAS, _NO_NUMBER = 127, 255  # of exponents (E8M0)


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """A matrix of all experts within a tensor.

    module       the tensor's name; its biases [experts, rows] are in `{module}_bias`
    parts, part  the tensor has the rows of so many matrices, this one's number
    interleaved  row by row, else one matrix after the other
    transposed   [experts, features, rows], where it is of floats
    """

    module: str
    parts: int = 1
    part: int = 0
    interleaved: bool = False
    transposed: bool = False

    def own(self, rows: Array) -> Array:
        """Return a view of this matrix's rows of [experts, rows, …]."""
        if self.interleaved:
            return rows[:, self.part :: self.parts]
        each = rows.shape[1] // self.parts
        return rows[:, self.part * each : (self.part + 1) * each]

    def is_coded(self, prefix: str, present: Container[str]) -> bool:
        """Return whether a checkpoint has the tensor in MXFP4."""
        return f"{prefix}{self.module}{MXFP4_PARTS[0]}" in present

    def shapes(
        self, prefix: str, experts: int, n: int, k: int, *, bias: bool, present: Container[str]
    ) -> dict[str, tuple[int, ...]]:
        """Return the tensors behind `prefix`, n rows of k features being one expert's."""
        rows, name = self.parts * n, self.module
        shapes: dict[str, tuple[int, ...]] = {f"{name}_bias": (experts, rows)} if bias else {}
        if self.is_coded(prefix, present):
            groups = experts, rows, k // GROUP_SIZE
            blocks, scales = (f"{name}{part}" for part in MXFP4_PARTS)
            return shapes | {blocks: (*groups, GROUP_SIZE // 2), scales: groups}
        return shapes | {name: (experts, k, rows) if self.transposed else (experts, rows, k)}


class Files(Protocol):
    """The tensors of a checkpoint by name."""

    def __contains__(self, name: object) -> bool: ...
    def array(self, name: str) -> Array: ...


def stacked_tensor(files: Files, prefix: str, place: Stacked) -> StackedTensor:
    """Return the source of a matrix of all experts."""
    name = f"{prefix}{place.module}"
    if place.is_coded(prefix, files):
        blocks, scales = (place.own(files.array(f"{name}{part}")) for part in MXFP4_PARTS)
        return Mxfp4Tensor(name, [f"{name}{part}" for part in MXFP4_PARTS], blocks, scales)
    values = files.array(name)
    return StackedTensor(name, [name], place.own(values.mT if place.transposed else values))


class StackedTensor:
    """Floats [experts, rows, features] as a source of `hetero.models.packing.pack_rows`.

    `names` are the tensors that are read.
    """

    watch: Watch | None = None

    def __init__(self, name: str, names: list[str], values: Array) -> None:
        self.name, self.names = name, names
        self._values = values

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows of all experts, and the features."""
        experts, rows, features = self._values.shape
        return experts * rows, features

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop) of all experts' as float32."""
        return np.concatenate([self._floats(*part) for part in self._parts(start, stop)])

    def codes(self, start: int, stop: int, storage: StorageFormat) -> Codes | None:  # noqa: ARG002
        """Return None: floats have no codes."""
        return None

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Yield the experts that have these rows, and which of theirs."""
        each = self._values.shape[1]
        for expert in range(start // each, -(-stop // each)):
            first = expert * each
            yield expert, slice(max(start - first, 0), min(stop - first, each))

    def _floats(self, expert: int, rows: slice) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self._values[expert, rows].astype(np.float32)
        return values


class Mxfp4Tensor(StackedTensor):
    """Codes [experts, rows, blocks, 16], two in a byte, the first in the low half."""

    def __init__(self, name: str, names: list[str], values: Array, scales: Array) -> None:
        super().__init__(name, names, values)
        self._scales = scales

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows of all experts, and the features."""
        experts, rows, blocks, _ = self._values.shape
        return experts * rows, blocks * GROUP_SIZE

    def codes(self, start: int, stop: int, storage: StorageFormat) -> Codes | None:
        """Return the rows as blocks, where they are stored as such.

        Raises `ModelError` for a power of two that fp16 does not have.
        """
        if storage is not StorageFormat.MXFP4:
            return None
        from hetero.models.gguf.block_types import block_parts
        from hetero.models.gguf.kinds import Kind

        rows = np.concatenate([self._blocks(*part) for part in self._parts(start, stop)])
        parts = block_parts(Kind.MXFP4, rows.reshape(stop - start, -1))
        if not np.isfinite(parts.d).all():
            raise ModelError(
                f"tensor {self.name} holds scales beyond fp16's 2^-24 to 2^15; load it with "
                "--weights f32"
            )
        return parts

    def _blocks(self, expert: int, rows: slice) -> Array:
        """Return blocks [rows, groups, 17] of ggml: the scale, then codes by halves of a group."""
        scales, codes = self._scales[expert, rows, :, None], self._codes(expert, rows)
        low, high = codes[..., : GROUP_SIZE // 2], codes[..., GROUP_SIZE // 2 :]
        return np.concatenate([scales, low | high << np.uint8(4)], axis=-1)

    def _codes(self, expert: int, rows: slice) -> Array:
        """Return codes [rows, groups, 32]."""
        pairs = self._values[expert, rows]
        return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], GROUP_SIZE)

    def _floats(self, expert: int, rows: slice) -> npt.NDArray[np.float32]:
        codes, scales = self._codes(expert, rows), self._scales[expert, rows, :, None]
        with np.errstate(over="ignore"):  # what is not finite is refused by the caller
            values = np.ldexp(_VALUES[codes], scales.astype(np.int32) - _BIAS)
        values[(scales == _NO_NUMBER)[..., 0]] = np.nan
        return values.reshape(len(codes), -1)

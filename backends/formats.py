"""Formats of matmuls: each is one record here, and all other code reads it.

A format is how weights are stored (`StorageFormat`), how activations are rounded (`Activations`),
and how far its results may be from exact ones. A new one is a member of `WeightFormat` with its
record below (and one of `StorageFormat`, with its layout in `hetero.backends.weights`, if weights
are stored in a new way); `reference` computes it at once, other backends name the formats that they
have kernels for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:  # the command line takes the names of formats from here, and loads no numpy
    import numpy as np

GROUP_SIZE: Final = 32  # features along k that share a scale

Granularity: TypeAlias = Literal["group", "token", "tensor"]
WeightScales: TypeAlias = Literal["none", "group", "row", "block", "parts"]


class CacheFormat(StrEnum):
    """Format of cached keys and values (`hetero.backends.kv_rows`).

    Floats, or `q8`, codes of 8 bits with a scale for each token of a head, and one for each channel
    of a head.
    """

    F32 = "f32"
    F16 = "f16"
    Q8 = "q8"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the tensors."""
        import numpy as np

        return np.dtype(_CACHE_TYPES[self])

    @property
    def coded(self) -> bool:
        """Return whether values are integer codes with scales."""
        return self is CacheFormat.Q8

    def row(self, head_dim: int) -> int:
        """Return the elements of a token of a head: values, or codes and a float32 scale."""
        return -(-head_dim // 4) * 4 + 4 if self.coded else head_dim

    def shape(self, kv_heads: int, capacity: int, head_dim: int) -> tuple[int, int, int]:
        """Return the shape of a tensor.

        After the tokens of a head are the scales of its channels, if coded.
        """
        return kv_heads, capacity + CHANNEL_ROWS * self.coded, self.row(head_dim)

    def bytes_per_token(self, head_dim: int) -> int:
        """Return the bytes of a head's keys, or values, a token."""
        return self.row(head_dim) * self.dtype.itemsize


DEFAULT_CACHE: Final = CacheFormat.F16
CHANNEL_ROWS: Final = 4  # rows of codes that hold a float32 for each channel
_CACHE_TYPES: Final = {CacheFormat.F32: "f4", CacheFormat.F16: "f2", CacheFormat.Q8: "i1"}


class StorageFormat(StrEnum):
    """Format of stored weights (see `hetero.backends.weights.PackedWeight`).

    `q4_1` to `mxfp4` hold what GGUF calls so, exactly (`hetero.backends.blocks`). `mixed`: rows in
    parts, each of another storage, as the tensors of a file are.
    """

    Q4 = "q4"
    Q8 = "q8"
    Q8R = "q8r"
    F16 = "f16"
    F32 = "f32"
    Q4_1 = "q4_1"
    Q4_K = "q4_k"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    MXFP4 = "mxfp4"
    MIXED = "mixed"

    @property
    def bits(self) -> int:
        """Return the bits of a weight, without scales."""
        return _STORAGE[self].bits

    @property
    def scales(self) -> WeightScales:
        """Return what shares a scale.

        A `group` of `GROUP_SIZE` weights along k (fp16), a whole `row` (fp32), as its `blocks` say,
        as the `parts` have it; `none`: floating point.
        """
        return _STORAGE[self].scales

    @property
    def blocks(self) -> Blocks:
        """Return how blocks are made up. Raises `ValueError` for a storage without them."""
        blocks = _STORAGE[self].blocks
        if blocks is None:
            raise ValueError(f"{self} weights are not stored in blocks")
        return blocks

    @property
    def default_format(self) -> WeightFormat:
        """Return the format that such weights are opened in.

        Raises `ValueError` for a storage of parts only, which no format has alone.
        """
        return WeightFormat(_STORAGE[self].default)

    @property
    def quantised(self) -> bool:
        """Return whether weights are integer codes, padded along k to whole groups, with scales."""
        return self.scales != "none"

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of a weight, its part of a group's scale included.

        Padding and scales of rows, which are 4 bytes for k weights, not. Of parts: what they come
        to in a usual file (Q4_K_M).
        """
        if self is StorageFormat.MIXED:
            return 21 / 32
        if self.scales == "block":
            blocks = self.blocks
            return blocks.bits / 8 + blocks.scale_bytes / (blocks.features * ROWS_OF_BLOCK)
        return self.bits / 8 + (2 / GROUP_SIZE if self.scales == "group" else 0.0)


ROWS_OF_BLOCK: Final = 16  # of the packed layout


# Twice the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and 12 (OCP Microscaling
# Formats, version 1.0, section 5.3.3).
E2M1: Final = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)


class Blocks(NamedTuple):
    """Integer codes from 0 on, with scales of two levels.

    A weight is d · s · (code - zero), or with `minimum` d · s · code - e · t: d and e are fp16, of
    `groups` groups of 32 features of a row; s and t are int8, s of a group or, with 2 `halves`, of
    16 features, t of a group. With `e2m1` a code is a float of 4 bits (sign, exponent of 2 bits,
    one bit of mantissa), and `E2M1[code]` stands in its place: twice its value, and `zero`.
    """

    bits: int
    groups: int
    minimum: bool = False
    halves: int = 1
    zero: int = 0
    e2m1: bool = False

    @property
    def largest(self) -> int:
        """Return the largest code, or what stands in its place."""
        return max(E2M1) if self.e2m1 else (1 << self.bits) - 1

    @property
    def features(self) -> int:
        """Return the number of features that share d."""
        return GROUP_SIZE * self.groups

    @property
    def words(self) -> int:
        """Return 32-bit words of the codes of a group of a row."""
        return self.bits

    @property
    def float_bytes(self) -> int:
        """Return the bytes of d and e of 16 rows."""
        return (2 + 2 * self.minimum) * ROWS_OF_BLOCK

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of all scales of `features` features of 16 rows."""
        return self.float_bytes + (self.halves + self.minimum) * self.groups * ROWS_OF_BLOCK


class _Storage(NamedTuple):
    bits: int
    scales: WeightScales
    blocks: Blocks | None = None
    default: str = ""  # of `WeightFormat`


def _blocks(blocks: Blocks) -> _Storage:
    return _Storage(blocks.bits, "block", blocks)


# Five bits are stored as six: one kernel for both. Q5_0's and Q6_K's zeros are the code 32.
_STORAGE: Final = {
    StorageFormat.Q4_1: _blocks(Blocks(bits=4, groups=1, minimum=True)),
    StorageFormat.Q4_K: _blocks(Blocks(bits=4, groups=8, minimum=True)),
    StorageFormat.Q5_0: _blocks(Blocks(bits=6, groups=1, zero=32)),
    StorageFormat.Q5_1: _blocks(Blocks(bits=6, groups=1, minimum=True)),
    StorageFormat.Q5_K: _blocks(Blocks(bits=6, groups=8, minimum=True)),
    StorageFormat.Q6_K: _blocks(Blocks(bits=6, groups=8, halves=2, zero=32)),
    StorageFormat.MXFP4: _blocks(Blocks(bits=4, groups=1, zero=12, e2m1=True)),
    StorageFormat.MIXED: _Storage(bits=4, scales="parts", default="gguf-a16"),
    StorageFormat.Q4: _Storage(bits=4, scales="group", default="w4a16"),
    StorageFormat.Q8: _Storage(bits=8, scales="group", default="w8a16"),
    StorageFormat.Q8R: _Storage(bits=8, scales="row", default="w8a8"),
    StorageFormat.F16: _Storage(bits=16, scales="none", default="f16"),
    StorageFormat.F32: _Storage(bits=32, scales="none", default="f32"),
}


@dataclass(frozen=True)
class Activations:
    """Rounding of a matmul's float32 input before it multiplies.

    bits            of a code, symmetric; 0: floating point (fp32, or fp16 where a GPU has it)
    granularity     of the codes' scales: a `group` of 32 features of a token, a `token`, the tensor
    static          scales are the model's, from calibration (the matmul's weight `x_scale`); else
                    they are max|x| / largest code
    """

    bits: int = 0
    granularity: Granularity | None = None
    static: bool = False

    @property
    def are_floats(self) -> bool:
        """Return whether nothing is quantised."""
        return self.bits == 0

    @property
    def largest(self) -> int:
        """Return the largest code."""
        return (1 << (self.bits - 1)) - 1


FLOATS: Final = Activations()
INT8_GROUPS: Final = Activations(8, "group")
INT8_STATIC: Final = Activations(8, "tensor", static=True)


class WeightFormat(StrEnum):
    """Weight and activation precision of a matmul, as `--weights` names it.

    `w4`: 4-bit symmetric, groups of 32 along k, one fp16 scale each. `w8`: 8-bit, same groups.
    `a16`: floating-point activations (fp32 where the device has no fp16 arithmetic).
    `a8`: activations quantised to int8 per token and block of 32 on the fly, as llama.cpp does.
    `w8a8`: 8-bit weights with one fp32 scale a row, int8 activations with one static scale a
    tensor: sums of integers over all of k (mllm-NPU, section 3.3).
    `gguf`: every tensor as the GGUF file stores it. Its `a8` rounds activations where codes have
    at most 6 bits; 8-bit codes and floats are multiplied with floats.
    """

    W4A16 = "w4a16"
    W4A8 = "w4a8"
    W8A16 = "w8a16"
    W8A8 = "w8a8"
    F16 = "f16"
    F32 = "f32"
    GGUF_A16 = "gguf-a16"
    GGUF_A8 = "gguf-a8"

    @property
    def storage(self) -> StorageFormat:
        """Return how the weights are stored, whatever the activations are."""
        return _FORMATS[self].storage

    @property
    def of_file(self) -> bool:
        """Return whether its weights come from a GGUF file and cannot be made of others."""
        return self.storage is StorageFormat.MIXED

    @property
    def activations(self) -> Activations:
        """Return how its input is rounded."""
        return _FORMATS[self].activations

    @property
    def tolerance(self) -> float:
        """Return the largest ‖y - exact‖ / ‖exact‖ of a right kernel.

        exact is float64 on unrounded activations: the cost of the format, with a margin.
        """
        return _FORMATS[self].tolerance

    @property
    def half_is_enough(self) -> bool:
        """Return whether fp16 arithmetic keeps to it.

        No integers to be exact in, no 32-bit weights.
        """
        return self.activations.are_floats and self.storage is not StorageFormat.F32


def activations_of(activations: Activations, storage: StorageFormat) -> Activations:
    """Return how the input of a part is rounded.

    Not for codes of 8 bits and floats, of which sums of integers have no kernels.
    """
    rounded = storage is StorageFormat.Q4 or storage.scales == "block"
    return activations if rounded else FLOATS


class _Format(NamedTuple):
    storage: StorageFormat
    activations: Activations
    tolerance: float


_FORMATS: Final = {
    WeightFormat.W4A16: _Format(StorageFormat.Q4, FLOATS, 2e-3),
    WeightFormat.W4A8: _Format(StorageFormat.Q4, INT8_GROUPS, 2e-2),
    WeightFormat.W8A16: _Format(StorageFormat.Q8, FLOATS, 2e-3),
    WeightFormat.W8A8: _Format(StorageFormat.Q8R, INT8_STATIC, 3e-2),
    WeightFormat.F16: _Format(StorageFormat.F16, FLOATS, 2e-3),
    WeightFormat.F32: _Format(StorageFormat.F32, FLOATS, 1e-4),
    WeightFormat.GGUF_A16: _Format(StorageFormat.MIXED, FLOATS, 2e-3),
    WeightFormat.GGUF_A8: _Format(StorageFormat.MIXED, INT8_GROUPS, 2e-2),
}

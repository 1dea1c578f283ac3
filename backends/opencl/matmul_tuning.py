"""The tiling of matmul kernels on each family of devices (`hetero.backends.opencl.tuning`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hetero.backends.formats import (
    GROUP_SIZE,
    Activations,
    StorageFormat,
    WeightFormat,
    activations_of,
)


class BlockFormat(NamedTuple):
    """Format of multiplying a part in blocks; other parts of a mixed weight have their own."""

    storage: StorageFormat
    activations: Activations

    @property
    def half_is_enough(self) -> bool:
        """Do the same as formats: there are no integers to be exact in."""
        return self.activations.are_floats


Kind: TypeAlias = WeightFormat | BlockFormat


def kind_of(weight_format: WeightFormat, storage: StorageFormat) -> Kind:
    """Return how rows in `storage` are multiplied in a format."""
    if not weight_format.of_file:
        return weight_format
    activations = activations_of(weight_format.activations, storage)
    if storage.scales == "block":
        return BlockFormat(storage, activations)
    formats = (x for x in WeightFormat if (x.storage, x.activations) == (storage, activations))
    return next(formats)


class WorkTile(NamedTuple):
    """Register tile of the CPU kernel, used up to `max_m` tokens.

    `prefetch` is the distance in 32-bit words at which weights are prefetched, 0 to leave it to the
    hardware. It pays where there is little arithmetic per word and one stream of weights. `widen`
    features of weights are widened at a time for all tokens, 0 for on the fly. With `planes` 2,
    floats are rounded to 16 bits in each block of 32 and multiplied as integers: two planes of int8
    with AVX-512, pairs of int16 with AVX2.
    """

    max_m: float
    tokens: int
    vectors: int
    prefetch: int = 0
    widen: int = 0
    planes: int = 0


INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class CpuTuning:
    """Tiles of the vector kernel.

    rows            rows of a vector register, 8 or 16
    dot             integer dot product of w4a8: 2 AVX512-VNNI, 1 AVX512-BW, 0 what there is
    tiles           by rising `max_m`
    special_tiles   the same for formats that want others
    block_tiles     the same for blocks, by planes of codes
    weight_panel_bytes  weights of one row tile that are read again for every token tile
    x_panel_bytes       packed x that is read again for every row tile
    """

    rows: int
    dot: int
    tiles: tuple[WorkTile, ...]
    special_tiles: Mapping[WeightFormat, tuple[WorkTile, ...]]
    block_tiles: Mapping[int, tuple[WorkTile, ...]]
    weight_panel_bytes: int = 512 << 10
    x_panel_bytes: int = 4 << 20

    def tile(self, weight_format: Kind, m: int) -> WorkTile:
        """Return the smallest tile for m tokens."""
        if isinstance(weight_format, BlockFormat):
            planes = 2 if weight_format.activations.are_floats else 1
            return next(tile for tile in self.block_tiles[planes] if m <= tile.max_m)
        tiles = self.special_tiles.get(weight_format, self.tiles)
        return next(tile for tile in tiles if m <= tile.max_m)

    def planes(self, weight_format: Kind, tile: WorkTile) -> int:
        """Return the planes of int8 codes that activations are given as, 0 for floats."""
        if isinstance(weight_format, BlockFormat):
            return 2 if weight_format.activations.are_floats else 1
        return 1 if weight_format is WeightFormat.W4A8 else tile.planes

    def group_words(self, weight_format: Kind, tile: WorkTile) -> int:
        """Return 32-bit words of a token's group of 32 features in packed x.

        X_WORDS of matmul_pack.cl.
        """
        planes = self.planes(weight_format, tile)
        if planes:
            blocks = isinstance(weight_format, BlockFormat)
            halves = weight_format.storage.blocks.halves if blocks else 1
            return 8 * planes + 1 + halves  # codes, scale, corrections
        if weight_format is WeightFormat.W8A8:
            return 16  # codes in 16 bits; half of it where bytes are multiplied
        return GROUP_SIZE

    def panels(self, weight_format: Kind, m: int, k: int, tile: WorkTile) -> tuple[int, int]:
        """Return (tokens, features) of the panels that the kernel keeps in the L2 cache.

        Features are limited by the weights of one row tile (where sums are integers, by nothing),
        tokens by what x takes then.
        """
        if m <= tile.tokens:
            return m, k
        feature_bytes = tile.vectors * self.rows * weight_format.storage.bytes_per_weight
        step = 256 if isinstance(weight_format, BlockFormat) else 64
        k_panel = tile.widen or int(self.weight_panel_bytes / feature_bytes) // step * step
        k_panel = k if weight_format.activations.static else min(k, k_panel)
        x_bytes = 4 * self.group_words(weight_format, tile) / GROUP_SIZE
        tokens = int(self.x_panel_bytes / (k_panel * x_bytes)) // tile.tokens * tile.tokens
        return min(m, max(tokens, tile.tokens)), k_panel


@dataclass(frozen=True, kw_only=True)
class SimtTuning:
    """Work-groups of the GPU kernels."""

    splits: int = 8


# Measured on one Zen 5 core. One stream of weights is fastest from memory, so few tokens take one
# vector; from 9 tokens on 4 x 4 vectors keep the unit busiest, but for f16, whose conversion wants
# more tokens per vector, and for two planes, of which 4 x 4 sums do not fit the registers. Two
# planes of codes take half the arithmetic of floats where there is VNNI: w4a16 then streams at the
# speed of memory for one token and computes 1.8 times as fast for many. Without it they are ahead
# up to 4 tokens.
_AVX512 = (WorkTile(1, 1, 1), WorkTile(2, 2, 1), WorkTile(INF, 4, 4))
_W4A16_FEW = (
    WorkTile(1, 1, 1, 1024, planes=2),
    WorkTile(2, 2, 1, 1024, planes=2),
    WorkTile(4, 4, 1, 1024, planes=2),
)
_AVX512_SPECIAL = {
    WeightFormat.W4A16: (*_W4A16_FEW, WorkTile(INF, 4, 4)),
    WeightFormat.W4A8: (
        WorkTile(1, 1, 1, 1024),
        WorkTile(2, 2, 1, 1024),
        WorkTile(4, 4, 1, 1024),
        WorkTile(8, 8, 1, 1024),
        WorkTile(INF, 4, 4, 256),
    ),
    WeightFormat.W8A16: (
        WorkTile(1, 1, 1),
        WorkTile(2, 2, 1),
        WorkTile(4, 4, 1),
        WorkTile(INF, 4, 4),
    ),
    WeightFormat.W8A8: (
        WorkTile(1, 1, 1, 1024),
        WorkTile(2, 2, 1, 1024),
        WorkTile(4, 4, 1, 1024),
        WorkTile(8, 8, 1, 1024),
        WorkTile(INF, 4, 4, 256),
    ),
    WeightFormat.F16: (
        WorkTile(1, 1, 1),
        WorkTile(2, 2, 1),
        WorkTile(4, 4, 2),
        WorkTile(INF, 8, 2),
    ),
}
_VNNI_SPECIAL = _AVX512_SPECIAL | {
    WeightFormat.W4A16: (
        *_W4A16_FEW,
        WorkTile(8, 8, 1, 1024, planes=2),
        WorkTile(INF, 4, 2, 512, planes=2),
    ),
}
# Few tiles: every type of a file has kernels of its own to compile.
_AVX512_BLOCKS = {
    1: (WorkTile(1, 1, 1, 1024), WorkTile(4, 4, 1, 1024), WorkTile(INF, 4, 4, 256)),
    2: (WorkTile(1, 1, 1, 1024), WorkTile(4, 4, 1, 1024), WorkTile(INF, 4, 2, 512)),
}
# Measured on one Zen 3 core; 16 registers of 8. Pairs of int16 multiply at 1.5 times the rate of
# floats, and widening to those has no permutation of 16 values here: w4a16 computes 1.4 times as
# fast for many tokens, 1.7 times for two, and streams at the speed of memory for one.
_AVX2 = (WorkTile(1, 1, 2), WorkTile(2, 2, 2), WorkTile(8, 4, 2), WorkTile(INF, 4, 3, widen=384))
_AVX2_SPECIAL = {
    WeightFormat.W4A16: (
        WorkTile(1, 1, 2, 1024, planes=2),
        WorkTile(2, 2, 2, 1024, planes=2),
        WorkTile(INF, 4, 2, 512, planes=2),
    ),
    WeightFormat.W4A8: (WorkTile(1, 1, 2, 1024), WorkTile(2, 2, 2, 1024), WorkTile(INF, 4, 2)),
    WeightFormat.W8A8: (WorkTile(1, 1, 2, 1024), WorkTile(2, 2, 2, 1024), WorkTile(INF, 4, 2)),
    WeightFormat.F32: (WorkTile(1, 1, 2), WorkTile(2, 2, 2), WorkTile(INF, 4, 2)),
}
_AVX2_BLOCKS = {
    1: (WorkTile(1, 1, 2, 1024), WorkTile(INF, 4, 2)),
    2: (WorkTile(1, 1, 2, 1024), WorkTile(INF, 4, 2, 512)),
}

_CPU: dict[str, CpuTuning] = {
    "pocl-avx512-vnni": CpuTuning(
        rows=16,
        dot=2,
        tiles=_AVX512,
        special_tiles=_VNNI_SPECIAL,
        block_tiles=_AVX512_BLOCKS,
    ),
    "pocl-avx512": CpuTuning(
        rows=16,
        dot=1,
        tiles=_AVX512,
        special_tiles=_AVX512_SPECIAL,
        block_tiles=_AVX512_BLOCKS,
    ),
    "pocl": CpuTuning(
        rows=8, dot=0, tiles=_AVX2, special_tiles=_AVX2_SPECIAL, block_tiles=_AVX2_BLOCKS
    ),
}


# Work-groups on a processor: 4 x 4 sums of an item stay in registers, of 4 x 8 they did not (128
# tokens took 24 times as long, on Zen 5).
_SIMT: dict[str, SimtTuning] = {"pocl-x86-64": SimtTuning(splits=16)}


def matmul_tuning(family: str) -> CpuTuning | SimtTuning:
    """Return the record of a family: a CPU's or, for every other, a GPU's."""
    return _CPU.get(family) or _SIMT.get(family, SimtTuning())

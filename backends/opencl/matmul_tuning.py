"""How matmul kernels are cut on each family of devices (`hetero.backends.opencl.tuning`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetero.backends.ops import WeightFormat


class Tile(NamedTuple):
    """Register tile of the CPU kernel, used up to `max_m` tokens.

    `prefetch` is the distance in 32-bit words at which weights are prefetched, 0 to leave it to the
    hardware. It pays where there is little arithmetic per word and one stream of weights.
    """

    max_m: float
    tokens: int
    blocks: int
    prefetch: int = 0


INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class CpuTuning:
    """Tiles of the vector kernel.

    dot             integer dot product of w4a8: 2 AVX512-VNNI, 1 AVX512-BW, 0 what there is
    float_tiles     for floating-point activations, by rising `max_m`
    f16_tiles       the same for f16 weights
    int8_tiles      for w4a8
    panel_bytes     part of the L2 cache that a panel of x may take
    """

    dot: int
    float_tiles: tuple[Tile, ...]
    f16_tiles: tuple[Tile, ...]
    int8_tiles: tuple[Tile, ...]
    panel_bytes: int = 4 << 20
    k_panel: int = 4096

    def tile(self, weight_format: WeightFormat, m: int) -> Tile:
        """The smallest tile for m tokens."""
        special = {WeightFormat.W4A8: self.int8_tiles, WeightFormat.F16: self.f16_tiles}
        tiles = special.get(weight_format, self.float_tiles)
        return next(tile for tile in tiles if m <= tile.max_m)

    def panels(self, weight_format: WeightFormat, m: int, k: int, tokens: int) -> tuple[int, int]:
        """(tokens, features) of the panel of x that the kernel keeps in cache."""
        feature_bytes = 1.25 if weight_format is WeightFormat.W4A8 else 4.0
        if m <= tokens or m * k * feature_bytes <= self.panel_bytes:
            return m, k
        most = int(self.panel_bytes / (self.k_panel * feature_bytes))
        return most // tokens * tokens, self.k_panel


@dataclass(frozen=True, kw_only=True)
class SimtTuning:
    """Work-groups of the GPU kernels."""

    splits: int = 8


# Measured on one Zen 5 core. One row block streams best; from 9 tokens on 4 x 4 vectors keep the
# unit busiest, but for f16, whose conversion wants more tokens per vector.
_FLOAT = (Tile(1, 1, 1), Tile(2, 2, 1), Tile(INF, 4, 4))
_F16 = (Tile(1, 1, 1), Tile(2, 2, 1), Tile(4, 4, 2), Tile(INF, 8, 2))
_INT8 = (
    Tile(1, 1, 1, 1024),
    Tile(2, 2, 1, 1024),
    Tile(4, 4, 1, 1024),
    Tile(8, 8, 1, 1024),
    Tile(INF, 4, 4),
)
_AVX2 = (Tile(1, 1, 1), Tile(2, 2, 1), Tile(INF, 4, 1))

_CPU: dict[str, CpuTuning] = {
    "pocl-avx512-vnni": CpuTuning(dot=2, float_tiles=_FLOAT, f16_tiles=_F16, int8_tiles=_INT8),
    "pocl-avx512": CpuTuning(dot=1, float_tiles=_FLOAT, f16_tiles=_F16, int8_tiles=_INT8),
    "pocl": CpuTuning(dot=0, float_tiles=_AVX2, f16_tiles=_AVX2, int8_tiles=_AVX2),
}


def matmul_tuning(family: str) -> CpuTuning | SimtTuning:
    """The record of a family: a CPU's or, for every other, a GPU's."""
    return _CPU.get(family, SimtTuning())

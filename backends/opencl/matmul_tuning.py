"""How matmul kernels are cut on each family of devices (`hetero.backends.opencl.tuning`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetero.backends.ops import WeightFormat


class Tile(NamedTuple):
    """Register tile of the CPU kernel, used up to `max_m` tokens."""

    max_m: float
    tokens: int
    blocks: int


INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class CpuTuning:
    """Tiles of the vector kernel.

    dot             integer dot product of w4a8: 2 AVX512-VNNI, 1 AVX512-BW, 0 what there is
    float_tiles     for floating-point activations, by rising `max_m`
    int8_tiles      for w4a8
    panel_bytes     part of the L2 cache that a panel of x may take
    """

    dot: int
    float_tiles: tuple[Tile, ...]
    int8_tiles: tuple[Tile, ...]
    panel_bytes: int = 512 * 1024
    k_panel: int = 512

    def tile(self, weight_format: WeightFormat, m: int) -> Tile:
        """The smallest tile for m tokens."""
        quantised = weight_format is WeightFormat.W4A8
        tiles = self.int8_tiles if quantised else self.float_tiles
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


_AVX512_FLOAT = (Tile(1, 1, 1), Tile(2, 2, 2), Tile(4, 4, 2), Tile(INF, 8, 2))
_CPU: dict[str, CpuTuning] = {
    "pocl-avx512-vnni": CpuTuning(
        dot=2,
        float_tiles=_AVX512_FLOAT,
        int8_tiles=(Tile(1, 1, 1), Tile(2, 2, 2), Tile(INF, 4, 2)),
    ),
    "pocl-avx512": CpuTuning(
        dot=1,
        float_tiles=_AVX512_FLOAT,
        int8_tiles=(Tile(1, 1, 1), Tile(2, 2, 2), Tile(INF, 4, 2)),
    ),
    "pocl": CpuTuning(
        dot=0,
        float_tiles=(Tile(1, 1, 1), Tile(2, 2, 1), Tile(INF, 4, 1)),
        int8_tiles=(Tile(1, 1, 1), Tile(INF, 2, 1)),
    ),
}


def matmul_tuning(family: str) -> CpuTuning | SimtTuning:
    """The record of a family: a CPU's or, for every other, a GPU's."""
    return _CPU.get(family, SimtTuning())

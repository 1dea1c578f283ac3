"""The sizes of a gated delta net: what mixes tokens in the linear layers of Qwen3.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.errors import ModelError
from hetero.models.fields import Fields

LINEAR = "linear_attention"
# Fields of config.json, and what `transformers` takes where one is left out.
_FIELDS = {
    "k_heads": ("linear_num_key_heads", 16),
    "v_heads": ("linear_num_value_heads", 32),
    "k_dim": ("linear_key_head_dim", 128),
    "v_dim": ("linear_value_head_dim", 128),
}


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Heads and their sizes (notation of `ops.GatedDelta`)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    @property
    def values(self) -> int:
        """Return the features of all value heads."""
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Return the features of the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.values

    @property
    def projections(self) -> tuple[int, int, int, int]:
        """Return the rows of the matmul before it: of the convolution, z, b and a."""
        return self.channels, self.values, self.v_heads, self.v_heads

    def value_rows(self, size: int, before: int = 0) -> npt.NDArray[np.int64]:
        """Return the order of value heads of `size` rows each, behind rows that stay.

        A checkpoint has the value heads of a key head one after the other. Ours go round by round,
        one of each key head, as in GGUF files.
        """
        group = self.v_heads // self.k_heads
        heads = np.arange(self.v_heads, dtype=np.int64).reshape(self.k_heads, group).T.reshape(-1)
        rows = heads[:, None] * size + np.arange(size)
        return np.concatenate([np.arange(before), before + rows.reshape(-1)])


def read_delta_net(source: Fields) -> DeltaNet:
    """Return the sizes in a config.json. Raises `ModelError`."""
    sizes = {ours: source.positive_int(name, absent) for ours, (name, absent) in _FIELDS.items()}
    net = DeltaNet(**sizes)
    if net.v_heads % net.k_heads:
        raise ModelError(
            f"{source.where}: linear_num_value_heads must be a multiple of linear_num_key_heads, "
            f"got {net.v_heads} and {net.k_heads}; correct the file"
        )
    return net


def write_delta_net(net: DeltaNet) -> dict[str, Any]:
    """Return the fields that `read_delta_net` reads."""
    return {name: getattr(net, ours) for ours, (name, _) in _FIELDS.items()}

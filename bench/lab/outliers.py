"""The same model with outliers: channels grow by a power of two, and their readers shrink by it.

The function of the model is exactly the same, to test the handling of outliers:

    norm weight (and bias) of a channel · 2^a    columns of the matmuls after it ÷ 2^a
    row of up · 2^a                              column of down ÷ 2^a
    row of v · 2^a                               columns of o ÷ 2^a, in all heads that share it

Powers of two change no mantissa, and sums keep their order, so float logits have the same bits
(unless something under- or overflows). Rounding to integers sees a difference: a tensor's scale is
that of its largest channel. The other side shrinks too: a column divided by 2^a all but vanishes in
an int8 weight with one scale a row. SmoothQuant undoes exactly this, so it is no comparison with
SmoothQuant. `python bench/quality.py outliers` scores such models.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hetero.backends.formats import StorageFormat
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.errors import UserError
from hetero.models.model_weights import BlockWeights, DerivedWeights, ModelWeights
from hetero.models.packing import SourceTensor, pack_rows

PART: Final = 0.003  # of a tensor's channels, at least one: 0.1 to 0.3 % in mllm-NPU's figure 10
EXPONENTS: Final = (4, 8)  # from, to


class OutlyingWeights(DerivedWeights):
    """The weights `exact` (f32) with outliers at the inputs of every matmul, drawn from `seed`.

    Feed-forwards without a gate stay as they are at `down` (an activation is no product), tied
    output heads at `lm_head`.
    """

    def __init__(
        self,
        exact: ModelWeights,
        seed: int = 0,
        *,
        part: float = PART,
        exponents: tuple[int, int] = EXPONENTS,
    ) -> None:
        super().__init__(exact, exact.weight_format)
        if exact.weight_format != "f32":
            raise UserError("outliers are folded into f32 weights: open the model as f32")
        self._seed, self._part, self._exponents = seed, part, exponents

    def _factors(self, size: int, *place: int) -> Float32Array:
        """Return 2^a for a few channels [size], 1 for the others; the same at the same place."""
        rng = np.random.default_rng([self._seed, *place])
        factors = np.ones(size, dtype=np.float32)
        hot = rng.choice(size, max(1, round(self._part * size)), replace=False)
        low, high = self._exponents
        factors[hot] = np.exp2(rng.integers(low, high + 1, len(hot))).astype(np.float32)
        return factors

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        vector = self.inner.model_vector(name)
        if name in ("final_norm", "final_norm_bias") and not self.config.tie_word_embeddings:
            return vector * self._factors(self.config.hidden_size, 0)
        return vector

    def _load_matrix(self, name: str) -> PackedWeight:
        if name == "embed":
            return self.inner.embed()
        return _packed(
            self.inner.lm_head().dequantize() / self._factors(self.config.hidden_size, 0)
        )

    def _load_block(self, index: int) -> BlockWeights:
        exact = self.inner.block(index)
        parts: dict[str, Any] = dict(exact.vectors)
        dense = {name: x.dequantize() for name, x in exact.matrices.items()}
        self._after_norms(parts, dense, index)
        self._at_o(parts, dense, index)
        if self.config.gated:
            factors = self._factors(self.config.intermediate_size, index, 4)
            rows = np.concatenate([np.ones_like(factors), factors])
            _grow(parts, dense, "gate_up", rows)
            dense["down"] /= factors
        return BlockWeights({name: _packed(x) for name, x in dense.items()}, parts)

    def _after_norms(
        self, parts: dict[str, Any], dense: dict[str, Float32Array], index: int
    ) -> None:
        readers = {"input_norm": ["qkv"], "post_norm": ["gate_up"]}
        if self.config.parallel:
            readers = {"input_norm": ["qkv", "gate_up"]}
        for place, (norm, matmuls) in enumerate(readers.items(), start=1):
            factors = self._factors(self.config.hidden_size, index, place)
            for vector in (norm, f"{norm}_bias"):
                if vector in parts:
                    parts[vector] = parts[vector] * factors
            for name in matmuls:
                dense[name] /= factors

    def _at_o(self, parts: dict[str, Any], dense: dict[str, Float32Array], index: int) -> None:
        config = self.config
        factors = self._factors(config.kv_heads * config.head_dim, index, 3)
        others = (config.heads + config.kv_heads) * config.head_dim
        rows = np.concatenate([np.ones(others, dtype=np.float32), factors])
        _grow(parts, dense, "qkv", rows)
        shared = factors.reshape(config.kv_heads, 1, config.head_dim)
        columns = np.repeat(shared, config.heads // config.kv_heads, axis=1)
        dense["o"] /= columns.reshape(-1)


def _grow(
    parts: dict[str, Any], dense: dict[str, Float32Array], name: str, rows: Float32Array
) -> None:
    """Multiply rows of a matmul, and its bias."""
    dense[name] *= rows[:, None]
    if f"{name}_bias" in parts:
        parts[f"{name}_bias"] = parts[f"{name}_bias"] * rows


def _packed(dense: Float32Array) -> PackedWeight:
    return pack_rows([SourceTensor("weight", dense)], StorageFormat.F32)

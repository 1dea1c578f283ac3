"""Stored weights served in another format: dequantised, and packed again."""

from __future__ import annotations

from hetero.backends.formats import WeightFormat
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.models.layout import block_matrices
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.models.packing import SourceTensor, pack_rows


class ConvertedWeights(ModelWeights):
    """The numbers of `inner` in another format: f32 is exact, the others round again.

    For models without a better source: a format with more bits does not restore what the stored one
    has lost.
    """

    def __init__(self, inner: ModelWeights, weight_format: WeightFormat) -> None:
        super().__init__(inner.config, weight_format)
        self.source = inner.source
        self._inner = inner

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        return self._inner.model_vector(name)

    def release(self, index: int) -> None:
        """Forget a block here and in the source."""
        super().release(index)
        self._inner.release(index)

    def _load_block(self, index: int) -> BlockWeights:
        block = self._inner.block(index)
        packed = {x.name: self._packed(getattr(block, x.name)) for x in block_matrices(self.config)}
        vectors = {x.name: getattr(block, x.name) for x in self.vectors()}
        return BlockWeights(**packed, **vectors)  # type: ignore[arg-type]

    def _load_matrix(self, name: str) -> PackedWeight:
        inner = self._inner.embed() if name == "embed" else self._inner.lm_head()
        return self._packed(inner)

    def _packed(self, weight: PackedWeight) -> PackedWeight:
        source = SourceTensor("weight", weight.dequantize())
        return pack_rows([source], self.weight_format.storage)

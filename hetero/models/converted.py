"""Stored weights served in another format: dequantised, and packed again."""

from __future__ import annotations

from hetero.backends.weights import PackedWeight
from hetero.models.layout import block_matrices
from hetero.models.model_weights import BlockWeights, DerivedWeights
from hetero.models.packing import SourceTensor, pack_rows


class ConvertedWeights(DerivedWeights):
    """The numbers of `inner` in another format: f32 is exact, the others round again.

    For models without a better source: a format with more bits does not restore what the stored one
    has lost.
    """

    def _load_block(self, index: int) -> BlockWeights:
        block = self.inner.block(index)
        packed = {
            x.name: self._packed(block.matrix(x.name)) for x in block_matrices(self.config, index)
        }
        vectors = {x.name: block.vectors[x.name] for x in self.vectors(index)}
        return BlockWeights(packed, vectors)

    def _load_matrix(self, name: str) -> PackedWeight:
        return self._packed(self.inner.outer_matrix(name))

    def _packed(self, weight: PackedWeight) -> PackedWeight:
        source = SourceTensor("weight", weight.dequantize())
        return pack_rows([source], self.weight_format.storage)

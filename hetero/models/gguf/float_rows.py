"""The tensors of a GGUF file as float32 rows, without packing them."""

from __future__ import annotations

from hetero.backends.formats import WeightFormat
from hetero.models.gguf.file import GgufFile
from hetero.models.gguf.gguf_weights import GgufWeights
from hetero.models.gguf.model_config import read_config
from hetero.models.gguf.tensors import GgufTensor
from hetero.models.model_weights import BlockWeights


class GgufRows(GgufWeights):
    """Weights of a GGUF file whose blocks have vectors only; `sources` read its matrices."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file, read_config(file), WeightFormat.F32)

    def sources(self, name: str) -> list[GgufTensor]:
        """Return the tensors whose rows are a matrix (`blk.3.qkv`, `embed`), in its order."""
        return [x for _, members in self._runs(name) for x in members]

    def _load_block(self, index: int) -> BlockWeights:
        prefix = f"blk.{index}."
        vectors = {x.name: self._block_vector(prefix, x.name) for x in self.vectors(index)}
        return BlockWeights({}, vectors)

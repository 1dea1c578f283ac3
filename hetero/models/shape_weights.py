"""Weights without values: the shapes of a model, for devices that compute nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat
from hetero.backends.weights import (
    Float32Array,
    PackedWeight,
    data_dtype,
    data_shape,
    scales_dtype,
    scales_shape,
)
from hetero.models.layout import block_matrices, embedding_matrices, model_vectors
from hetero.models.model_weights import BlockWeights, ModelWeights


class ShapeWeights(ModelWeights):
    """A model's weights as shapes: every array repeats one zero, and takes no memory."""

    in_memory = False

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        shapes = model_vectors(self.config, self.weight_format.storage)
        return _zeros(np.float32, (next(x.n for x in shapes if x.name == name),))

    def _load_block(self, index: int) -> BlockWeights:
        storage = self.weight_format.storage
        matrices = {x.name: _matrix(storage, x.n, x.k) for x in block_matrices(self.config, index)}
        vectors = {x.name: _zeros(np.float32, (x.n,)) for x in self.vectors(index)}
        return BlockWeights(matrices, vectors)

    def _load_matrix(self, name: str) -> PackedWeight:
        shape = next(x for x in embedding_matrices(self.config) if x.name == name)
        return _matrix(self.weight_format.storage, shape.n, shape.k)


def _matrix(storage: StorageFormat, n: int, k: int) -> PackedWeight:
    scales = None
    if storage.quantised:
        scales = _zeros(scales_dtype(storage), scales_shape(storage, n, k))
    return PackedWeight(
        storage, n, k, _zeros(data_dtype(storage), data_shape(storage, n, k)), scales
    )


def _zeros(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.broadcast_to(np.zeros((), dtype), shape)

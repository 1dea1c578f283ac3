"""The first layers of a model with its final norm and output head, which guess for it.

Some models are trained so that their first layers alone say nearly what all of them do (LayerSkip,
arXiv 2404.16710; early exit).
"""

from __future__ import annotations

from dataclasses import replace

from hetero.backends.formats import StorageFormat
from hetero.backends.weights import PackedWeight
from hetero.errors import ModelError
from hetero.models.calibration_record import matmul_shapes
from hetero.models.config import ModelConfig
from hetero.models.model_weights import BlockWeights, DerivedWeights, ModelWeights

BY_LAYER = ("windows", "mixers", "layer_ropes", "layer_sizes", "kv_source")


def first_layers(config: ModelConfig, layers: int, name: str) -> ModelConfig:
    """Return the configuration of the first layers. Raises `ModelError` where there are too few."""
    if not 1 <= layers < config.num_layers:
        raise ModelError(
            f"{name}: has {config.num_layers} layers, so an early exit is behind 1 to "
            f"{config.num_layers - 1} of them, got {layers}"
        )
    if config.layer_inputs:
        raise ModelError(
            f"{name}: an early exit is not supported where layers have inputs of their own: name a "
            "draft model, or Gemma 4's assistant"
        )
    by_layer = {field: getattr(config, field)[:layers] for field in BY_LAYER}
    experts = config.experts
    if experts is not None:
        dense = tuple(x for x in experts.dense if x < layers)
        experts = replace(experts, dense=dense) if len(dense) < layers else None
    return replace(config, num_layers=layers, experts=experts, **by_layer)


class FirstLayers(DerivedWeights):
    """The weights of a model's first layers, read as its own are."""

    def __init__(self, inner: ModelWeights, config: ModelConfig) -> None:
        super().__init__(inner, inner.weight_format)
        self.config = config
        self.also, self.in_memory = inner.also, inner.in_memory
        if inner.calibration is not None:
            matmuls, names = inner.calibration.matmuls, matmul_shapes(config)
            own = {name: matmuls[name] for name in matmuls if name in names}
            self.calibration = inner.calibration.model_copy(update={"matmuls": own})

    @property
    def mapped(self) -> bool:
        """Return whether the packed weights are those of a mapped file."""
        return self.inner.mapped

    def head_in(self, storage: StorageFormat) -> PackedWeight:
        """Return the output head in another storage."""
        return self.inner.head_in(storage)

    def release_embeddings(self) -> None:
        """Drop embeddings and output head here and in the source."""
        super().release_embeddings()
        self.inner.release_embeddings()

    def prefetch(self) -> None:
        """Read mapped files ahead."""
        self.inner.prefetch()

    def close(self) -> None:
        """Wait until everything for the next start is stored."""
        self.inner.close()

    def _load_block(self, index: int) -> BlockWeights:
        return self.inner.block(index)

    def _load_matrix(self, name: str) -> PackedWeight:
        return self.inner.outer_matrix(name)

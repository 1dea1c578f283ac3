"""Gemma 4's assistants: small decoders that guess what a larger model says next.

An assistant (`gemma4_assistant` in `transformers`) has queries only. Each of its layers attends to
the keys and values that the model keeps in its last layer of the same kind, full or sliding. With
the model's embedding e of the last token and its hidden state h of the token before, which its
final norm has written,

    x = W_pre · [e, h];  the layers;  x = norm(x);  logits = W_head · x;  h' = W_post · x

where h' is the h of the next guess. All guesses of a round have the position of the last token.
With `use_ordered_embeddings` only the rows of the most likely clusters of W_head are multiplied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hetero.backends.weights import Float32Array
from hetero.errors import ModelError
from hetero.models import named_path
from hetero.models.architectures import ARCHITECTURES
from hetero.models.checkpoint import CheckpointFiles
from hetero.models.config import ModelConfig
from hetero.models.fields import Fields, read_json_object
from hetero.models.packing import check_finite
from hetero.models.row_tables import Ids
from hetero.models.safetensors_file import FLOAT_DTYPES

# `model_type` of an assistant: that of its decoder.
ASSISTANTS: Final[Mapping[str, str]] = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
VECTORS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def assistant_path(model: str) -> Path | None:
    """Return the directory of the assistant that a MODEL names; None where it names another model.

    Raises `ModelError` for a broken one.
    """
    path = named_path(model)
    config = path / "config.json"
    is_one = os.path.isfile(config) and read_json_object(config).get("model_type") in ASSISTANTS
    return path if is_one else None


@dataclass(frozen=True)
class AssistantLayer:
    """The weights of a layer: matrices [out, in] by name, and norms; `scale` is of its output."""

    matrices: Mapping[str, Float32Array]
    norms: Mapping[str, Float32Array]
    scale: np.float32


class AssistantWeights:
    """An assistant's weights, float32; the rows of the output head stay in their file.

    Without clusters all rows are read once they are needed. `config` is of a decoder whose layers
    have keys and values of their own, of the sizes of those that they attend to. `backbone` is the
    width of the larger model.
    """

    def __init__(self, directory: Path) -> None:
        raw = read_json_object(directory / "config.json")
        source = Fields(raw, str(directory / "config.json"))
        self.name = directory.name
        self.config = config = _decoder(source)
        self.backbone = source.positive_int("backbone_hidden_size", 1536)
        self._files = files = CheckpointFiles(directory)
        read = _Tensors(files)
        d = config.hidden_size
        self.pre = read("pre_projection.weight", d, 2 * self.backbone)
        self.post = read("post_projection.weight", self.backbone, d)
        self.final_norm = read("model.norm.weight", d)
        self.layers = [_layer(read, config, i) for i in range(config.num_layers)]
        self._head = "model.embed_tokens.weight"
        read.check(self._head, config.vocab_size, d)
        self._centroids: Float32Array | None = None
        self._chosen, self._tokens = 0, np.zeros((0, 0), np.int64)
        if source.boolean("use_ordered_embeddings", False):
            self._read_clusters(source, read)
        self._rows: Float32Array | None = None

    def _read_clusters(self, source: Fields, read: _Tensors) -> None:
        count = source.positive_int("num_centroids", 2048)
        vocabulary, d = self.config.vocab_size, self.config.hidden_size
        if vocabulary % count:
            rule = f"must divide the vocabulary of {vocabulary}"
            raise source.error("num_centroids", rule, "correct the file")
        self._chosen = source.positive_int("centroid_intermediate_top_k", 32, limit=count)
        self._centroids = read("masked_embedding.centroids.weight", count, d)
        name = "masked_embedding.token_ordering"
        tokens = self._files.array(name) if name in self._files else np.zeros(0, np.int64)
        if not np.array_equal(np.sort(tokens, axis=None), np.arange(vocabulary)):
            raise ModelError(
                f"{self._files.directory}: {name} must have every token of the vocabulary of "
                f"{vocabulary} once; download the file again"
            )
        self._tokens = tokens.reshape(count, -1)

    def logits(self, x: Float32Array) -> tuple[Ids, Float32Array]:
        """Return tokens, and their logits behind a normed state [d]."""
        if self._centroids is None:
            if self._rows is None:
                self._rows = self._head_rows(np.arange(self.config.vocab_size))
            return np.arange(len(self._rows)), self._rows @ x
        near = np.argpartition(self._centroids @ x, -self._chosen)[-self._chosen :]
        tokens = self._tokens[near].ravel()
        return tokens, self._head_rows(tokens) @ x

    def _head_rows(self, ids: Ids) -> Float32Array:
        rows: Float32Array = self._files.rows(self._head, ids).astype(np.float32)
        check_finite(self._head, rows)
        return rows


class _Tensors:
    """Reads tensors by name as float32, checked. Raises `ModelError`."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files

    def __call__(self, name: str, *shape: int) -> Float32Array:
        self.check(name, *shape)
        values = np.array(self._files.array(name), np.float32)
        check_finite(name, values)
        return values

    def check(self, name: str, *shape: int) -> None:
        """Raise `ModelError` unless there are floats of this shape."""
        where = self._files.directory
        if name not in self._files:
            raise ModelError(f"{where}: tensor {name} is missing; download the files again")
        found_shape, dtype = self._files.shape(name), self._files.dtype(name)
        if found_shape != shape or dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{where}: tensor {name} must be floats of the shape {list(shape)}, got "
                f"{dtype} of {list(found_shape)}; download the files again"
            )


def _decoder(source: Fields) -> ModelConfig:
    """Return the decoder's configuration, as one whose layers have keys and values."""
    kind = ASSISTANTS[source.text("model_type")]
    if source.raw.get("text_config") is None:
        raise source.error("text_config", "must be given", "download the file again")
    text: dict[str, Any] = {
        **ARCHITECTURES[kind].defaults,
        **source.object("text_config"),
        "model_type": kind,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    text.pop("architectures", None)
    config = ModelConfig.from_dict(text, where=f"{source.where}: text_config")
    for field in ("experts", "qkv_bias"):
        if getattr(config, field):
            raise ModelError(
                f"{source.where}: assistants with experts or biases are not supported; choose "
                "another assistant"
            )
    return config


def _layer(read: _Tensors, config: ModelConfig, index: int) -> AssistantLayer:
    prefix, own, d = f"model.layers.{index}.", config.at(index), config.hidden_size
    queries, f = own.heads * own.head_dim, own.intermediate_size
    shapes = {"self_attn.q_proj": (queries, d), "self_attn.o_proj": (d, queries)}
    shapes |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    norms = {name: read(f"{prefix}{name}.weight", d) for name in VECTORS}
    norms["q_norm"] = read(f"{prefix}self_attn.q_norm.weight", own.head_dim)
    matrices = {
        name.rpartition(".")[2]: read(f"{prefix}{name}.weight", *shape)
        for name, shape in shapes.items()
    }
    return AssistantLayer(matrices, norms, np.float32(read(f"{prefix}layer_scalar", 1)[0]))

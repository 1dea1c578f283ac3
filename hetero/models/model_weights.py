"""`ModelWeights`: packed weights of a model, block by block, from any source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.ops import Outliers
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.errors import ModelError
from hetero.models.calibration_record import Calibration, hot_bytes, matmul_shapes
from hetero.models.config import ModelConfig
from hetero.models.layout import VectorShape, block_vectors, embedding_matrices, total_bytes
from hetero.models.row_tables import RowTable, packed_rows
from hetero.terminal.notices import notify_once


@dataclass(frozen=True, eq=False)
class Shadow:
    """Hot channels of a matmul's input: those that hold most of its outliers.

    `channels` int32 [h], rising; `weight` float16 [n, h], their columns of the weight.
    """

    channels: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Weights of one transformer block (notation of `hetero.backends.ops`).

    `matrices` by the names of the block's matmuls: `qkv` [(H + 2G)·D, d]: rows of the query, key
    and value weights in this order, or `q_only` [H·D, d] where keys and values are another layer's;
    `o` [d, H·D]; `gate_up` [2f, d]: rows of gate, then up ([f, d]: up alone, without a gate);
    `down` [d, f]; of a short convolution `conv_in` [3d, d] and `conv_out` [d, d]; of a layer's own
    inputs `input_in`, `input_gate` and `input_out`; of routed experts `experts_gate`, `experts_up`
    and `experts_down`, with the rows of all of them.
    `vectors` are float32 norms, biases and other numbers that the block has, by name:
    `input_norm`; `post_norm`, the norm before the feed-forward; `o_norm` and `down_norm`, which
    follow the matmuls of these names; `layer_scale` [1], which multiplies the stream after the
    block; `qkv_bias`, …; `conv_taps` [L · d]; `router` [experts · d]. A `qkv_x_scale` [1] is the
    step of the codes of that matmul's input, where the format has one.
    `shadows` are hot channels by matmul, where calibration chose some; their columns are zero in
    every storage. `also` are the matrices in other storages, by name.
    """

    matrices: Mapping[str, PackedWeight]
    vectors: Mapping[str, Float32Array]
    shadows: Mapping[str, Shadow] = field(default_factory=dict)
    also: Mapping[StorageFormat, Mapping[str, PackedWeight]] = field(default_factory=dict)

    def matrix(self, name: str, storage: StorageFormat | None = None) -> PackedWeight:
        """Return a matrix in the model's storage, or in another that it has too."""
        return self.matrices[name] if storage is None else self.also[storage][name]


class ModelWeights(ABC):
    """Packed weights of a model.

    `block(i)` and the tensors outside of the blocks (`embed`, `lm_head`, the vectors) are made on
    first use and kept until `release`; a caller that still needs an array keeps a reference to it.
    With tied embeddings `lm_head()` is the same object as `embed()`. Data and scales of packed
    weights are page-aligned; all arrays are read-only by contract and live as long as anything
    refers to them. One thread at a time. `source` is the directory that the weights come from, None
    if they were generated; `calibration` is the origin of static scales of activations, if they
    come from a text; `also` are other formats in which all matrices are stored too;
    `in_memory`: they have values, which take memory; `mtp` are the weights of the model's head for
    multi-token prediction, which stay in their file until they are asked for, and whose `trunk`
    are these weights, with the embeddings and the output head of both.

    Reading a block raises `ModelError` when its tensors hold values that are not finite.
    """

    config: ModelConfig
    weight_format: WeightFormat
    source: Path | None = None
    calibration: Calibration | None = None
    also: tuple[WeightFormat, ...] = ()
    in_memory: bool = True
    mtp: ModelWeights | None = None
    trunk: ModelWeights | None = None

    def __init__(self, config: ModelConfig, weight_format: WeightFormat) -> None:
        self.config = config
        self.weight_format = weight_format
        self._blocks: dict[int, BlockWeights] = {}
        self._outer: dict[str, PackedWeight] = {}

    @property
    def mapped(self) -> bool:
        """Return whether the packed weights are those of a mapped file, which are no copies."""
        return False

    @property
    def nbytes(self) -> int:
        """Return the bytes of all packed weights, norms, biases and hot channels."""
        packed = total_bytes(self.config, self.weight_format.storage)
        return packed + hot_bytes(self.config, self.calibration)

    def keep_head(self, opened: Callable[[], ModelWeights], size: int) -> None:
        """Keep the weights of a head for multi-token prediction, of so many bytes in its file.

        A notice says so, or why a head that is not as expected is left out.
        """
        try:
            head = opened()
        except ModelError as error:
            notify_once(f"{error}; the head for multi-token prediction is left out")
            return
        self.mtp, head.trunk = head, self
        notify_once(
            f"{self.source}: has a head for multi-token prediction ({size / 2**20:.1f} MiB), which "
            "guesses tokens ahead with --draft-model mtp, and else stays in the file"
        )

    def outliers(self) -> dict[str, Outliers]:
        """Return the operations of the shadows, by block and matmul (`blocks.3.down`)."""
        if self.calibration is None:
            return {}
        shapes, by_name = matmul_shapes(self.config), {}
        for name in self.calibration.shadowed:
            shape = shapes[name]
            hot, excess = self.calibration.hot(name), self.calibration.excess
            by_name[name] = Outliers(n=shape.n, k=shape.k, hot=hot, excess=excess)
        return by_name

    def vectors(self, index: int) -> tuple[VectorShape, ...]:
        """Return the float32 vectors of a block."""
        return block_vectors(self.config, self.weight_format.storage, index)

    def block(self, index: int) -> BlockWeights:
        """Return the weights of a block, 0 <= index < num_layers. Raises `IndexError` outside."""
        if not 0 <= index < self.config.num_layers:
            raise IndexError(f"block {index} of a model of {self.config.num_layers} blocks")
        if index not in self._blocks:
            self._blocks[index] = self._load_block(index)
        return self._blocks[index]

    def embed(self) -> PackedWeight:
        """Return the token embeddings [vocab, d]."""
        return self.outer_matrix("embed")

    def lm_head(self) -> PackedWeight:
        """Return the output head [vocab, d]; the embeddings themselves if tied."""
        return self.embed() if self.config.tie_word_embeddings else self.outer_matrix("lm_head")

    def outer_matrix(self, name: str) -> PackedWeight:
        """Return a matrix of `layout.embedding_matrices`."""
        if name not in self._outer:
            shared = self.trunk is not None and name in ("embed", "lm_head")
            source = self.trunk.outer_matrix if self.trunk and shared else self._load_matrix
            self._outer[name] = source(name)
        return self._outer[name]

    def table(self, name: str) -> RowTable:
        """Return the rows of a matrix of `layout.MAPPED`, read where they are stored."""
        return packed_rows(self.outer_matrix(name))

    def outer_weight(self, role: str, name: str) -> PackedWeight | Float32Array:
        """Return a weight outside of the blocks, by operation and name in `ops.weight_names`."""
        if name == "weight" and role == "lm_head":
            return self.lm_head()
        if name == "weight" and any(x.name == role for x in embedding_matrices(self.config)):
            return self.outer_matrix(role)
        return self.model_vector(f"{role}_{name}" if name in ("bias", "x_scale") else role)

    def head_in(self, storage: StorageFormat) -> PackedWeight:
        """Return the output head in another storage. Raises `KeyError` where there is none."""
        raise KeyError(storage)

    def final_norm(self) -> Float32Array:
        """Return the weight [d] of the norm before the output head."""
        return self.model_vector("final_norm")

    @abstractmethod
    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks.

        It is `final_norm`, `final_norm_bias` (both times `logit_scale`), `lm_head_bias`,
        `lm_head_x_scale` or `positions` (row after row).
        """

    def _with_logit_scale(self, name: str, vector: Float32Array) -> Float32Array:
        """Return a vector of the source, with the factor on logits if it is the final norm's."""
        if not name.startswith("final_norm") or self.config.logit_scale == 1:
            return vector
        return vector * np.float32(self.config.logit_scale)

    def requantised(self) -> dict[str, float]:
        """Return the relative error of what was quantised a second time, by the source's type.

        It is measured on what has been read so far.
        """
        return {}

    def release(self, index: int) -> None:
        """Drop block `index`; pages of a mapped file leave memory until they are read again.

        Arrays that were handed out stay valid. `block(index)` makes the block again.
        """
        self._blocks.pop(index, None)

    def release_embeddings(self) -> None:
        """Drop embeddings and output head, as `release` drops a block."""
        self._outer.clear()

    def prefetch(self) -> None:  # noqa: B027
        """Read mapped files ahead, before all weights are used in place."""

    def close(self) -> None:  # noqa: B027
        """Wait until everything for the next start is stored."""

    @abstractmethod
    def _load_block(self, index: int) -> BlockWeights:
        """Make the weights of a block."""

    @abstractmethod
    def _load_matrix(self, name: str) -> PackedWeight:
        """Make a matrix of `layout.embedding_matrices`."""


class DerivedWeights(ModelWeights):
    """Weights made of the matrices of others, `inner`, whose vectors they have as well."""

    def __init__(self, inner: ModelWeights, weight_format: WeightFormat) -> None:
        super().__init__(inner.config, weight_format)
        self.source, self.inner = inner.source, inner

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        return self.inner.model_vector(name)

    def table(self, name: str) -> RowTable:
        """Return the rows of a matrix of `layout.MAPPED`, of the inner weights."""
        return self.inner.table(name)

    def release(self, index: int) -> None:
        """Forget a block here and in the source."""
        super().release(index)
        self.inner.release(index)

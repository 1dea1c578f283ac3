"""`ModelSpec`: the matmuls and other operators of a model, without weights.

Written from model files by `hetero.models`; read by the solver and the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_file
from hetero.backends.ops import (
    Act,
    Activation,
    Add,
    AddPositions,
    Attention,
    Embed,
    GatedAct,
    LayerNorm,
    MatMul,
    Op,
    RMSNorm,
    Rope,
    RopeScaling,
    WeightFormat,
)
from hetero.backends.weights import data_dtype, data_shape, scales_shape

SCHEMA_VERSION: Final = 1

MatMulName: TypeAlias = Literal["qkv", "o", "gate_up", "down", "lm_head"]


@dataclass(frozen=True)
class StepOp:
    """One operator of a whole step (all layers): how often `op` runs per step."""

    name: str
    op: Op
    count: int


class MatMulSpec(BaseModel):
    """A matmul `y[m, n] = x[m, k] · W[n, k]ᵀ` that occurs `count` times in the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: MatMulName
    n: int = Field(ge=1)
    k: int = Field(ge=1)
    count: int = Field(ge=1)
    bias: bool = False


class ModelSpec(BaseModel):
    """Shapes of a decoder-only model; everything needed to cost a step, and no weights.

    `max_position` is in tokens. `windows` has one entry per layer: the sliding attention window in
    tokens, 0 for full attention. The other fields are those of `hetero.models.config.ModelConfig`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    architecture: str
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_position: int = Field(ge=1)
    weight_format: WeightFormat
    matmuls: tuple[MatMulSpec, ...]
    activation: Activation = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    rotary_dim: int = 0
    positions: int = 0
    norm: Literal["rms", "layer"] = "rms"
    out_norms: bool = False
    parallel: bool = False
    gated: bool = True
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [matmul.name for matmul in self.matmuls]
        if len(set(names)) != len(names):
            raise ValueError(f"every matmul is listed once, got {names}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(
                f"windows has one entry per layer, got {len(self.windows)} for {self.layers} layers"
            )
        return self

    def matmul(self, name: MatMulName) -> MatMulSpec:
        """The matmul of that name. Raises `KeyError` if the model has none."""
        for matmul in self.matmuls:
            if matmul.name == name:
                return matmul
        raise KeyError(name)

    def matmul_op(self, name: MatMulName) -> MatMul:
        """Operation record of a matmul, all rows in one piece."""
        spec = self.matmul(name)
        return MatMul(
            n=spec.n,
            k=spec.k,
            weight_format=self.weight_format,
            bias=spec.bias,
            softcap=self.logit_softcap if name == "lm_head" else 0.0,
        )

    def step_ops(self, capacity: int) -> tuple[StepOp, ...]:
        """Every operator of one step with a KV cache of `capacity` tokens, matmuls included.

        Norms that follow a residual add are fused with it, as the runtime runs them.
        """
        matmuls = [StepOp(x.name, self.matmul_op(x.name), x.count) for x in self.matmuls]
        return (*matmuls, *self._other_ops(capacity))

    def _other_ops(self, capacity: int) -> list[StepOp]:
        """The operators that are not matmuls, named by what they do."""
        norms = self.layers if self.parallel else 2 * self.layers  # input norms but one, final norm
        found = [
            StepOp("embed", self.embed_op(), 1),
            StepOp("first_norm", self.norm_op(), 1),
            StepOp("norm", self.norm_op(add=True), norms),
            self._placing(),
            *(
                StepOp("attention", self.attention_op(capacity, window), count)
                for window, count in sorted(self._window_counts().items())
            ),
            StepOp("activation", self.activation_op(), self.layers),
        ]
        if self.out_norms:
            found.append(StepOp("out_norm", self.norm_op(), 2 * self.layers))
        if self.parallel:
            found.append(StepOp("join", Add(d=self.hidden_size), self.layers))
        return found

    def _placing(self) -> StepOp:
        """What tells positions apart."""
        if self.positions:
            return StepOp("positions", self.positions_op(), 1)
        return StepOp("rope", self.rope_op(), self.layers)

    def embed_op(self) -> Embed:
        """Operation record of the embedding."""
        return Embed(
            vocab=self.vocab_size,
            d=self.hidden_size,
            weight_format=self.weight_format,
            scale=self.embed_scale,
        )

    def positions_op(self, offset: int = 0) -> AddPositions:
        """Operation record of the learned positions, whose first is row `offset` of the table."""
        return AddPositions(d=self.hidden_size, rows=self.positions, offset=offset)

    def norm_op(self, *, add: bool = False) -> RMSNorm | LayerNorm:
        """Operation record of a norm, with the addition to the residual stream before it."""
        kind = LayerNorm if self.norm == "layer" else RMSNorm
        return kind(d=self.hidden_size, eps=self.rms_norm_eps, add=add)

    def activation_op(self) -> GatedAct | Act:
        """Operation record of what is between the matmuls of the feed-forward."""
        kind = GatedAct if self.gated else Act
        return kind(f=self.intermediate_size, activation=self.activation)

    def rope_op(self, max_position: int = 0) -> Rope:
        """Operation record of the rotary embedding, with the query/key norm if there is one."""
        return Rope(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            theta=self.rope_theta,
            max_position=max_position or self.max_position,
            rotary_dim=self.rotary_dim,
            scaling=self.rope_scaling,
            qk_norm_eps=self.rms_norm_eps if self.qk_norm else None,
        )

    def attention_op(self, capacity: int, window: int = 0) -> Attention:
        """Operation record of attention over a cache of `capacity` tokens."""
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=capacity,
            window=window,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
        )

    def _window_counts(self) -> dict[int, int]:
        windows = self.windows or (0,) * self.layers
        return {window: windows.count(window) for window in set(windows)}

    @property
    def matmul_weight_bytes(self) -> int:
        """Bytes of packed weights that one decode step reads: all matmuls, lm_head included."""
        storage = self.weight_format.storage
        total = 0
        for matmul in self.matmuls:
            shape = data_shape(storage, matmul.n, matmul.k)
            size = _product(shape) * data_dtype(storage).itemsize
            if storage.value in ("q4", "q8"):
                size += 2 * _product(scales_shape(matmul.n, matmul.k))
            total += matmul.count * size
        return total

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one token adds to the caches of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically."""
        atomic_write(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Raises `pydantic.ValidationError` for anything else."""
        return cls.model_validate_json(read_file(path, LONGEST_DOCUMENT_BYTES))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total

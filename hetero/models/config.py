"""`ModelConfig`: what `config.json` says, checked, in one spelling."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from hetero.backends.extensible import Extensible, later
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.ops import Activation
from hetero.errors import ModelError
from hetero.models.architectures import ARCHITECTURES, Architecture
from hetero.models.config_keys import notice_unread, refuse_unused
from hetero.models.delta_net import DeltaNet
from hetero.models.expert_config import ExpertConfig
from hetero.models.fields import Fields, read_json_object
from hetero.models.layer_sizes import LayerSizes
from hetero.models.rope_config import (
    NO_SCALING,
    LayerRope,
    check_factors,
    read_ropes,
    refuse_partial_rotary,
    write_ropes,
)
from hetero.models.wrapper import text_fields
from hetero.profiler.model_graph import MatMulName, MatMulSpec

NormKind: TypeAlias = Literal["rms", "layer"]
Mixer: TypeAlias = Literal["attention", "conv", "delta"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
_ACTIVATION_NAMES = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"
}  # fmt: skip
_MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelConfig(Extensible):
    """Hyperparameters of a decoder-only model (notation of `hetero.backends.ops`).

    layer_sizes        one entry per layer where key/value heads, their size or the feed-forward's
                       features differ (`at`); else those of the model are of all layers
    kv_source          one entry per layer: the layer whose keys and values it attends to, itself
                       or one before it; empty: itself
    keys_are_values    in layers with full attention the values are the keys, before their norm
    layer_inputs       features of a layer's own inputs, from the token and its embedding, 0 for
                       none
    layer_scale        the residual stream is multiplied by a number after each block
    layer_ropes        one entry per layer where their rotary embeddings differ, None for a layer
                       without; else `rope_theta` and `rope_scaling` are of all layers
    windows            one entry per layer: the sliding attention window in tokens, 0 for full
                       attention
    mixers             one entry per layer: how it mixes tokens, attention, a short convolution of
                       `conv_taps` taps (`conv_bias`: it and its matmuls have biases), or the gated
                       delta net `delta` with such a convolution before it
    output_gate        the outputs of attention are multiplied by gates
    rotary_dim         dimensions of a head that are rotated, 0 for all of them
    positions          rows of the table of learned positions, 0 with rotary embeddings; position p
                       is row p + position_offset
    rms_norm_eps       of every norm; `norm` says which kind they are
    qk_norm            norm of queries and keys: of each head or of their whole row, before or
                       after they are rotated
    v_norm             norm of each head of values, without a weight
    in_norms           the inputs of attention and feed-forward are normed
    out_norms          the outputs of attention and feed-forward have another norm
    parallel           attention and feed-forward both read the one norm before them
    gated              the feed-forward multiplies by a gate; else it is up, activation, down
    experts            the feed-forward is that of a few experts, chosen for each token
    sinks              each head of attention has a score without a value
    attention_scale    on the scores, None for D^-0.5
    attention_softcap, logit_softcap    cap · tanh(x / cap) on scores and logits, 0 for none
    embed_scale        on the embeddings
    residual_scale     on what a block adds to the residual stream
    logit_scale        on the logits, before their soft cap
    eos_ids            end a generation; ids outside the vocabulary are dropped
    dtype              of the source as written, for information
    mtp                the decoder is the head of another model that predicts one token more
                       (`mtp_head` below): its input is a token and the hidden state before it
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = NO_SCALING
    rotary_dim: int = 0
    positions: int = 0
    position_offset: int = 0
    windows: tuple[int, ...] = ()
    mixers: tuple[Mixer, ...] = ()
    conv_taps: int = 0
    conv_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    norm: NormKind = "rms"
    out_norms: bool = False
    parallel: bool = False
    gated: bool = True
    experts: ExpertConfig | None = later(None)  # noqa: RUF009
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    tie_word_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None
    layer_ropes: tuple[LayerRope | None, ...] = later(())
    qk_norm_row: bool = later(False)
    qk_norm_after: bool = later(False)
    v_norm: bool = later(False)
    in_norms: bool = later(True)
    delta: DeltaNet | None = later(None)  # noqa: RUF009
    output_gate: bool = later(False)
    sinks: bool = later(False)
    residual_scale: float = later(1.0)
    logit_scale: float = later(1.0)
    layer_sizes: tuple[LayerSizes, ...] = later(())
    kv_source: tuple[int, ...] = later(())
    keys_are_values: bool = later(False)
    layer_inputs: int = later(0)
    layer_scale: bool = later(False)
    mtp: bool = later(False)

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if all(rope == self.rope for rope in self.layer_ropes):
            object.__setattr__(self, "layer_ropes", ())
        if {*self.mixers} <= {"attention"}:
            object.__setattr__(self, "mixers", ("attention",) * self.num_layers)
        if {*self.layer_sizes} <= {(self.kv_heads, self.head_dim, self.intermediate_size)}:
            object.__setattr__(self, "layer_sizes", ())
        if self.kv_source == tuple(range(self.num_layers)):
            object.__setattr__(self, "kv_source", ())

    def at(self, layer: int) -> Self:
        """Return the configuration of a model whose layers are all like this one in their sizes."""
        if not self.layer_sizes:
            return self
        return replace(self, **self.layer_sizes[layer]._asdict(), layer_sizes=())

    def reads(self, layer: int) -> bool:
        """Return whether a layer attends to the keys and values of another."""
        return bool(self.kv_source) and self.kv_source[layer] != layer

    def for_context(self, length: int) -> Self:
        """Return the configuration in a context of up to `length` tokens (`RopeScaling`)."""

        def scaled(rope: LayerRope) -> LayerRope:
            length_scaling = rope.scaling.for_length(min(length, self.max_position))
            return replace(rope, scaling=length_scaling)

        ropes = tuple(x and scaled(x) for x in self.layer_ropes)
        return replace(self, rope_scaling=scaled(self.rope).scaling, layer_ropes=ropes)

    @property
    def rope(self) -> LayerRope:
        """Return the rotary embedding of layers with full attention."""
        return LayerRope(theta=self.rope_theta, scaling=self.rope_scaling)

    def rope_at(self, layer: int) -> LayerRope | None:
        """Return the rotary embedding of a layer; None: it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def rope_scaled(self) -> bool:
        """Return whether the frequencies of the rotary embedding are scaled."""
        return self.rope_scaling != NO_SCALING

    @property
    def rotates(self) -> tuple[bool, ...]:
        """Return by layer whether it has a rotary embedding."""
        return tuple(self.rope_at(i) is not None for i in range(self.num_layers))

    @property
    def shifts(self) -> bool:
        """Return whether all that is kept of a text can be moved to other positions."""
        return not self.positions and set(self.mixers) == {"attention"}

    @cached_property
    def cache_numbers(self) -> tuple[int, ...]:
        """Return the number of each layer's keys and values, or of its state.

        Layers with attention are numbered first, then those with a state. A layer that reads those
        of another has its number.
        """
        sources = self.kv_source or tuple(range(self.num_layers))
        order = sorted(set(sources), key=lambda i: (self.mixers[i] != "attention", i))
        return tuple(order.index(source) for source in sources)

    @property
    def cached_layers(self) -> list[int]:
        """Return the layers with keys and values of their own, in the order of their numbers."""
        return [i for i, x in enumerate(self.mixers) if x == "attention" and not self.reads(i)]

    @property
    def qkv_width(self) -> int:
        """Return the rows of the fused query, key and value weight: (H + 2G)·D, and gates.

        For layers of their own sizes see `at`.
        """
        heads = 2 * self.heads if self.output_gate else self.heads
        return (heads + 2 * self.kv_heads) * self.head_dim

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Read `config.json`, and `generation_config.json` if there is one."""
        file = path / "generation_config.json"
        generation = read_json_object(file) if file.is_file() else {}
        notice_unread(generation, str(file))
        return cls.from_dict(
            read_json_object(path / "config.json"),
            generation=generation,
            where=str(path / "config.json"),
        )

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        generation: Mapping[str, Any] | None = None,
        where: str = "config.json",
    ) -> Self:
        """Convert and check the contents of `config.json`; raises `ModelError`.

        Both spellings are accepted (`rope_theta`/`rope_scaling` and `rope_parameters`,
        `torch_dtype` and `dtype`). End-of-text ids in `generation` (generation_config.json) come
        first, as in `transformers`.
        """
        source = Fields(*text_fields(raw, where))
        architecture = _architecture(source)
        if architecture.ropes and source.raw.get("rope_parameters") is None:
            source = Fields({**source.raw, "rope_parameters": architecture.ropes}, source.where)
        _refuse_quantised(source, architecture)
        _refuse_sinks(source)
        layers = source.positive_int("num_hidden_layers", limit=_MAX_LAYERS)
        sizes = _sizes(source, architecture)
        bos_id, eos_ids = _token_ids(
            source, Fields(generation or {}, "generation_config.json"), architecture
        )
        own = architecture.read(source, layers)
        ropes = read_ropes(
            source,
            sizes["max_position"],
            theta=architecture.theta,
            local_theta=architecture.local_theta,
        )
        own |= _layer_ropes(ropes, layers, own)
        factor = own.pop("rotary_factor", None)
        if factor is None:
            refuse_partial_rotary(source)
        else:
            own["rotary_dim"] = _rotary_dim(source, factor, sizes["head_dim"])
        if not own.get("positions"):
            _check_even(source, sizes["head_dim"])
            rotated = own.get("rotary_dim") or sizes["head_dim"]
            for rope in ropes:
                check_factors(source, rope.scaling, rotated)
        given: dict[str, Any] = {
            "architecture": architecture.name,
            "num_layers": layers,
            "activation": _activation(source, architecture),
            "tie_word_embeddings": source.boolean("tie_word_embeddings", architecture.tied),
            "bos_id": bos_id,
            "eos_ids": eos_ids,
            "dtype": _dtype(source),
        }
        config = cls(**given | sizes | own)
        refuse_unused(source, config, architecture.used)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a `config.json` that `from_dict` turns into this configuration."""
        return _document(self)

    @property
    def weights_per_token(self) -> int:
        """Return the weights that a token is multiplied with."""
        total = sum(x.n * x.k * x.count for x in self.matmuls())
        routed = (self.routed(i) for i in range(self.num_layers))
        return total + sum(x.weights_per_token(self.hidden_size) for x in routed if x)

    def routed(self, layer: int) -> ExpertConfig | None:
        """Return the experts of a layer, None where its feed-forward is a plain one."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    def block_matmuls(self, layer: int) -> tuple[MatMulSpec, ...]:
        """Return the matmuls of a block in the order in which they run, each once.

        Routed experts are none of them (`hetero.models.graph`), a shared expert is.
        """
        own, d = self.at(layer), self.hidden_size
        f, queries = own.intermediate_size, own.heads * own.head_dim
        up = 2 * f if self.gated else f
        rows: list[tuple[MatMulName, int, int, bool]] = [
            ("q_only", queries, d, self.qkv_bias)
            if self.reads(layer)
            else ("qkv", own.qkv_width, d, self.qkv_bias),
            ("o", d, queries, self.o_bias),
        ]
        if self.mixers[layer] == "conv":
            rows = [("conv_in", 3 * d, d, self.conv_bias), ("conv_out", d, d, self.conv_bias)]
        if self.mixers[layer] == "delta":
            assert self.delta is not None
            rows = [("delta_in", sum(self.delta.projections), d, False)]
            rows += [("delta_out", d, self.delta.values, False)]
        routed = self.routed(layer)
        if routed is None or routed.plain:
            rows += [("gate_up", up, d, self.mlp_bias), ("down", d, f, self.mlp_bias)]
        if (width := self.layer_inputs) > 0:
            rows += [("input_in", width, d, False), ("input_gate", width, d, False)]
            rows += [("input_out", d, width, False)]
        return tuple(
            MatMulSpec(name=name, n=n, k=k, count=1, bias=bias) for name, n, k, bias in rows
        )

    def matmuls(self) -> tuple[MatMulSpec, ...]:
        """Return the matmuls of all blocks and the output head, with how often each occurs."""
        counts = Counter(x for i in range(self.num_layers) for x in self.block_matmuls(i))
        head = MatMulSpec(
            name="lm_head", n=self.vocab_size, k=self.hidden_size, count=1, bias=self.head_bias
        )
        return (*(replace(x, count=count) for x, count in counts.items()), head)


def mtp_head(config: ModelConfig) -> ModelConfig:
    """Return the configuration of a model's head for multi-token prediction: one block."""
    return replace(config, num_layers=1, mixers=(), windows=(), mtp=True)


def _document(config: ModelConfig) -> dict[str, Any]:
    architecture = ARCHITECTURES[config.architecture]
    raw: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        architecture.key("intermediate_size"): config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        architecture.key("rms_norm_eps"): config.rms_norm_eps,
        **write_ropes(config.rope, _sliding_rope(config)),
        architecture.key("hidden_act"): _ACTIVATION_NAMES[config.activation],
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    if config.dtype is not None:
        raw["dtype"] = config.dtype
    return raw | architecture.write(config)


def _sliding_rope(config: ModelConfig) -> LayerRope | None:
    """Return the rotary embedding of layers with a window, where the family has one apart."""
    if ARCHITECTURES[config.architecture].local_theta is None:
        return None
    return next((config.rope_at(i) for i, window in enumerate(config.windows) if window), None)


def _architecture(source: Fields) -> Architecture:
    """Return the architecture of `model_type`, checked against `architectures`.

    A headless model is refused.
    """
    declared = source.raw.get("architectures")
    if declared is not None and (
        not isinstance(declared, list) or any(not isinstance(name, str) for name in declared)
    ):
        raise source.error("architectures", "must be a list of names", "correct the file")
    classes = {x.class_name: x for x in ARCHITECTURES.values()}
    names = [name for name in declared or [] if name not in classes]
    if declared and len(names) == len(declared):
        raise _unknown(source, names[0], list(classes))
    if source.raw.get("model_type") is None and declared:
        return next(classes[name] for name in declared if name in classes)
    model_type = source.text("model_type")
    if model_type not in ARCHITECTURES:
        raise _unknown(source, model_type, list(ARCHITECTURES))
    return ARCHITECTURES[model_type]


def _unknown(source: Fields, name: str, known: list[str]) -> ModelError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"the nearest supported one is {near[0]!r}, " if near else ""
    return ModelError(
        f"{source.where}: architecture {name[:64]!r} is not supported; {hint}"
        f"choose a model of one of: {', '.join(known)}"
    )


def _refuse_quantised(source: Fields, architecture: Architecture) -> None:
    quantisation = source.raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        if method in architecture.quantised:
            return
        raise ModelError(
            f"{source.where}: weights quantised with {method or 'quantization_config'!r} are not "
            "supported; use the model's original fp32, fp16 or bf16 files"
        )


def _refuse_sinks(source: Fields) -> None:
    """Raise `ModelError` for learned attention sinks, or tokens that all windows attend to."""
    name = next((name for name, value in source.raw.items() if "sink" in name and value), None)
    if name is not None:
        raise source.error(
            name,
            "asks for attention sinks, which no supported architecture has",
            "choose another model",
        )


def _sizes(source: Fields, architecture: Architecture) -> dict[str, Any]:
    heads, kv_heads, head_dim = _heads(source, architecture)
    return {
        "hidden_size": source.positive_int("hidden_size"),
        "intermediate_size": source.positive_int(
            architecture.key("intermediate_size"), architecture.intermediate_size
        ),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": source.positive_int("vocab_size"),
        "rms_norm_eps": source.positive_float(architecture.key("rms_norm_eps"), architecture.eps),
        "max_position": source.positive_int("max_position_embeddings", architecture.max_position),
    }


def _layer_ropes(ropes: list[LayerRope], layers: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embeddings: by layer where windows or `rotates` say that they differ."""
    full, sliding = ropes
    windows, rotates = own.get("windows") or (0,) * layers, own.pop("rotates", (True,) * layers)
    if adjusted := own.pop("adjust_rope", None):
        full = sliding = adjusted(full)
    by_layer = tuple(
        (sliding if window else full) if rotated else None
        for window, rotated in zip(windows, rotates, strict=True)
    )
    return {"rope_theta": full.theta, "rope_scaling": full.scaling, "layer_ropes": by_layer}


def _rotary_dim(source: Fields, factor: float, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated, 0 for all of them."""
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"{source.where}: partial_rotary_factor must leave an even number of dimensions to "
            f"rotate, got {factor} of {head_dim}; correct the file"
        )
    return 0 if rotated == head_dim else rotated


def _heads(source: Fields, architecture: Architecture) -> tuple[int, int, int]:
    heads = source.positive_int("num_attention_heads")
    absent = architecture.kv_heads or heads
    kv_default = heads if "num_key_value_heads" in source.raw else absent
    kv_heads = heads
    if architecture.grouped:
        kv_heads = source.positive_int("num_key_value_heads", kv_default)
    if heads % kv_heads:
        raise ModelError(
            f"{source.where}: num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {heads} and {kv_heads}; correct the file"
        )
    return heads, kv_heads, source.positive_int("head_dim", _head_dim(source, architecture, heads))


def _head_dim(source: Fields, architecture: Architecture, heads: int) -> int:
    """Return the head size where config.json does not give one."""
    if source.raw.get("head_dim") is not None:
        return 1
    if architecture.head_dim is not None and "head_dim" not in source.raw:
        return architecture.head_dim
    hidden = source.positive_int("hidden_size")
    if hidden % heads:
        raise ModelError(
            f"{source.where}: hidden_size must be a multiple of num_attention_heads where head_dim "
            f"is not given, got {hidden} and {heads}; correct the file"
        )
    return hidden // heads


def _check_even(source: Fields, head_dim: int) -> None:
    if head_dim % 2:
        raise ModelError(
            f"{source.where}: head_dim must be even for rotary embeddings, got {head_dim}; "
            "correct the file"
        )


def _activation(source: Fields, architecture: Architecture) -> Activation:
    given = ("hidden_activation", architecture.key("hidden_act"), "hidden_act")
    name = next((x for x in given if source.raw.get(x) is not None), given[1])
    text = source.text(name, architecture.activation)
    if text not in ACTIVATIONS:
        raise source.error(
            name, f"must be one of {', '.join(ACTIVATIONS)}", "choose a model with one of these"
        )
    return ACTIVATIONS[text]


def _token_ids(
    source: Fields, generation: Fields, architecture: Architecture
) -> tuple[int | None, tuple[int, ...]]:
    """Return the bos and eos ids; generation_config.json takes precedence.

    Ids outside the vocabulary are dropped.
    """
    vocab = source.positive_int("vocab_size")
    names = ("bos_token_id", "eos_token_id")
    defaults = dict(zip(names, architecture.ids, strict=True)) if architecture.ids else {}
    ids_by_name: dict[str, tuple[int, ...]] = {}
    for name in names:
        ids = generation.ids(name) or source.ids(name)
        if name in defaults and name not in source.raw:
            ids = ids or (defaults[name],)
        ids_by_name[name] = tuple(dict.fromkeys(x for x in ids if 0 <= x < vocab))
    bos = ids_by_name["bos_token_id"]
    return (bos[0] if bos else None), ids_by_name["eos_token_id"]


def _dtype(source: Fields) -> str | None:
    value = source.raw.get("dtype", source.raw.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None

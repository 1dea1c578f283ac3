"""`ModelConfig`: what `config.json` says, checked, in one spelling."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast

from hetero.backends.ops import Activation, RopeScaling, WeightFormat
from hetero.errors import ModelError
from hetero.models.fields import Fields, is_number, read_json_object
from hetero.models.rope_config import NO_SCALING, read_rope, rope_dict
from hetero.solver.model_spec import MatMulName, MatMulSpec, ModelSpec

Architecture: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# What `transformers` takes when config.json leaves the field out.
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_WINDOW = 4096
_MAX_LAYERS = 4096
_DEFAULT_WINDOW_LAYERS = 28
_DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hyperparameters of a decoder-only model (notation of `hetero.backends.ops`).

    `windows` has one entry per layer: the sliding attention window in tokens, 0 for full attention.
    `eos_ids` end a generation; ids outside the vocabulary are dropped. `dtype` is the source's data
    type as written, for information.
    """

    architecture: Architecture
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
    windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value weight: (H + 2G)·D."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Read `config.json`, and `generation_config.json` if there is one."""
        generation = path / "generation_config.json"
        return cls.from_dict(
            read_json_object(path / "config.json"),
            generation=read_json_object(generation) if generation.is_file() else None,
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
        """Check and convert the contents of `config.json`; raises `ModelError`.

        Both spellings are taken (`rope_theta`/`rope_scaling` and `rope_parameters`, `torch_dtype`
        and `dtype`). End-of-text ids in `generation` (generation_config.json) come first, as in
        `transformers`.
        """
        source = Fields(raw, where)
        architecture = _architecture(source)
        _refuse_quantised(source)
        layers = source.positive_int("num_hidden_layers", limit=_MAX_LAYERS)
        max_position = source.positive_int(
            "max_position_embeddings", _DEFAULT_MAX_POSITION[architecture]
        )
        theta, scaling = read_rope(source, max_position)
        heads, kv_heads, head_dim = _heads(source, architecture)
        qkv_bias, o_bias, mlp_bias = _biases(source, architecture)
        bos_id, eos_ids = _token_ids(
            source, Fields(generation or {}, "generation_config.json"), architecture
        )
        return cls(
            architecture=architecture,
            hidden_size=source.positive_int("hidden_size"),
            intermediate_size=source.positive_int("intermediate_size"),
            num_layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=source.positive_int("vocab_size"),
            max_position=max_position,
            rms_norm_eps=source.positive_float("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            windows=_windows(source, architecture, layers),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=architecture == "qwen3",
            activation=_activation(source),
            tie_word_embeddings=source.boolean("tie_word_embeddings", False),
            bos_id=bos_id,
            eos_ids=eos_ids,
            dtype=_dtype(source),
        )

    def to_dict(self) -> dict[str, Any]:
        """Contents of a `config.json` that `from_dict` turns into this configuration again."""
        names = {cls: name for name, cls in ARCHITECTURES.items()}
        raw: dict[str, Any] = {
            "architectures": [names[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_dict(self.rope_scaling),
            "hidden_act": _ACTIVATION_NAMES[self.activation],
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids) or None,
        }
        if self.dtype is not None:
            raw["dtype"] = self.dtype
        return raw | _bias_dict(self) | _window_dict(self)

    def spec(self, weight_format: WeightFormat, name: str = "") -> ModelSpec:
        """Shapes only, for the solver."""
        return ModelSpec(
            name=name or self.architecture,
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=self.num_layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            weight_format=weight_format,
            matmuls=self.matmuls(),
            activation=self.activation,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            qk_norm=self.qk_norm,
            windows=self.windows,
            tie_word_embeddings=self.tie_word_embeddings,
        )

    def matmuls(self) -> tuple[MatMulSpec, ...]:
        """The matmuls of a block and the output head, in the order in which they run."""
        d, f, layers = self.hidden_size, self.intermediate_size, self.num_layers
        rows: list[tuple[MatMulName, int, int, int, bool]] = [
            ("qkv", self.qkv_width, d, layers, self.qkv_bias),
            ("o", d, self.heads * self.head_dim, layers, self.o_bias),
            ("gate_up", 2 * f, d, layers, self.mlp_bias),
            ("down", d, f, layers, self.mlp_bias),
            ("lm_head", self.vocab_size, d, 1, False),
        ]
        return tuple(
            MatMulSpec(name=name, n=n, k=k, count=count, bias=bias)
            for name, n, k, count, bias in rows
        )


def _architecture(source: Fields) -> Architecture:
    """From `model_type`, checked against `architectures` (a headless model is another thing)."""
    declared = source.raw.get("architectures")
    if declared is not None and (
        not isinstance(declared, list) or any(not isinstance(name, str) for name in declared)
    ):
        raise source.error("architectures", "must be a list of names", "correct the file")
    names = [name for name in declared or [] if name not in ARCHITECTURES]
    if declared and len(names) == len(declared):
        raise _unknown(source, names[0], list(ARCHITECTURES))
    if source.raw.get("model_type") is None and declared:
        return next(ARCHITECTURES[name] for name in declared if name in ARCHITECTURES)
    model_type = source.text("model_type")
    if model_type not in ARCHITECTURES.values():
        raise _unknown(source, model_type, list(ARCHITECTURES.values()))
    return cast(Architecture, model_type)


def _unknown(source: Fields, name: str, known: list[str]) -> ModelError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"the nearest supported one is {near[0]!r}, " if near else ""
    return ModelError(
        f"{source.where}: architecture {name!r} is not supported; {hint}"
        f"choose a model of one of: {', '.join(known)}"
    )


def _refuse_quantised(source: Fields) -> None:
    quantisation = source.raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise ModelError(
            f"{source.where}: weights quantised with {method or 'quantization_config'!r} are not "
            "supported; use the model's original fp32, fp16 or bf16 files"
        )


def _heads(source: Fields, architecture: Architecture) -> tuple[int, int, int]:
    heads = source.positive_int("num_attention_heads")
    absent = _DEFAULT_KV_HEADS.get(architecture, heads)
    kv_default = heads if "num_key_value_heads" in source.raw else absent
    kv_heads = source.positive_int("num_key_value_heads", kv_default)
    if heads % kv_heads:
        raise ModelError(
            f"{source.where}: num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {heads} and {kv_heads}; correct the file"
        )
    head_dim = source.positive_int("head_dim", _default_head_dim(source, architecture, heads))
    if head_dim % 2:
        raise ModelError(
            f"{source.where}: head_dim must be even for rotary embeddings, got {head_dim}; "
            "correct the file"
        )
    return heads, kv_heads, head_dim


def _default_head_dim(source: Fields, architecture: Architecture, heads: int) -> int:
    if source.raw.get("head_dim") is not None:
        return 1
    if architecture == "qwen3" and "head_dim" not in source.raw:
        return 128
    hidden = source.positive_int("hidden_size")
    if hidden % heads:
        raise ModelError(
            f"{source.where}: hidden_size must be a multiple of num_attention_heads where head_dim "
            f"is not given, got {hidden} and {heads}; correct the file"
        )
    return hidden // heads


def _windows(source: Fields, architecture: Architecture, layers: int) -> tuple[int, ...]:
    """Sliding window per layer in tokens, 0 for full attention."""
    if architecture == "llama":
        return (0,) * layers
    absent = _DEFAULT_WINDOW if "sliding_window" not in source.raw else 0
    given = source.raw.get("sliding_window") is not None
    window = source.positive_int("sliding_window") if given else absent
    if architecture == "mistral":
        return (window,) * layers
    if not source.boolean("use_sliding_window", False):
        return (0,) * layers
    types = source.raw.get("layer_types")
    if types is not None:
        kinds = _types(source, layers)
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = source.raw.get("max_window_layers", _DEFAULT_WINDOW_LAYERS)
    if not is_number(first) or first < 0:
        raise source.error("max_window_layers", "must be a layer number", "correct the file")
    return tuple(window if i >= first else 0 for i in range(layers))


def _types(source: Fields, layers: int) -> list[str]:
    types = source.raw["layer_types"]
    allowed = ("full_attention", "sliding_attention")
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in allowed for kind in types)
    ):
        raise source.error(
            "layer_types",
            f"must list {' or '.join(allowed)} for each of the {layers} layers",
            "correct the file",
        )
    return types


def _window_dict(config: ModelConfig) -> dict[str, Any]:
    window = max(config.windows)
    if config.architecture == "llama":
        return {}
    if config.architecture == "mistral":
        return {"sliding_window": window or None}
    kinds = ["sliding_attention" if w else "full_attention" for w in config.windows]
    return {
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "layer_types": kinds,
    }


def _biases(source: Fields, architecture: Architecture) -> tuple[bool, bool, bool]:
    """Whether query/key/value, output and feed-forward projections have biases."""
    if architecture == "qwen2":
        return True, False, False
    if architecture == "mistral":
        return False, False, False
    attention = source.boolean("attention_bias", False)
    mlp = source.boolean("mlp_bias", False) if architecture == "llama" else False
    return attention, attention, mlp


def _bias_dict(config: ModelConfig) -> dict[str, bool]:
    if config.architecture == "llama":
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return {"attention_bias": config.qkv_bias} if config.architecture == "qwen3" else {}


def _activation(source: Fields) -> Activation:
    name = "hidden_act" if "hidden_act" in source.raw else "hidden_activation"
    text = source.text(name, "silu")
    if text not in _ACTIVATIONS:
        raise source.error(
            name, f"must be one of {', '.join(_ACTIVATIONS)}", "choose a model with one of these"
        )
    return _ACTIVATIONS[text]


def _token_ids(
    source: Fields, generation: Fields, architecture: Architecture
) -> tuple[int | None, tuple[int, ...]]:
    """bos and eos ids; those of generation_config.json win, ids outside the vocabulary go."""
    vocab = source.positive_int("vocab_size")
    defaults = _DEFAULT_IDS if architecture in ("llama", "mistral") else {}
    found: dict[str, tuple[int, ...]] = {}
    for name in ("bos_token_id", "eos_token_id"):
        ids = generation.ids(name) or source.ids(name)
        if name in defaults and name not in source.raw:
            ids = ids or (defaults[name],)
        found[name] = tuple(dict.fromkeys(x for x in ids if 0 <= x < vocab))
    bos = found["bos_token_id"]
    return (bos[0] if bos else None), found["eos_token_id"]


def _dtype(source: Fields) -> str | None:
    value = source.raw.get("dtype", source.raw.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None

"""The architectures of GGUF files, by what differs from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from hetero.models.architectures.lfm2 import CONV
from hetero.models.delta_net import LINEAR
from hetero.models.fields import is_number
from hetero.models.sliding import FULL, SLIDING

# From an entry's name behind the architecture's prefix to its value, None if absent.
Entry: TypeAlias = Callable[[str], Any]
Raw: TypeAlias = Mapping[str, Any]
RMS_EPS: Final = "attention.layer_norm_rms_epsilon"
EPS: Final = "attention.layer_norm_epsilon"
MAX_LAYERS: Final = 4096  # more are refused
_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """An architecture of GGUF files.

    model_type   that of config.json
    fields       the fields of config.json that only it has, from entries and the fields so far
    used         entries that most others do not have; `eps` is that of its norms
    pairs        rows of queries and keys lie pair by pair (llama.cpp's "normal" rotary embedding)
    frequencies  a tensor `rope_freqs` has divisors of the frequencies (Llama 3.1's scaling)
    rotated_part that tensor is 1 for the part of the frequencies that layers with full attention
                 have, and so large for the others that nothing is rotated
    lists        entries with a number for each layer, which `fields` reads
    biases       whether attention and feed-forward have biases is seen in the tensors
    some         entries that are 0 for layers that have none of it
    final_norm   the last norm
    tensors      those of a block's vectors that have other names than most: of a module, or whole
    """

    model_type: str
    fields: Callable[[Entry, Raw], dict[str, Any]] = lambda _entry, _raw: {}
    used: tuple[str, ...] = ()
    eps: str = RMS_EPS
    pairs: bool = False
    frequencies: bool = False
    rotated_part: bool = False
    lists: tuple[str, ...] = ()
    biases: bool = False
    some: tuple[str, ...] = ()
    final_norm: str = "output_norm"
    tensors: Mapping[str, str] = field(default_factory=dict)


def _partial_rotary(entry: Entry, raw: Raw) -> dict[str, Any]:
    size = raw.get("head_dim")
    if not is_number(size):
        return {}
    rotated = entry("rope.dimension_count")
    rotated = size if rotated is None else rotated
    return {"partial_rotary_factor": rotated / max(size, 1) if is_number(rotated) else rotated}


def _phi3(entry: Entry, raw: Raw) -> dict[str, Any]:
    return {**_partial_rotary(entry, raw), "sliding_window": raw.get("sliding_window") or None}


def _gemma(entry: Entry, raw: Raw, large: int, default: int | None = None) -> dict[str, Any]:
    """Return windows by layer, and the scale of scores.

    llama.cpp: the model with `large` layers scales by the hidden size of a head, the others by its
    own. `default` is the pattern of a file without one.
    """
    heads, hidden, layers = (
        raw.get(x) for x in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    scalar = raw.get("head_dim")
    if layers == large and is_number(heads) and is_number(hidden):
        scalar = hidden / max(heads, 1)
    return {"query_pre_attn_scalar": scalar, "layer_types": _layer_types(entry, layers, default)}


def _gemma3(entry: Entry, raw: Raw) -> dict[str, Any]:
    fields = _gemma(entry, raw, _GEMMA3_27B_LAYERS, 6)
    if not raw.get("sliding_window"):
        fields |= {"sliding_window": None, "layer_types": None, "sliding_window_pattern": 1}
    local = entry("rope.freq_base_swa")
    return fields if local is None else fields | {"rope_local_base_freq": local}


def _gemma4(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the fields in which layers differ; the last shared ones may be twice as wide."""
    layers, full = raw.get(_LAYERS), raw.get("head_dim")
    types = _layer_types(entry, layers)
    size, shared = (entry(x) for x in ("attention.key_length_swa", "attention.shared_kv_layers"))
    inputs = entry("embedding_length_per_layer_input")
    heads, widths = (np.atleast_1d(entry(x)).tolist() for x in _GEMMA4_LISTS)
    fields = {
        "head_dim": full if size is None else size,
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": 0 if inputs is None else inputs,
        "vocab_size_per_layer_input": raw.get("vocab_size"),
        "rope_parameters": {
            FULL: {"rope_theta": raw.get("rope_theta", 1e6)},
            SLIDING: {"rope_theta": entry("rope.freq_base_swa")},
        },
        "rope_scaling": None,
    }
    if entry("expert_count"):
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        values = (entry(x) for x in _EXPERTS)
        fields |= {"enable_moe_block": True, **dict(zip(names, values, strict=True))}
    if types is None or not isinstance(layers, int):
        return fields
    counts = heads if len(heads) == layers else heads[:1] * layers
    own = list(zip(types, counts, strict=False))
    fields["num_key_value_heads"] = next((n for x, n in own if x == SLIDING), heads[0])
    fields["per_layer_config"] = {
        str(i): {"head_dim": full if x == FULL else fields["head_dim"], "num_key_value_heads": n}
        for i, (x, n) in enumerate(own)
    }
    return fields


def _qwen35(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the sizes of the delta net, and the layers without those that predict more tokens."""
    layers, heads, inner = raw.get("num_hidden_layers"), *map(entry, _DELTA_HEADS)
    more, types = entry("nextn_predict_layers"), entry("attention.recurrent_layers")
    fields = {field: entry(name) for field, name in _DELTA.items() if entry(name) is not None}
    if is_number(layers) and is_number(more):
        fields["num_hidden_layers"] = layers = layers - more
    if is_number(inner) and is_number(heads) and heads > 0:
        fields["linear_value_head_dim"] = inner / heads if inner % heads else int(inner // heads)
    if types is not None:
        kinds = [LINEAR if x else FULL for x in np.atleast_1d(types).tolist()]
        fields["layer_types"] = kinds[:layers] if isinstance(layers, int) else kinds
    return fields | _partial_rotary(entry, raw)


def _qwen35moe(entry: Entry, raw: Raw) -> dict[str, Any]:
    width = entry("expert_shared_feed_forward_length")
    return {**_qwen35(entry, raw), "shared_expert_intermediate_size": width}


def _lfm2(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the kinds of layers: one without key/value heads is a convolution."""
    fields = {
        "norm_eps": raw.get("rms_norm_eps"),
        "conv_L_cache": entry("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    heads = entry("attention.head_count_kv")
    if isinstance(heads, np.ndarray):
        fields["layer_types"] = [FULL if x else CONV for x in heads.tolist()]
    return fields


def _lfm2_moe(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the router's fields; llama.cpp's graph always divides by the sum of the weights."""
    dense, scale = entry("leading_dense_block_count"), entry("expert_weights_scale")
    return {
        **_lfm2(entry, raw),
        "num_dense_layers": 0 if dense is None else dense,
        "routed_scaling_factor": _given(scale, 1.0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
    }


def _gpt_oss(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the windows of every other layer, and YaRN whose ramp is not rounded."""
    layers, scaling = raw.get(_LAYERS), raw.get("rope_scaling") or {"rope_type": "default"}
    return {
        "rope_scaling": {**scaling, "truncate": False},
        "intermediate_size": entry("expert_feed_forward_length"),
        "layer_types": _layer_types(entry, layers, 2),
        "sliding_window": raw.get("sliding_window") or None,
    }


def _layer_types(entry: Entry, layers: object, default: int | None = None) -> list[str] | None:
    """Return `layer_types`: of each group of layers the last one has full attention."""
    pattern = entry("attention.sliding_window_pattern")
    pattern = default if pattern is None else pattern
    if pattern is None or not isinstance(layers, int) or layers > MAX_LAYERS:
        return None
    if is_number(pattern) and pattern >= 1:
        pattern = [i % pattern < pattern - 1 for i in range(layers)]
    return [SLIDING if x else FULL for x in np.atleast_1d(pattern).tolist()]


def _granite(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the factors; 0 is none. `rope.scaling.finetuned` says whether heads are rotated."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    fields = {name: _given(entry(key), 1.0) for name, key in names.items()}
    fields["attention_multiplier"] = _given(entry("attention.scale"), _own_scale(raw))
    if entry("rope.scaling.finetuned") is not False:
        return fields
    layers = raw.get("num_hidden_layers")
    kinds = ["attention"] * layers if isinstance(layers, int) and layers <= MAX_LAYERS else None
    return {
        **fields,
        "model_type": "granitemoehybrid",
        "position_embedding_type": "nope",
        "layer_types": kinds,
        "shared_intermediate_size": raw.get("intermediate_size"),
    }


def _given(value: Any, default: float) -> Any:
    """Return an entry, and the default for none or 0."""
    return default if value is None or (is_number(value) and not value) else value


def _number(value: Any) -> Any:
    """Return an entry, and -1 for one that is no number, which is refused."""
    return value if value is None or is_number(value) else -1


def _own_scale(raw: Raw) -> float:
    size = raw.get("head_dim")
    return float(size) ** -0.5 if is_number(size) and size > 0 else 1.0


def _minicpm(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the fields of a Granite with these factors, and llama.cpp's defaults for old files."""
    layers, hidden = (x if is_number(x := raw.get(y)) else 1 for y in (_LAYERS, "hidden_size"))
    residual, logits = 1.4 / max(layers, 1) ** 0.5, hidden / 256
    given = {
        "embedding_multiplier": (entry("embedding_scale"), 12.0),
        "residual_multiplier": (entry("residual_scale"), residual),
        "logits_scaling": (entry("logit_scale"), logits),
    }
    fields = {name: default if value is None else value for name, (value, default) in given.items()}
    return {**fields, "attention_multiplier": _own_scale(raw)}


def _ministral3(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return YaRN with its own attention factor taken out, and the scale of queries by position."""
    rope = dict(raw.get("rope_scaling") or {"rope_type": "default"})
    if multiplier := _number(entry("rope.scaling.yarn_log_multiplier")):
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if beta := _number(entry("attention.temperature_scale")):
        original = entry("rope.scaling.original_context_length")
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if entry(f"rope.scaling.yarn_{name}") is not None:
            rope[name] = entry(f"rope.scaling.yarn_{name}")
    return {"rope_scaling": rope, "sliding_window": raw.get("sliding_window") or None}


def _olmo(entry: Entry, raw: Raw) -> dict[str, Any]:
    """Return the fields of OLMo 3 if there are windows: their layers are rotated unscaled."""
    if not raw.get("sliding_window"):
        return {}
    full = {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta", 1e4)}
    local = entry("rope.freq_base_swa")
    theta = full["rope_theta"] if local is None else local
    return {
        "model_type": "olmo3",
        "layer_types": _layer_types(entry, raw.get(_LAYERS), 4),
        "rope_parameters": {FULL: full, SLIDING: {"rope_theta": theta}},
        "rope_scaling": None,
    }


def _exaone4(entry: Entry, raw: Raw) -> dict[str, Any]:
    if not raw.get("sliding_window"):
        return {"sliding_window": None}
    return {"layer_types": _layer_types(entry, raw.get(_LAYERS), 4)}


def _cohere2(entry: Entry, raw: Raw) -> dict[str, Any]:
    layers = raw.get(_LAYERS)
    return {
        "logit_scale": _given(entry("logit_scale"), 0.0),  # required
        "layer_types": _layer_types(entry, layers, 4),
    }


_LAYERS: Final = "num_hidden_layers"
_SCALES: Final = ("embedding_scale", "residual_scale", "logit_scale")
_EXPERTS: Final = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_DELTA: Final = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
}
_DELTA_HEADS: Final = ("ssm.time_step_rank", "ssm.inner_size")
_QWEN35_USED: Final = (
    *_DELTA.values(),
    "ssm.inner_size",
    "attention.recurrent_layers",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.dimension_sections",
)
_QWEN35_TENSORS: Final = {
    "post_norm": "post_attention_norm.weight",
    "conv_taps": "ssm_conv1d.weight",
    "delta_decay": "ssm_a",
    "delta_dt_bias": "ssm_dt.bias",
    "delta_norm": "ssm_norm.weight",
}
_GEMMA4_LISTS: Final = ("attention.head_count_kv", "feed_forward_length")
_WINDOWS: Final = ("attention.sliding_window", "attention.sliding_window_pattern")
_CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": GgufFamily(model_type="llama", pairs=True, frequencies=True, biases=True),
    "qwen2": GgufFamily(model_type="qwen2"),
    "qwen3": GgufFamily(model_type="qwen3", biases=True),
    "qwen3moe": GgufFamily(
        model_type="qwen3_moe",
        # llama.cpp's graph always divides by the sum
        fields=lambda _entry, _raw: {"norm_topk_prob": True},
        used=_EXPERTS,
        biases=True,
    ),
    "internlm2": GgufFamily(model_type="internlm2", pairs=True, biases=True),
    "gemma": GgufFamily(model_type="gemma"),
    "gemma2": GgufFamily(
        model_type="gemma2",
        fields=lambda entry, raw: _gemma(entry, raw, _GEMMA2_27B_LAYERS),
        used=(*_WINDOWS, *_CAPS),
    ),
    "gemma3": GgufFamily(
        model_type="gemma3_text",
        fields=_gemma3,
        used=(*_WINDOWS, "final_logit_softcapping", "rope.freq_base_swa"),
    ),
    "gemma4": GgufFamily(
        model_type="gemma4_text",
        fields=_gemma4,
        used=(
            *_WINDOWS,
            "final_logit_softcapping",
            "rope.freq_base_swa",
            "rope.dimension_count",
            "rope.dimension_count_swa",
            "attention.key_length_swa",
            "attention.value_length",
            "attention.value_length_swa",
            "attention.shared_kv_layers",
            "embedding_length_per_layer_input",
            *_EXPERTS,
        ),
        tensors={"router_norm": "ffn_gate_inp.scale", "expert_scale": "ffn_down_exps.scale"},
        rotated_part=True,
        lists=_GEMMA4_LISTS,
    ),
    "lfm2": GgufFamily(
        model_type="lfm2",
        fields=_lfm2,
        used=("shortconv.l_cache",),
        some=("attention.head_count_kv",),
        final_norm="token_embd_norm",
        tensors={"conv_taps": "shortconv.conv.weight"},
    ),
    "lfm2moe": GgufFamily(
        model_type="lfm2_moe",
        fields=_lfm2_moe,
        used=(
            *_EXPERTS,
            "shortconv.l_cache",
            "leading_dense_block_count",
            "expert_weights_scale",
        ),
        some=("attention.head_count_kv",),
        final_norm="token_embd_norm",
        tensors={"conv_taps": "shortconv.conv.weight", "choice_bias": "exp_probs_b.bias"},
    ),
    "gpt-oss": GgufFamily(
        model_type="gpt_oss",
        fields=_gpt_oss,
        used=(*_EXPERTS, "attention.sliding_window", "attention.sliding_window_pattern"),
        biases=True,
        tensors={"post_norm": "post_attention_norm.weight", "sinks": "attn_sinks.weight"},
    ),
    "qwen35": GgufFamily(
        model_type="qwen3_5_text",
        fields=_qwen35,
        used=_QWEN35_USED,
        biases=True,
        tensors=_QWEN35_TENSORS,
    ),
    "qwen35moe": GgufFamily(
        model_type="qwen3_5_moe_text",
        fields=_qwen35moe,
        used=(*_QWEN35_USED, *_EXPERTS, "expert_shared_feed_forward_length"),
        biases=True,
        tensors=_QWEN35_TENSORS,
    ),
    "phi2": GgufFamily(
        model_type="phi", fields=_partial_rotary, used=("rope.dimension_count",), eps=EPS
    ),
    "phi3": GgufFamily(
        model_type="phi3",
        fields=_phi3,
        used=("attention.sliding_window", "rope.dimension_count"),
    ),
    "granite": GgufFamily(
        model_type="granite",
        fields=_granite,
        used=(*_SCALES, "attention.scale", "rope.scaling.finetuned"),
        pairs=True,
        frequencies=True,
        biases=True,
    ),
    "minicpm": GgufFamily(
        model_type="granite", fields=_minicpm, used=_SCALES, pairs=True, biases=True
    ),
    "smollm3": GgufFamily(model_type="smollm3", pairs=True, frequencies=True, biases=True),
    "mistral3": GgufFamily(
        model_type="ministral3",
        fields=_ministral3,
        used=(
            "attention.temperature_scale",
            "rope.scaling.yarn_log_multiplier",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
        ),
        pairs=True,
    ),
    "olmo2": GgufFamily(
        model_type="olmo2", fields=_olmo, used=(*_WINDOWS, "rope.freq_base_swa"), biases=True
    ),
    "exaone4": GgufFamily(model_type="exaone4", fields=_exaone4, used=_WINDOWS, frequencies=True),
    "glm4": GgufFamily(
        model_type="glm4",
        fields=_partial_rotary,
        used=("rope.dimension_count",),
        pairs=True,
        biases=True,
    ),
    "ernie4_5": GgufFamily(model_type="ernie4_5", pairs=True, biases=True),
    "hunyuan-dense": GgufFamily(model_type="hunyuan_v1_dense", biases=True),
    "cohere2": GgufFamily(
        model_type="cohere2",
        fields=_cohere2,
        used=(*_WINDOWS, "logit_scale"),
        eps=EPS,
        pairs=True,
        biases=True,
    ),
}

"""A GGUF file's metadata as a `ModelConfig`, by way of the fields of a `config.json`.

Everything that is checked there is checked here too. What converters leave out of the file is taken
from llama.cpp's loader (`llama-model.cpp`), as noted at each place.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.rope_tables import inverse_frequencies
from hetero.errors import ModelError
from hetero.models.config import ModelConfig
from hetero.models.fields import is_number
from hetero.models.gguf.families import EPS, FAMILIES, RMS_EPS
from hetero.models.gguf.file import GgufFile
from hetero.models.gguf.metadata_rules import USED, check_metadata, check_required
from hetero.models.gguf.rope_scaling import rope_scaling
from hetero.models.gguf.special_tokens import end_ids, special_id
from hetero.models.graph import rope_of
from hetero.models.rope_config import rope_dict

LLAMA3_ORIGINAL: Final = 8192

# Fields of config.json and the entries they come from; `{}` is the architecture.
_SIZES: Final = {
    "hidden_size": "{}.embedding_length",
    "intermediate_size": "{}.feed_forward_length",
    "num_hidden_layers": "{}.block_count",
    "num_attention_heads": "{}.attention.head_count",
    "num_key_value_heads": "{}.attention.head_count_kv",
    "head_dim": "{}.attention.key_length",
    "max_position_embeddings": "{}.context_length",
    "rope_theta": "{}.rope.freq_base",
    "sliding_window": "{}.attention.sliding_window",
    "attn_logit_softcapping": "{}.attn_logit_softcapping",
    "final_logit_softcapping": "{}.final_logit_softcapping",
    "vocab_size": "{}.vocab_size",
    "num_experts": "{}.expert_count",
    "num_experts_per_tok": "{}.expert_used_count",
    "moe_intermediate_size": "{}.expert_feed_forward_length",
}


_EPS_FIELDS: Final = {RMS_EPS: "rms_norm_eps", EPS: "layer_norm_eps"}


def read_config(file: GgufFile) -> ModelConfig:
    """Check and convert the metadata. Raises `ModelError`."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, n=1, cutoff=0.5)
        hint = f"the nearest supported one is {near[0]!r}, " if near else ""
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported in GGUF files; {hint}choose a "
            f"model of one of: {', '.join(FAMILIES)}"
        )
    check_required(file, name)
    raw = _raw(file, name)
    config = ModelConfig.from_dict(raw, where=str(file.path))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None and FAMILIES[name].frequencies:
        raw["rope_scaling"] = _frequency_scaling(file, config)
        config = ModelConfig.from_dict(raw, where=str(file.path))
    check_metadata(file, name, config)
    return config


def _raw(file: GgufFile, name: str) -> dict[str, Any]:
    value, family = _one_for_all_layers(file, name), FAMILIES[name]
    raw: dict[str, Any] = {"model_type": family.model_type}
    raw |= {
        field: value[entry.format(name)]
        for field, entry in _SIZES.items()
        if entry.format(name) in value and name in USED[entry.removeprefix("{}.")]
    }
    raw[_EPS_FIELDS[family.eps]] = value[f"{name}.{family.eps}"]
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if is_number(heads) and is_number(hidden) and heads > 0:
        raw.setdefault("num_key_value_heads", heads)
        raw.setdefault("head_dim", int(hidden // heads))
    raw.setdefault("vocab_size", _vocabulary(file))
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    if family.biases:  # the others always have them, or never
        raw["attention_bias"] = raw["bias"] = raw["use_bias"] = _has_bias(file, ".attn_")
        raw["mlp_bias"] = _has_bias(file, ".ffn_")
    raw |= {"bos_token_id": special_id(value, "bos"), "eos_token_id": list(end_ids(value)) or None}
    raw["rope_scaling"] = rope_scaling(file, name)
    return raw | family.fields(lambda entry: file.metadata.get(f"{name}.{entry}"), raw)


def _has_bias(file: GgufFile, module: str) -> bool:
    return any(module in name and name.endswith(".bias") for name in file.tensors)


def _one_for_all_layers(file: GgufFile, name: str) -> dict[str, Any]:
    """Return the metadata with one number where a list has it for every layer.

    Raises `ModelError` for a list of different numbers: the decoder's layers are alike, but for
    those that have 0 of what a family's layers may lack.
    """
    metadata = dict(file.metadata)
    for entry in (x.format(name) for x in (*_SIZES.values(), f"{{}}.{EPS}", f"{{}}.{RMS_EPS}")):
        values = metadata.get(entry)
        if not isinstance(values, np.ndarray | list):
            continue
        layers = metadata.get(f"{name}.block_count")
        if not is_number(layers) or len(values) != layers:
            raise ModelError(
                f"{file.path}: {entry} must be one number or a list of {layers}, one for each "
                f"layer, got {len(values)}; download the file again"
            )
        if isinstance(values, np.ndarray) and entry in [f"{name}.{x}" for x in FAMILIES[name].some]:
            values = values[values != 0]
            if not len(values):
                raise ModelError(
                    f"{file.path}: {entry} must be above 0 for a layer, got {layers} zeros; choose "
                    "another model"
                )
        if not isinstance(values, np.ndarray) or (values != values[0]).any():
            raise ModelError(
                f"{file.path}: {entry} differs from layer to layer, which is not supported; choose "
                "another model"
            )
        metadata[entry] = values[0].item()
    return metadata


def _vocabulary(file: GgufFile) -> int | None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        return len(tokens)
    info = file.tensors.get("token_embd.weight")
    return None if info is None else info.shape[0]


def _frequency_scaling(file: GgufFile, config: ModelConfig) -> dict[str, Any]:
    """Return the scaling that `rope_freqs.weight` holds as divisors of the frequencies.

    That is mostly Llama 3.1's; others are LongRoPE's with one factor for all lengths. Raises
    `ModelError` where they are misplaced, or come with YaRN or LongRoPE.
    """
    info = file.tensors["rope_freqs.weight"]
    half = config.head_dim // 2
    if info.kind.name != "F32" or info.shape != (half,):
        raise ModelError(
            f"{file.path}: tensor rope_freqs.weight must be {half} F32 numbers, got "
            f"{list(info.shape)} of {info.kind.name}; download the file again"
        )
    given = config.rope_scaling
    if given.kind not in ("none", "linear"):
        raise ModelError(
            f"{file.path}: tensor rope_freqs.weight and {given.kind} scaling are not supported "
            "together; use the model's Hugging Face directory"
        )
    divisors = file.raw("rope_freqs.weight").view("<f4").astype(np.float64)
    scaling = RopeScaling(
        kind="llama3",
        factor=float(divisors.max()),
        original_max_position=LLAMA3_ORIGINAL,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    if given.kind == "none" and np.allclose(_divisors(config, scaling), divisors, rtol=1e-3):
        return rope_dict(scaling) or {}
    factors = (divisors * given.factor).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }


def _divisors(config: ModelConfig, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    ropes = (rope_of(config, i) for i in range(config.num_layers))
    rope = next(x for x in ropes if x is not None)
    plain = replace(rope, scaling=RopeScaling())
    return inverse_frequencies(plain) / inverse_frequencies(replace(rope, scaling=scaling))

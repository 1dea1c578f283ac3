"""GGUF files of random weights for known models whose layers are not all Llama's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.models.config import ModelConfig
from hetero.models.gguf.families import FAMILIES
from hetero.models.gguf.gguf_weights import GgufWeights
from hetero.models.random_models import known_config

from .gguf_files import add_words, random_blocks

SCALES = {"ssm_a": -1.0}  # where it is not 1: negative, or states would grow from token to token
FLOAT_MATRICES = ("conv.weight", "conv1d.weight", "ffn_gate_inp.weight")  # never quantised


class TensorShapes(GgufWeights):
    """The names and shapes of a model's tensors; there is no file yet."""

    def __init__(self, config: ModelConfig, architecture: str) -> None:
        metadata = {"general.architecture": architecture}
        nothing: Any = SimpleNamespace(path=Path(), metadata=metadata, tensors={})
        super().__init__(nothing, config, WeightFormat.W4A8)

    def _check(self) -> None:
        self.shapes = self._expected()


def shallow_config(model: str, layers: int) -> ModelConfig:
    """A known model with its first layers, 0 for all."""
    raw = known_config(model).to_dict()
    all_layers = raw["num_hidden_layers"]
    for key, value in raw.items():
        if layers and isinstance(value, list) and len(value) == all_layers:
            raw[key] = value[:layers]
    if layers and (shared := raw.get("num_kv_shared_layers")):
        # About as large a part of the layers, after one of full attention as llama.cpp assumes.
        own = layers - shared * layers // all_layers
        full = [i for i, kind in enumerate(raw["layer_types"][:own]) if kind == "full_attention"]
        raw["num_kv_shared_layers"] = layers - full[-1] - 1
        own = raw.get("per_layer_config") or {}
        raw["per_layer_config"] = {i: sizes for i, sizes in own.items() if int(i) < layers}
    raw["num_hidden_layers"] = layers or all_layers
    return ModelConfig.from_dict(raw, where=model)


def architecture_of(config: ModelConfig) -> str:
    """The architecture of GGUF files with such a configuration."""
    model_type = config.to_dict()["model_type"]
    return next(name for name, family in FAMILIES.items() if family.model_type == model_type)


def entries(config: ModelConfig, context: int) -> dict[str, int | float | list[Any]]:
    """The metadata without the architecture's prefix; all layers have numbers of their own kind."""
    attends = [mixer == "attention" for mixer in config.mixers] or [True] * config.num_layers
    found: dict[str, int | float | list[Any]] = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.rotary_dim or config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if "conv" in config.mixers:
        found["attention.head_count_kv"] = [config.kv_heads * x for x in attends]
        found["shortconv.l_cache"] = config.conv_taps
    if (net := config.delta) is not None:
        found |= {
            "ssm.conv_kernel": config.conv_taps,
            "ssm.state_size": net.k_dim,
            "ssm.group_count": net.k_heads,
            "ssm.time_step_rank": net.v_heads,
            "ssm.inner_size": net.values,
            "full_attention_interval": [*attends, True].index(True) + 1,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    if config.to_dict()["model_type"] == "gemma4_text":
        found |= gemma4_entries(config.to_dict())
    if (experts := config.experts) is not None:
        found |= {
            "expert_count": experts.count,
            "expert_used_count": experts.chosen,
            "expert_feed_forward_length": experts.width,
        }
    return found


def gemma4_entries(raw: dict[str, Any]) -> dict[str, int | float | list[Any]]:
    """Entries that differ from layer to layer of Gemma 4: heads, windows, widths."""
    layers, shared = raw["num_hidden_layers"], raw["num_kv_shared_layers"]
    wide = [raw["use_double_wide_mlp"] and i >= layers - shared for i in range(layers)]
    local, full = raw["head_dim"], raw["per_layer_config"][str(layers - 1)]["head_dim"]
    return {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": local,
        "rope.freq_base": raw["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": raw["rope_parameters"]["sliding_attention"]["rope_theta"],
        "feed_forward_length": [raw["intermediate_size"] * (1 + x) for x in wide],
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": [x == "sliding_attention" for x in raw["layer_types"]],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": raw["hidden_size_per_layer_input"],
        "final_logit_softcapping": raw["final_logit_softcapping"],
    }


def add_tensor(
    writer: Any, name: str, shape: tuple[int, ...], file_type: str, rng: np.random.Generator
) -> None:
    """Add a random tensor; matrices of experts are drawn as one."""
    import gguf

    if len(shape) == 1:
        value = SCALES.get(name.rpartition(".")[2], 1.0)
        writer.add_tensor(name, np.full(shape, value, np.float32))
    elif name.endswith(FLOAT_MATRICES):
        values = rng.standard_normal(shape, np.float32)
        writer.add_tensor(name, values * np.float32(shape[-1] ** -0.5))
    else:
        blocks = random_blocks(file_type, int(np.prod(shape[:-1])), shape[-1], rng)
        kind = gguf.GGMLQuantizationType[file_type]
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)


def write_random_model(
    config: ModelConfig, path: Path, *, context: int, file_type: str = "Q4_0"
) -> None:
    """A file with a configuration's shapes."""
    import gguf

    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in entries(config, context).items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    add_words(writer, config.vocab_size)
    rng = np.random.default_rng(0)
    for name, shape in TensorShapes(config, architecture).shapes.items():
        add_tensor(writer, name, shape, file_type, rng)
    if architecture == "gemma4":  # a quarter of a wide head is rotated
        size = entries(config, context)["rope.dimension_count"] // 2  # type: ignore[operator]
        freqs = np.where(np.arange(size) < size // 4, 1.0, 1e30)
        writer.add_tensor("rope_freqs.weight", freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Writing GGUF files from Hugging Face directories, as llama.cpp's converter does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from bench.parts.gguf_files import new_writer, shapes
from hetero.backends.formats import WeightFormat
from hetero.models.graph import model_graph
from hetero.models.random_models import known_config

Array = npt.NDArray[Any]
ARCHITECTURES = {
    "phi": "phi2", "gemma3_text": "gemma3", "granitemoehybrid": "granite", "ministral3": "mistral3",
    "olmo3": "olmo2", "hunyuan_v1_dense": "hunyuan-dense", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "qwen3_moe": "qwen3moe", "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss", "gemma4_text": "gemma4",
}  # fmt: skip
PERMUTED = ("llama", "internlm2", "granite", "smollm3", "mistral3", "minicpm")
NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "model.final_layernorm": "output_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_exps": "ffn_gate_exps", "mlp.up_exps": "ffn_up_exps",
    "mlp.down_exps": "ffn_down_exps", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm", "shared_mlp.input_linear": "ffn_gate_up",
    "shared_mlp.output_linear": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
GLM4_NAMES = {
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
INTERNLM2_NAMES = {
    "model.tok_embeddings": "token_embd", "output": "output", "attention.wq": "attn_q",
    "attention.wk": "attn_k", "attention.wv": "attn_v", "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
}  # fmt: skip
SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
QWEN35_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
QWEN35_MOE_NAMES = {
    **QWEN35_NAMES, "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
}  # fmt: skip
LFM2_NAMES = {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
LFM2_MOE_NAMES = {
    **LFM2_NAMES, "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"mlp.{x}_exps": f"ffn_{x}_exps" for x in ("gate", "up", "down")},
}  # fmt: skip
GPT_OSS_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight",
}  # fmt: skip
GEMMA4_NAMES = {
    **SANDWICH_NAMES, "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "gate_up_exps": "ffn_gate_up_exps",
    "down_exps": "ffn_down_exps", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip
WHOLE_NAMES = (
    "layer_scalar",
    "A_log",
    "dt_bias",
    "sinks",
    "expert_bias",
    "scale",
    "per_expert_scale",
)  # parameters that are no module's
OWN_NAMES = {
    "lfm2": LFM2_NAMES, "lfm2moe": LFM2_MOE_NAMES, "gpt-oss": GPT_OSS_NAMES,
    "qwen35": QWEN35_NAMES, "qwen35moe": QWEN35_MOE_NAMES,
    "gemma4": GEMMA4_NAMES, "gemma2": SANDWICH_NAMES, "gemma3": SANDWICH_NAMES,
    "internlm2": INTERNLM2_NAMES,
    "olmo2": SANDWICH_NAMES, "exaone4": SANDWICH_NAMES, "glm4": GLM4_NAMES,
}  # fmt: skip
FLOATS = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


def convert(
    source: Path,
    target: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    experts: GGMLQuantizationType | None = None,
    **changes: Any,
) -> dict[str, Array]:
    """Write a Hugging Face directory as GGUF; returns the tensors as they were given to the file.

    `changes` to the metadata have `__` for a dot; None leaves an entry out. Vectors stay F32.
    Experts are in the type `experts`, if given.
    """
    from safetensors.torch import load_file  # takes bfloat16; torch is heavy

    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = ARCHITECTURES.get(raw["model_type"], raw["model_type"])
    own = {key.replace("__", "."): value for key, value in changes.items()}
    entries = metadata(raw, name) | tokenizer(source) | own
    tensors = named_tensors(raw, name, load_file(source / "model.safetensors"))
    kept = {k: v for k, v in entries.items() if v is not None}
    write(target, name, kept, tensors, kind, experts=experts)
    return tensors


def write(
    target: Path,
    name: str,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Array],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    split: int = 0,
    experts: GGMLQuantizationType | None = None,
) -> None:
    """Write metadata and tensors, matrices in `kind`, `split` tensors to a file (0: all)."""
    writer = GGUFWriter(target, name, split_max_tensors=split)
    for key, value in entries.items():
        add_entry(writer, key, value)
    for key, value in tensors.items():
        # routers and taps are never quantised
        own = ("conv.weight", "conv1d.weight", "ffn_gate_inp.weight", ".bias")
        matrix = value.ndim > 1 and not key.endswith(own)
        whole = matrix and value.shape[-1] % 32 == 0  # llama.cpp too keeps others in floats
        given = experts if experts is not None and key.endswith("_exps.weight") else kind
        chosen = given if whole or (given in FLOATS and matrix) else GGMLQuantizationType.F32
        if chosen in FLOATS:
            writer.add_tensor(key, value.astype(FLOATS[chosen]))
        else:
            data = gguf.quants.quantize(value.astype(np.float32), chosen)
            writer.add_tensor(key, data, raw_dtype=chosen)
    finish(writer)


def tensor_file(path: Path, data: Array, kind: GGMLQuantizationType) -> Path:
    """A file of one tensor `x` given in bytes."""
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write everything."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_entry(writer: GGUFWriter, key: str, value: Any) -> None:
    """One metadata entry, by its Python type."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def metadata(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Entries of a config.json."""
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    rope = raw.get("rope_parameters") or {}
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    rotated = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    found: dict[str, Any] = {
        "embedding_length": raw["hidden_size"],
        "block_count": raw["num_hidden_layers"],
        "feed_forward_length": raw.get("shared_intermediate_size", raw.get("intermediate_size", 0)),
        "attention.head_count": heads,
        "attention.head_count_kv": raw.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "context_length": raw["max_position_embeddings"],
        "rope.freq_base": float(rope.get("rope_theta", raw.get("rope_theta", 1e4))),
        "rope.dimension_count": int(head_dim * rotated),
        "vocab_size": raw["vocab_size"],
    }
    if "rms_norm_eps" in raw or "norm_eps" in raw:
        eps = raw.get("rms_norm_eps", raw.get("norm_eps"))
        found["attention.layer_norm_rms_epsilon"] = float(eps)
    else:
        found["attention.layer_norm_epsilon"] = float(raw["layer_norm_eps"])
    for ours, theirs in (
        ("sliding_window", "attention.sliding_window"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("num_experts_per_tok", "expert_used_count"),
        ("top_k_experts", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        routes = bool(expert_count(raw)) or not theirs.startswith("expert")
        if raw.get(ours) is not None and routes:
            found[theirs] = raw[ours]
    if expert_count(raw):
        found["expert_count"] = expert_count(raw)
    if raw["model_type"] == "hunyuan_v1_dense" and rope.get("alpha"):
        stretch = rope["alpha"] ** (head_dim / (head_dim - 2))
        found["rope.freq_base"] = float(rope["rope_theta"] * stretch)
        rope = {}
    if local:
        found["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope.get("rope_type", "default") not in ("default", "llama3", "longrope", "proportional"):
        found |= scaling(rope)
    return {f"{name}.{key}": value for key, value in (found | own_metadata(raw, name)).items()}


def expert_count(raw: Mapping[str, Any]) -> int:
    """The number of experts, in either spelling."""
    return int(raw.get("num_local_experts", raw.get("num_experts")) or 0)


def scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a scaled rotary embedding."""
    found = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        key = "rope.scaling.original_context_length"
        found[key] = rope["original_max_position_embeddings"]
    return found


def own_metadata(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Entries that converters write for one architecture alone."""
    match name:
        case "gemma3" | "exaone4" | "cohere2" | "olmo2" if raw.get("sliding_window"):
            sliding = [x == "sliding_attention" for x in raw["layer_types"]]
            scale = {"logit_scale": raw["logit_scale"]} if name == "cohere2" else {}
            return {"attention.sliding_window_pattern": sliding, **scale}
        case "gemma4":
            layers, shared = raw["num_hidden_layers"], raw["num_kv_shared_layers"]
            own = raw["per_layer_config"]
            at = [own.get(str(i), {}) for i in range(layers)]
            wide = [raw["use_double_wide_mlp"] and i >= layers - shared for i in range(layers)]
            sliding = [x == "sliding_attention" for x in raw["layer_types"]]
            size = at[sliding.index(False)].get("head_dim", raw["head_dim"])
            heads = raw["num_key_value_heads"]
            return {
                "attention.key_length": size,
                "attention.value_length": size,
                "attention.key_length_swa": raw["head_dim"],
                "attention.value_length_swa": raw["head_dim"],
                "rope.dimension_count": size,
                "rope.dimension_count_swa": raw["head_dim"],
                "attention.head_count_kv": [x.get("num_key_value_heads", heads) for x in at],
                "feed_forward_length": [raw["intermediate_size"] * (1 + x) for x in wide],
                "attention.sliding_window_pattern": sliding,
                "attention.shared_kv_layers": shared,
                "embedding_length_per_layer_input": raw["hidden_size_per_layer_input"],
            }
        case "gpt-oss":
            return {
                "expert_feed_forward_length": raw["intermediate_size"],
                "attention.sliding_window_pattern": [
                    x == "sliding_attention" for x in raw["layer_types"]
                ],
            }
        case "lfm2" | "lfm2moe":
            width = raw["intermediate_size"]
            if raw.get("block_auto_adjust_ff_dim"):
                width, step = int(2 * width / 3), raw["block_multiple_of"]
                if raw["block_ffn_dim_multiplier"] is not None:
                    width = -(-int(raw["block_ffn_dim_multiplier"] * width) // step) * step
            heads = raw["num_key_value_heads"]
            attends = [x == "full_attention" for x in raw["layer_types"]]
            return {
                "attention.head_count_kv": [heads * x for x in attends],
                "feed_forward_length": width,
                "shortconv.l_cache": raw["conv_L_cache"],
                **(routed_lfm2(raw) if name == "lfm2moe" else {}),
            }
        case "granite":
            return {
                "embedding_scale": raw["embedding_multiplier"],
                "residual_scale": raw["residual_multiplier"],
                "attention.scale": raw["attention_multiplier"],
                "logit_scale": raw["logits_scaling"],
                "rope.scaling.finetuned": raw.get("position_embedding_type", "rope") == "rope",
            }
        case "minicpm":
            return {
                "embedding_scale": float(raw["scale_emb"]),
                "residual_scale": raw["scale_depth"] / raw["num_hidden_layers"] ** 0.5,
                "logit_scale": raw["hidden_size"] / raw["dim_model_base"],
            }
        case "mistral3":
            rope = raw["rope_parameters"]
            return {
                "attention.temperature_scale": rope["llama_4_scaling_beta"],
                "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim", 0.0),
            }
        case "qwen35" | "qwen35moe":
            heads, size = raw["linear_num_value_heads"], raw["linear_value_head_dim"]
            return {
                "ssm.conv_kernel": raw["linear_conv_kernel_dim"],
                "ssm.state_size": raw["linear_key_head_dim"],
                "ssm.group_count": raw["linear_num_key_heads"],
                "ssm.time_step_rank": heads,
                "ssm.inner_size": heads * size,
                "attention.recurrent_layers": [x != "full_attention" for x in raw["layer_types"]],
                "rope.dimension_sections": [11, 11, 10, 0],
            }
        case _:
            return {}


def routed_lfm2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of the router of LFM2-MoE (`Lfm2MoeModel` of the converter)."""
    return {"leading_dense_block_count": raw["num_dense_layers"], "expert_gating_func": 2}


def named_tensors(raw: Mapping[str, Any], name: str, source: Mapping[str, Any]) -> dict[str, Array]:
    """Tensors under their names in GGUF, permuted, shifted and fused as the converter does."""
    source = with_stacked_experts(raw, source)
    names = NAMES | OWN_NAMES.get(name, {})
    found: dict[str, Array] = {}
    for key, tensor in (split_groups(raw, source) if name == "internlm2" else source).items():
        value: Array = tensor.float().numpy()
        module, suffix = key.rsplit(".", 1)
        if suffix in WHOLE_NAMES:
            module, suffix = key, ""
        prefix = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        renamed = names[module]
        if name in PERMUTED and renamed in ("attn_q", "attn_k"):
            field = "num_attention_heads" if renamed == "attn_q" else "num_key_value_heads"
            value = permute(value, raw[field])
        if name.startswith("gemma") and name != "gemma4" and renamed.endswith("norm"):
            value = value + 1
        if name.startswith("lfm2") and renamed == "shortconv.conv":
            value = value.squeeze(1)
        if name.startswith("qwen35"):
            value = of_delta_net(raw, renamed, value)
        if renamed == "ffn_gate_up":
            gate, value = np.split(value, 2)
            found[f"{prefix}ffn_gate.{suffix}"], renamed = gate, "ffn_up"
        found[f"{prefix}{renamed}.{suffix}".rstrip(".")] = value
    if name == "gemma4":
        full = raw["rope_parameters"]["full_attention"]
        last = raw["per_layer_config"].get(str(raw["num_hidden_layers"] - 1), {})
        size = last.get("head_dim", raw["head_dim"])
        part = int(full.get("partial_rotary_factor", 1.0) * size // 2)
        ones, rest = np.ones(part), np.full(size // 2 - part, 1e30)
        found["rope_freqs.weight"] = np.concatenate([ones, rest]).astype(np.float32)
    for layer in range(raw["num_hidden_layers"] if name == "phi2" else 0):
        for suffix in ("weight", "bias"):
            parts = [found.pop(f"blk.{layer}.attn_{x}.{suffix}") for x in "qkv"]
            found[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(parts)
    return found


def with_stacked_experts(raw: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """The matrices of a layer's experts as one tensor each, expert after expert."""
    import torch

    found = {key: tensor for key, tensor in source.items() if ".experts." not in key}
    for layer in {key.partition(".experts.")[0] for key in source if ".experts." in key}:
        if f"{layer}.experts.gate_up_proj_bias" in source:
            found |= split_experts(layer, source)
            continue
        if f"{layer}.experts.gate_up_proj" in source:
            found[f"{layer}.gate_up_exps.weight"] = source[f"{layer}.experts.gate_up_proj"]
            found[f"{layer}.down_exps.weight"] = source[f"{layer}.experts.down_proj"]
            continue
        w1 = f"{layer}.experts.0.w1.weight" in source
        names = ("w1", "w3", "w2") if w1 else ("gate_proj", "up_proj", "down_proj")
        for part, name in zip(("gate", "up", "down"), names, strict=True):
            keys = [f"{layer}.experts.{e}.{name}.weight" for e in range(expert_count(raw))]
            stacked = torch.stack([source[key] for key in keys])
            own = layer.replace("feed_forward", "mlp")
            found[f"{own}.{part}_exps.weight"] = stacked
    return found


def split_experts(layer: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """gpt-oss: gate and up apart, rows and features in the order of matrices."""
    both, bias = (source[f"{layer}.experts.gate_up_proj{x}"] for x in ("", "_bias"))
    down, down_bias = (source[f"{layer}.experts.down_proj{x}"] for x in ("", "_bias"))
    return {
        f"{layer}.gate_exps.weight": both[..., ::2].mT,
        f"{layer}.up_exps.weight": both[..., 1::2].mT,
        f"{layer}.gate_exps.bias": bias[:, ::2],
        f"{layer}.up_exps.bias": bias[:, 1::2],
        f"{layer}.down_exps.weight": down.mT,
        f"{layer}.down_exps.bias": down_bias,
    }


def of_delta_net(raw: Mapping[str, Any], name: str, value: Array) -> Array:
    """Norms are shifted, decays computed; value heads go round by round over the key heads
    (`_LinearAttentionVReorderBase` of the converter).
    """
    groups, heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    values = heads * raw["linear_value_head_dim"]

    def reordered(part: Array, axis: int = 0) -> Array:
        moved = np.moveaxis(part, axis, 0)
        split = moved.reshape(groups, heads // groups, -1, *moved.shape[1:])
        return np.moveaxis(split.swapaxes(0, 1).reshape(moved.shape), 0, axis)

    match name:
        case "attn_qkv" | "ssm_conv1d":
            whole = np.concatenate([value[:-values], reordered(value[-values:])])
            return whole.squeeze() if name == "ssm_conv1d" else whole
        case "attn_gate" | "ssm_beta" | "ssm_alpha" | "ssm_dt.bias":
            return reordered(value)
        case "ssm_a":
            return reordered(-np.exp(value))
        case "ssm_out":
            return reordered(value, axis=1)
        case "ssm_norm":
            return value
        case _:
            return value + 1 if name.endswith("norm") else value


def split_groups(raw: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """InternLM2's queries, keys and values of each group of heads apart (`Internlm2Model`)."""
    found = {}
    for key, tensor in source.items():
        if "attention.wqkv" not in key:
            found[key] = tensor
            continue
        groups, heads = raw["num_key_value_heads"], raw["num_attention_heads"]
        head_dim = tensor.shape[0] // (heads + 2 * groups)
        parts = tensor.reshape(groups, heads // groups + 2, head_dim, *tensor.shape[1:])
        for letter, value in (("q", parts[:, :-2]), ("k", parts[:, -2]), ("v", parts[:, -1])):
            rows = value.reshape(-1, *tensor.shape[1:])
            found[key.replace("wqkv", f"w{letter}")] = rows
    return found


def permute(value: Array, heads: int) -> Array:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return split.swapaxes(1, 2).reshape(value.shape)


def tokenizer(source: Path) -> dict[str, Any]:
    """SentencePiece (scores from the order of merges) or byte-level BPE."""
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = raw["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {x["content"] for x in raw["added_tokens"]}
    merges = [x.split(" ") if isinstance(x, str) else x for x in raw["model"]["merges"]]
    pieces = raw["model"].get("byte_fallback", False)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if pieces else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            3 if x in special else 6 if pieces and x.startswith("<0x") else 1 for x in tokens
        ],
    }
    if pieces:
        rank = {left + right: -float(i) for i, (left, right) in enumerate(merges)}
        found["tokenizer.ggml.scores"] = [rank.get(x, -1e6) for x in tokens]
    else:
        found["tokenizer.ggml.pre"] = "gpt-2"
        found["tokenizer.ggml.merges"] = [" ".join(x) for x in merges] or ["a b"]
        found["tokenizer.ggml.add_bos_token"] = raw.get("post_processor") is not None
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    for ours, theirs in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token")):
        if settings.get(theirs) in vocabulary:
            found[f"tokenizer.ggml.{ours}_token_id"] = vocabulary[settings[theirs]]
    if isinstance(settings.get("chat_template"), str):
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found


def write_large(path: Path, *, layers: int = 8) -> Path:
    """An F16 model of Llama 3 8B's shapes, 4.5 GB with 8 layers; its weights take no room."""
    known = known_config("llama-3-8b")
    windows = known.windows[:layers]
    config = replace(known, num_layers=layers, windows=windows, vocab_size=128000)
    spec = model_graph(config, WeightFormat.F16, "large")
    writer = new_writer(spec, path, 8192)
    letters = [chr(0x100 + i) for i in range(256)]
    pairs = [a + b for a in letters for b in letters]
    words = [*letters, *pairs, *(a + letters[0] for a in pairs)][: spec.vocab_size]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", words)
    merges = [f"{word[:-1]} {word[-1]}" for word in words if len(word) > 1]
    writer.add_array("tokenizer.ggml.merges", merges)
    total = 0
    for name, shape in shapes(spec):
        kind = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        nbytes = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(name, shape, kind, nbytes)
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        size = -(-file.seek(0, os.SEEK_END) // 32) * 32 + total
        file.truncate(size)
    return path


# Where the fp16 numbers of a block lie, in bytes.
FLOATS_OF = {
    GGMLQuantizationType.Q4_0: (0,), GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.IQ4_NL: (0,), GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_0: (0,), GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q3_K: (108,), GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2), GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.MXFP4: (),
}  # fmt: skip
MIXED_KINDS = tuple(FLOATS_OF)


def random_blocks(
    rng: np.random.Generator, kind: GGMLQuantizationType, n: int, k: int, size: float = 0.0
) -> Array:
    """Rows [n, bytes] of random blocks whose weights are about `size` (0: of any size)."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, k // elements, nbytes), dtype=np.uint8)
    if kind == GGMLQuantizationType.MXFP4:  # a power of two, of codes of size 2.8
        low, high = (int(np.log2(size / 2.8)),) * 2 if size else (-23, 14)
        blocks[..., 0] = rng.integers(127 + low, 129 + high, blocks.shape[:2])
        return blocks.reshape(n, -1)
    floats = [rng.normal(0, 0.01, blocks.shape[:2]) for _ in FLOATS_OF[kind]]
    if size:
        unscaled = blocks.copy()
        for at in FLOATS_OF[kind]:
            ones = np.ones((*blocks.shape[:2], 1), np.float16)
            unscaled[..., at : at + 2] = ones.view(np.uint8)
        values = gguf.quants.dequantize(unscaled.reshape(n, -1), kind)
        step = size / float(np.std(values))
        signs = rng.choice([-1.0, 1.0], blocks.shape[:2])
        floats = [signs * step * rng.uniform(0.7, 1.4, blocks.shape[:2]) for _ in floats]
    for at, values in zip(FLOATS_OF[kind], floats, strict=True):
        blocks[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def write_mixed(
    path: Path,
    rng: np.random.Generator,
    kinds: tuple[GGMLQuantizationType, ...] = MIXED_KINDS,
    *,
    hidden: int = 256,
    head_dim: int = 64,
    kv: int = 2,
    vocabulary: int = 301,
) -> Path:
    """A Llama of two layers whose matrices have these types in turn; its tokens are letters."""
    heads, wide = 4, 2 * hidden
    entries = {
        "llama.embedding_length": hidden, "llama.block_count": 2,
        "llama.feed_forward_length": wide, "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv, "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim, "llama.context_length": 128,
        "llama.rope.dimension_count": head_dim, "llama.vocab_size": vocabulary,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.tokens": ["a", "b", "ab", *(chr(0x200 + i) for i in range(vocabulary - 3))],
        "tokenizer.ggml.pre": "gpt-2",
    }  # fmt: skip
    q, keys = heads * head_dim, kv * head_dim
    block = {
        "attn_q": (q, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, q), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }  # fmt: skip
    matrices = {"token_embd.weight": (vocabulary, hidden), "output.weight": (vocabulary, hidden)}
    vectors = ["output_norm.weight"]
    for layer in range(2):
        matrices |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
        vectors += [f"blk.{layer}.{name}.weight" for name in ("attn_norm", "ffn_norm")]
    writer = GGUFWriter(path, "llama")
    for key, value in entries.items():
        add_entry(writer, key, value)
    for index, (name, (n, k)) in enumerate(matrices.items()):
        kind = kinds[index % len(kinds)]
        if kind in FLOATS:
            values = rng.normal(0, k**-0.5, (n, k))
            writer.add_tensor(name, values.astype(FLOATS[kind]))
            continue
        if k % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.Q5_0  # as llama.cpp does where k has no whole blocks
        writer.add_tensor(name, random_blocks(rng, kind, n, k, k**-0.5), raw_dtype=kind)
    for name in vectors:
        writer.add_tensor(name, rng.uniform(0.8, 1.2, hidden).astype(np.float32))
    finish(writer)
    return path


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"abcdefgh"]


def write_tiny(
    path: Path,
    *,
    arch: str = "llama",
    tokens: Sequence[str] = PIECES,
    tensors: Mapping[str, Array | None] | None = None,
    split: int = 0,
    **changes: Any,
) -> Path:
    """A random model of one layer, `split` tensors to a file; `changes` to its metadata as in
    `convert`, where a name of no known group is the architecture's. `tensors` are added, those that
    are None are left out.
    """
    size = len(tokens)
    shape = {
        "embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": size,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    entries: dict[str, Any] = {f"{arch}.{key}": value for key, value in shape.items()}
    entries |= {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": [-float(i) for i in range(size)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (size - 259)],
    }  # fmt: skip
    for key, value in changes.items():
        name = key.replace("__", ".")
        known = name.split(".")[0] in ("general", "tokenizer", "split", "adapter")
        entries[name if known else f"{arch}.{name}"] = value
    rng = np.random.default_rng(3)
    blocks = {
        "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
        "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,),
        "ffn_norm": (32,),
    }  # fmt: skip
    shapes_: dict[str, tuple[int, ...]] = {f"blk.0.{k}.weight": v for k, v in blocks.items()}
    shapes_ |= {"token_embd.weight": (size, 32), "output_norm.weight": (32,)}
    found: dict[str, Any] = {
        name: rng.normal(len(shape) == 1, 0.2, shape).astype(np.float32)
        for name, shape in shapes_.items()
    }
    found |= tensors or {}
    write(
        path,
        arch,
        {key: value for key, value in entries.items() if value is not None},
        {name: value for name, value in found.items() if value is not None},
        split=split,
    )
    return path

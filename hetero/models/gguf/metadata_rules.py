"""Rules for every metadata entry of a GGUF file that llama.cpp knows.

Names are those of `llama-arch.cpp` and of the `gguf` package, without the architecture's prefix.

    USED      read here, by the architectures named (`hetero.models.gguf.families`)
    HARMLESS  changes no number of a decoder: names, provenance, pooling, defaults said again
    FIXED     supported with one value, which the model's other entries or its architecture give
    UNREAD    llama.cpp reads it for other architectures only, and so does not use it either
    FOREIGN   of other architectures: supported where it is 0, false or empty

A `FIXED` or `FOREIGN` entry with another value is an error: the numbers would be wrong. An `UNREAD`
entry that differs from its default, and an unknown entry, are one notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np

from hetero.errors import ModelError
from hetero.models.config import ACTIVATIONS, ModelConfig
from hetero.models.fields import is_number
from hetero.models.gguf.families import FAMILIES
from hetero.models.gguf.file import GgufFile
from hetero.terminal.notices import notify_once

_OF_ALL: Final = (
    "context_length", "embedding_length", "block_count", "vocab_size", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
)  # fmt: skip
_USED_BY: Final = {name: (*_OF_ALL, x.eps, *x.used) for name, x in FAMILIES.items()}
USED: Final[Mapping[str, tuple[str, ...]]] = {
    entry: tuple(name for name, used in _USED_BY.items() if entry in used)
    for entry in dict.fromkeys(chain(*_USED_BY.values()))
}
REQUIRED: Final = ("context_length", "attention.layer_norm_rms_epsilon",
                   "attention.layer_norm_epsilon")  # fmt: skip
HARMLESS: Final = (
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "rope.scaling.finetuned",
    "tensor_data_layout", "pooling_type", "classifier.output_labels", "classifier.pooling_type",
    "dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out",
)  # fmt: skip
UNREAD: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.sliding_window_pattern": (), "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,),
}  # fmt: skip
_GATES: Final = {"softmax": 1, "sigmoid": 2, "softmax_chosen": 3}  # `llama_expert_gating_func_type`
FIXED: Final[Mapping[str, Callable[[ModelConfig], tuple[object, ...]]]] = {
    "attention.value_length": lambda config: (config.head_dim,),
    "attention.key_length_swa": lambda config: (config.head_dim,),
    "attention.value_length_swa": lambda config: (config.head_dim,),
    "rope.dimension_count": lambda config: (config.rotary_dim or config.head_dim,),
    "rope.dimension_count_swa": lambda config: (config.rotary_dim or config.head_dim,),
    "rope.freq_base_swa": lambda config: (config.rope_theta,),
    "embedding_length_out": lambda config: (config.hidden_size,),
    "attention.causal": lambda _: (True,),
    "use_parallel_residual": lambda config: (config.parallel,),
    "hidden_activation": lambda config: tuple(
        name for name, kind in ACTIVATIONS.items() if kind == config.activation
    ),
    "logit_scale": lambda _: (1, 0),
    "residual_scale": lambda _: (1, 0),
    "embedding_scale": lambda _: (1, 0),
    "expert_weights_scale": lambda _: (1, 0),
    "expert_gating_func": lambda config: (_GATES[config.experts.scores] if config.experts else 0,),
    "expert_weights_norm": lambda config: (bool(config.experts and config.experts.renormalised),),
}
_FOREIGN: Final = """
activation.situ_beta activation.situ_linear_beta activation_sparsity_scale adapters.count
adapters.lora_rank adapters.router_gain adapters.token_ids_activate
adapters.token_ids_substitute altup.active_idx altup.num_inputs attention.clamp_kqv
attention.compress_ratios attention.compress_rope_freq_base attention.decay_lora_rank
attention.gate_lora_rank attention.group_norm_epsilon attention.group_norm_groups
attention.iclr_lora_rank attention.indexer.block_size attention.indexer.head_count
attention.indexer.key_length attention.indexer.kpool attention.indexer.kpool_select_tail
attention.indexer.local_blocks attention.indexer.top_k attention.indexer.types
attention.key_length_mla attention.key_length_mla_swa attention.kv_lora_rank
attention.kv_lora_rank_swa attention.max_alibi_bias attention.output_group_count
attention.output_lora_rank attention.output_scale attention.q_lora_rank
attention.recurrent_layers attention.relative_buckets_count attention.rope_pattern
attention.scale attention.shared_kv_layers attention.temperature_length
attention.temperature_scale attention.value_length_mla attention.value_length_mla_swa
attention.value_residual_mix_lora_rank attention.value_scale attn_logit_softcapping
attn_res.block_size block_size conv_group_size conv_kernel_size convnext.block_count
convnext.embedding_length decoder_block_count decoder_start_token_id deepstack_mapping
embedding_length_per_layer_input expert_chunk_feed_forward_length expert_count
expert_feed_forward_length expert_group_count expert_group_scale
expert_group_used_count expert_latent_length expert_shared_count
expert_shared_feed_forward_length expert_used_count experts_per_group
features_length final_logit_softcapping full_attention_interval hash_layer_count hrm.h_cycles
hrm.l_cycles hrm.layers_per_stack hrm.prefix_lm hyper_connection.count hyper_connection.epsilon
hyper_connection.low_rank hyper_connection.magnitude hyper_connection.sinkhorn_iterations
interleave_moe_layer_step kda.gate_lower_bound kda.head_dim kda.safe_gate
leading_dense_block_count moe_every_n_layers moe_latent_size n_deepstack_layers
nextn_predict_layers norm_before_fc norm_before_residual num_loops ple.conv_kernel
ple.eos_token_id ple.head_offsets ple.head_vocab_sizes ple.heads_per_ngram ple.image_token_id
ple.layer_multipliers ple.layers ple.ngram_size posnet.block_count posnet.embedding_length
rescale_every_n_layers rope.dimension_sections rope.scaling.alpha router_logit_softcapping
selector_rank selector_top_k shortconv.l_cache skip_loop_final_norm ssm.conv_kernel
ssm.dt_b_c_rms ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank swiglu_clamp_exp
swiglu_clamp_shexp swin_norm target_hidden_size target_layers time_decay_extra_dim
time_mix_extra_dim token_shift_count wkv.head_size
"""
FOREIGN: Final = frozenset(_FOREIGN.split())
# Behind `tokenizer.`; of the kinds `llama` and `gpt2`.
TOKENIZER_USED: Final = (
    "ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges",
    "ggml.bos_token_id", "ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id",
    "ggml.unknown_token_id", "ggml.seperator_token_id", "ggml.separator_token_id",
    "ggml.padding_token_id", "ggml.fim_pad_token_id", "ggml.fim_rep_token_id",
    "ggml.fim_sep_token_id", "ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix",
    "chat_template",
)  # fmt: skip
TOKENIZER_HARMLESS: Final = (
    "ggml.cls_token_id", "ggml.mask_token_id", "ggml.fim_pre_token_id", "ggml.fim_suf_token_id",
    "ggml.fim_mid_token_id", "ggml.prefix_token_id", "ggml.suffix_token_id",
    "ggml.middle_token_id", "ggml.token_type_count", "ggml.remove_extra_whitespaces",
    "ggml.precompiled_charsmap", "huggingface.json", "rwkv.world", "chat_templates",
)  # fmt: skip
TOKENIZER_FOREIGN: Final = (
    "ggml.add_sep_token", "ggml.normalizer.lowercase", "ggml.normalizer.strip_accents"
)  # fmt: skip
TOKENIZER_UNREAD: Final = ("ggml.suppress_tokens",)


def check_metadata(file: GgufFile, architecture: str, config: ModelConfig) -> None:
    """Raise `ModelError` for an entry that changes numbers and is not used.

    Gives one notice of others that are not read.
    """
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise ModelError(
            f"{file.path}: general.type is {kind!r}, which is no language model of its own; choose "
            "the file of the model"
        )
    unread = []
    for key, value in file.metadata.items():
        prefix, _, name = key.partition(".")
        if prefix == architecture:
            unread += _check(file, key, name, value, architecture, config)
        elif prefix == "tokenizer":
            unread += _check_tokenizer(file, key, name, value)
    if unread:
        notify_once(
            f"{file.path}: metadata that is not read: {_listed(unread)}; if the answers are wrong, "
            "use the model's Hugging Face directory"
        )


def check_required(file: GgufFile, architecture: str) -> None:
    """Raise `ModelError` where an entry is missing that llama.cpp requires as well."""
    for name in REQUIRED:
        if architecture in USED[name] and f"{architecture}.{name}" not in file.metadata:
            raise ModelError(
                f"{file.path}: {architecture}.{name} must be given, but it is missing; convert the "
                "model again"
            )


def _check(
    file: GgufFile, key: str, name: str, value: Any, architecture: str, config: ModelConfig
) -> list[str]:
    """Return the key if it is not read."""
    if architecture in USED.get(name, ()) or name in HARMLESS:
        return []
    if name == "attention.sliding_window":
        covers = is_number(value) and value >= config.max_position
        return [] if covers or _is_empty(value) else [key]
    if name in UNREAD:
        return [] if _is_one_of(value, UNREAD[name]) else [key]
    if name not in FIXED and name not in FOREIGN:
        return [key]
    allowed = FIXED[name](config) if name in FIXED else (0,)
    if _is_one_of(value, allowed) or (name in FOREIGN and _is_empty(value)):
        return []
    raise ModelError(
        f"{file.path}: {key} must be {allowed[0]!r} for the architecture {architecture!r}, got "
        f"{_shown(value)}; choose another model"
    )


def _check_tokenizer(file: GgufFile, key: str, name: str, value: Any) -> list[str]:
    """Return the key if it is not read."""
    if name.endswith("_token_id") and (not isinstance(value, int) or isinstance(value, bool)):
        raise ModelError(
            f"{file.path}: {key} must be a token id, got {_shown(value)}; download the file again"
        )
    known = (*TOKENIZER_USED, *TOKENIZER_HARMLESS)
    if name in known or name.startswith("chat_template."):
        return []
    if name not in TOKENIZER_FOREIGN:
        return [] if name in TOKENIZER_UNREAD and _is_empty(value) else [key]
    if _is_empty(value):
        return []
    raise ModelError(
        f"{file.path}: {key} must be false for tokenizers of the kinds llama and gpt2, got "
        f"{_shown(value)}; choose another model"
    )


def _is_one_of(value: Any, allowed: tuple[object, ...]) -> bool:
    return not isinstance(value, np.ndarray | list) and value in allowed


def _is_empty(value: Any) -> bool:
    """Return whether a value is 0, false, empty, or a list of such."""
    return not np.any(value) if isinstance(value, np.ndarray | list) else not value


def _shown(value: Any) -> str:
    return f"{str(value)[:60]}" if isinstance(value, np.ndarray | list) else repr(value)[:60]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

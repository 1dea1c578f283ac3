"""Every field of `transformers`' configurations is used, harmless, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ModelError
from hetero.models.architectures import ARCHITECTURES
from hetero.models.config import ModelConfig
from hetero.models.config_keys import NEUTRAL, NEUTRAL_ROPE, SAME, UNREAD
from tests.models.test_model_config import BASE, of

# In transformers 5 these come with the model's own code.
CLASSES = {
    x.name: x.class_name.replace("ForCausalLM", "Config")
    for x in ARCHITECTURES.values()
    if x.name not in ("internlm2", "minicpm")
} | {
    "gemma3_text": "Gemma3TextConfig", "gemma4_text": "Gemma4TextConfig",
    "gemma4_unified_text": "Gemma4UnifiedTextConfig", "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
}  # fmt: skip

USED = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation",
    "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "tie_word_embeddings",
    "rope_parameters", "bos_token_id", "eos_token_id", "dtype", "model_type", "architectures",
}  # fmt: skip
HARMLESS = {
    # how training went, and how a library computes the same numbers
    "output_router_logits", "router_aux_loss_coef",
    "initializer_range", "init_std", "attention_dropout", "resid_pdrop", "embd_pdrop", "dropout",
    "layerdrop", "pretraining_tp", "use_cache", "pad_token_id", "chunk_size_feed_forward",
    # what a library notes
    "_name_or_path", "id2label", "label2id", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "transformers_version",
}  # fmt: skip
SCALES = {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
GEMMA4 = {
    "attention_bias", "attention_k_eq_v", "final_logit_softcapping", "layer_types",
    "num_kv_shared_layers", "per_layer_config", "sliding_window", "use_double_wide_mlp",
}  # fmt: skip
OWN = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"attention_bias", "use_sliding_window", "sliding_window", "max_window_layers",
              "layer_types"},
    "lfm2_moe": {"layer_types", "conv_L_cache", "conv_bias", "norm_eps", "num_dense_layers",
                 "num_experts_per_tok", "moe_intermediate_size", "use_expert_bias",
                 "routed_scaling_factor", "norm_topk_prob"},
    "qwen3_moe": {"attention_bias", "use_sliding_window", "sliding_window", "decoder_sparse_step",
                  "mlp_only_layers", "num_experts_per_tok", "moe_intermediate_size",
                  "norm_topk_prob"},
    "gemma": {"attention_bias"},  # refused where it is true
    "gemma2": {"attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar",
               "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3_text": {"attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar",
                    "attn_logit_softcapping", "final_logit_softcapping", "sliding_window_pattern",
                    "rope_local_base_freq",
                    "_sliding_window_pattern"},  # what layer_types was made of
    "gemma4_text": {
        *GEMMA4, "hidden_size_per_layer_input", "vocab_size_per_layer_input",
        "enable_moe_block", "top_k_experts", "moe_intermediate_size",
    },
    "gemma4_unified_text": GEMMA4,
    "qwen3_5_text": {"attention_bias", "layer_types", "linear_conv_kernel_dim",
                     "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
                     "linear_num_value_heads"},
    "qwen3_5_moe_text": {"attention_bias", "layer_types", "linear_conv_kernel_dim",
                         "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
                         "linear_num_value_heads", "moe_intermediate_size", "num_experts_per_tok",
                         "shared_expert_intermediate_size"},
    "gpt_oss": {"attention_bias", "layer_types", "sliding_window", "num_experts_per_tok",
                "swiglu_alpha", "swiglu_limit"},
    "granite": {"attention_bias", "mlp_bias"} | SCALES,
    "granitemoehybrid": {
        "attention_bias", "layer_types", "shared_intermediate_size", "position_embedding_type",
        *SCALES,
        # of Mamba layers and of experts, which are refused
        "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "time_step_limit",
        "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
        "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias",
    },
    "smollm3": {"attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "layer_types",
                "no_rope_layers", "no_rope_layer_interval"},
    "ministral3": {"sliding_window"},
    "olmo2": {"attention_bias"},
    "olmo3": {"attention_bias", "sliding_window", "layer_types"},
    "exaone4": {"sliding_window", "sliding_window_pattern", "layer_types"},
    "glm4": {"attention_bias", "partial_rotary_factor"},
    "ernie4_5": {"use_bias"},
    "hunyuan_v1_dense": {"attention_bias", "eod_token_id"},  # tokenizers know the other
    "cohere2": {"attention_bias", "layer_norm_eps", "logit_scale", "sliding_window", "layer_types",
                "sliding_window_pattern"},
    "phi": {"qk_layernorm"},  # refused where it is true
    "phi3": {"sliding_window", "original_max_position_embeddings"},
    "lfm2": {"norm_eps", "layer_types", "full_attn_idxs", "conv_L_cache", "conv_bias",
             "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "block_multiple_of"},
    "opt": {"ffn_dim", "activation_function", "enable_bias", "do_layer_norm_before",
            "_remove_final_layer_norm", "word_embed_proj_dim", "layer_norm_elementwise_affine"},
}  # fmt: skip


# The defaults of `transformers` are of a model that has Mamba layers and experts.
WITHOUT_OTHERS = {"granitemoehybrid": {"layer_types": ["attention"] * 32, "num_local_experts": 0}}


def defaults(family: str) -> dict[str, Any]:
    """All fields of a family's configuration in this version of `transformers`."""
    found: dict[str, Any] = getattr(
        pytest.importorskip("transformers"), CLASSES[family]
    )().to_dict()
    return found


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_has_a_rule(family: str) -> None:
    assert set(defaults(family)) <= USED | HARMLESS | OWN[family] | set(NEUTRAL)


@pytest.mark.parametrize("family", CLASSES)
def test_the_defaults_of_a_family_are_taken(family: str) -> None:
    raw = defaults(family) | {"architectures": [ARCHITECTURES[family].class_name]}
    raw |= WITHOUT_OTHERS.get(family, {})
    assert ModelConfig.from_dict(raw).architecture == family


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_of_other_families_is_refused(family: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} (other than 1 )?is not supported, got 8; choo"):
        ModelConfig.from_dict(of(family, **{name: 8}))
    for value in (None, False, 0, *NEUTRAL[name]):
        assert ModelConfig.from_dict(of(family, **{name: value}))


@pytest.mark.parametrize("holder", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", NEUTRAL_ROPE)
def test_a_field_of_other_scalings_is_refused(holder: str, name: str) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, name: 3.0}
    with pytest.raises(ModelError, match=f"{holder}: {name} (other than 1 )?is not supported"):
        ModelConfig.from_dict(BASE | {holder: rope})


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (of("llama", layer_types=["full_attention", "sliding_attention"] * 2), "layer_types must"),
        (of("mistral", sliding_window=8, layer_types=["full_attention"] * 4), "layer_types must"),
        (of("qwen2", layer_types=["sliding_attention"] * 4), "layer_types must be"),
        (of("llama", attention_multiplier=0.015625), "attention_multiplier must be 0.35355339"),
        (of("llama", query_pre_attn_scalar=144), "query_pre_attn_scalar must be 8 with"),
        (of("gemma", final_logit_softcapping=30.0), "final_logit_softcapping must be 0.0 with"),
        (of("llama", no_rope_layers=[1, 1, 1, 0]), "no_rope_layers must be"),
        (
            of("smollm3", layer_types=["sliding_attention"] * 4, sliding_window=4),
            "layer_types must be full_attention without use_sliding_window and sliding_window, got",
        ),
        (of("smollm3", no_rope_layers=[1, 0]), "no_rope_layers must list 0 or 1 for each of 4 l"),
        (of("smollm3", no_rope_layers=[1, 0, 2, 1]), r"got \[1, 0, 2, 1\]; correct the file"),
        (
            of("granitemoehybrid", layer_types=["mamba"] * 4, shared_intermediate_size=9),
            "layer_types must list attention or full_attention for each of the 4 layers, got",
        ),
        (
            of("granitemoehybrid", layers_block_type=["attention"], shared_intermediate_size=9),
            r"layers_block_type must list attention or full_attention for each of the 4 layers, "
            r"got \['attention'\]; choose a model without Mamba",
        ),
        (
            of("granitemoehybrid", shared_intermediate_size=9),
            "layer_types must be attention in every layer, but it is missing",
        ),
        (
            of(
                "granitemoehybrid",
                layer_types=["attention"] * 4,
                num_local_experts=8,
                shared_intermediate_size=9,
            ),
            "num_local_experts is not supported, got 8; choose ano",
        ),
        (
            of(
                "granitemoehybrid",
                layer_types=["attention"] * 4,
                shared_intermediate_size=9,
                position_embedding_type="alibi",
            ),
            "position_embedding_type must be rope or nope, got 'alibi'; choose another model",
        ),
        (of("granite", residual_multiplier=0), "residual_multiplier must be a positive number, g"),
        (of("llama", residual_multiplier=0.5), "residual_multiplier other than 1 is not supported"),
        (of("exaone4", sliding_window_pattern="LGLG"), "must be a number, or L … L G, got 'LGLG'"),
        (of("ministral3"), "rope_parameters must be given for ministral3, but it is missing; corr"),
        (
            of("ministral3", rope_scaling={"type": "default", "llama_4_scaling_beta": 0.1}),
            "original_max_position_embeddings must be a positive integer, but it is missing",
        ),
        (
            of("olmo3", layer_types=["full_attention"] * 5),
            "layer_types must list full_at",
        ),
        (of("cohere2", logit_scale="x"), "logit_scale must be a positive number, got 'x'; corr"),
        (
            of("gemma3_text", rope_parameters={"full_attention": {"rope_type": "x"}}),
            "rope_parameters: full_attention: rope_type must be one of default",
        ),
        (
            of("llama", rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0}}),
            "rope_parameters per layer type is not supported, got full_attention; choose a model",
        ),
        (
            of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": -1}),
            "rope_scaling: alpha must be a positive number, got -1; correct the file",
        ),
        (of("gemma", use_bidirectional_attention="all"), "use_bidirectional_attention is not"),
    ],
)
def test_a_field_that_disagrees_with_the_family_is_refused(raw: dict[str, Any], rule: str) -> None:
    with pytest.raises(ModelError, match=rule):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "raw",
    [
        of("llama", layer_types=["full_attention"] * 4, attention_multiplier=8**-0.5),
        of("llama", query_pre_attn_scalar=8, no_rope_layers=[1] * 4),
        of("mistral", sliding_window=8, layer_types=["sliding_attention"] * 4),
        of("gemma2", query_pre_attn_scalar=144, attn_logit_softcapping=20.0),
        of("llama", sliding_window=None, anything={"else": 1}, auto_map={"AutoConfig": "x.Y"}),
    ],
)
def test_a_field_that_agrees_with_the_family_is_taken(raw: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(raw)


@pytest.mark.parametrize("name", SAME)
def test_a_field_that_is_not_given_says_nothing(name: str) -> None:
    assert ModelConfig.from_dict(BASE | {name: None})


SAMPLING = {
    "eos_token_id", "bos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty",
}  # fmt: skip
NO_SAMPLING = {
    # how long, how many, and what is returned
    "max_length", "max_new_tokens", "max_time", "num_return_sequences", "return_dict_in_generate",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "transformers_version", "_from_model_config",
    # how the same tokens are computed
    "use_cache", "cache_config", "cache_implementation", "compile_config", "disable_compile",
    "continuous_batching_config", "prefill_chunk_size", "low_memory", "max_cache_len",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "speculation_type", "target_lookbehind", "use_mtp", "remove_invalid_values",
    "renormalize_logits", "token_healing",
    # of beams, which num_beams asks for, and of encoders
    "early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups",
    "decoder_start_token_id", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
}  # fmt: skip


def test_every_field_of_a_generation_config_has_a_rule() -> None:
    transformers = pytest.importorskip("transformers")
    fields = set(transformers.GenerationConfig().to_dict())
    assert fields <= SAMPLING | NO_SAMPLING | set(UNREAD)


@pytest.mark.parametrize(
    ("generation", "unread"),
    [
        ({"suppress_tokens": [5], "num_beams": 4}, "suppress_tokens, num_beams are not read"),
        ({"stop_strings": ["User:"]}, "stop_strings is not read"),
        ({"suppress_tokens": None, "num_beams": 1, "typical_p": 1.0, "temperature": 0.5}, None),
    ],
)
def test_a_generation_config_that_is_not_read_whole_gets_a_notice(
    generation: dict[str, Any],
    unread: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(generation))
    for _ in range(2):
        ModelConfig.from_directory(tmp_path)
    notice = f"hetero: {file}: {unread}: answers may differ from those of transformers\n"
    assert capsys.readouterr().err == ("" if unread is None else notice)

"""Random tiny configurations of families, with every field that changes numbers.

Sizes are those of `TINY` wherever a family allows it, so that all share the kernels of matmuls.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from hypothesis import strategies as st

Changes: TypeAlias = dict[str, Any]

LAYERS = 3
MAX_POSITION = 512
FULL = ["full_attention"] * LAYERS
PADDING = {"pad_token_id": st.just(0)}
WINDOW = st.sampled_from([5, 24])
ORIGINAL = 24  # tokens of the first training, of scaled rotary embeddings
KINDS = st.lists(
    st.sampled_from(["full_attention", "sliding_attention"]), min_size=LAYERS, max_size=LAYERS
)
THETA = st.sampled_from([100.0, 1e4, 1e6])
LINEAR = st.builds(lambda x: {"rope_type": "linear", "factor": x}, st.sampled_from([2.0, 8.0]))
YARN = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": st.sampled_from([4.0, 16.0]),
        "original_max_position_embeddings": st.just(ORIGINAL),
    }
)
PLAIN = st.just({"rope_type": "default"})
SCALES: dict[str, st.SearchStrategy[Any]] = {
    "embedding_multiplier": st.sampled_from([1.0, 12.0]),
    "residual_multiplier": st.sampled_from([1.0, 0.22, 1.7]),
    "attention_multiplier": st.sampled_from([0.35, 0.0156]),
    "logits_scaling": st.sampled_from([1.0, 8.0, 3.3]),
}


def with_theta(ropes: st.SearchStrategy[Changes]) -> st.SearchStrategy[Changes]:
    """Rotary embeddings with a base period."""
    return st.builds(lambda rope, theta: rope | {"rope_theta": theta}, ropes, THETA)


# By class name of the family in `transformers`: the changes of a configuration.
FAMILIES: dict[str, st.SearchStrategy[Changes]] = {
    "Qwen3_5": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "attention_bias": st.booleans(),
            "layer_types": st.lists(
                st.sampled_from(["linear_attention", "full_attention"]),
                min_size=LAYERS,
                max_size=LAYERS,
            ).filter(lambda kinds: "full_attention" in kinds),
            "linear_conv_kernel_dim": st.sampled_from([2, 4]),
            "linear_num_key_heads": st.sampled_from([1, 2]),
            "linear_num_value_heads": st.sampled_from([2, 6]),
            "linear_key_head_dim": st.just(16),
            "linear_value_head_dim": st.sampled_from([8, 32]),
            "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
            "rope_parameters": st.builds(
                lambda theta, factor: {
                    "rope_type": "default",
                    "rope_theta": theta,
                    "partial_rotary_factor": factor,
                    "mrope_section": [1, 1, 1],
                    "mrope_interleaved": True,
                },
                THETA,
                st.sampled_from([0.25, 1.0]),
            ),
            "tie_word_embeddings": st.booleans(),
            **PADDING,
        }
    ),
    "Granite": st.fixed_dictionaries(
        {
            **SCALES,
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN | LINEAR | YARN),
        }
    ),
    "GraniteMoeHybrid": st.fixed_dictionaries(
        {
            **SCALES,
            "attention_bias": st.booleans(),
            "shared_intermediate_size": st.just(172),
            "num_local_experts": st.just(0),
            "position_embedding_type": st.sampled_from(["rope", None]),
            "layer_types": st.just(FULL),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN),
        }
    ),
    "SmolLM3": st.fixed_dictionaries(
        {
            "no_rope_layers": st.lists(st.sampled_from([0, 1]), min_size=LAYERS, max_size=LAYERS),
            "use_sliding_window": st.booleans(),
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN | YARN),
            **PADDING,
        }
    ).map(lambda x: x if x["use_sliding_window"] else x | {"layer_types": FULL}),
    "Ministral3": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "sliding_window": st.none() | WINDOW,
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(
                st.builds(
                    lambda rope, beta, mscale: rope | beta | mscale,
                    YARN,
                    st.builds(lambda x: {"llama_4_scaling_beta": x}, st.sampled_from([0.1, 0.7])),
                    st.sampled_from([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}]),
                )
            ),
            **PADDING,
        }
    ),
    "Olmo2": st.fixed_dictionaries(
        {
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN | YARN),
            **PADDING,
        }
    ),
    "Olmo3": st.fixed_dictionaries(
        {
            "attention_bias": st.booleans(),
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "rope_parameters": st.fixed_dictionaries(
                {
                    "full_attention": with_theta(PLAIN | YARN),
                    "sliding_attention": with_theta(PLAIN),
                }
            ),
            **PADDING,
        }
    ),
    "Exaone4": st.fixed_dictionaries(
        {
            "sliding_window": st.none() | WINDOW,
            "layer_types": KINDS,
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN | LINEAR),
        }
    ).map(lambda x: x if x["sliding_window"] else x | {"layer_types": FULL}),
    "Glm4": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": st.builds(
                lambda rope, part: rope | {"partial_rotary_factor": part},
                with_theta(PLAIN),
                st.sampled_from([0.5, 0.25, 1.0]),
            ),
            **PADDING,
        }
    ),
    "Ernie4_5": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "use_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN | LINEAR),
        }
    ),
    "HunYuanDenseV1": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(
                PLAIN | YARN | st.just({"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0})
            ),
        }
    ),
    "Cohere2": st.fixed_dictionaries(
        {
            "attention_bias": st.booleans(),
            "logit_scale": st.sampled_from([0.0625, 1.7]),
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "tie_word_embeddings": st.booleans(),
            "rope_parameters": with_theta(PLAIN | LINEAR),
        }
    ),
    "Phi3": st.fixed_dictionaries(
        {
            "sliding_window": st.none() | WINDOW,
            "tie_word_embeddings": st.booleans(),
            # every text is longer: transformers goes by the text, not by the context
            "original_max_position_embeddings": st.just(4),
            "rope_parameters": st.fixed_dictionaries(
                {
                    "rope_type": st.just("longrope"),
                    "rope_theta": THETA,
                    "partial_rotary_factor": st.just(0.75),
                    "short_factor": st.just([1.0, 1.5, 2.0]),
                    "long_factor": st.just([1.5, 3.0, 7.0]),
                }
            ),
            **PADDING,
        }
    ),
    "Lfm2": st.fixed_dictionaries(
        {
            "layer_types": st.lists(
                st.sampled_from(["conv", "full_attention"]), min_size=LAYERS, max_size=LAYERS
            ).filter(lambda x: "full_attention" in x),
            "conv_L_cache": st.integers(2, 5),
            "conv_bias": st.booleans(),
            "norm_eps": st.sampled_from([1e-5, 1e-2]),
            "tie_word_embeddings": st.booleans(),
            "block_auto_adjust_ff_dim": st.booleans(),
            "block_ffn_dim_multiplier": st.sampled_from([1.0, 1.3]),
            "block_multiple_of": st.sampled_from([4, 32]),
            "rope_parameters": with_theta(PLAIN | LINEAR | YARN),
        }
    ),
    "Gemma4": st.fixed_dictionaries(
        {
            "num_hidden_layers": st.just(5),
            "layer_types": st.sampled_from(
                [
                    ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                    ["full_attention"] * 2 + ["sliding_attention"] * 2 + ["full_attention"],
                ]
            ),
            "head_dim": st.sampled_from([8, 16]),
            "global_head_dim": st.sampled_from([8, 16]),
            "attention_k_eq_v": st.booleans(),
            "num_global_key_value_heads": st.sampled_from([None, 2]),
            "num_kv_shared_layers": st.sampled_from([0, 1, 2]),
            "use_double_wide_mlp": st.booleans(),
            "hidden_size_per_layer_input": st.sampled_from([0, 16]),
            "vocab_size_per_layer_input": st.just(263),
            "attention_bias": st.booleans(),
            "sliding_window": WINDOW,
            "final_logit_softcapping": st.sampled_from([None, 3.0]),
            "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
            "rope_parameters": st.none()
            | st.fixed_dictionaries(
                {
                    "full_attention": with_theta(
                        st.builds(
                            lambda x: {"rope_type": "proportional", "partial_rotary_factor": x},
                            st.sampled_from([0.25, 0.5, 1.0]),
                        )
                    ),
                    "sliding_attention": with_theta(PLAIN),
                }
            ),
            "tie_word_embeddings": st.booleans(),
            **PADDING,
        }
    ),
    "Gemma3": st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([8, 16]),
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "query_pre_attn_scalar": st.sampled_from([8, 16, 29]),
            "final_logit_softcapping": st.sampled_from([None, 3.0]),
            "rope_parameters": st.fixed_dictionaries(
                {
                    "full_attention": with_theta(PLAIN | LINEAR),
                    "sliding_attention": with_theta(PLAIN),
                }
            ),
            "tie_word_embeddings": st.booleans(),
            **PADDING,
        }
    ),
}


def in_files(family: str, changes: Changes) -> Changes:
    """What GGUF files fix: they have no entry for it."""
    match family:
        case "Gemma3":
            return {"query_pre_attn_scalar": changes["head_dim"]}
        case "SmolLM3":
            return {
                "num_hidden_layers": 4,
                "no_rope_layers": [1, 1, 1, 0],
                "use_sliding_window": False,
                "sliding_window": None,
                "layer_types": ["full_attention"] * 4,
            }
        case "Lfm2":
            return {"conv_bias": False}
        case "Ministral3":
            return {"sliding_window": None}
        case "HunYuanDenseV1":
            kept = {
                "rope_type": "default",
                "rope_theta": 1e4,
            }  # a stretched theta is rounded to f32
            stretched = "alpha" in changes["rope_parameters"]
            return {"rope_parameters": kept} if stretched else {}
        case _:
            return {}

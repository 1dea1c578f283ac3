"""The published `config.json` of known models, by the fields that shapes and numbers depend on."""

from __future__ import annotations

from typing import Any, Final

# d, f, layers, H, G, D, vocabulary
_LONG: Final = {  # the published factors change no shape
    "rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48,
}  # fmt: skip
_PHI: Final = {"rope_scaling": _LONG, "original_max_position_embeddings": 4096}
_GRANITE: Final = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
    "rope_theta": 1e7, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3: Final = {"rope_theta": 1e6, "tie_word_embeddings": True}
_SMOLLM2: Final = {"rope_theta": 1e5, "tie_word_embeddings": True}
_YARN: Final = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6,
}  # fmt: skip
_SIZES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip


def _model(
    model_type: str, sizes: tuple[int, ...], max_position: int, eps: float, **fields: Any
) -> dict[str, Any]:
    shape = dict(zip(_SIZES, sizes, strict=True))
    common = {"max_position_embeddings": max_position, "rms_norm_eps": eps}
    return {"model_type": model_type, **shape, **common, **fields}


def _qwen3_5(sizes: tuple[int, ...], values: int, *, tied: bool = True) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    fields = {"linear_num_value_heads": values, "tie_word_embeddings": tied}
    return _model("qwen3_5_text", sizes, 262144, 1e-6, rope_parameters=rope, **fields)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    sizes = (2880, 2880, layers, 64, 8, 64, 201088)
    rope = {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "truncate": False,
    }  # fmt: skip
    routed = {"num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return _model("gpt_oss", sizes, 131072, 1e-5, rope_theta=150000.0, rope_scaling=rope, **routed)


def _gemma4(
    sizes: tuple[int, ...], window: int, sliding: int, *, kind: str = "gemma4_text", **fields: Any
) -> dict[str, Any]:
    """Return a model of `sliding` layers with a window for each with full attention."""
    types = [*["sliding_attention"] * sliding, "full_attention"] * (sizes[2] // (sliding + 1))
    common = {"sliding_window": window, "layer_types": types, "final_logit_softcapping": 30.0}
    position = 131072 if window == 512 else 262144
    return _model(kind, (*sizes, 256, 262144), position, 1e-6, **common, **fields)


# Widths of Gemma 4 and Qwen3.5 are those that others quote of `config.json` or GGUF metadata (read
# in 2026-11). Gemma 4: issues canonical/inference-snaps#275 and ollama#18123 (E4B); iamulya.one
# "decoder-forward-pass-dimensions" (12B); THUDM/slime scripts/models (26B-A4B, 31B); the global
# heads go-inference-lab-bench gemma4.arch.toml (26B-A4B) and huggingface/transformers#46467 (31B).
# Qwen3.5: slime again (0.8B, 27B, 35B-A3B), apxml.com (4B), `Qwen3_5TextConfig` of transformers
# (9B); nothing was found of the feed-forward and heads of 2B.
_KEYS_ONLY: Final[dict[str, Any]] = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
PUBLISHED: Final[dict[str, dict[str, Any]]] = {
    "qwen3-1.7b": _model("qwen3", (2048, 6144, 28, 16, 8, 128, 151936), 40960, 1e-6, **_QWEN3),
    "qwen3-4b": _model("qwen3", (2560, 9728, 36, 32, 8, 128, 151936), 40960, 1e-6, **_QWEN3),
    "qwen3-8b": _model("qwen3", (4096, 12288, 36, 32, 8, 128, 151936), 40960, 1e-6, rope_theta=1e6),
    "smollm2-135m": _model("llama", (576, 1536, 30, 9, 3, 64, 49152), 8192, 1e-5, **_SMOLLM2),
    "smollm2-1.7b": _model("llama", (2048, 8192, 24, 32, 32, 64, 49152), 8192, 1e-5, **_SMOLLM2),
    "falcon3-7b": _model(
        "llama", (3072, 23040, 28, 12, 4, 256, 131072), 32768, 1e-6, rope_theta=1000042.0
    ),
    "gemma-3-270m": _model(
        "gemma3_text", (640, 2048, 18, 4, 1, 256, 262144), 32768, 1e-6, sliding_window=512
    ),
    "gemma-3-1b": _model(
        "gemma3_text", (1152, 6912, 26, 4, 1, 256, 262144), 32768, 1e-6, sliding_window=512
    ),
    "gemma-3-4b": _model(
        "gemma3_text",
        (2560, 10240, 34, 8, 4, 256, 262208),
        131072,
        1e-6,
        sliding_window=1024,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma-4-e2b": _gemma4(
        (1536, 6144, 35, 8, 1), 512, 4, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma-4-e4b": _gemma4((2560, 10240, 42, 8, 2), 512, 5, num_kv_shared_layers=18),
    "gemma-4-12b": _gemma4(
        (3840, 15360, 48, 16, 8),
        1024,
        5,
        kind="gemma4_unified_text",
        num_global_key_value_heads=1,
        **_KEYS_ONLY,
    ),
    "gemma-4-31b": _gemma4(
        (5376, 21504, 60, 32, 16), 1024, 5, num_global_key_value_heads=4, **_KEYS_ONLY
    ),
    "gemma-4-26b-a4b": _gemma4(
        (2816, 2112, 30, 16, 8),
        1024,
        5,
        num_global_key_value_heads=2,
        **_KEYS_ONLY,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "qwen3.5-0.8b": _qwen3_5((1024, 3584, 24, 8, 2, 256, 248320), 16),
    "qwen3.5-2b": _qwen3_5((2048, 6144, 24, 8, 2, 256, 248320), 16),
    "qwen3.5-4b": _qwen3_5((2560, 9216, 32, 16, 4, 256, 248320), 32),
    "qwen3.5-9b": _qwen3_5((4096, 12288, 32, 16, 4, 256, 248320), 32, tied=False),
    "qwen3.5-27b": _qwen3_5((5120, 17408, 64, 24, 4, 256, 248320), 48, tied=False),
    "qwen3.5-35b-a3b": {
        **_qwen3_5((2048, 512, 40, 16, 2, 256, 248320), 32, tied=False),
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 512,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "lfm2-8b-a1b": _model(
        "lfm2_moe",
        (2048, 7168, 24, 32, 8, 64, 65536),
        128000,
        1e-5,
        layer_types=[
            "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
        ],
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
        num_dense_layers=2,
        rope_theta=1e6,
    ),
    "phi-3.5-mini": _model("phi3", (3072, 8192, 32, 32, 32, 96, 32064), 131072, 1e-5, **_PHI),
    "phi-4-mini": _model(
        "phi3",
        (3072, 8192, 32, 24, 8, 128, 200064),
        131072,
        1e-5,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        **_PHI,
    ),
    "granite-3.3-2b": _model(
        "granite", (2048, 8192, 40, 32, 8, 64, 49159), 131072, 1e-5, logits_scaling=8.0, **_GRANITE
    ),
    "granite-4.0-micro": _model(
        "granitemoehybrid",
        (2560, 8192, 40, 40, 8, 64, 100352),
        131072,
        1e-5,
        shared_intermediate_size=8192,
        layer_types=["attention"] * 40,
        position_embedding_type="rope",
        logits_scaling=10.0,
        **_GRANITE,
    ),
    "minicpm-2b": _model(
        "minicpm",
        (2304, 5760, 40, 36, 36, 64, 122753),
        4096,
        1e-5,
        scale_emb=12.0,
        scale_depth=1.4,
        dim_model_base=256,
    ),
    "smollm3-3b": _model(
        "smollm3", (2048, 11008, 36, 16, 4, 128, 128256), 65536, 1e-6, rope_theta=5e6
    ),
    "ministral-3-3b": _model(
        "ministral3",
        (3072, 9216, 26, 32, 8, 128, 131072),
        262144,
        1e-5,
        rope_parameters=_YARN,
        tie_word_embeddings=True,
    ),
    "ministral-3-8b": _model(
        "ministral3", (4096, 14336, 34, 32, 8, 128, 131072), 262144, 1e-5, rope_parameters=_YARN
    ),
    "olmo-2-1b": _model("olmo2", (2048, 8192, 16, 16, 16, 128, 100352), 4096, 1e-6, rope_theta=5e5),
    "olmo-3-7b": _model(
        "olmo3",
        (4096, 11008, 32, 32, 32, 128, 100278),
        65536,
        1e-6,
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
        },
    ),
    "exaone-4.0-1.2b": _model(
        "exaone4",
        (2048, 4096, 30, 32, 8, 64, 102400),
        65536,
        1e-5,
        sliding_window=None,
        rope_theta=1e6,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
    ),
    "glm-4-9b": _model("glm4", (4096, 13696, 40, 32, 2, 128, 151552), 32768, 1e-5),
    "ernie-4.5-0.3b": _model("ernie4_5", (1024, 3072, 18, 16, 2, 128, 103424), 131072, 1e-5),
    "hunyuan-1.8b": _model(
        "hunyuan_v1_dense",
        (2048, 6144, 32, 16, 4, 128, 120818),
        262144,
        1e-5,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "command-r7b": _model(
        "cohere2",
        (4096, 14336, 32, 32, 8, 128, 256000),
        132096,
        1e-5,
        logit_scale=0.25,
        rope_theta=5e4,
    ),
}

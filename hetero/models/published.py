"""The published `config.json` of known models, by the fields that shapes and numbers depend on."""

from __future__ import annotations

from typing import Any, Final

# d, f, layers, H, G, D, vocabulary
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


PUBLISHED: Final[dict[str, dict[str, Any]]] = {
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
}

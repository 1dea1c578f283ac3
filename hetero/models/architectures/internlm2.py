"""InternLM2: Llama under other names, with queries, keys and values in one interleaved weight.

`wqkv` holds, for each key/value head, its H / G query heads, then its key, then its value
(`rearrange(..., "(h gs d)")` of `modeling_internlm2.py`, gs = H / G + 2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.models.architectures.base import Architecture, Decoder, TensorNames
from hetero.models.fields import Fields


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    bias = source.boolean("bias", True)
    return {"qkv_bias": bias, "o_bias": bias}


def _write(config: Decoder) -> dict[str, Any]:
    return {"bias": config.qkv_bias}


def interleaved_rows(config: Decoder) -> npt.NDArray[np.int64]:
    """Return rows of `wqkv` in the order queries, keys, values."""
    group = config.heads // config.kv_heads
    rows = np.arange(config.kv_heads * (group + 2) * config.head_dim, dtype=np.int64)
    heads = rows.reshape(config.kv_heads, group + 2, config.head_dim)
    return np.concatenate(
        [heads[:, :group].reshape(-1), heads[:, group].reshape(-1), heads[:, group + 1].reshape(-1)]
    )


INTERNLM2 = Architecture(
    name="internlm2",
    class_name="InternLM2ForCausalLM",
    ids=(1, 2),
    read=_read,
    write=_write,
    row_order={"attention.wqkv": interleaved_rows},
    names=TensorNames(
        matmuls={
            "qkv": ("attention.wqkv",),
            "o": ("attention.wo",),
            "gate_up": ("feed_forward.w1", "feed_forward.w3"),
            "down": ("feed_forward.w2",),
        },
        vectors={"input_norm": "attention_norm", "post_norm": "ffn_norm"},
        model_modules={
            "embed": "model.tok_embeddings",
            "lm_head": "output",
            "final_norm": "model.norm",
        },
    ),
)

"""The smallest files that are whole models: a few kilobytes, made without torch.

`write_directory` and `write_gguf` hold the same kind of model: a Llama of hidden size 8 over a
vocabulary of bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from hetero.models.config import ModelConfig
from tests.models.gguf_files import write
from tests.models.model_helpers import random_tensors

Array = npt.NDArray[Any]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["<unk>", "<s>", "</s>", *ALPHABET, "th", "the"]
MERGES = [("t", "h"), ("th", "e")]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": TEMPLATE,
}
GGUF_ENTRIES: dict[str, Any] = {
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.key_length": 4,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [3 if x.startswith("<") and len(x) > 1 else 1 for x in WORDS],
    "tokenizer.ggml.merges": [" ".join(x) for x in MERGES],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and one word."""
    found = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(WORDS)}, MERGES, unk_token="<unk>")
    )
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(WORDS[:3])
    return found


def write_directory(folder: Path) -> Path:
    """A Hugging Face directory of float32 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(random_tensors(ModelConfig.from_dict(CONFIG)), folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer().to_str(), encoding="utf-8")
    return folder


def gguf_tensors(vocabulary: int = len(WORDS)) -> dict[str, Array]:
    """The tensors of the GGUF file, float32."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_gate.weight": (12, 8),
        "blk.0.ffn_up.weight": (12, 8),
        "blk.0.ffn_down.weight": (8, 12),
    }
    rng = np.random.default_rng(3)
    return {k: rng.standard_normal(v, dtype=np.float32) for k, v in shapes.items()}


def write_gguf(path: Path, **changes: Any) -> Path:
    """A GGUF file; `changes` to the metadata have `__` for a dot, None leaves an entry out."""
    entries = GGUF_ENTRIES | {key.replace("__", "."): value for key, value in changes.items()}
    tokens = entries["tokenizer.ggml.tokens"]
    tensors = gguf_tensors(len(tokens) if tokens else len(WORDS))
    write(path, "llama", {k: v for k, v in entries.items() if v is not None}, tensors)
    return path

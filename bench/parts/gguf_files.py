"""A GGUF file of random weights, for llama.cpp and its peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hetero.profiler.model_graph import ModelGraph

Array = np.ndarray[Any, Any]


def shapes(spec: ModelGraph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor; the output head is tied to the embedding."""
    d, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    block = {
        "attn_norm": (d,), "ffn_norm": (d,), "attn_q": (q, d), "attn_k": (kv, d),
        "attn_v": (kv, d), "attn_output": (d, q), "ffn_gate": (f, d), "ffn_up": (f, d),
        "ffn_down": (d, f),
    }  # fmt: skip
    yield "token_embd.weight", (spec.vocab_size, d)
    yield "output_norm.weight", (d,)
    for layer in range(spec.layers):
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in block.items())


def random_blocks(spec: ModelGraph, kind: str) -> Iterator[tuple[str, Array]]:
    """Tensors of random Q4_0 or Q8_0 blocks [n, k/32 · 18 or 34], the same ones every time, and
    norms of 1.
    """
    rng, codes = np.random.default_rng(0), {"Q4_0": 16, "Q8_0": 32}[kind]
    for name, shape in shapes(spec):
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
            continue
        n, k = shape
        blocks = np.empty((n, k // 32, 2 + codes), np.uint8)
        blocks[..., 2:] = rng.integers(0, 256, (n, k // 32, codes), dtype=np.uint8)
        scale = np.float16(1 / (4.6 * np.sqrt(k)) / (1 if codes == 16 else 16))
        blocks[..., :2] = np.full((n, k // 32, 1), scale).view(np.uint8)
        yield name, blocks.reshape(n, -1)


def new_writer(spec: ModelGraph, path: Path, context: int) -> Any:
    """A writer that has the model's configuration, without its tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    return writer


def write_random(spec: ModelGraph, path: Path, context: int, blocks: str = "Q4_0") -> None:
    """A model of random Q4_0 or Q8_0 weights with the shapes of `spec`."""
    import gguf

    writer = new_writer(spec, path, context)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("llama")
    words = [b"<unk>", b"<s>", b"</s>", *(f"t{i}".encode() for i in range(spec.vocab_size - 3))]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * spec.vocab_size)
    writer.add_token_types([2, 3, 3] + [1] * (spec.vocab_size - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in random_blocks(spec, blocks):
        kind = gguf.GGMLQuantizationType[blocks] if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

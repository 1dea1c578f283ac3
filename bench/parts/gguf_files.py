"""GGUF files of random weights: a small one for llama.cpp and its peers, a large one to open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.models.graph import model_graph
from hetero.models.random_models import known_config
from hetero.profiler.model_graph import ModelGraph

ALIGNMENT = 32
PIECE_BYTES = 64 << 20
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


def random_q4(spec: ModelGraph) -> Iterator[tuple[str, Array]]:
    """Tensors of random Q4_0 blocks [n, k/32 · 18], the same ones every time, and norms of 1."""
    rng = np.random.default_rng(0)
    for name, shape in shapes(spec):
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
            continue
        n, k = shape
        blocks = np.empty((n, k // 32, 18), np.uint8)
        blocks[..., 2:] = rng.integers(0, 256, (n, k // 32, 16), dtype=np.uint8)
        scale = np.float16(1 / (4.6 * np.sqrt(k)))
        blocks[..., :2] = np.full((n, k // 32, 1), scale).view(np.uint8)
        yield name, blocks.reshape(n, -1)


def _writer(spec: ModelGraph, path: Path, context: int) -> Any:
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


def write_q4(spec: ModelGraph, path: Path, context: int) -> None:
    """A model of random Q4_0 weights with the shapes of `spec`."""
    import gguf

    writer = _writer(spec, path, context)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("llama")
    words = [b"<unk>", b"<s>", b"</s>", *(f"t{i}".encode() for i in range(spec.vocab_size - 3))]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * spec.vocab_size)
    writer.add_token_types([2, 3, 3] + [1] * (spec.vocab_size - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in random_q4(spec):
        kind = gguf.GGMLQuantizationType.Q4_0 if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_large(path: Path, *, layers: int = 8, dense: bool = False) -> Path:
    """An F16 model of Llama 3 8B's shapes, 4.5 GB with 8 layers; its weights take no room on disk,
    or are random bytes with `dense`.
    """
    known = known_config("llama-3-8b")
    windows = known.windows[:layers]
    config = replace(known, num_layers=layers, windows=windows, vocab_size=128000)
    spec = model_graph(config, WeightFormat.F16, "large")
    writer = _writer(spec, path, 8192)
    letters = [chr(0x100 + i) for i in range(256)]
    pairs = [a + b for a in letters for b in letters]
    words = [*letters, *pairs, *(a + letters[0] for a in pairs)][: spec.vocab_size]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", words)
    merges = [f"{word[:-1]} {word[-1]}" for word in words if len(word) > 1]
    writer.add_array("tokenizer.ggml.merges", merges)
    total = 0
    for name, shape in shapes(spec):
        kind = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        nbytes = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(name, shape, kind, nbytes)
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        size = -(-file.seek(0, os.SEEK_END) // ALIGNMENT) * ALIGNMENT + total
        while dense and (left := size - file.tell()) > 0:
            file.write(os.urandom(min(left, PIECE_BYTES)))
        file.truncate(size)
    return path

"""A GGUF file of random weights, for llama.cpp and its peers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

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


def file_types(name: str, layers: int, file_type: str) -> str:
    """The block type of a matrix in a file of `Q4_0`, `Q8_0` or `Q4_K_M` (as llama.cpp's quantiser
    chooses: half of `attn_v` and `ffn_down`, and the embedding that is the head, in Q6_K).
    """
    if file_type != "Q4_K_M":
        return file_type
    if name == "token_embd.weight":
        return "Q6_K"
    layer = int(name.split(".")[1])
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if more and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def random_blocks(
    kind: str, n: int, k: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows [n, bytes] of random blocks whose values have a deviation of about 1 / sqrt(k)."""
    values, size, halves, spread = {
        "Q4_0": (32, 18, {0: 1.0}, 4.6),
        "Q8_0": (32, 34, {0: 1.0}, 74.0),
        "Q4_K": (256, 144, {0: 1.0, 2: 7.5}, 255.0),
        "Q6_K": (256, 210, {208: 1.0}, 1369.0),
    }[kind]
    blocks = np.frombuffer(rng.bytes(n * k // values * size), np.uint8).reshape(-1, size).copy()
    for at, factor in halves.items():
        scale = np.float16(factor / (spread * np.sqrt(k)))
        blocks[:, at : at + 2] = np.full((len(blocks), 1), scale).view(np.uint8)
    return blocks.reshape(n, -1)


def random_tensors(spec: ModelGraph, file_type: str) -> Iterator[tuple[str, str, Array]]:
    """Name, type and bytes of every tensor, the same ones every time; norms are 1."""
    rng = np.random.default_rng(0)
    for name, shape in shapes(spec):
        if len(shape) == 1:
            yield name, "F32", np.ones(shape, np.float32)
        else:
            kind = file_types(name, spec.layers, file_type)
            yield name, kind, random_blocks(kind, *shape, rng)


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


def add_words(writer: Any, size: int) -> None:
    """Add a byte-level tokenizer of words without meaning: pairs of letters, and pairs of them.

    Every engine reads this kind; OpenVINO GenAI no other.
    """
    bytes_ = sorted(ByteLevel.alphabet())
    pairs = [x + y for x, y in product(ascii_lowercase, repeat=2)]
    fours = (x + y for x, y in product(pairs, repeat=2))
    words = [*bytes_, *pairs, *islice(fours, max(0, size - len(bytes_) - len(pairs) - 2))]
    words = [*words[: size - 2], "<s>", "</s>"]
    writer.add_file_type(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(words)
    writer.add_token_types([1] * (size - 2) + [3, 3])
    writer.add_token_merges([f"{x[: len(x) // 2]} {x[len(x) // 2 :]}" for x in words[256:-2]])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)


def write_random(spec: ModelGraph, path: Path, context: int, file_type: str = "Q4_0") -> None:
    """A model of random weights with the shapes of `spec`."""
    import gguf

    writer = new_writer(spec, path, context)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    add_words(writer, spec.vocab_size)
    for name, kind, array in random_tensors(spec, file_type):
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

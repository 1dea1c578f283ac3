"""How long a 4 GB GGUF file takes to open: `python bench/open_gguf.py [--dense]`.

The file has the shapes of an 8-layer cut of Llama 3 8B in F16 and a vocabulary of 128000 tokens. It
is sparse, or full of random bytes with `--dense` (which the page cache then holds at most in part).
Opening maps it: time and memory must not depend on its size.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

D, F, VOCABULARY, LAYERS = 4096, 14336, 128000, 8
SIZES = {
    "embedding_length": D,
    "block_count": LAYERS,
    "feed_forward_length": F,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "context_length": 8192,
}
BLOCK: dict[str, tuple[int, ...]] = {
    "attn_q": (D, D),
    "attn_k": (1024, D),
    "attn_v": (1024, D),
    "attn_output": (D, D),
    "ffn_gate": (F, D),
    "ffn_up": (F, D),
    "ffn_down": (D, F),
    "attn_norm": (D,),
    "ffn_norm": (D,),
}
ALIGNMENT = 32
PIECE_BYTES = 64 << 20


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor."""
    yield "token_embd.weight", (VOCABULARY, D)
    yield "output_norm.weight", (D,)
    for layer in range(LAYERS):
        for name, shape in BLOCK.items():
            yield f"blk.{layer}.{name}.weight", shape


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens of one to three letters, and the merges that make them."""
    letters = [chr(0x100 + i) for i in range(256)]
    pairs = [a + b for a in letters for b in letters]
    triples = [a + b for a in pairs for b in letters[:1]]
    longer = [a + b for a in triples for b in letters[:1]]
    words = [*letters, *pairs, *triples, *longer][:VOCABULARY]
    return words, [f"{word[:-1]} {word[-1]}" for word in words if len(word) > 1]


def write_large(path: Path, *, dense: bool = False) -> Path:
    """Write the file; only its header takes room on disk unless `dense`."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in SIZES.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    words, merges = vocabulary()
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", words)
    writer.add_array("tokenizer.ggml.merges", merges)
    total = 0
    for name, shape in shapes():
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


def peak_memory_bytes() -> int:
    """Peak resident memory of this process that no file backs."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(found["RssAnon"].split()[0]) * 1024


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", action="store_true", help="write every byte")
    parser.add_argument("-r", type=int, default=5, help="rounds")
    options = parser.parse_args()
    from hetero.models import open_model

    with tempfile.TemporaryDirectory() as folder:
        path = write_large(Path(folder) / "large.gguf", dense=options.dense)
        before = peak_memory_bytes()
        own, wall = [], []
        for _ in range(options.r):
            starts = time.process_time(), time.perf_counter()
            model = open_model(path)
            own.append(time.process_time() - starts[0])
            wall.append(time.perf_counter() - starts[1])
        grown = (peak_memory_bytes() - before) / 2**20
        start = time.process_time()
        count = model.tokenizer.vocab_size
        tokenizer_s = time.process_time() - start
        print(
            f"{path.stat().st_size / 1e9:.2f} GB: opened in {max(own):.2f} s of own time at most "
            f"(median {np.median(own):.2f}, first {wall[0]:.2f} s by the clock), {grown:.0f} MiB; "
            f"its tokenizer of {count} tokens {tokenizer_s:.2f} s more; measured"
        )


if __name__ == "__main__":
    main()

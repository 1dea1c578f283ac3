"""hetero against llama.cpp on 4-bit weights of the same shapes, interleaved in one run.

    pip install -e '.[peers]'
    python bench/compare_llama_cpp.py --model llama-3.2-1b -p 256 -n 32 -r 5

llama.cpp (through llama-cpp-python) gets a GGUF file of random Q4_0 weights, tied output included,
which is exactly the 4-bit format here; its kernels quantise activations to int8 per block of 32,
so `w4a8` is the like-for-like row and `w4a16` (floating-point activations) stands beside it.
`bare` rows run the same kernels in a loop without the engine. Results go into bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workers import Engine, Worker

from hetero.backends.ops import WeightFormat
from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment
from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.runtime.program import RUN, SUBMIT

CONTEXT = 4096


class LlamaCpp(Engine):
    """llama.cpp with a number of threads, each on a core of its own."""

    def __init__(self, *, path: str, threads: int, cores: list[int]) -> None:
        os.sched_setaffinity(0, cores)
        from llama_cpp import Llama

        self._model = Llama(
            path,
            n_ctx=CONTEXT,
            n_batch=512,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def round(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        tokens = np.random.default_rng(0).integers(3, 32000, prompt_tokens + decode_tokens).tolist()
        self._model.reset()
        start = time.perf_counter()
        self._model.eval(tokens[:prompt_tokens])
        middle = time.perf_counter()
        for token in tokens[prompt_tokens:]:
            self._model.eval([token])
        end = time.perf_counter()
        return {
            "prefill": prompt_tokens / (middle - start),
            "decode": decode_tokens / (end - middle),
        }


class Hetero(Engine):
    """One device mode of hetero. `bare` also times the kernels alone, in a loop."""

    def __init__(self, *, model: str, device: str, weights: str) -> None:
        self._llm = LLM(model, device=device, weights=weights)  # type: ignore[arg-type]

    def round(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """One prefill and the decode after it, then the same steps as bare loops."""
        engine = self._llm.engine
        tokens = np.random.default_rng(0).integers(3, 32000, prompt_tokens + decode_tokens).tolist()
        engine.truncate(0)
        start = time.perf_counter()
        engine.prefill(tokens[:prompt_tokens])
        middle = time.perf_counter()
        for token in tokens[prompt_tokens:]:
            engine.decode(token)
        end = time.perf_counter()
        found = {
            "prefill": prompt_tokens / (middle - start),
            "decode": decode_tokens / (end - middle),
        }
        return found | self._bare(prompt_tokens, decode_tokens)

    def _bare(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """The kernels of a single-device step in a loop, each waited for only at the end."""
        if len(self._llm.devices.devices) != 1:
            return {}
        engine = self._llm.engine
        found = {}
        for name, phase, m, repeat in (
            ("bare prefill", "prefill", prompt_tokens, 1),
            ("bare decode", "decode", 1, decode_tokens),
        ):
            step = engine.step(phase, m, gates=False)  # type: ignore[arg-type]
            calls = [a.target for a in step.program if a.code in (SUBMIT, RUN)]
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            start = time.perf_counter()
            for _ in range(repeat):
                for call in calls:
                    last = call()
                if last is not None:  # a submission's completion
                    last.wait()
            found[name] = m * repeat / (time.perf_counter() - start)
        return found


def write_gguf(spec: ModelGraph, path: Path) -> None:
    """A GGUF of random Q4_0 weights with the shapes of `spec`, tied output."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("llama")
    words = [b"<unk>", b"<s>", b"</s>", *(f"t{i}".encode() for i in range(spec.vocab_size - 3))]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * spec.vocab_size)
    writer.add_token_types([2, 3, 3] + [1] * (spec.vocab_size - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in _gguf_tensors(spec):
        kind = gguf.GGMLQuantizationType.Q4_0 if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(spec: ModelGraph) -> list[tuple[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(0)
    d, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def q4(n: int, k: int) -> np.ndarray[Any, Any]:
        blocks = np.empty((n, k // 32, 18), np.uint8)
        blocks[..., 2:] = random.integers(0, 256, (n, k // 32, 16), dtype=np.uint8)
        scale = np.float16(1 / (4.6 * np.sqrt(k)))
        blocks[..., :2] = np.full((n, k // 32, 1), scale).view(np.uint8)
        return blocks.reshape(n, -1)

    ones = np.ones(d, np.float32)
    tensors = [("token_embd.weight", q4(spec.vocab_size, d)), ("output_norm.weight", ones)]
    for i in range(spec.layers):
        shapes = {
            "attn_q": (q, d),
            "attn_k": (kv, d),
            "attn_v": (kv, d),
            "attn_output": (d, q),
            "ffn_gate": (f, d),
            "ffn_up": (f, d),
            "ffn_down": (d, f),
        }
        tensors += [(f"blk.{i}.attn_norm.weight", ones), (f"blk.{i}.ffn_norm.weight", ones)]
        tensors += [(f"blk.{i}.{name}.weight", q4(*shape)) for name, shape in shapes.items()]
    return tensors


def make_workers(options: argparse.Namespace, gguf_path: Path) -> list[Worker]:
    """llama.cpp with one and two threads, and hetero's modes."""
    cores = sorted(os.sched_getaffinity(0))
    found = [
        Worker(
            f"llama.cpp, {threads} thread{'s' * (threads > 1)}",
            LlamaCpp,
            {"path": str(gguf_path), "threads": threads, "cores": cores[-threads:]},
        )
        for threads in (1, 2)
    ]
    for weights in options.weights:
        for device in ("gpu", "npu", "hetero"):
            name = f"hetero {weights} {device}{' (layer level)' * (device == 'hetero')}"
            arguments = {"model": f"random:{options.model}", "device": device, "weights": weights}
            found.append(Worker(name, Hetero, arguments))
    return found


def table(workers: list[Worker], memory: dict[str, int]) -> str:
    """Markdown: medians with spread, the ratio to llama.cpp's one thread, memory."""
    base = workers[0].samples
    lines = [
        "| engine | test | tokens/s (median) | min | max | × llama.cpp 1 thread | PSS MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for worker in workers:
        for test, values in worker.samples.items():
            middle = statistics.median(values)
            against = statistics.median(
                value / reference
                for value, reference in zip(values, base[test.split()[-1]], strict=True)
            )
            lines.append(
                f"| {worker.name} | {test} | {middle:.2f} | {min(values):.2f} | {max(values):.2f} "
                f"| {against:.2f} | {memory[worker.name] / 2**20:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse, run the rounds in turn, print the table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("-p", type=int, default=256)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("-r", type=int, default=5)
    parser.add_argument("--weights", nargs="+", default=["w4a8", "w4a16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write_gguf(model_spec(options.model, WeightFormat.W4A8), path)
        workers = make_workers(options, path)
        for worker in workers:
            worker.start()
            worker.round(options.p, 4, keep=False)
        for turn in range(options.r):
            print(f"round {turn + 1} of {options.r}", file=sys.stderr, flush=True)
            for worker in workers:
                worker.round(options.p, options.n)
        memory = {worker.name: worker.memory_bytes() for worker in workers}
        for worker in workers:
            worker.stop()
    print(
        f"{options.model}, prompt {options.p}, decode {options.n}, {options.r} rounds, measured\n"
    )
    print(table(workers, memory))
    print("\n" + json.dumps(environment()))


if __name__ == "__main__":
    main()

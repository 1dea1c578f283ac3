"""hetero and its peers on the same weights, quantisation, cores and prompts, interleaved.

    pip install -e '.[peers]' onnxruntime-genai
    python bench/peers.py --model llama-3.2-1b --profile host.json -p 256 -n 32 -r 3

One GGUF file of random Q4_0 weights serves all: hetero and llama.cpp read it, for ONNX Runtime and
ONNX Runtime GenAI its blocks become one graph (`whole_onnx`). All compute with int8 activations
(`w4a8`). Every engine has a process of its own, and rounds are interleaved; two threads mean both
cores. A peer that is not installed, or that fails, is named instead of measured.
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
from compare_llama_cpp import CONTEXT, LlamaCpp, _gguf_tensors, write_gguf
from whole_onnx import write_onnx
from workers import Engine, Worker

from hetero.backends.ops import WeightFormat
from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment
from hetero.models import model_spec

WARM_UP_TOKENS = 4


def prompt_of(prompt_tokens: int, decode_tokens: int) -> list[int]:
    """The same token ids for every engine."""
    return np.random.default_rng(0).integers(3, 32000, prompt_tokens + decode_tokens).tolist()


def speeds(
    prompt_tokens: int, decode_tokens: int, start_s: float, middle_s: float
) -> dict[str, float]:
    """Tokens/s of a round that ends now."""
    end_s = time.perf_counter()
    return {
        "prefill": prompt_tokens / (middle_s - start_s),
        "decode": decode_tokens / (end_s - middle_s),
    }


class Hetero(Engine):
    """hetero on some devices."""

    def __init__(self, *, path: str, device: str, profile: str | None, length: int) -> None:
        both = device in ("hetero", "auto")
        self._llm = LLM(
            path,
            device=device,  # type: ignore[arg-type]
            weights="w4a8",
            profile=profile if both else None,
            prompt_lengths=(length,) if both else (),
            max_seq_len=CONTEXT,
        )
        print(f"{device}: {self._llm.choice.reason or self._llm.plan.plan_id}", file=sys.stderr)

    def round(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        tokens = prompt_of(prompt_tokens, decode_tokens)
        engine = self._llm.engine
        self._llm.context.truncate(0)
        start_s = time.perf_counter()
        engine.prefill(self._llm.context, tokens[:prompt_tokens])
        middle_s = time.perf_counter()
        for token in tokens[prompt_tokens:]:
            engine.decode(self._llm.context, token)
        return speeds(prompt_tokens, decode_tokens, start_s, middle_s)


class OnnxRuntime(Engine):
    """The whole model in one session of ONNX Runtime; keys and values stay where they are."""

    def __init__(self, *, path: str, threads: int, layers: int, heads: int, size: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._caches = {
            f"{i}.{kind}": ort.OrtValue.ortvalue_from_numpy(
                np.zeros((1, heads, CONTEXT, size), np.float32)
            )
            for i in range(layers)
            for kind in ("key", "value")
        }

    def _step(self, tokens: list[int], position: int) -> np.ndarray[Any, Any]:
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
        mask = np.ones((1, position + len(tokens)), np.int64)
        binding.bind_cpu_input("attention_mask", mask)
        for name, value in self._caches.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
            binding.bind_ortvalue_output(f"present.{name}", value)
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        logits: np.ndarray[Any, Any] = binding.get_outputs()[-1].numpy()
        return logits

    def round(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        tokens = prompt_of(prompt_tokens, decode_tokens)
        start_s = time.perf_counter()
        self._step(tokens[:prompt_tokens], 0)
        middle_s = time.perf_counter()
        for i, token in enumerate(tokens[prompt_tokens:]):
            self._step([token], prompt_tokens + i)
        return speeds(prompt_tokens, decode_tokens, start_s, middle_s)


class GenAI(Engine):
    """ONNX Runtime GenAI on the same graph."""

    def __init__(self, *, folder: str) -> None:
        import onnxruntime_genai as og

        self._og = og
        self._model = og.Model(folder)

    def round(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """One prefill and the decode after it; GenAI samples in the same calls."""
        tokens = prompt_of(prompt_tokens, decode_tokens)
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(max_length=CONTEXT, min_length=CONTEXT, do_sample=False)
        generator = self._og.Generator(self._model, params)
        start_s = time.perf_counter()
        generator.append_tokens(np.array([tokens[:prompt_tokens]], np.int32))
        generator.generate_next_token()
        middle_s = time.perf_counter()
        for _ in range(decode_tokens):
            generator.generate_next_token()
        return speeds(prompt_tokens, decode_tokens, start_s, middle_s)


def make_workers(options: argparse.Namespace, folder: Path) -> list[Worker]:
    """Everything that is compared; files are written to `folder`."""
    spec = model_spec(options.model, WeightFormat.W4A8)
    path = folder / "random.gguf"
    write_gguf(spec, path)
    model = write_onnx(spec, dict(_gguf_tensors(spec)), folder, CONTEXT)
    cores = sorted(os.sched_getaffinity(0))
    shape = {"layers": spec.layers, "heads": spec.kv_heads, "size": spec.head_dim}
    common = {"path": str(path), "profile": options.profile, "length": options.p}
    names = {
        "hetero": "hetero, tensor level",
        "auto": "hetero, auto",
        "gpu": "hetero, OpenCL core",
        "npu": "hetero, ONNX Runtime core",
    }
    threads = [
        Worker(
            f"llama.cpp, {count} thread{'s' * (count > 1)}",
            LlamaCpp,
            {"path": str(path), "threads": count, "cores": cores[-count:]},
        )
        for count in (1, 2)
    ]
    found = [Worker(name, Hetero, common | {"device": mode}) for mode, name in names.items()]
    whole = {"path": str(model), "threads": 2} | shape
    return [
        *threads,
        *found,
        Worker("ONNX Runtime, 2 threads", OnnxRuntime, whole),
        Worker("ONNX Runtime GenAI, 2 threads", GenAI, {"folder": str(folder)}),
    ]


def started(workers: list[Worker], prompt_tokens: int) -> list[Worker]:
    """Those that load and run; the others are named with the last line of their error."""
    found = []
    for worker in workers:
        try:
            worker.start()
            worker.round(prompt_tokens, WARM_UP_TOKENS, keep=False)
        except (RuntimeError, EOFError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error) else "its process ended"
            print(f"not measured: {worker.name}: {reason}")
        else:
            found.append(worker)
    return found


def table(workers: list[Worker], memory: dict[str, int], base: str) -> str:
    """Markdown: medians with spread, the median of the rounds' ratios to a peer, memory."""
    against = next((w for w in workers if w.name == base), workers[0]).samples
    lines = [
        f"| engine | test | tokens/s (median) | min | max | × {base} | PSS MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for test in ("prefill", "decode"):
        for worker in workers:
            values = worker.samples[test]
            ratio = statistics.median(a / b for a, b in zip(values, against[test], strict=True))
            lines.append(
                f"| {worker.name} | {test} | {statistics.median(values):.2f} | {min(values):.2f} "
                f"| {max(values):.2f} | {ratio:.2f} | {memory[worker.name] / 2**20:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse, run the rounds in turn, print the table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--profile", help="with the model's shapes at w4a8 (hetero profile)")
    parser.add_argument("-p", type=int, default=256)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("-r", type=int, default=3)
    parser.add_argument("--only", help="parts of the engines' names, such as 'llama.cpp,auto'")
    options = parser.parse_args()
    if options.p + options.n > CONTEXT:
        parser.error(f"-p and -n together are at most {CONTEXT}")
    wanted = [""] if options.only is None else options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        made = make_workers(options, Path(folder))
        made = [w for w in made if any(part in w.name for part in wanted)]
        workers = started(made, options.p)
        for turn in range(options.r):
            print(f"round {turn + 1} of {options.r}", file=sys.stderr, flush=True)
            for worker in workers:
                worker.round(options.p, options.n)
                last = ", ".join(f"{k} {v[-1]:.2f}" for k, v in worker.samples.items())
                print(f"  {worker.name}: {last}", file=sys.stderr, flush=True)
        memory = {worker.name: worker.memory_bytes() for worker in workers}
        for worker in workers:
            worker.stop()
    print(f"{options.model} w4a8, prompt {options.p}, decode {options.n}, {options.r} rounds\n")
    print(table(workers, memory, "llama.cpp, 2 threads"))
    print("\n" + json.dumps(environment()))


if __name__ == "__main__":
    main()

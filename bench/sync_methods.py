"""What synchronisation costs a small model: decoding with each method, interleaved.

    python bench/sync_methods.py -n 64 -r 9

A random llama of hidden size 512, whose kernels are so short that waits matter, on two plans: every
matmul cut between both devices (tensor level), and matmuls on one device, the rest on the other
(layer level, which meets after every operation). Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment
from hetero.models import open_model, random_models
from hetero.runtime.waits import SyncMethod
from hetero.solver.handmade import layer_level
from hetero.solver.model_spec import ModelSpec
from hetero.solver.plan import ExecutionPlan, OpPlan, Rest, Tile

METHODS: tuple[SyncMethod, ...] = ("fast", "event", "finish", "copy")
NAME = "llama-512"
ALIGNMENT = 32


def add_model() -> None:
    """Make `random:llama-512` known to this process."""
    known = random_models.KNOWN_MODELS
    known[NAME] = random_models._config("llama", (512, 1408, 16, 8, 4, 64, 32000), 2048, 1e4, 1e-5)


def cut_plan(spec: ModelSpec, share: float) -> ExecutionPlan:
    """The NPU has this share of the rows of every matmul in decoding, all of them in prompts."""
    entries = []
    for matmul in spec.matmuls:
        cut = max(ALIGNMENT, int(matmul.n * share) // ALIGNMENT * ALIGNMENT)
        whole = Tile(device="npu", tokens=(0, None), rows=(0, matmul.n))
        halves = (
            Tile(device="npu", tokens=(0, 1), rows=(0, cut)),
            Tile(device="gpu", tokens=(0, 1), rows=(cut, matmul.n)),
        )
        shape: dict[str, Any] = {"op": matmul.name, "n": matmul.n, "k": matmul.k}
        entries += [
            OpPlan(phase="prefill", m=None, strategy="npu-only", tiles=(whole,), **shape),
            OpPlan(phase="decode", m=1, strategy="row-cut", tiles=halves, **shape),
        ]
    rest = Rest(prefill="gpu", decode="gpu")
    return ExecutionPlan(model=spec.name, ops=tuple(entries), rest=rest)


def decode(llm: LLM, tokens: int) -> float:
    """Tokens/s after a short prompt."""
    engine = llm.engine
    engine.truncate(0)
    engine.prefill(list(range(3, 35)))
    start_s = time.perf_counter()
    for i in range(tokens):
        engine.decode(3 + i)
    return tokens / (time.perf_counter() - start_s)


def main() -> None:
    """Parse, run all methods in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="w4a16")
    parser.add_argument("--share", type=float, default=0.4, help="of the rows, on the NPU")
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("-r", type=int, default=9)
    options = parser.parse_args()
    add_model()
    model = f"random:{NAME}"
    spec = open_model(model, weights=options.weights).spec()
    plans = {
        "tensor": cut_plan(spec, options.share),
        "layer": layer_level(spec, prefill="npu", decode="npu", rest="gpu"),
    }
    common: dict[str, Any] = {"weights": options.weights, "max_seq_len": 256}
    print("| level | sync | tokens/s (median) | min | max | fast is × | copied B/token |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for level, plan in plans.items():
        models = {sync: LLM(model, plan=plan, sync=sync, **common) for sync in METHODS}
        speeds: dict[str, list[float]] = {sync: [] for sync in METHODS}
        for turn in range(options.r + 2):
            for i in range(len(METHODS)):
                sync = METHODS[(i + turn) % len(METHODS)]
                speed = decode(models[sync], options.n)
                if turn >= 2:
                    speeds[sync].append(speed)
        for sync, values in speeds.items():
            ratio = statistics.median(np.divide(speeds["fast"], values).tolist())
            print(
                f"| {level} | {sync} | {statistics.median(values):.1f} | {min(values):.1f} "
                f"| {max(values):.1f} | {ratio:.3f} "
                f"| {models[sync].engine.step('decode', 1).copied_bytes} |"
            )
        for llm in models.values():
            llm.close()
    print("\n" + json.dumps(environment()))


if __name__ == "__main__":
    main()

"""What a decode step costs beyond its kernels, and how long a saved model takes to its first token.

    python bench/control_plane.py --model random:llama-3.2-1b --weights w4a8 -n 32 --profile host

Control-plane cost = the part of the wall time of `Engine.decode` in which no device computes. A
device computes from OpenCL's own start to its end of every kernel (a profiling queue), and while a
call of ONNX Runtime blocks; where both compute at once the time counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment
from hetero.models import open_model
from hetero.models.quantized import save
from hetero.runtime.engine import Engine
from hetero.runtime.program import RUN

FIRST_TOKEN = """
import sys, time
start = time.perf_counter()
import hetero
with hetero.LLM(sys.argv[1], device=sys.argv[2], weights=sys.argv[3]) as llm:
    llm.generate([1] * 32, max_tokens=1)
    print(time.perf_counter() - start)
"""


def computing_s(engine: Engine) -> float:
    """Seconds of the last step in which any device computed."""
    step, stamps = engine.last_step, engine.last_run.stamps
    spans = [
        (stamps[i], stamps[i + 1]) for i, action in enumerate(step.program) if action.code == RUN
    ]
    spans += [span for c in step.completions if c is not None and (span := c.span()) is not None]
    total = end = 0.0
    for start_s, stop_s in sorted(spans):
        total += max(0.0, stop_s - max(start_s, end))
        end = max(end, stop_s)
    return total


def decode_overhead(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Median wall and computing time of a decode step at a context of 256, seconds."""
    modes: dict[str, dict[str, Any]] = {
        "gpu": {"device": "gpu"},
        "npu": {"device": "npu"},
        "layer level": {"device": "hetero", "strategy": "layer", "profile": options.profile},
        "tensor level": {"device": "hetero", "profile": options.profile},
    }
    with LLM(options.model, weights=options.weights, adapt=False, **modes[name]) as llm:
        for device in llm.devices.devices.values():
            device.set_timing(True)
        engine = llm.engine
        prompt = np.random.default_rng(0).integers(3, llm.model.config.vocab_size, 256).tolist()
        engine.prefill(llm.context, prompt)
        for _ in range(4):
            engine.decode(llm.context, 5)
        walls, computes = [], []
        for _ in range(options.n):
            start = time.perf_counter()
            engine.decode(llm.context, 5)
            walls.append(time.perf_counter() - start)
            computes.append(computing_s(engine))
    wall, compute = statistics.median(walls), statistics.median(computes)
    return {"wall_s": wall, "compute_s": compute, "overhead": (wall - compute) / wall}


def first_token(model: str, device: str, weights: str, rounds: int) -> list[float]:
    """Seconds from start of the import to the first token of a saved model, in fresh processes.

    Modules are compiled once, as in an installation, whatever this shell's variables say.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    folder = Path(tempfile.mkdtemp())
    try:
        loaded = open_model(model, weights=weights)
        save(loaded.weights, folder / "model", name=loaded.name)
        command = [sys.executable, "-c", FIRST_TOKEN, str(folder / "model"), device, weights]
        times = []
        for _ in range(rounds):
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
            times.append(float(done.stdout.split()[-1]))
        return times
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure every device mode and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument("--profile", default=None, help="for tensor level")
    parser.add_argument("-n", type=int, default=32)
    options = parser.parse_args()
    print(f"{options.model}, {options.weights}, measured\n")
    print("| device | decode step ms | of it computing ms | control plane |")
    print("|---|---:|---:|---:|")
    for device in ("gpu", "npu", "layer level", "tensor level"):
        found = decode_overhead(device, options)
        print(
            f"| {device} | {found['wall_s'] * 1e3:.2f} | {found['compute_s'] * 1e3:.2f} "
            f"| {found['overhead']:.1%} |",
            flush=True,
        )
    times = first_token(options.model, "hetero", options.weights, 3)
    shown = ", ".join(f"{value:.2f}" for value in times)
    print(f"\nsaved model to its first token, fresh process, 1st to 3rd: {shown} s")
    print("\n" + json.dumps(environment()))


if __name__ == "__main__":
    main()

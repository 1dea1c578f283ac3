"""What a decode step costs beyond its kernels, and how long a saved model takes to its first token.

    python bench/control_plane.py --model random:llama-3.2-1b --weights w4a8 -n 32

Control-plane cost = (wall time of `Engine.decode` - time that devices compute) / wall time. A
device's computing time is the sum over OpenCL's own start and end of every kernel (a profiling
queue) and over the blocking runs of ONNX Runtime. Both are taken in the same steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from hetero.backends.opencl import calls as opencl_calls
from hetero.benchmark import environment
from hetero.llm import LLM
from hetero.models import open_model
from hetero.models.quantized import save

FIRST_TOKEN = """
import sys, time
start = time.perf_counter()
import hetero
with hetero.LLM(sys.argv[1], device=sys.argv[2], weights=sys.argv[3]) as llm:
    llm.generate([1] * 32, max_tokens=1)
    print(time.perf_counter() - start)
"""


class KernelClock:
    """Sums the time that OpenCL kernels ran: installs itself where calls are enqueued."""

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._enqueue = cl.enqueue_nd_range_kernel

    def install(self, llm: LLM) -> None:
        """Give the GPU a profiling queue and remember every event."""
        device: Any = llm.devices.devices["gpu"]
        properties = cl.command_queue_properties.PROFILING_ENABLE
        device.queue = cl.CommandQueue(device.context, properties=properties)
        opencl_calls.cl.enqueue_nd_range_kernel = self._remember

    def take_s(self) -> float:
        """Seconds of kernels since the last call."""
        total = sum(event.profile.end - event.profile.start for event in self._events) * 1e-9
        self._events.clear()
        return total

    def _remember(self, *arguments: Any) -> Any:
        event = self._enqueue(*arguments)
        self._events.append(event)
        return event


def decode_overhead(model: str, device: str, weights: str, steps: int) -> dict[str, float]:
    """Median wall and computing time of a decode step at a context of 256, seconds."""
    with LLM(model, device=device, weights=weights) as llm:  # type: ignore[arg-type]
        clock = KernelClock()
        if "gpu" in llm.devices.devices:
            clock.install(llm)
        engine = llm.engine
        prompt = np.random.default_rng(0).integers(3, llm.model.config.vocab_size, 256).tolist()
        engine.prefill(prompt)
        for _ in range(4):
            engine.decode(5)
        walls, computes = [], []
        for _ in range(steps):
            clock.take_s()
            engine.reset_usage()
            start = time.perf_counter()
            engine.decode(5)
            walls.append(time.perf_counter() - start)
            npu = engine.usage().get("npu")
            computes.append(clock.take_s() + (npu.busy_s if npu else 0.0))
    wall, compute = statistics.median(walls), statistics.median(computes)
    return {"wall_s": wall, "compute_s": compute, "overhead": (wall - compute) / wall}


def first_token(model: str, device: str, weights: str, rounds: int) -> list[float]:
    """Seconds from start of the import to the first token of a saved model, in fresh processes."""
    folder = Path(tempfile.mkdtemp())
    try:
        loaded = open_model(model, weights=weights)
        save(loaded.weights, folder / "model", name=loaded.name)
        command = [sys.executable, "-c", FIRST_TOKEN, str(folder / "model"), device, weights]
        times = []
        for _ in range(rounds):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times.append(float(done.stdout.split()[-1]))
        return times
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure every device mode and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument("-n", type=int, default=32)
    options = parser.parse_args()
    print(f"{options.model}, {options.weights}, measured\n")
    print("| device | decode step ms | of it computing ms | control plane |")
    print("|---|---:|---:|---:|")
    for device in ("gpu", "npu", "hetero"):
        found = decode_overhead(options.model, device, options.weights, options.n)
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

"""A neighbour that draws: how many frames it misses, and how much slower the model becomes.

    python bench/neighbour.py --model random:qwen2.5-0.5b -n 48 -r 3 [--share 0.5]

A second context on the same OpenCL device gets a small kernel 60 times a second, as a program that
draws would. A frame is missed when its kernel ends later than the next frame's start. Measured for
each way to run the model, in turns, decoding with and without the neighbour: GPU only, layer level,
tensor level, and tensor level with `--max-gpu-share`. The neighbour alone comes first: what it
misses then is the machine's (the device is one core of a shared PC here, and the system decides
which of two queues' threads has it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyopencl as cl

from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment

FRAMES_PER_S = 60
FRAME_S = 1 / FRAMES_PER_S
WIDTH = 1 << 18
SOURCE = """
__kernel void draw(__global float *x, int rounds) {
  int i = get_global_id(0);
  float v = x[i];
  for (int r = 0; r < rounds; ++r) v = v * 0.999f + 0.5f;
  x[i] = v;
}
"""


class Neighbour:
    """Submits a kernel of about `frame_s` seconds 60 times a second, on a thread of its own."""

    def __init__(self, device: cl.Device, busy_s: float) -> None:
        context = cl.Context([device])
        self._queue = cl.CommandQueue(context)
        self._kernel = cl.Kernel(cl.Program(context, SOURCE).build(), "draw")
        self._data = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4 * WIDTH)
        rounds = 16
        while (taken_s := self._draw(rounds)) < busy_s:
            rounds = max(rounds + 8, int(rounds * min(4.0, busy_s / taken_s)))
        self.rounds, self.busy_s = rounds, min(self._draw(rounds) for _ in range(5))
        self._stop = threading.Event()
        self.late_s: list[float] = []

    def _draw(self, rounds: int) -> float:
        start_s = time.perf_counter()
        self._kernel(self._queue, (WIDTH,), None, self._data, np.int32(rounds))
        self._queue.finish()
        return time.perf_counter() - start_s

    def __enter__(self) -> Neighbour:
        self._stop.clear()
        self.late_s = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due_s = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(max(due_s - time.perf_counter(), 0.0))
            self._draw(self.rounds)
            end_s = time.perf_counter()
            self.late_s.append(end_s - due_s - FRAME_S)
            missed = max(0, int((end_s - due_s) / FRAME_S))
            self.late_s += [FRAME_S] * max(missed - 1, 0)  # frames that were never begun
            due_s += FRAME_S * max(missed, 1)

    @property
    def missed(self) -> float:
        """Part of the frames that ended after the next should have begun."""
        return sum(late > 0 for late in self.late_s) / max(len(self.late_s), 1)


@dataclass
class Way:
    """One way to run the model, and what was measured of it."""

    name: str
    llm: LLM | None
    free: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)


def decode(llm: LLM, tokens: int) -> float:
    """Tokens/s after a short prompt."""
    engine = llm.engine
    if engine.gpu_share is not None:
        engine.gpu_share.reset()
    llm.context.truncate(0)
    engine.prefill(llm.context, list(range(3, 35)))
    start_s = time.perf_counter()
    for i in range(tokens):
        engine.decode(llm.context, 3 + i)
    return tokens / (time.perf_counter() - start_s)


def measure(way: Way, neighbour: Neighbour, tokens: int) -> None:
    """One round without and one with the neighbour."""
    if way.llm is None:
        with neighbour:
            time.sleep(2.0)
        way.missed.append(neighbour.missed)
        return
    way.free.append(decode(way.llm, tokens))
    with neighbour:
        way.shared.append(decode(way.llm, tokens))
    way.missed.append(neighbour.missed)
    if (share := way.llm.engine.gpu_share) is not None:
        way.share.append(share.share)


def table(ways: list[Way]) -> str:
    """Markdown of medians."""
    lines = [
        "| model | tokens/s alone | with the neighbour | slowdown | frames missed | GPU busy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for way in ways:
        missed = f"{statistics.median(way.missed):.1%}"
        if way.llm is None:
            lines.append(f"| {way.name} | | | | {missed} | |")
            continue
        free, shared = statistics.median(way.free), statistics.median(way.shared)
        share = f"{statistics.median(way.share):.0%}" if way.share else ""
        lines.append(
            f"| {way.name} | {free:.2f} | {shared:.2f} | {free / shared:.2f} | {missed} | {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, open every way, run the rounds in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--weights", default="w4a16")
    parser.add_argument("--profile", default="host")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--frame-ms", type=float, default=2.0, help="of GPU time for each frame")
    parser.add_argument("-n", type=int, default=48)
    parser.add_argument("-r", type=int, default=3)
    options = parser.parse_args()
    common: dict[str, Any] = {"weights": options.weights, "max_seq_len": 256, "adapt": False}
    both = common | {"device": "hetero", "profile": options.profile}
    ways = [
        Way("none", None),
        Way("GPU only", LLM(options.model, device="gpu", **common)),
        Way("layer level", LLM(options.model, strategy="layer", **both)),
        Way("tensor level", LLM(options.model, **both)),
        Way(
            f"tensor level, GPU at most {options.share:.0%}",
            LLM(options.model, max_gpu_share=options.share, **both),
        ),
    ]
    gpu: Any = next(way.llm for way in ways if way.llm is not None).devices.devices["gpu"]
    neighbour = Neighbour(gpu.native, options.frame_ms * 1e-3)
    print(f"a frame takes {1e3 * neighbour.busy_s:.2f} ms alone", file=sys.stderr)
    for turn in range(options.r + 1):
        for way in ways:
            measure(way, neighbour, options.n)
            if turn == 0:  # warm-up
                way.free.clear(), way.shared.clear(), way.missed.clear(), way.share.clear()
    print(table(ways))
    print("\n" + json.dumps(environment()))


if __name__ == "__main__":
    main()

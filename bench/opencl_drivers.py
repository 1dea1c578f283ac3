"""OpenCL drivers of processors side by side: prefill and decode, in turns in one process.

    python bench/opencl_drivers.py [--model random:llama-3.2-1b] [--weights w4a8] [-p 256] [-n 32]
                                   [-r 5] [--drivers pocl,intel]

Each driver has one worker on the first core (the control thread is on the last), or with
`--every-core` one on each, and the same kernels at this machine's level. Drivers that are not
installed, or whose trial failed, are named and left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from hetero.backends.opencl import driver_reports
from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument("-p", "--prompt", type=int, default=256)
    parser.add_argument("-n", "--decode", type=int, default=32)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--drivers", default="pocl,intel")
    parser.add_argument("--every-core", action="store_true")
    options = parser.parse_args()
    passed = {report.driver for report in driver_reports() if report.level is not None}
    wanted = options.drivers.split(",")
    for name in wanted:
        if name not in passed:
            print(f"{name}: not installed, or its trial failed (`hetero devices`)")
    backend = "opencl-cores" if options.every_core else "opencl"
    models = {
        name: LLM(
            options.model, device="gpu", gpu=f"{backend}:{name}", weights=options.weights,
            max_seq_len=options.prompt + options.decode + 1,
        )
        for name in wanted
        if name in passed
    }  # fmt: skip
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(options.rounds + 1):
        for name, llm in models.items():
            found = steps(llm, options.prompt, options.decode)
            if turn:  # the first warms up
                times[name].append(found)
    print(f"{options.model}, {options.weights}, {options.rounds} rounds (measured)\n")
    print("| driver | level | prefill, tokens/s | decode, tokens/s |\n|---|---|---|---|")
    for name, rows in times.items():
        level = models[name].devices.devices["gpu"].info.details["level"]
        prefill = spread([options.prompt / prompt_s for prompt_s, _ in rows])
        decode = spread([options.decode / decode_s for _, decode_s in rows])
        print(f"| {name} | {level} | {prefill} | {decode} |")
    if models:
        print(f"\n{environment(next(iter(models.values())))}")


def steps(llm: LLM, prompt: int, decode: int) -> tuple[float, float]:
    """Seconds of a prompt and of so many decoding steps after it."""
    engine = llm.engine
    llm.context.truncate(0)
    start_s = time.perf_counter()
    engine.prefill(llm.context, [5] * prompt)
    middle_s = time.perf_counter()
    for _ in range(decode):
        engine.decode(llm.context, 5)
    return middle_s - start_s, time.perf_counter() - middle_s


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()

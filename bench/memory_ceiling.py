"""How fast one core reads memory, and two at once: the most that splitting a decode step can gain.

    python bench/memory_ceiling.py [-r 7] [--seconds 0.5]

A decode step reads every weight once. A device whose kernel reads at the speed of its core cannot
be beaten by more than what both cores read together over what one reads alone, whatever the cut.
Two processes, one on each core of a GPU's and an NPU's place (`assign_cores`), read 512 MiB of
huge pages each over and over (a dot product with itself, one thread): one, the other, both, in
turns. What one reads so is not all that its core can read, so the ratio is rather too high.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when numpy is loaded

import numpy as np

from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.memory import HostBuffer
from hetero.measuring.benchmark import environment

NBYTES = 512 << 20


def read(core: int, seconds: float, orders: Connection) -> None:
    """On `core`: for each moment received, read from then on; answers bytes per second."""
    with pinned(core):
        buffer = HostBuffer(NBYTES, huge=True)
        buffer.bytes[:] = 0
        parts = np.split(buffer.bytes.view(np.float64), 64)
        orders.send(0.0)
        while (start_s := orders.recv()) is not None:
            time.sleep(max(0.0, start_s - time.monotonic()))
            count, begun_s = 0, time.monotonic()
            while time.monotonic() < begun_s + seconds:
                part = parts[count % len(parts)]
                part.dot(part)
                count += 1
            orders.send(count * parts[0].nbytes / (time.monotonic() - begun_s))


def main() -> None:
    """Parse, measure, print a Markdown table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-r", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    cores = assign_cores()
    if cores.gpu is None or cores.control is None or cores.gpu == cores.control:
        parser.error("this needs two cores to pin to")
    pipes, workers = [], []
    for core in (cores.gpu, cores.control):
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=read, args=(core, arguments.seconds, theirs))
        process.start()
        pipes.append(mine)
        workers.append(process)
    for pipe in pipes:
        pipe.recv()
    found: dict[str, list[float]] = {"one": [], "other": [], "both": []}
    for _ in range(arguments.r):
        for name, readers in (("one", pipes[:1]), ("other", pipes[1:]), ("both", pipes)):
            start_s = time.monotonic() + 0.05
            for pipe in readers:
                pipe.send(start_s)
            found[name].append(sum(pipe.recv() for pipe in readers) / 1e9)
    for pipe, process in zip(pipes, workers, strict=True):
        pipe.send(None)
        process.join()
    print("| who reads | GB/s (median) | min | max |\n|---|---:|---:|---:|")
    for name, rates in found.items():
        print(f"| {name} | {statistics.median(rates):.1f} | {min(rates):.1f} | {max(rates):.1f} |")
    rounds = zip(found["both"], found["one"], found["other"], strict=True)
    most = statistics.median(both / max(one, other) for both, one, other in rounds)
    print(f"\nboth over the better one: {most:.2f} x (median of the rounds)")
    print(json.dumps(environment(), separators=(", ", ": ")))


if __name__ == "__main__":
    main()

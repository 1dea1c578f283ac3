"""How fast one core and both read memory: what no split of a decode step can beat.

    python bench/memory_limit.py [--mib 512] [-r 9]

Two processes pinned to two cores read blocks of their own (`numpy.max`, in pages of 4 KiB and of
2 MiB), in turns alone and at the same time. A model whose weights are streamed once for a token
gains at most `together / alone` from the second core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from multiprocessing.synchronize import Barrier

import numpy as np

from hetero.backends.memory import HostBuffer
from hetero.measuring.benchmark import environment

TURNS = ("first alone", "second alone", "together")


def read(core: int, number: int, mib: int, rounds: int, start: Barrier, out: mp.Queue) -> None:  # type: ignore[type-arg]
    """Bytes per second of one core in every turn, by kind of page."""
    os.sched_setaffinity(0, {core})
    found: dict[str, list[float]] = {}
    blocks = {"4 KiB": HostBuffer(mib << 20), "2 MiB": HostBuffer(mib << 20, huge=True)}
    for block in blocks.values():
        block.bytes[:] = 1
    for _ in range(rounds):
        for pages, block in blocks.items():
            words = block.bytes.view(np.uint64)
            for turn, name in enumerate(TURNS):
                start.wait()
                if turn in (number, 2):
                    start_s = time.perf_counter()
                    words.max()
                    speed = block.nbytes / (time.perf_counter() - start_s)
                    found.setdefault(f"{pages} {name}", []).append(speed)
    out.put((number, {key: statistics.median(values) for key, values in found.items()}))


def main() -> None:
    """Parse, measure, print a Markdown table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("-r", type=int, default=9)
    arguments = parser.parse_args()
    start, out = mp.Barrier(2), mp.Queue()
    cores = sorted(os.sched_getaffinity(0))[:2]
    workers = [
        mp.Process(target=read, args=(core, i, arguments.mib, arguments.r, start, out))
        for i, core in enumerate(cores)
    ]
    for worker in workers:
        worker.start()
    speeds = dict(out.get() for _ in workers)
    for worker in workers:
        worker.join()
    print("| pages | one core GB/s | the other | together | together / the faster |")
    print("|---|---:|---:|---:|---:|")
    for pages in ("4 KiB", "2 MiB"):
        one, other = (1e-9 * speeds[i][f"{pages} {TURNS[i]}"] for i in (0, 1))
        both = 1e-9 * sum(speeds[i][f"{pages} together"] for i in (0, 1))
        ratio = both / max(one, other)
        print(f"| {pages} | {one:.1f} | {other:.1f} | {both:.1f} | {ratio:.2f} |")
    print(f"\nmeasured, medians of {arguments.r} rounds; {json.dumps(environment())}")


if __name__ == "__main__":
    main()

"""How much slower a core computes while another computes too, moment by moment.

    python bench/siblings.py [--seconds 60]

Two virtual cores may be two threads of one physical core, or become that for a while when a
hypervisor moves them. One core multiplies matrices that fit into its first cache, so that memory
plays no part; again and again it is timed for some milliseconds with the other core idle and then
with the other core at the same work. A mark is a moment: `.` nothing lost, `+` over 1.15 times as
long, `#` over 1.4. In such moments everything that both devices of `hetero` do at once takes longer
than a profile of other moments says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import time
from multiprocessing.sharedctypes import Synchronized

import numpy as np

from hetero.backends.host.affinity import assign_cores, pinned
from hetero.measuring.benchmark import environment

SIZE = 48  # of the matrices: three of float32 take 27 KiB, and BLAS computes them on one thread
BURST = 100  # products of one timing
TIMINGS = 12  # of which the median counts
SETTLED_S = 4e-3
PAUSE_S = 0.05
LEVELS = ((1.4, "#"), (1.15, "+"), (0.0, "."))


def work_s(matrix: np.ndarray) -> float:
    """Seconds of some products."""
    start_s = time.perf_counter()
    for _ in range(BURST):
        matrix @ matrix
    return time.perf_counter() - start_s


def other(core: int, busy: Synchronized[int], running: Synchronized[int]) -> None:
    """The other core's process: works while `busy`."""
    matrix = np.random.default_rng(1).random((SIZE, SIZE), dtype=np.float32)
    with pinned(core):
        while running.value:
            work_s(matrix) if busy.value else time.sleep(1e-3)


def moments(busy: Synchronized[int], seconds: float) -> list[float]:
    """Time beside the other core over time alone, moment by moment."""
    matrix = np.random.default_rng(0).random((SIZE, SIZE), dtype=np.float32)
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        times = []
        for state in (0, 1):
            busy.value = state
            time.sleep(SETTLED_S)
            times.append(statistics.median(work_s(matrix) for _ in range(TIMINGS)))
        busy.value = 0
        found.append(times[1] / times[0])
        time.sleep(PAUSE_S)
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    cores = assign_cores()
    if cores.gpu is None or cores.control is None:
        parser.error("this needs two cores that the process may use")
    busy, running = mp.Value("i", 0), mp.Value("i", 1)
    process = mp.Process(target=other, args=(cores.gpu, busy, running), daemon=True)
    process.start()
    with pinned(cores.control):
        found = moments(busy, arguments.seconds)
    running.value = 0
    process.join()
    low, middle, high = np.percentile(found, [10, 50, 90])
    slow = [x for x in found if x > LEVELS[0][0]]
    print(
        f"measured; {len(found)} moments, beside / alone: median {middle:.2f}, 10 to 90 % of them"
    )
    print(f"{low:.2f} to {high:.2f}; over {LEVELS[0][0]} in {len(slow) / len(found):.0%}", end="")
    print(f", then {statistics.median(slow):.2f}" if slow else "")
    print("".join(next(mark for level, mark in LEVELS if x > level) for x in found))
    print(json.dumps(environment()))


if __name__ == "__main__":
    main()

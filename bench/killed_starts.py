"""First starts that are killed at random moments, and whether the next start works.

    python bench/killed_starts.py [--starts 200] [--jobs 2] [--seed 0]

Each start has an empty cache of its own: kernels are tried and compiled by child processes. It gets
SIGKILL after a random part of the time that a first start takes here; then the same command runs to
its end on what is left. That must exit with 0, print the text of an undisturbed start, leave no
process of the killed one behind, and say nothing on standard error but progress and the notice that
a shipped profile is used. Linux.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hetero.backends.opencl.reports import CHECKING, PREPARING

COMMAND = (
    *(sys.executable, "-P", "-m", "hetero.start", "generate", "demo", "Once upon a time"),
    *("--max-tokens", "20"),
)
EXPECTED_LINES = (PREPARING, CHECKING, "the shipped profile", "this machine has no profile")
LONGEST_S = 120.0
ENDING_S = 2.0  # of children whose parent was killed; a busy machine starts them late


class Outcome(NamedTuple):
    """One start: when it was killed, how long the next took, and what was wrong with that."""

    killed_s: float
    next_s: float
    wrong: str


def start(cache: Path) -> subprocess.Popen[str]:
    """The command with a cache folder, in a process group of its own."""
    return subprocess.Popen(
        COMMAND,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def first_start() -> tuple[float, str]:
    """Seconds and text of an undisturbed first start."""
    with tempfile.TemporaryDirectory() as cache:
        start_s = time.perf_counter()
        out, errors = (process := start(Path(cache))).communicate(timeout=LONGEST_S)
        if process.returncode:
            raise SystemExit(f"a first start does not work here: {errors}")
        return time.perf_counter() - start_s, out


def members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def survivors(group: int) -> list[int]:
    """Processes of a group that do not end within `ENDING_S`."""
    for _ in range(20):
        if not members(group):
            return []
        time.sleep(ENDING_S / 20)
    return members(group)


def one(after_s: float, text: str) -> Outcome:
    """Kill one first start after so many seconds, and look at the next."""
    cache = Path(tempfile.mkdtemp(prefix="killed-"))
    try:
        process = start(cache)
        try:
            process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the parent alone: its children must see to it
            process.communicate()
        left = survivors(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        start_s = time.perf_counter()
        following = start(cache)
        try:
            out, errors = following.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(following.pid, signal.SIGKILL)
            return Outcome(after_s, LONGEST_S, "it hung")
        next_s = time.perf_counter() - start_s
        said = [
            line for line in errors.splitlines() if not any(word in line for word in EXPECTED_LINES)
        ]
        wrong = [
            f"{len(left)} processes were left" if left else "",
            f"exit code {following.returncode}" if following.returncode else "",
            "another text" if out != text else "",
            f"said {said}" if said else "",
        ]
        return Outcome(after_s, next_s, "; ".join(filter(None, wrong)))
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def main() -> None:
    """Kill and count."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    length_s, text = first_start()
    draw = random.Random(options.seed)
    moments = [draw.uniform(0.02, 1.1 * length_s) for _ in range(options.starts)]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda after_s: one(after_s, text), moments))
    for outcome in found:
        if outcome.wrong:
            print(f"killed after {outcome.killed_s:.2f} s: {outcome.wrong}")
    good = sum(not outcome.wrong for outcome in found)
    times = sorted(outcome.next_s for outcome in found)
    print(
        f"{good} of {len(found)} next starts work (first start {length_s:.1f} s; next: median "
        f"{times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s; measured, {options.jobs} at "
        "a time)"
    )
    sys.exit(good < len(found))


if __name__ == "__main__":
    main()

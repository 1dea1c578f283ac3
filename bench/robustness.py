"""First starts: how long they take at every level of the processor, and after a kill.

python bench/robustness.py starts
python bench/robustness.py killed-starts --starts 200

What must hold for long is in the tests: `python -m tests.support.robustness --help`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from common import finish, new_app, table

from hetero.backends.opencl.drivers.levels import processor_levels
from hetero.backends.opencl.reports import CHECKING, PREPARING

app = new_app(__doc__)
COMMAND = (
    *(sys.executable, "-P", "-m", "hetero.start", "generate", "demo", "Once upon a time"),
    *("--max-tokens", "20"),
)
EXPECTED = (PREPARING, CHECKING, "the shipped profile", "this machine has no profile")
ANOTHER = ("--max-seq-len", "300")
LONGEST_S = 120.0
ENDING_S = 2.0  # of children whose parent was killed; a busy machine starts them late


class Outcome(NamedTuple):
    """One start: when it was killed, how long the next took, and what was wrong with that."""

    killed_s: float
    next_s: float
    wrong: str


def start(cache: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    """The command with a cache folder, in a process group of its own."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *options], env=environ, start_new_session=True, **pipes)


def expected(line: str) -> bool:
    """Progress, or the notice that a shipped profile is used."""
    return any(word in line for word in EXPECTED)


def first_start() -> tuple[float, str]:
    """Seconds and text of an undisturbed first start."""
    with tempfile.TemporaryDirectory() as cache:
        start_s = time.perf_counter()
        out, errors = (process := start(Path(cache))).communicate(timeout=LONGEST_S)
        if process.returncode:
            raise SystemExit(f"a first start does not work here: {errors}")
        return time.perf_counter() - start_s, out


def members(group: int) -> Iterator[int]:
    """Processes of a group that still run."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                yield int(entry.name)


def killed(after_s: float, text: str) -> Outcome:
    """Kill one first start after so many seconds, and look at the next."""
    cache = Path(tempfile.mkdtemp(prefix="killed-"))
    try:
        process = start(cache)
        try:
            process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)  # the parent alone: its children must see to it
            process.communicate()
        until_s = time.monotonic() + ENDING_S
        while (left := list(members(process.pid))) and time.monotonic() < until_s:
            time.sleep(ENDING_S / 20)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        start_s = time.perf_counter()
        following = start(cache)
        try:
            out, errors = following.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(following.pid, signal.SIGKILL)
            return Outcome(after_s, LONGEST_S, "it hung")
        next_s, lines = time.perf_counter() - start_s, errors.splitlines()
        said = [line for line in lines if not expected(line)]
        wrong = [
            f"{len(left)} processes were left" if left else "",
            f"exit code {following.returncode}" if following.returncode else "",
            "another text" if out != text else "",
            f"said {said}" if said else "",
        ]
        return Outcome(after_s, next_s, "; ".join(filter(None, wrong)))
    finally:
        shutil.rmtree(cache, ignore_errors=True)


@app.command("starts")
def starts(
    repeats: int = 3, best: Annotated[bool, typer.Option(help="of the best level alone")] = False
) -> None:
    """First and second start of the demo at every level of the processor, each on an empty cache,
    and one with another length of context.

    Exits with 1 if one fails, prints another text than the best level's, or says more than progress
    and notices.
    """
    text, wrong, rows = "", False, []
    for level in processor_levels()[: 1 if best else None]:
        spent: list[tuple[Sequence[str], list[float]]] = [((), []), ((), []), (ANOTHER, [])]
        said: set[str] = set()
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                for options, times in spent:
                    start_s = time.perf_counter()
                    process = start(Path(cache), *options, HETERO_OPENCL_LEVEL=level.name)
                    out, errors = process.communicate(timeout=LONGEST_S)
                    times.append(time.perf_counter() - start_s)
                    text = text or out
                    if process.returncode or out != text:
                        said.add(f"exit code {process.returncode}, {len(out)} characters")
                    said.update(line for line in errors.splitlines() if not expected(line))
        wrong |= bool(said)
        shown = [f"{statistics.median(t):.1f} ({min(t):.1f} to {max(t):.1f})" for _, t in spent]
        rows.append([level.name, *shown, "; ".join(sorted(said)) or "nothing"])
    print(f"measured; demo, 20 tokens, {repeats} times\n")
    table(f"level|first start, s|second, s|with `{' '.join(ANOTHER)}`, s|wrong", rows)
    finish()
    sys.exit(wrong)


@app.command("killed-starts")
def killed_starts(starts: int = 200, jobs: int = 1, seed: int = 0) -> None:
    """First starts that are killed at random moments, and whether the next start works (Linux).

    Each start has an empty cache of its own; kernels are tried and compiled by child processes. It
    gets SIGKILL after a random part of the time that a first start takes here; then the same
    command runs to its end on what is left. That must exit with 0, print the text of an undisturbed
    start, leave no process of the killed one behind, and say nothing but progress and the notice
    that a shipped profile is used. Exits with 1 if any does not.
    """
    length_s, text = first_start()
    draw = random.Random(seed)
    moments = [draw.uniform(0.02, 1.1 * length_s) for _ in range(starts)]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda after_s: killed(after_s, text), moments))
    for outcome in found:
        if outcome.wrong:
            print(f"killed after {outcome.killed_s:.2f} s: {outcome.wrong}")
    good, times = sum(not x.wrong for x in found), sorted(x.next_s for x in found)
    print(
        f"{good} of {len(found)} next starts work (first start {length_s:.1f} s; next: median "
        f"{times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s; measured, {jobs} at a time)"
    )
    finish()
    sys.exit(good < len(found))


if __name__ == "__main__":
    app()

"""What must not happen: broken next starts after a kill, growth, answers that depend on the cut.

python bench/robustness.py starts
python bench/robustness.py killed-starts --starts 200
nice -n 19 python bench/robustness.py soak --minutes 20 --strategy row-cut
python bench/robustness.py open-close --cycles 200
python bench/robustness.py prompts --count 40
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from common import finish, new_app, pss_bytes, table

from hetero.backends.opencl.drivers.levels import processor_levels
from hetero.backends.opencl.reports import CHECKING, PREPARING
from hetero.generation.llm import LLM
from hetero.solver.plan import NamedStrategy

app = new_app(__doc__)
COMMAND = (
    *(sys.executable, "-P", "-m", "hetero.start", "generate", "demo", "Once upon a time"),
    *("--max-tokens", "20"),
)
EXPECTED = (PREPARING, CHECKING, "the shipped profile", "this machine has no profile")
LONGEST_S = 120.0
ENDING_S = 2.0  # of children whose parent was killed; a busy machine starts them late
WARM_UP = 0.2
GROWTH = 0.01
OWN = ("Pss_Anon", "Pss_Shmem", "Swap")  # pages that are this process's and no file's
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.1},
    {"temperature": 0.0, "speculative": 5},
)


class Outcome(NamedTuple):
    """One start: when it was killed, how long the next took, and what was wrong with that."""

    killed_s: float
    next_s: float
    wrong: str


def start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    """The command with a cache folder, in a process group of its own."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(COMMAND, env=environ, start_new_session=True, **pipes)


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
def starts(repeats: int = 3) -> None:
    """First and second start of the demo at every level of the processor, each on an empty cache.

    Exits with 1 if one fails, prints another text than the best level's, or says more than progress
    and notices.
    """
    text, wrong, rows = "", False, []
    for level in processor_levels():
        spent: tuple[list[float], list[float]] = ([], [])
        said: set[str] = set()
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                for times in spent:
                    start_s = time.perf_counter()
                    process = start(Path(cache), HETERO_OPENCL_LEVEL=level.name)
                    out, errors = process.communicate(timeout=LONGEST_S)
                    times.append(time.perf_counter() - start_s)
                    text = text or out
                    if process.returncode or out != text:
                        said.add(f"exit code {process.returncode}, {len(out)} characters")
                    said.update(line for line in errors.splitlines() if not expected(line))
        wrong |= bool(said)
        shown = [f"{statistics.median(t):.1f} ({min(t):.1f} to {max(t):.1f})" for t in spent]
        rows.append([level.name, *shown, "; ".join(sorted(said)) or "nothing"])
    print(f"measured; demo, 20 tokens, {repeats} times\n")
    table("level|first start, s|second, s|wrong", rows)
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


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Tokens of the fixed questions."""
    prompt = list(range(5, 5 + min(64, llm.max_seq_len // 4)))
    return [llm.generate(prompt, max_tokens=60, **options).tokens for options in QUESTIONS]


def turn(llm: LLM, rng: np.random.Generator) -> int:
    """Some work of a random kind; tokens that were generated."""
    room = llm.max_seq_len
    prompt = rng.integers(3, llm.model.config.vocab_size, int(rng.integers(1, room // 2))).tolist()
    if rng.random() < 0.1:
        talk = llm.conversation()
        return sum(len(talk.say("Tell me a story.", max_tokens=40).tokens) for _ in range(3))
    options, count = QUESTIONS[int(rng.integers(len(QUESTIONS)))], int(rng.integers(1, room // 4))
    return len(llm.generate(prompt, max_tokens=count, **options).tokens)


@app.command("soak")
def soak(
    minutes: float = 20,
    model: str = "demo",
    device: str = "hetero",
    strategy: str | None = None,
) -> None:
    """Generation for a long time: memory must not grow, and the same seed must give the same text.

    Prompts and answers of random lengths, sampled and greedy, with and without guesses, and a
    conversation now and then. Memory is what the process itself made, not pages of files. Growth is
    from the tenth of the time after the warm-up (a fifth) to the last tenth, by medians. Exits with
    1 if memory grew by more than 1 % or any answer differs.
    """
    options: dict[str, Any] = {"device": device, "strategy": strategy}
    rng, generated, turns = np.random.default_rng(0), 0, 0
    later: list[int] = []
    with LLM(model, max_seq_len=512, adapt=False, **options) as llm:
        before, start_s = answers(llm), time.monotonic()
        while (spent_s := time.monotonic() - start_s) < 60 * minutes or not later:
            generated += turn(llm, rng)
            turns += 1
            if spent_s > 60 * minutes * WARM_UP:
                later.append(pss_bytes(*OWN))
        same = before == answers(llm)
    tenth = max(1, len(later) // 8)  # of the whole time: a fifth of it is not in the list
    first, last = statistics.median(later[:tenth]), statistics.median(later[-tenth:])
    growth = last / first - 1
    print(f"measured; {model}, {minutes:g} minutes, {turns} turns, {generated} tokens\n")
    shown = [f"{nbytes / 1e6:.1f}" for nbytes in (first, last, max(later))]
    table("memory after warm-up, MB|at the end|at most|growth|same answers",
          [[*shown, f"{growth:.2%}", "yes" if same else "NO"]])  # fmt: skip
    finish()
    sys.exit(growth > GROWTH or not same)


@app.command("open-close")
def open_close(cycles: int = 200, model: str = "demo") -> None:
    """A model opened, asked and closed, again and again, on each device: nothing may be left.

    Compared are the end and a tenth of the cycles, when libraries have settled: open files,
    threads, shared memory, and what the process itself made. Exits with 1 if any grew, memory by
    more than 5 %.
    """
    rows, grown = [], False
    for device in ("hetero", "npu", "gpu"):
        found = []
        for i in range(cycles):
            with LLM(model, device=device) as llm:
                llm.generate("Once upon a time", max_tokens=8)
            if i in (cycles // 10, cycles - 1):
                gc.collect()
                counts = [len(os.listdir(f"/proc/self/{x}")) for x in ("fd", "task")]
                found.append((*counts, len(os.listdir("/dev/shm")), pss_bytes(*OWN)))
        (*before, first), (*after, last) = found
        grown |= after > before or last > 1.05 * first
        shown = [f"{a} {b}" for a, b in zip(before, after, strict=True)]
        rows.append([device, *shown, f"{first / 1e6:.0f} {last / 1e6:.0f}"])
    print(f"measured; {model}, {cycles} cycles, early and at the end\n")
    table("device|open files|threads|shared memory|own memory, MB", rows)
    finish()
    sys.exit(grown)


@app.command("prompts")
def prompts(count: int = 40, model: str = "demo", seed: int = 0) -> None:
    """Random prompts by every strategy against the float64 reference: log-probabilities of the next
    tokens. Exits with 1 if one is off by more than 0.005, or another token is drawn where the
    reference prefers one by more than 0.01.
    """
    rng, worst, rows = np.random.default_rng(seed), 0.0, []
    options: dict[str, Any] = {"max_tokens": 3, "logprobs": 2}
    with LLM(model, device="gpu", gpu="reference", weights="w4a16") as twin:
        top = min(300, twin.max_seq_len - 8)
        vocabulary = twin.model.config.vocab_size
        drawn = [rng.integers(3, vocabulary, rng.integers(1, top)).tolist() for _ in range(count)]
        wanted = [twin.generate(prompt, **options).logprobs for prompt in drawn]
    for strategy in get_args(NamedStrategy):
        with LLM(model, device="hetero", strategy=strategy, weights="w4a16", adapt=False) as llm:
            found = [llm.generate(prompt, **options).logprobs for prompt in drawn]
        wrong = 0
        for one, other in zip(wanted, found, strict=True):
            for a, b in zip(one, other, strict=False):
                off = abs(a.top[0][1] - b.top[0][1])
                worst = max(worst, off)
                clear = a.top[0][1] - a.top[1][1] > 0.01
                wrong += off > 0.005 or (clear and a.token != b.token)
                if a.token != b.token:
                    break
        rows.append([strategy, count, wrong])
    print(f"measured; {model}, largest difference of a log-probability {worst:.5f}\n")
    table("strategy|prompts|wrong", rows)
    finish()
    sys.exit(any(row[2] for row in rows))


if __name__ == "__main__":
    app()

"""What must hold for long: no growth, the same answers, nothing left open, no wrong cut.

python -m tests.support.robustness soak --minutes 20 --strategy row-cut
python -m tests.support.robustness open-close --cycles 200
python -m tests.support.robustness prompts --count 40

Each exits with 1 where it does not hold.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from typing import Any, get_args

import numpy as np

from bench.common import finish, new_app, pss_bytes, table
from hetero.generation.llm import LLM
from hetero.solver.names import NamedStrategy

app = new_app(__doc__)
WARM_UP = 0.2
GROWTH = 0.01
OWN = ("Pss_Anon", "Pss_Shmem", "Swap")  # pages that are this process's and no file's
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.1},
    {"temperature": 0.0, "speculative": 5},
)


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

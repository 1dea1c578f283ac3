"""Generation for a long time: memory must not grow, and the same seed must give the same text.

    nice -n 19 python bench/soak.py --minutes 20 --model demo --strategy row-cut

Prompts of random lengths (prefilled in every size up to the context), answers of random lengths,
sampled and greedy, with and without guesses, and a conversation now and then. Memory is what the
process itself made (anonymous and shared-memory pages, and what of them is swapped out). Pages of
files are not: 81 MB of libraries count as private or as shared, whole or in part, as other
processes that map them come and go (the proportional set size, told beside it, has them). Growth is
from the tenth of the time after the warm-up (a fifth) to the last tenth, by medians, because
lowered steps of other lengths come and go. Fixed questions are answered at the start and at the
end, with the cuts fixed (`--no-adapt`).
Exits with 1 if memory grew by more than 1 % or any answer differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workers import pss_bytes

from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment

WARM_UP = 0.2
GROWTH = 0.01
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.1},
    {"temperature": 0.0, "speculative": 5},
)


OWN = ("Pss_Anon:", "Pss_Shmem:", "Swap:")


def own_bytes() -> int:
    """Memory that is this process's and no file's (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(OWN))


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Tokens of the fixed questions."""
    prompt = list(range(5, 5 + min(64, llm.max_seq_len // 4)))
    return [llm.generate(prompt, max_tokens=60, **options).tokens for options in QUESTIONS]


def turn(llm: LLM, rng: np.random.Generator) -> int:
    """Some work of a random kind; tokens that were generated."""
    room = llm.max_seq_len
    length = int(rng.integers(1, room // 2))
    prompt = rng.integers(3, llm.model.config.vocab_size, length).tolist()
    count = int(rng.integers(1, room // 4))
    if rng.random() < 0.1:
        talk = llm.conversation()
        said = [talk.say("Tell me a story.", max_tokens=40) for _ in range(3)]
        return sum(len(answer.tokens) for answer in said)
    options = QUESTIONS[int(rng.integers(len(QUESTIONS)))]
    return len(llm.generate(prompt, max_tokens=count, **options).tokens)


def soak(llm: LLM, minutes: float) -> dict[str, Any]:
    """Work for so long, and what became of memory and answers."""
    rng = np.random.default_rng(0)
    before = answers(llm)
    start_s = time.monotonic()
    end_s = start_s + 60 * minutes
    later: list[tuple[int, int]] = []
    generated = turns = 0
    while (now_s := time.monotonic()) < end_s:
        generated += turn(llm, rng)
        turns += 1
        if now_s - start_s > 60 * minutes * WARM_UP:
            later.append((own_bytes(), pss_bytes()))
    after = answers(llm)
    tenth = max(1, len(later) // 8)  # of the whole time: a fifth of it is not in the list
    first = statistics.median(own for own, _ in later[:tenth])
    last = statistics.median(own for own, _ in later[-tenth:])
    return {
        "minutes": minutes,
        "turns": turns,
        "generated_tokens": generated,
        "warm_bytes": first,
        "last_bytes": last,
        "largest_bytes": max(own for own, _ in later),
        "warm_pss_bytes": later[0][1],
        "last_pss_bytes": later[-1][1],
        "growth": last / first - 1,
        "same_answers": before == after,
    }


def main() -> None:
    """Parse, soak, print one line of JSON; exit with 1 for growth or drift."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="hetero")
    parser.add_argument("--strategy", default=None)
    options = parser.parse_args()
    with LLM(
        options.model, device=options.device, strategy=options.strategy, max_seq_len=512,
        adapt=False,
    ) as llm:  # fmt: skip
        found = {"model": options.model, "plan": llm.plan.plan_id} | soak(llm, options.minutes)
    print(json.dumps(found | {"environment": environment()}))
    sys.exit(found["growth"] > GROWTH or not found["same_answers"])


if __name__ == "__main__":
    main()

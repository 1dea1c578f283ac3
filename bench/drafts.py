"""Gains of two forms of speculative decoding that are not built.

python bench/drafts.py trees SmolLM2-135M-Instruct.Q4_1.gguf -n 256   # a second branch of guesses
python bench/drafts.py devices            # a draft on one device while the other verifies

`trees`: the tokens of an answer, looked up again. A second branch begins with another token, what
followed the latest earlier occurrence of the text's end. Calls of the best division of as many rows
into both branches; and, as a bound, of the best of all such branches, whose rows are free.

`devices`: rounds of k guesses, each right with one probability. In turns, draft and verification
take the best device set each. At once, the draft keeps guessing on one device while the other
verifies, which slows both down as the profile says; where a guess was wrong it begins again. Tokens
a second of the best k; times are predicted by profiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from typing import Annotated

import numpy as np
import typer
from common import Tokens, finish, new_app, table
from speculation import TEXTS

from hetero import LLM
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.generation.speculative import LONGEST_MATCH, SHORTEST_MATCH, LookupDrafter
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.runtime.kv.context import common_prefix
from hetero.runtime.sizes import LONGEST_VERIFIED
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.solution import Scenario
from hetero.solver.tilings import contended

app = new_app(__doc__)
MOST = LONGEST_VERIFIED - 1


def branches(text: Sequence[int], first: int | None) -> Iterator[Sequence[int]]:
    """Yield continuations of earlier occurrences of a text's end that begin with another token."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        end = tuple(text[-length:])
        for at in range(len(text) - 1, length - 1, -1):
            if tuple(text[at - length : at]) == end and text[at] != first:
                yield text[at : at + MOST]


def calls(prompt: Sequence[int], answer: Sequence[int], second: int, *, free: bool = False) -> int:
    """Calls of the model that an answer takes, with so many guesses in a second branch.

    They are some of `MOST`, or `free` and those of the best branch.
    """
    drafter, text, count, done = LookupDrafter(), list(prompt), 0, 0
    while done < len(answer):
        guess = drafter.guess(text, MOST if free else MOST - second).tokens
        right = common_prefix(guess, answer[done:])
        if second and guess and not right:
            others = islice(branches(text, guess[0]), None if free else 1)
            right = max((common_prefix(x[:second], answer[done:]) for x in others), default=0)
        step = min(right + 1, len(answer) - done)
        text += answer[done : done + step]
        done, count = done + step, count + 1
    return count


@app.command("trees")
def trees(
    model: Annotated[str, typer.Argument()] = "demo",
    device: Annotated[str, typer.Option()] = "auto",
    tokens: Tokens = 256,
) -> None:
    """Fewer calls by a second branch of guesses."""
    rows = []
    with LLM(model, device=device) as llm:  # type: ignore[arg-type]
        for name, (prompt, options) in TEXTS.items():
            ids = llm.encode(prompt)[-(llm.max_seq_len - tokens) :]
            answer = llm.generate(ids, max_tokens=tokens, seed=1, **options).tokens
            chain, *divided = (calls(ids, answer, second) for second in range(MOST))
            bound = calls(ids, answer, MOST, free=True)
            best = min(divided)
            rows.append([name, len(answer), chain, best, divided.index(best) + 1,
                         f"{chain / best:.3f}", bound, f"{chain / bound:.3f}"])  # fmt: skip
    head = "text|tokens|calls of a chain|of a tree|second branch|chain / tree|bound|chain / bound"
    table(head, rows)
    finish()


def step_s(planner: Planner, rows: int, kind: DeviceKind | None) -> float | None:
    """Predicted seconds of a decode step of so many tokens, cut where no device is named."""
    scenario = Scenario("decode", rows)
    if kind is None:
        return planner.solve(scenario).seconds
    solution = planner.single(scenario, kind)
    return None if solution is None else solution.seconds


def contention(planner: Planner, kind: DeviceKind) -> float:
    """How many times as long a decode step takes while the other device works."""
    return planner.cost.contention(kind, "decode", planner.kernels.weight_format)


def best_speeds(target: Planner, draft: Planner, rate: float) -> tuple[float, float]:
    """Most tokens a second in turns and at once, over the number of guesses."""
    sets = (*KINDS, None)
    draft_s = {kind: step_s(draft, 1, kind) for kind in sets}
    in_turns = at_once = 0.0
    for k in range(1, MOST + 1):
        verify_s = {kind: step_s(target, k + 1, kind) for kind in sets}
        tokens = sum(rate**i for i in range(k + 1))
        fastest, cheapest = (
            min(x for x in times.values() if x is not None) for times in (verify_s, draft_s)
        )
        in_turns = max(in_turns, tokens / (fastest + k * cheapest))
        goes_on = rate ** (k + 1)  # all guesses are right, and the draft's own next token
        for here, there in permutations(KINDS):
            one, other = verify_s[here], draft_s[there]
            if one is None or other is None:
                continue
            factors = (contention(x, kind) for x, kind in ((target, here), (draft, there)))
            both = contended(*factors, np.array([one]), np.array([(k + 1) * other]))
            slowed, drafted = (float(x[0]) for x in both)
            round_s = goes_on * max(slowed, drafted) + (1 - goes_on) * (slowed + k * other)
            at_once = max(at_once, tokens / round_s)
    return in_turns, at_once


@app.command("devices")
def devices(
    model: Annotated[str, typer.Option(help="a known model")] = "llama-3.2-3b",
    draft_model: Annotated[str, typer.Option(help="a smaller one")] = "llama-3.2-1b",
    profiles: Annotated[str, typer.Option()] = (
        "host,snapdragon-8-gen-3,snapdragon-8-elite,snapdragon-8-elite-gen-5,snapdragon-x-elite,"
        "snapdragon-x2-elite"
    ),
    rates: Annotated[str, typer.Option(help="of right guesses")] = "0.6,0.8,0.9",
) -> None:
    """Tokens a second with the draft in turns and at once, predicted."""
    rows = []
    for name in profiles.split(","):
        known = DeviceProfile.load(name)
        target, draft = (
            Planner(model_spec(x), known, PlannerSettings()) for x in (model, draft_model)
        )
        for rate in map(float, rates.split(",")):
            in_turns, at_once = best_speeds(target, draft, rate)
            rows.append([name, f"{rate:g}", f"{in_turns:.1f}", f"{at_once:.1f}",
                         f"{at_once / in_turns:.2f}"])  # fmt: skip
    print(f"predicted; {model} with {draft_model}, decode\n")
    table("profile|right|in turns, tokens/s|at once, tokens/s|at once over in turns", rows)
    finish()


if __name__ == "__main__":
    app()

"""Answers with guessed tokens against plain ones, on texts that can be guessed and that cannot.

python bench/speculation.py SmolLM2-135M-Instruct.Q4_1.gguf -n 256 -r 3
python bench/speculation.py demo --draft-model demo -n 100
python bench/speculation.py random:qwen3.5-0.8b --draft-model mtp -n 256 -r 3
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Annotated, Any

import typer
from common import Rounds, Tokens, finish, in_turns, one_command, spread, table

from hetero import LLM
from hetero.generation.loop import GenerationResult

CODE = '''class Account:
    """An account with a balance in cents, which never becomes negative."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("a deposit must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("a withdrawal must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''
FIRST, _, _ = CODE.partition("    def withdraw")
EDIT = (
    "The class before the change:\n\n```python\n" + CODE + "```\n\n"
    "The class after `owner` was renamed to `holder`:\n\n```python\n"
    + FIRST.replace("owner", "holder")
)
STORY = "An unusual list of random words that have nothing to do with each other:"
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "code edited, greedy": (EDIT, {}),
    "random words, temperature 1.5": (STORY, {"temperature": 1.5}),
}


def decode(
    llm: LLM,
    ids: list[int],
    options: dict[str, Any],
    last: dict[str, GenerationResult],
    who: str,
) -> float:
    """Tokens a second of an answer, which is kept as a contender's last."""
    last[who] = llm.generate(ids, **options)
    return last[who].stats.decode_tokens_per_s


def speculation(
    model: Annotated[str, typer.Argument()] = "demo",
    draft_model: Annotated[str | None, typer.Option(help="guesses instead of the text")] = None,
    device: Annotated[str, typer.Option()] = "auto",
    tokens: Tokens = 256,
    rounds: Rounds = 3,
) -> None:
    """Time the same answers with and without guesses, in turns, in one process.

    Temperatures have a seed, so that plain and speculative answers have the same tokens.
    """
    rows = []
    guesses = {"text": {"speculative": 7}} if draft_model is None else {draft_model: {}}
    with LLM(model, device=device, draft_model=draft_model) as llm:  # type: ignore[arg-type]
        for name, (prompt, options) in TEXTS.items():
            ids = llm.encode(prompt)[-(llm.max_seq_len - tokens) :]  # a small model's last part
            common = {"max_tokens": tokens, "seed": 1, **options}
            wanted = {"plain": {"speculative": 0}} | guesses
            last: dict[str, GenerationResult] = {}
            contenders = {
                who: partial(decode, llm, ids, {**common, **more}, last, who)
                for who, more in wanted.items()
            }
            all_speeds = in_turns(contenders, rounds)
            for who, speeds in all_speeds.items():
                pairs = zip(all_speeds["plain"], speeds, strict=True)
                ratio = statistics.median(after / before for before, after in pairs)
                drafts, count = last[who].stats.speculation, last[who].stats.completion_tokens
                right = "" if drafts is None else f"{drafts.accepted} of {drafts.drafted}"
                same = last[who].tokens == last["plain"].tokens
                shown = spread(speeds, digits=1)
                rows.append([name, who, count, *shown, f"{ratio:.2f}", right, same])
    table("text|guesses by|tokens|tokens/s|min|max|x plain|guesses right|same tokens", rows)
    finish()


app = one_command(speculation)

if __name__ == "__main__":
    app()

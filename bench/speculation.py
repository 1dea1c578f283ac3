"""Answers with guessed tokens against plain ones, on texts that can be guessed and that cannot.

python bench/speculation.py SmolLM2-135M-Instruct.Q4_1.gguf -n 256 -r 3
python bench/speculation.py demo --draft-model demo -n 100
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import typer
from common import Rounds, Tokens, finish, in_turns, one_command, spread, table

from hetero import LLM

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


def speculation(
    model: Annotated[str, typer.Argument()] = "demo",
    draft_model: Annotated[str | None, typer.Option(help="guesses, beside the text itself")] = None,
    device: Annotated[str, typer.Option()] = "auto",
    tokens: Tokens = 256,
    rounds: Rounds = 3,
) -> None:
    """Time the same answers with and without guesses, in turns, in one process.

    Temperatures have a seed, so that plain and speculative answers have the same tokens.
    """
    rows = []
    guessing: dict[str, dict[str, Any]] = {"text": {"speculative": 7}}
    with LLM(model, device=device, draft_model=draft_model) as llm:  # type: ignore[arg-type]
        if draft_model is not None:
            guessing = {draft_model: {}}
        for name, (prompt, options) in TEXTS.items():
            wanted = {"max_tokens": tokens, "seed": 1, "speculative": 0, **options}
            last: dict[str, Any] = {}

            def decode(who: str, more: dict[str, Any]) -> float:
                last[who] = llm.generate(prompt, **{**wanted, **more})  # noqa: B023
                return float(last[who].stats.decode_tokens_per_s)  # noqa: B023

            contenders: dict[str, dict[str, Any]] = {"plain": {}, **guessing}
            found = in_turns(
                {who: lambda w=who, m=more: decode(w, m) for who, more in contenders.items()},
                rounds,
            )
            for who, speeds in found.items():
                ratios = [b / a for a, b in zip(found["plain"], speeds, strict=True)]
                guesses = last[who].stats.speculation
                right = "" if guesses is None else f"{guesses.accepted} of {guesses.drafted}"
                same = last[who].tokens == last["plain"].tokens
                n = last[who].stats.completion_tokens
                ratio = f"{statistics.median(ratios):.2f}"
                rows.append([name, who, n, *spread(speeds, digits=1), ratio, right, same])
    table("text|guesses by|tokens|tokens/s|min|max|x plain|guesses right|same tokens", rows)
    finish()


app = one_command(speculation)

if __name__ == "__main__":
    app()

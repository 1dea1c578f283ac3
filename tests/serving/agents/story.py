"""A task of three turns: a thought and two calls, one of which fails; a thought and a call; the
answer. Each client's test tells it with that client's functions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.serving.agents.assistant import END, Assistant

Call = tuple[str, dict[str, Any]]  # the name of a function, its arguments
NEXT = f"{END}\n<|im_start|>assistant\n"
QUESTION = "How warm is it in Paris and in Zürich?"


@dataclass(frozen=True)
class Turn:
    """What the model says in a turn, and the results that its calls have."""

    thought: str
    text: str = ""
    calls: Sequence[Call] = ()
    results: Sequence[str] = ()

    def written(self, *, thinks: bool = True) -> str:
        """The text that the model writes, or has written."""
        calls = [
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': given}, ensure_ascii=False)}"
            "\n</tool_call>"
            for name, given in self.calls
        ]
        thought = f"<think>\n{self.thought}\n</think>\n\n" if thinks else ""
        return thought + "\n".join([*filter(None, [self.text]), *calls])

    def answered(self, *, thinks: bool = True) -> str:
        """What the turn adds to a prompt, the results of its calls included."""
        results = "\n".join(f"<tool_response>\n{x}\n</tool_response>" for x in self.results)
        return f"{self.written(thinks=thinks)}{END}\n<|im_start|>user\n{results}{NEXT}"


def weather(first: str = "18", failure: str = "no such city: Zurich") -> list[Turn]:
    """The task with a function `weather`; `failure` is how the client tells an exception."""
    return [
        Turn(
            "Two cities.",
            "I look.",
            [("weather", {"city": "Paris"}), ("weather", {"city": "Zurich"})],
            [first, failure],
        ),
        Turn("It has an umlaut.", "", [("weather", {"city": "Zürich"})], ["21"]),
        Turn("Both are known.", "Paris has 18 degrees, Zürich 21. 😀"),
    ]


def temperature(city: str) -> str:
    """What the function returns. Raises `ValueError` for an unknown city."""
    degrees = {"Paris": "18", "Zürich": "21"}
    if city not in degrees:
        raise ValueError(f"no such city: {city}")
    return degrees[city]


def begin(assistant: Assistant, turns: Sequence[Turn]) -> None:
    """Have the model say the turns."""
    assistant.script([turn.written() for turn in turns])


def check_prompts(assistant: Assistant, turns: Sequence[Turn], *, thinks: bool = True) -> str:
    """Check that each prompt is the one before with the model's own text and the results.

    Return the first one. Without `thinks` the client leaves the thoughts out.
    """
    assert assistant.unsaid == []
    first, *later = assistant.prompts
    whole = first
    for prompt, turn in zip(later, turns[:-1], strict=True):
        whole += turn.answered(thinks=thinks)
        assert prompt == whole
    return first

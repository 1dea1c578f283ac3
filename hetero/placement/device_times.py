"""Predicted seconds of steps on one device alone, kept with a choice to compare measured steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hetero.solver.plan import Phase


@dataclass(frozen=True)
class DeviceTimes:
    """Predictions of a device set that is a single device.

    `prompts_s` and `answers_s` are of all prompts and answers that `auto` compared. `prompts` has
    seconds by tokens of a prompt, `steps` those of a decode step by the tokens before it, both
    rising. `error` is the profile's mean relative error.
    """

    device_set: str
    prompts_s: float
    answers_s: float
    prompts: tuple[tuple[int, float], ...]
    steps: tuple[tuple[int, float], ...]
    error: float = 0.0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> DeviceTimes:
        """Return the times of a JSON document."""
        tables = {
            name: tuple((int(at), float(seconds)) for at, seconds in document[name])
            for name in ("prompts", "steps")
        }
        return cls(**{**document, **tables})

    def of_phase(self, phase: Phase) -> float:
        """Return the seconds of a phase of what `auto` compared."""
        return self.prompts_s if phase == "prefill" else self.answers_s

    def total_s(self, factors: Mapping[Phase, float]) -> float:
        """Return the seconds of both phases where they take so many times as long."""
        return self.prompts_s * factors["prefill"] + self.answers_s * factors["decode"]

    def step_s(self, phase: Phase, tokens: int, before: int) -> float | None:
        """Return the predicted seconds of a call of tokens after others; None where unknown.

        Prompts are known at the beginning of a context, each as the next longer one in the table,
        for calls of an NPU take as long as its next graph; decode steps of one token at all depths
        up to the last one.
        """
        if phase == "decode":
            known = tokens == 1 and bool(self.steps) and before <= self.steps[-1][0]
            return _between(self.steps, before) if known else None
        at = bisect_left(self.prompts, (tokens, 0.0))
        shortest = self.prompts[0][0] if self.prompts else tokens + 1
        known = before == 0 and at < len(self.prompts) and tokens >= shortest
        return self.prompts[at][1] if known else None


def _between(table: tuple[tuple[int, float], ...], at: int) -> float:
    """Return the seconds at a depth by a line through its neighbours in the table."""
    for (left, left_s), (right, right_s) in pairwise(table):
        if left <= at <= right:
            return left_s + (right_s - left_s) * (at - left) / (right - left)
    return table[0][1] if at <= table[0][0] else table[-1][1]

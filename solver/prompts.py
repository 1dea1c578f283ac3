"""Times of whole prompts: call after call, each after the tokens of those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hetero.backends.protocol import DeviceKind
from hetero.solver.baselines import longest_step
from hetero.solver.planner import Planner
from hetero.solver.prompt_calls import split
from hetero.solver.solution import Scenario, Solution


class Prompt(NamedTuple):
    """A prompt's calls, solved; only the last one has the output head."""

    calls: tuple[Solution, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the token counts of the calls."""
        return tuple(call.scenario.m for call in self.calls)

    @property
    def seconds(self) -> float:
        """Return the predicted time of them all."""
        return sum(call.seconds for call in self.calls)

    @property
    def joules(self) -> float | None:
        """Return predicted energy; None if the profile does not say."""
        energies = [call.joules for call in self.calls]
        return None if None in energies else sum(x for x in energies if x is not None)


def call_scenarios(steps: Sequence[int], context: int = 0) -> list[Scenario]:
    """Return the calls of a prompt after `context` tokens.

    Attention of each sees those before it.
    """
    starts = accumulate(steps[:-1], initial=context)
    return [Scenario("prefill", m, start) for m, start in zip(steps, starts, strict=True)]


def prompt_of(calls: Iterable[Solution]) -> Prompt:
    """Return a prompt of solved calls."""
    *before, last = calls
    return Prompt((*(call.without_head() for call in before), last))


def solve_prompt(
    steps: Sequence[int], solve: Callable[[Scenario], Solution], context: int = 0
) -> Prompt:
    """Return a prompt in these calls, each solved."""
    return prompt_of(map(solve, call_scenarios(steps, context)))


def prompt_alone(planner: Planner, steps: Sequence[int], kind: DeviceKind) -> Prompt | None:
    """Return a prompt in these calls with all matmuls on one device, and the rest too if it can.

    None if the device cannot compute or hold them all.
    """
    calls = [planner.single(scenario, kind) for scenario in call_scenarios(steps)]
    solved = [call for call in calls if call is not None]
    return prompt_of(solved) if len(solved) == len(calls) else None


def steps_alone(planner: Planner, tokens: int, kind: DeviceKind) -> tuple[int, ...]:
    """Return the calls of a prompt on one device alone.

    One that runs the rest as well runs it in its graphs.
    """
    return split(tokens, (), longest_step(planner, f"{kind}-only") or tokens)

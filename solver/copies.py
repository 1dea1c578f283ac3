"""Copies: rows of weights that both devices hold, on a memory that they share.

Where one step gives rows of a matmul to the GPU and another gives them to the NPU, both hold them,
each in its own layout. That speeds up some steps and takes memory in all of them, so plans without
a memory budget have copies of at most a quarter of the weights (`SHARE`), unless more of them make
a step a tenth faster (`WORTH`), or keep it from losing to one device. On computers whose devices
take any amount, such as PCs, they need only gain what predictions are sure of, the plan's margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from hetero.solver import residency
from hetero.solver.expert_choice import model_bytes
from hetero.solver.options import INF
from hetero.solver.plan import Memory
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario, Solution
from hetero.solver.weight_memory import Limits

SHARE: Final = 0.25
WORTH: Final = 0.10
NEGLIGIBLE_BYTES: Final = 64 << 20  # in all: not worth the time to solve again
PROMPTS: Final = 4  # lengths by which rows are chosen: twenty take a second
PLACES: Final = 3  # of each row limit, besides those that the steps want
GAP: Final = 1e-3  # by which other rows may be better: less than a few lengths can tell


def tighter(
    parts: Sequence[residency.Part], memory: Memory, limits: Limits, request: PlanRequest
) -> Limits | None:
    """Return the limits with one of copies, `SHARE` of the weights; None where none is needed.

    `memory` is that of the best solutions, in which copies are as many as they like.
    """
    most = SHARE * weights_of(parts)
    if request.memory_budget_bytes is not None or memory.twice_bytes <= max(most, NEGLIGIBLE_BYTES):
        return None
    return limits._replace(copies=most)


def representatives(scenarios: Sequence[Scenario], request: PlanRequest) -> dict[Scenario, float]:
    """Return the few scenarios by which rows are chosen, and how much each counts.

    They are decoding and at most `PROMPTS` lengths, each for the lengths next to it.
    """
    prompts = sorted((x for x in scenarios if x.phase == "prefill"), key=lambda x: x.m)
    count = min(PROMPTS, len(prompts))
    edges = [round(i * len(prompts) / count) for i in range(count + 1)] if count else []
    groups = [prompts[first:stop] for first, stop in pairwise(edges)]
    weights = {x[len(x) // 2]: sum(map(request.weight, x)) for x in groups}
    decoding = (x for x in scenarios if x.phase == "decode")
    return weights | {x: request.weight(x) for x in decoding}


def weights_of(parts: Sequence[residency.Part]) -> float:
    """Return the bytes of a model's weights, each row once, all routed experts included."""
    return sum(model_bytes(planner.spec) for planner, _ in parts)


def slowdown(best: Iterable[Solution], others: Iterable[Solution], request: PlanRequest) -> float:
    """Return how much longer the step that loses most takes with other solutions.

    Infinite where only one device is left of two that must share a step.
    """
    slower = 0.0
    for mine, other in zip(best, others, strict=True):
        if request.shared and len(other.devices) < len(mine.devices):
            return INF
        slower = max(slower, other.path.cost / mine.path.cost - 1)
    return slower


def worth(limits: Limits, request: PlanRequest) -> float:
    """Return the least gain of a step, as a share of its time, that more copies are for."""
    return WORTH if limits.npu < INF else request.margin


def least_gain(memory: Memory, weights: float, limits: Limits) -> float:
    """Return by which fraction a plan with this memory must be faster than one without copies.

    Infinite where it does not fit the limits; `weights` are the bytes of the model's.
    """
    if not limits.hold(memory):
        return INF
    few = memory.twice_bytes <= max(SHARE * weights, NEGLIGIBLE_BYTES)
    return WORTH if limits.npu < INF and not few else 0.0


def note_of(before: Memory, after: Memory, weights: float, slower: float, *, kept: bool) -> str:
    """Return the sentence of a plan about the copies that are `kept` of the best plan's, or not."""
    size = before.twice_bytes / 2**20
    if kept:
        return (
            f"both devices hold {size:.0f} MiB of the weights ({before.twice_bytes / weights:.0%}):"
            f" with {SHARE:.0%} at most a step would take {slower:.0%} longer (--memory-budget "
            "bounds them)"
        )
    return (
        f"both devices hold {after.twice_bytes / 2**20:.0f} MiB of the weights, not {size:.0f}: "
        f"more copies would gain {slower:.1%} at most"
    )

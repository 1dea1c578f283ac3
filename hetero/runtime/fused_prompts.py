"""Chooses the prompts that run in fused launches.

Work-groups of a fused launch wait for each other without sleeping. That saves what threads take to
wake, 16 us of each launch on two cores, which is worth it while launches are short. But a thread
that never sleeps gets no credit from the scheduler: where another program keeps a core busy, it
loses that core for whole time slices, and launches of some 0.3 ms take longer than unfused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from hetero.profiler.interference import Interference, find_interference
from hetero.runtime.step import Step
from hetero.solver.fused_limit import LONGEST_FUSED

SHORT: Final = 1e8  # FLOPs of a launch: fused whatever other programs do (0.1 ms on two cores)
CONTENDED: Final = 0.2  # of a step's time, waiting for cores of all threads together
PAUSE: Final = 16  # steps that are not fused then
Waits: TypeAlias = Mapping[int, float]  # seconds that each thread has waited for a core


class FusedPrompts:
    """Decides for each step of a prompt. Control thread only.

    `token_flops` is what a token of the model takes. `interference` counts waits for cores that
    other programs have.
    """

    def __init__(self, token_flops: float, interference: Interference | None = None) -> None:
        self._token_flops = token_flops
        self._interference = interference or find_interference()
        self._paused = 0

    def fit(self, step: Step) -> bool:
        """Return whether a step of a prompt should be fused."""
        size = self._size(step)
        if SHORT < size <= LONGEST_FUSED and self._paused:
            self._paused -= 1
            return False
        return size <= LONGEST_FUSED

    def waits_s(self, step: Step) -> Waits | None:
        """Return what `observe` takes of a fused step that begins now; None: it needs nothing."""
        return self._interference.waits_s() if self._size(step) > SHORT else None

    def observe(self, before: Waits | None, wall_s: float) -> None:
        """Take note of a fused step: whether other programs took cores from it."""
        if before is not None:
            after = self._interference.waits_s()
            waited_s = sum(after[thread] - before.get(thread, 0.0) for thread in after)
            self._paused = PAUSE if waited_s > CONTENDED * wall_s else 0

    def _size(self, step: Step) -> float:
        return self._token_flops * step.tokens / len(step.launches)

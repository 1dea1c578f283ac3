"""Chooses the prompts that run in fused launches.

Work-groups of a fused launch wait for each other without sleeping. That saves what threads take to
wake, 16 us of each launch on two cores, which is worth it while launches are short. But a thread
that never sleeps gets no credit from the scheduler: where another program keeps a core busy, it
loses that core for whole time slices, and launches of some 0.3 ms take longer than unfused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetero.backends.host.timers import process_waited_s
from hetero.runtime.step import Step
from hetero.solver.fused_limit import LONGEST_FUSED

SHORT: Final = 1e8  # FLOPs of a launch: fused whatever other programs do (0.1 ms on two cores)
CONTENDED: Final = 0.2  # of a step's time, waiting for cores of all threads together
PAUSE: Final = 16  # steps that are not fused then


class FusedPrompts:
    """Decides for each step of a prompt. Control thread only.

    `token_flops` is what a token of the model takes. `waited_s` returns the time that all threads
    of the process have waited for cores that other programs had, None where that is not known.
    """

    def __init__(
        self, token_flops: float, waited_s: Callable[[], float | None] = process_waited_s
    ) -> None:
        self._token_flops, self._waited_s = token_flops, waited_s
        self._paused = 0

    def fit(self, step: Step) -> bool:
        """Return whether a step of a prompt should be fused."""
        size = self._size(step)
        if SHORT < size <= LONGEST_FUSED and self._paused:
            self._paused -= 1
            return False
        return size <= LONGEST_FUSED

    def waited_s(self, step: Step) -> float | None:
        """Return what `observe` takes of a fused step that begins now; None: it needs nothing."""
        return self._waited_s() if self._size(step) > SHORT else None

    def observe(self, before_s: float | None, wall_s: float) -> None:
        """Take note of a fused step: whether other programs took cores from it."""
        after_s = None if before_s is None else self._waited_s()
        if before_s is not None and after_s is not None:
            self._paused = PAUSE if after_s - before_s > CONTENDED * wall_s else 0

    def _size(self, step: Step) -> float:
        return self._token_flops * step.tokens / len(step.launches)

"""Limits the GPU's share of time at run time, for other users of the GPU (paper section 5.5).

The plan already keeps the GPU's tile of every matmul within the share. What the plan cannot know
(slower kernels than predicted, operators other than matmuls) is measured here, and a step that took
more than its share is followed by a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetero.backends.host.clock import SystemClock
from hetero.runtime.step import Step

LONGEST_PAUSE_S = 1.0
_SYSTEM: Final = SystemClock()


class GpuShare:
    """Busy seconds of the GPU and what `limit` (above 0, up to 1) makes of them. Control thread.

    `busy_s` and `wall_s` are totals since `reset`, pauses included.
    """

    def __init__(self, limit: float, sleep: Callable[[float], None] = _SYSTEM.sleep) -> None:
        self.limit = limit
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        """Restart the accounting."""
        self.busy_s = self.wall_s = 0.0

    @property
    def share(self) -> float:
        """Return the part of the time that the GPU was busy."""
        return self.busy_s / self.wall_s if self.wall_s else 0.0

    def after(self, busy_s: float, wall_s: float) -> float:
        """Account for a step, pause if the GPU took more than its share, and return both seconds.

        Only what this step overdrew is paid back, so that a cheap step saves nothing up.
        """
        pause_s = 0.0
        if self.limit < 1:
            pause_s = min(max(busy_s / max(self.limit, 1e-3) - wall_s, 0.0), LONGEST_PAUSE_S)
        if pause_s > 0:
            self._sleep(pause_s)
        self.busy_s += busy_s
        self.wall_s += wall_s + pause_s
        return wall_s + pause_s


def gpu_busy_s(step: Step, fallback_s: float) -> float:
    """Return the seconds that the GPU's kernels of the last run took by the driver's clock.

    `fallback_s`, from submission to seen completion, where the driver does not say.
    """
    spans = [
        completion.span()
        for launch, completion in zip(step.launches, step.completions, strict=True)
        if launch.kind == "gpu" and completion is not None
    ]
    known = [span for span in spans if span is not None]
    return sum(end - start for start, end in known) if known else fallback_s

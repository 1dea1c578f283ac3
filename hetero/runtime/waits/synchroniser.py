"""The waits of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetero.backends.host.clock import Clock, SystemClock
from hetero.backends.host.timers import waited_for_core_s
from hetero.backends.optional import StreamSignal
from hetero.backends.protocol import DEFAULT_DEADLINE_S, BoundCall, Device, DeviceKind
from hetero.runtime.waits.policy import DEFAULT, WaitPolicy
from hetero.runtime.waits.prediction import SleepTimes
from hetero.runtime.waits.shared import SharedWaits, SyncMethod
from hetero.runtime.waits.trials import Trials
from hetero.runtime.waits.wait_point import WaitKey, WaitPoint


class Synchroniser(SharedWaits):
    """The waits of one model: method, wait points and their predictions. Control thread only.

    `eager`: a GPU tile is submitted before the control thread waits for earlier work, so that the
    queue never runs dry; with `finish` and `copy` that would wait for the tile as well. `signals`
    are for `fast` with `wait_values` where they gain (`hetero.runtime.program`), `flags` for `fast`
    where they do. Time is the `clock`'s alone; `queued_s` is as in `CoreContention`.
    """

    def __init__(
        self,
        devices: Mapping[DeviceKind, Device],
        method: SyncMethod = "fast",
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        token_s: float = 0.0,
        sleep: SleepTimes | None = None,
        wait_values: bool = True,
        policy: WaitPolicy = DEFAULT,
        clock: Clock | None = None,
        queued_s: Callable[[], float | None] = waited_for_core_s,
    ) -> None:
        clock = clock or SystemClock()
        super().__init__(
            devices, method, deadline_s=deadline_s, token_s=token_s, sleep=sleep, policy=policy,
            clock=clock, queued_s=queued_s,
        )  # fmt: skip
        fast, trials = method == "fast", Trials(devices, policy, clock)
        self.signals: dict[DeviceKind, StreamSignal] = (
            trials.signals() if fast and wait_values else {}
        )
        self.flags: dict[DeviceKind, BoundCall] = trials.flags(self.signals) if fast else {}
        self._wait_points: dict[tuple[WaitKey, DeviceKind], WaitPoint] = {}
        self._last: dict[tuple[object, ...], WaitPoint] = {}  # of any token count

    @property
    def eager(self) -> bool:
        """Return whether submissions may precede the wait for earlier work (see the class)."""
        return self.method not in ("finish", "copy")

    def wait_values_now(self) -> bool:
        """Return whether the step that begins now should have wait values; count the steps."""
        return self.contention.wait_values_now()

    def wait_point(self, key: WaitKey, kind: DeviceKind, name: str) -> WaitPoint:
        """Return the wait point of a phase, its chunks' tokens, the waiting and awaited node."""
        if (key, kind) not in self._wait_points:
            point = self._wait_points[key, kind] = WaitPoint(self, key, kind, name)
            phase, chunks, *operations = key
            like = phase, len(chunks), *operations, kind
            if (last := self._last.get(like)) is not None:
                point.prediction.expected_s = last.at_least_s(sum(chunks))
            self._last[like] = point
        return self._wait_points[key, kind]

    def close(self) -> None:
        """Drop the wait points, which refer to this object; idempotent."""
        self._wait_points.clear()
        self._last.clear()

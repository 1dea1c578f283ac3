"""What a wait costs, on a device whose queue starts late and whose ends are seen late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.backends.errors import KernelBuildError
from hetero.backends.host.clock import ManualClock
from hetero.backends.optional import SupportsFusedLaunch
from hetero.backends.protocol import BoundCall, Completion
from hetero.profiler import sync

START_S, KERNEL_S, SEEN_S = 50e-6, 30e-6, 7e-6


class Ran(Completion):
    def __init__(self, clock: ManualClock, span: tuple[float, float], *, timed: bool) -> None:
        self.clock, self._span, self.timed = clock, span, timed

    def done(self) -> bool:
        return self.clock.now() >= self._span[1] + SEEN_S

    def wait(self, deadline_s: float = 1.0) -> None:
        self.clock.sleep(max(0.0, self._span[1] + SEEN_S - self.clock.now()))

    def span(self) -> tuple[float, float] | None:
        return self._span if self.timed else None


class Call(BoundCall):
    """Starts at once behind another launch, and `START_S` later in an empty queue."""

    def __init__(self, clock: ManualClock, *, timed: bool) -> None:
        self.name, self.m = "call", 1
        self.clock, self.timed, self.busy_until_s = clock, timed, 0.0

    def submit(self) -> Completion:
        now = self.clock.now()
        start_s = self.busy_until_s if self.busy_until_s > now else now + START_S
        self.busy_until_s = start_s + KERNEL_S
        return Ran(self.clock, (start_s, self.busy_until_s), timed=self.timed)

    def run(self) -> None:
        self.submit().wait()


@pytest.mark.parametrize(("timed", "expected_s"), [(True, SEEN_S), (False, START_S + SEEN_S)])
def test_a_wait_is_timed_from_the_kernels_end_where_the_device_has_a_clock(
    monkeypatch: pytest.MonkeyPatch, timed: bool, expected_s: float
) -> None:
    clock = ManualClock()
    call = Call(clock, timed=timed)
    monkeypatch.setattr(sync, "_call", lambda device, width: call)
    device: Any = SimpleNamespace(flag=lambda: None)
    waits, notes = sync._waits(device, clock, 9)
    assert set(waits) == {"finish", "event", "fast"}
    assert "flag" in notes
    # In a full queue of 32 launches the first one's start and the last one's end count a little.
    room = 3e-6 if timed is False else 1e-9
    assert waits["finish"] == pytest.approx(expected_s, abs=room)
    assert waits["event"] == pytest.approx(expected_s, abs=room + 1.1e-6)  # its polling step


class InFusedLaunch(BoundCall):
    """`count` calls of a queue as one, each of which takes `SAVED_S` less."""

    def __init__(self, call: Call, count: int) -> None:
        self.name, self.m = "chain", 1
        self.call, self.less_s = call, (KERNEL_S - SAVED_S) * count - KERNEL_S

    def submit(self) -> Completion:
        found = self.call.submit()
        assert isinstance(found, Ran)
        self.call.busy_until_s += self.less_s
        return Ran(self.call.clock, (0.0, self.call.busy_until_s), timed=False)

    def run(self) -> None: ...


SAVED_S = 13e-6


@pytest.mark.parametrize("how", ["chains", "none", "fails"])
def test_what_a_launch_saves_when_fused(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    clock = ManualClock()
    call = Call(clock, timed=False)
    call.fusible = True
    monkeypatch.setattr(sync, "_call", lambda device, width: call)

    class Fusing(SupportsFusedLaunch):
        def fuse(self, runs: Any, *, compiles: bool = True) -> list[InFusedLaunch] | None:
            if how == "fails":
                raise KernelBuildError(
                    "opencl", "building fused_launch.cl", "the driver's compiler hung"
                )
            return [InFusedLaunch(call, len(run)) for run in runs] if how == "chains" else None

    found = sync._fused(Fusing(), clock, 18, sync.DEFAULT)  # type: ignore[arg-type]
    assert found == (pytest.approx(SAVED_S, rel=1e-6) if how == "chains" else None)


class Slowing(Call):
    """Its clock falls while it is idle: the first launches after a gap take longer in all."""

    def __init__(self, clock: ManualClock, loss_s: dict[float, float], noise_s: float) -> None:
        super().__init__(clock, timed=False)
        self.loss_s, self.noise_s = loss_s, noise_s
        self.rng = np.random.default_rng(3)

    def submit(self) -> Completion:
        now = self.clock.now()
        gap_s = now - self.busy_until_s
        lost_s = max((s for at_s, s in self.loss_s.items() if gap_s >= at_s), default=0.0)
        late_s = START_S if gap_s > 0 else 0.0
        scatter_s = self.noise_s * abs(self.rng.standard_normal())
        self.busy_until_s = max(now, self.busy_until_s) + late_s + lost_s + KERNEL_S + scatter_s
        return Ran(self.clock, (0.0, self.busy_until_s), timed=False)


def measured_idle(monkeypatch: pytest.MonkeyPatch, call: Slowing) -> list[tuple[float, float]]:
    monkeypatch.setattr(sync, "_call", lambda device, width: call)
    costs = sync.idle_costs(SimpleNamespace(), call.clock, repeats=20, empty_s=START_S)  # type: ignore[arg-type]
    return [(x.gap_s, x.slower_s) for x in costs]


def test_what_an_idle_gap_costs_beyond_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Slowing(ManualClock(), {2e-4: 40e-6, 1e-3: 150e-6}, noise_s=0.0)
    found = measured_idle(monkeypatch, call)
    assert [gap_s for gap_s, _ in found] == list(sync.GAPS_S)
    wanted = [0.0, 40e-6, 40e-6, 150e-6, 150e-6]
    # A burst right after another one also starts in an empty queue, which is counted.
    assert [slower_s for _, slower_s in found] == pytest.approx(
        [max(s - START_S, 0.0) for s in wanted], abs=1e-9
    )


def test_scatter_is_no_cost_of_idle_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Slowing(ManualClock(), {}, noise_s=20e-6)
    assert measured_idle(monkeypatch, call) == []

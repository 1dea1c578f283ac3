"""What steps cost: counted for each run, added up for each context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero.backends.protocol import DeviceKind
from hetero.runtime.program import KINDS


@dataclass
class Usage:
    """What one device did: `ops` calls, `busy_s` seconds.

    A blocking device is busy while a call runs. An asynchronous one counts from a submission to an
    idle queue until the host has seen the last submission complete.
    """

    ops: int = 0
    busy_s: float = 0.0


class StepRun(NamedTuple):
    """One run of a step.

    `counts` are the calls of each device, `busy` the seconds that each of `kinds` was. `stamps` are
    its times: the start, then the end of every action, in seconds of `time.perf_counter`; `slept`
    the seconds that each of its waits was asleep.
    """

    counts: Mapping[DeviceKind, int]
    busy: Sequence[float]
    stamps: list[float]
    slept: list[float]
    kinds: Sequence[DeviceKind] = KINDS

    @property
    def usage(self) -> dict[DeviceKind, Usage]:
        """What each device did."""
        return {
            kind: Usage(n, self.busy[self.kinds.index(kind)]) for kind, n in self.counts.items()
        }

    @property
    def wall_s(self) -> float:
        """From its start to the end of its last action."""
        return self.stamps[-1] - self.stamps[0]


@dataclass
class Work:
    """What the steps of one context were, since it was made.

    `tokens` were computed (guesses that were wrong among them). `gpu_busy_s` and `wall_s` are what
    `GpuShare` counts, pauses included: 0 where no share bounds the GPU.
    """

    devices: dict[DeviceKind, Usage] = field(default_factory=dict)
    tokens: int = 0
    gpu_busy_s: float = 0.0
    wall_s: float = 0.0

    def add(self, run: StepRun, tokens: int) -> None:
        """A step of so many tokens ran."""
        self.tokens += tokens
        for kind, ops in run.counts.items():
            total = self.devices.get(kind)
            if total is None:
                total = self.devices[kind] = Usage()
            total.ops += ops
            total.busy_s += run.busy[run.kinds.index(kind)]

    def copy(self) -> Work:
        """As it is now."""
        devices = {kind: Usage(use.ops, use.busy_s) for kind, use in self.devices.items()}
        return Work(devices, self.tokens, self.gpu_busy_s, self.wall_s)

    def since(self, before: Work) -> Work:
        """What came after a copy; devices that did nothing are left out."""
        devices = {}
        for kind, use in self.devices.items():
            was = before.devices.get(kind, Usage())
            if use.ops > was.ops:
                devices[kind] = Usage(use.ops - was.ops, use.busy_s - was.busy_s)
        return Work(
            devices,
            self.tokens - before.tokens,
            self.gpu_busy_s - before.gpu_busy_s,
            self.wall_s - before.wall_s,
        )

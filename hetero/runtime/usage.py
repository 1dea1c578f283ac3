"""The cost of steps: counted for each run, added up for each context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from hetero.backends.protocol import EVERY_KIND, DeviceKind
from hetero.solver.plan import Phase

OpenDevices: TypeAlias = tuple[tuple[DeviceKind, str], ...]  # kinds, and their backends


@dataclass
class Usage:
    """The work of one device: `ops` calls, `busy_s` seconds.

    A blocking device is busy while a call runs. An asynchronous one counts from a submission to an
    idle queue until the host has seen the last submission complete.
    """

    ops: int = 0
    busy_s: float = 0.0


class StepRun(NamedTuple):
    """One run of a step.

    `counts` are the calls of each device, `busy` the seconds that each of `kinds` was. `stamps` are
    its times: the start, then the end of every action, in seconds of the engine's clock; `slept`
    the seconds that each of its waits was asleep.
    """

    counts: Mapping[DeviceKind, int]
    busy: Sequence[float]
    stamps: list[float]
    slept: list[float]
    kinds: Sequence[DeviceKind] = EVERY_KIND

    @property
    def usage(self) -> dict[DeviceKind, Usage]:
        """Return what each device did."""
        return {
            kind: Usage(n, self.busy[self.kinds.index(kind)]) for kind, n in self.counts.items()
        }

    @property
    def wall_s(self) -> float:
        """Return the seconds from its start to the end of its last action."""
        return self.stamps[-1] - self.stamps[0]

    def of_row(self, row: int, rows: int) -> StepRun:
        """Return the share of one of its rows: of several contexts, each has an equal part."""
        counts = {kind: n * (row + 1) // rows - n * row // rows for kind, n in self.counts.items()}
        busy = [busy_s / rows for busy_s in self.busy]
        return StepRun(counts, busy, self.stamps, self.slept, self.kinds)

    def idle_share(self, kind: DeviceKind) -> float:
        """Return the part of its time that a device had nothing to do."""
        return max(1 - self.usage.get(kind, Usage()).busy_s / self.wall_s, 0.0)


@dataclass
class Work:
    """The steps of one context since it was made.

    `tokens` were computed (guesses that were wrong among them). `gpu_busy_s` and `wall_s` are what
    `GpuShare` counts, pauses included: 0 where no share bounds the GPU. Of the steps with a prompt
    `prompt_s` is the time, `prompt_busy_s` the part of it that each device was busy; `mode` is the
    mode of the last prompt that had several, for people. `parts` has the tokens of prompts and of
    answers that were computed while these devices were open, in the order in which they were.
    """

    devices: dict[DeviceKind, Usage] = field(default_factory=dict)
    tokens: int = 0
    gpu_busy_s: float = 0.0
    wall_s: float = 0.0
    prompt_s: float = 0.0
    prompt_busy_s: Counter[DeviceKind] = field(default_factory=Counter)
    mode: str = ""
    parts: dict[OpenDevices, tuple[int, int]] = field(default_factory=dict)

    def add(self, run: StepRun, tokens: int, phase: Phase, devices: OpenDevices = ()) -> None:
        """Add a step of `tokens` tokens on a model's open devices."""
        self.tokens += tokens
        prompt, answer = self.parts.get(devices, (0, 0))
        of_prompt = tokens if phase == "prefill" else 0
        self.parts[devices] = prompt + of_prompt, answer + tokens - of_prompt
        if phase == "prefill":
            self.prompt_s += run.wall_s
            self.prompt_busy_s.update({kind: use.busy_s for kind, use in run.usage.items()})
        for kind, ops in run.counts.items():
            total = self.devices.get(kind)
            if total is None:
                total = self.devices[kind] = Usage()
            total.ops += ops
            total.busy_s += run.busy[run.kinds.index(kind)]

    def include(self, other: Work) -> None:
        """Count another context's steps, too."""
        for kind, use in other.devices.items():
            own = self.devices.setdefault(kind, Usage())
            own.ops += use.ops
            own.busy_s += use.busy_s
        self.tokens += other.tokens
        self.gpu_busy_s += other.gpu_busy_s
        self.wall_s += other.wall_s
        self.prompt_s += other.prompt_s
        self.prompt_busy_s.update(other.prompt_busy_s)
        for devices, (prompt, answer) in other.parts.items():
            before = self.parts.get(devices, (0, 0))
            self.parts[devices] = before[0] + prompt, before[1] + answer

    def copy(self) -> Work:
        """Return a copy."""
        devices = {kind: Usage(use.ops, use.busy_s) for kind, use in self.devices.items()}
        busy_s = self.prompt_busy_s.copy()
        done = (self.tokens, self.gpu_busy_s, self.wall_s, self.prompt_s)
        return Work(devices, *done, busy_s, self.mode, dict(self.parts))

    def idle_share(self, kind: DeviceKind) -> float | None:
        """Return the idle share of a device in the prompt's time; None without a prompt."""
        return max(1 - self.prompt_busy_s[kind] / self.prompt_s, 0.0) if self.prompt_s else None

    def since(self, before: Work) -> Work:
        """Return what was added since a copy; idle devices are left out."""
        devices = {}
        for kind, use in self.devices.items():
            was = before.devices.get(kind, Usage())
            if use.ops > was.ops:
                devices[kind] = Usage(use.ops - was.ops, use.busy_s - was.busy_s)
        parts = {}
        for key, (prompt, answer) in self.parts.items():
            start = before.parts.get(key, (0, 0))
            if (prompt, answer) != start:
                parts[key] = prompt - start[0], answer - start[1]
        return Work(
            devices,
            self.tokens - before.tokens,
            self.gpu_busy_s - before.gpu_busy_s,
            self.wall_s - before.wall_s,
            self.prompt_s - before.prompt_s,
            self.prompt_busy_s - before.prompt_busy_s,
            self.mode,
            parts,
        )


def total(works: Iterable[Work]) -> Work:
    """Return the sum over several contexts."""
    summed = Work()
    for work in works:
        summed.include(work)
    return summed

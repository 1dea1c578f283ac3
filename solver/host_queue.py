"""Corrections of the paper's costs for a GPU that is fed by the thread which drives the NPU.

That is a PC: OpenCL on one core plays the GPU, ONNX Runtime on another the NPU, and the control
thread's own microseconds are a part of every step. Each correction can be taken out (`CORRECTIONS`,
docs/explanation/cost-corrections.md); with none of them the answers are those of `Overheads`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, Self, TypeAlias, get_args

import numpy as np

from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel, WaitMethod
from hetero.profiler.records import phase_of
from hetero.solver.kernel_times import Bools, Floats, KernelTimes
from hetero.solver.overheads import CutTimes, Overheads

Correction: TypeAlias = Literal["chains", "gates", "queue", "restart", "spread", "step"]
CORRECTIONS: Final[frozenset[Correction]] = frozenset(get_args(Correction))
FAR: Final = 9.0  # deviations between two times of which the shorter one does not matter
Spread: TypeAlias = tuple[float, float]  # relative standard deviations, GPU and NPU


@dataclass(frozen=True)
class HostCutTimes(CutTimes):
    """Time that both parts of a cut take where times vary and a thread has work of its own.

    restart_s   how much longer the NPU's part takes because the thread did something else before
    spread      how much the GPU's and the NPU's times vary, as fractions of them
    start_s     starting the GPU on what follows, if its queue has run dry,
    after_s    and from the end of the NPU's tile until the queue has that
    queue_s     by how much the NPU's part must end before the GPU's for a queue that stays busy:
                it starts later, and launches are submitted after it; None: not corrected
    """

    restart_s: float = 0.0
    spread: Spread = (0.0, 0.0)
    start_s: float = 0.0
    after_s: float = 0.0
    queue_s: float | None = None

    @cached_property
    def npu_dominant(self) -> Bools:
        """See `CutTimes`; with `queue_s` also where the GPU is last, but its queue runs dry."""
        return np.asarray(self.npu_thread_s + (self.queue_s or 0.0) >= self.gpu_s)

    @cached_property
    def npu_thread_s(self) -> Floats:
        """See `CutTimes`."""
        return np.asarray(self.npu_s + self.restart_s)

    @cached_property
    def elapsed_s(self) -> Floats:
        """See `CutTimes`; the expected value."""
        return longer(self.gpu_s, self.npu_thread_s, self.spread)

    @cached_property
    def restarts_s(self) -> Floats | float:
        """See `CutTimes`: all of a start where the NPU's thread is done last, else nothing.

        Times that vary make that a chance.
        """
        idle = super().restarts_s
        if not self.start_s or self.spread == (0.0, 0.0):
            return idle
        chance = later(self.npu_thread_s + self.after_s, self.gpu_s, self.spread[::-1])
        return np.asarray(self.start_s * (chance - self.npu_dominant) + idle)

    @property
    def dry_s(self) -> Floats | float:
        """See `CutTimes`."""
        return 0.0 if self.queue_s is None else np.asarray(self.start_s * self.npu_dominant)

    @property
    def after_gpu_s(self) -> float:
        """See `CutTimes`."""
        return self.restart_s


@dataclass(frozen=True)
class HostQueue(Overheads):
    """The paper's costs with the corrections that a profile has measurements for.

    ring_s      signalling launches that were queued ahead (decode only); None: none are
    busy_s      one submission after others, made by the thread on which the NPU's calls block
    step_s      the thread's time before the first and after the last launch of a step; None:
                not measured
    chain_s     what a launch saves in a fused launch (`SupportsFusedLaunch`), of steps that decode
                and of prompts of up to `LONGEST_FUSED` for each launch
    varies      whether times vary (`CostModel.spread`)
    stays_busy  whether a queue must have its next launch before it runs dry; where times vary that
                is a chance, which `HostCutTimes.restarts_s` has
    """

    ring_s: float | None = None
    busy_s: float = 0.0
    step_s: float | None = None
    chain_s: float = 0.0
    varies: bool = True
    stays_busy: bool = False

    @classmethod
    def of(
        cls,
        cost: CostModel,
        method: WaitMethod = "fast",
        corrections: frozenset[Correction] = CORRECTIONS,
    ) -> Self:
        """See `Overheads.of`."""
        paper = Overheads.of(cost, method)
        if "gpu" not in cost.profile.devices:
            return cls()
        npu = cost.profile.devices.get("npu")
        blocks = npu is not None and not npu.capabilities.asynchronous
        shared = vars(paper) | {
            "npu_restart_s": cost.restart_s() if "restart" in corrections else 0.0
        }
        return cls(
            **shared,
            ring_s=cost.ring_s("gpu") if blocks and "gates" in corrections else None,
            busy_s=cost.submit_s("gpu", "busy"),
            step_s=cost.profile.host_sync.step_s if "step" in corrections else None,
            chain_s=cost.chain_s("gpu") if "chains" in corrections else 0.0,
            varies="spread" in corrections,
            stays_busy="queue" in corrections,
        )

    @classmethod
    def slow(cls, cost: CostModel) -> Self:
        """See `Overheads.slow`."""
        return cls(
            **vars(Overheads.slow(cost)) | {"npu_restart_s": cost.restart_s()},
            step_s=cost.profile.host_sync.step_s,
        )

    def at(self, m: int) -> Self:
        """See `Overheads.at`: with stream signals, starting the GPU costs a signal."""
        return replace(self, submit_s=self.ring_s or 0.0) if self.queues_ahead(m) else self

    def queues_ahead(self, m: int) -> bool:
        """Return whether launches are queued ahead of a signal in a step of m tokens."""
        return self.ring_s is not None and phase_of(m) == "decode"

    def cut(self, kernels: KernelTimes, m: int, gpu_s: Floats, npu_s: Floats) -> CutTimes:
        """See `Overheads.cut`."""
        start_s, after_s = (self.ring_s or 0.0, 0.0) if self.queues_ahead(m) else (
            self.submit_s, self.busy_s
        )  # fmt: skip
        spread = spread_of(kernels, m) if self.varies else (0.0, 0.0)
        queue_s = None
        if self.stays_busy and spread == (0.0, 0.0):
            # Between two matmuls of few tokens are operators that are over before another launch
            # is submitted.
            queue_s = self.wait_s + after_s * (2 if phase_of(m) == "decode" else 1)
        return HostCutTimes(
            gpu_s,
            npu_s,
            self.idle,
            restart_s=self.npu_restart_s,
            spread=spread,
            start_s=start_s,
            after_s=after_s,
            queue_s=queue_s,
        )

    def around_s(self, non_matmul_device: DeviceKind) -> float:
        """See `Overheads.around_s`: the control thread's time around the launches of a step.

        Before the first and after the last launch, and the first submission, whose queue is empty.
        0 if it was not measured.
        """
        if self.step_s is None:
            return 0.0
        return self.step_s + (self.submit_s if non_matmul_device == "gpu" else 0.0)

    def chained_s(self, launches: int) -> float:
        """See `Overheads.chained_s`."""
        return launches * self.chain_s


def spread_of(kernels: KernelTimes, m: int) -> Spread:
    """Return how much the GPU's and the NPU's kernels of m tokens vary (`CostModel.spread`)."""
    cost, key = kernels.cost, (phase_of(m), kernels.weight_format)
    return cost.spread("gpu", *key), cost.spread("npu", *key)


def longer(a: Floats, b: Floats, spread: Spread) -> Floats:
    """Return expected value of the longer of two times with these relative standard deviations.

    Two times that vary are never both at their mean: what takes 10 ms on either device, give or
    take 1 ms, takes 10.6 ms on both (C. E. Clark, "The greatest of a finite set of random
    variables", Operations Research 9, 1961; independent and normal). With no spread the maximum.
    """
    top = np.maximum(a, b)
    if spread == (0.0, 0.0):
        return top
    deviation = _deviation(a, b, spread)
    with np.errstate(invalid="ignore", divide="ignore"):  # impossible ones, and those of no time
        distance = np.abs(a - b) / -deviation
    near = np.flatnonzero(distance > -FAR)  # elsewhere nothing is added that a float64 could hold
    x, deviation = distance.ravel()[near], deviation.ravel()[near]
    more = deviation * (0.3989423 * np.exp(-0.5 * x * x) + x * _below(x))
    total = top.ravel()
    total[near] += np.maximum(more, 0.0)
    return total.reshape(top.shape)


def later(a: Floats, b: Floats, spread: Spread) -> Floats:
    """Return the chance that the first of two times is the longer one, as in `longer`.

    0 where either is infinite.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = (a - b) / _deviation(a, b, spread)
    return np.where(np.isfinite(a + b), _below(np.clip(distance, -FAR, FAR)), 0.0)


def _deviation(a: Floats, b: Floats, spread: Spread) -> Floats:
    """Return standard deviation of the difference of two times with these relative ones."""
    with np.errstate(invalid="ignore"):  # no spread, and a time that is infinite
        return np.sqrt((spread[0] * a) ** 2 + (spread[1] * b) ** 2)


def _below(x: Floats) -> Floats:
    """Return the normal distribution function to 5e-4 (numpy has none)."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.7978846 * x + 0.0356774 * x**3))

"""The cost of a step beyond its kernels, as in the paper (sections 3.1, 4.2 and 4.3).

T_sync, T_copy, and both devices' times added up by their maximum.

The search asks an `Overheads`, and for the tilings of a matmul the `CutTimes` that it makes. Those
here are the paper's. `hetero.solver.host_queue` answers the same questions for a GPU that is fed by
a thread which also drives the NPU, as on a PC; docs: cost-corrections.md lists what it adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import NO_IDLE_COSTS, CostModel, IdleCurve, WaitMethod
from hetero.solver.kernel_times import Bools, Floats, Ints, KernelTimes


def idle_s(curve: IdleCurve, gaps_s: Floats) -> Floats:
    """Return what idle gaps cost: linear between those that were measured, none below 0."""
    gaps, costs = curve
    if not gaps:
        return np.zeros_like(gaps_s)
    return np.asarray(np.interp(gaps_s, (0.0, *gaps), (0.0, *costs)))


@dataclass(frozen=True)
class CutTimes:
    """Time that both parts of tilings take together.

    With several matmuls, each has a run of columns.

    gpu_s, npu_s    [T, R] seconds of each device's part, contention included
    idle            what the GPU's idle gaps cost (`CostModel.idle_costs`)
    """

    gpu_s: Floats
    npu_s: Floats
    idle: IdleCurve = NO_IDLE_COSTS

    @cached_property
    def npu_thread_s(self) -> Floats:
        """Return [T, R] until the thread that drives the NPU is done."""
        return self.npu_s

    @cached_property
    def elapsed_s(self) -> Floats:
        """[T, R] until both are done: max(T_gpu, T_npu)."""
        return np.maximum(self.gpu_s, self.npu_thread_s)

    @cached_property
    def npu_dominant(self) -> Bools:
        """[T, R] whether the NPU's thread is done last."""
        return np.asarray(self.npu_thread_s >= self.gpu_s)

    @property
    def restarts_s(self) -> Floats | float:
        """[T, R] what starting the GPU again is expected to cost beyond what the mode says.

        After an NPU-dominant tiling the GPU was idle since its part was done.
        """
        if self.idle == NO_IDLE_COSTS:
            return 0.0
        gaps_s = np.where(self.npu_dominant, self.npu_thread_s - self.gpu_s, 0.0)
        return idle_s(self.idle, gaps_s)

    @property
    def dry_s(self) -> Floats | float:
        """[T, R] what starting the GPU again costs after a cut in whose end its queue is empty.

        The modes differ by it, which matters where cuts of both are compared.
        """
        return 0.0

    @property
    def after_gpu_s(self) -> float:
        """Return how much longer a tiling without the GPU takes after the GPU than after others."""
        return 0.0


@dataclass(frozen=True)
class Overheads:
    """Costs between the devices, in seconds.

    wait_s      until the host knows of the GPU's last kernel
    submit_s    submission to an empty queue
    join_s      learning that the GPU's part of a cut is done, where that is not seen on the way
    copy_s, copy_s_per_byte    a copy of activations to or from the NPU, fixed and per byte
    eager       the GPU's tile is queued after its operand before the host waits for that
    npu_restart_s   how much longer an NPU call takes when its thread did something else before
    idle            what the GPU's idle gaps cost (`CostModel.idle_costs`)
    """

    wait_s: float = 0.0
    submit_s: float = 0.0
    join_s: float = 0.0
    copy_s: float = 0.0
    copy_s_per_byte: float = 0.0
    eager: bool = False
    npu_restart_s: float = 0.0
    idle: IdleCurve = NO_IDLE_COSTS

    @classmethod
    def of(cls, cost: CostModel, method: WaitMethod = "fast") -> Self:
        """Return the fast synchronisation of the profile's devices.

        There are copies if memory is not unified.
        """
        if "gpu" not in cost.profile.devices:
            return cls()
        fixed = cost.copy_s("gpu", 0)
        return cls(
            wait_s=cost.wait_s("gpu", method),
            submit_s=cost.submit_s("gpu", "empty"),
            copy_s=fixed,
            copy_s_per_byte=(cost.copy_s("gpu", 1 << 20) - fixed) / (1 << 20),
            eager=True,
            idle=cost.idle_costs("gpu"),
        )

    @classmethod
    def slow(cls, cost: CostModel) -> Self:
        """Return the costs without the paper's fast synchronisation.

        Every wait is a `finish`, and activations are copied on the way to the NPU and back
        (sections 3.1 and 4.2).
        """
        sync = cost.profile.sync["gpu"]
        finish = cost.wait_s("gpu", "finish")
        return cls(
            wait_s=finish,
            submit_s=sync.submit_empty_s,
            join_s=finish,
            copy_s=sync.copy_fixed_s,
            copy_s_per_byte=sync.copy_s_per_byte,
            idle=cost.idle_costs("gpu"),
        )

    def at(self, m: int) -> Self:  # noqa: ARG002
        """Return the costs in a step of m tokens."""
        return self

    def cut(
        self,
        kernels: KernelTimes,  # noqa: ARG002
        m: int,  # noqa: ARG002
        gpu_s: Floats,
        npu_s: Floats,
    ) -> CutTimes:
        """Return what halves of m tokens make together."""
        return CutTimes(gpu_s, npu_s, self.idle)

    def around_s(self, non_matmul_device: DeviceKind) -> float:  # noqa: ARG002
        """Return what a step takes besides its operators, the first on `non_matmul_device`."""
        return 0.0

    def chained_s(self, launches: int) -> float:  # noqa: ARG002
        """Return what so many launches of a step on the GPU alone take less than one by one."""
        return 0.0

    def resume_s(self, gap_s: float) -> float:
        """Return what an idle gap of the GPU costs beyond a submission to its empty queue."""
        return float(idle_s(self.idle, np.asarray(gap_s)))

    @property
    def copies(self) -> bool:
        """Return whether activations are copied at all."""
        return self.copy_s != 0 or self.copy_s_per_byte != 0

    def copy(self, nbytes: float) -> float:
        """Return one copy; nothing where nothing is copied."""
        return float(self.copies_s(np.asarray(nbytes))) if self.copies else 0.0

    def copies_s(self, nbytes: Ints | Floats) -> Floats:
        """Return `copy` of many."""
        return np.where(nbytes > 0, self.copy_s + self.copy_s_per_byte * nbytes, 0.0)

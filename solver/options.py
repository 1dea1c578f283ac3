"""The options of an operator on a path through the layers, and what each costs.

States between operators: `GPU` - the operand is the last kernel of a busy queue; `HOST` - the host
knows that it is complete, the GPU's queue has run dry (docs/explanation/solver.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.solver.npu_tiles import NpuTiles
from hetero.solver.plan import Strategy

GPU: Final = 0
HOST: Final = 1
INF: Final = float("inf")
BOTH: Final[frozenset[DeviceKind]] = frozenset(KINDS)
Mode: TypeAlias = Literal["gpu", "npu", "gpu-dominant", "npu-dominant"]


@dataclass(frozen=True)
class PowerModel:
    """Watts while both devices work, only one, or neither."""

    gpu_w: float
    npu_w: float
    both_w: float
    idle_w: float = 0.0

    @classmethod
    def of(cls, cost: CostModel) -> PowerModel | None:
        """Return the power of a profile's devices, None if it does not say."""
        gpu, npu = cost.power_w("gpu"), cost.power_w("npu")
        if gpu is None or npu is None:
            return None
        both = cost.power_w("both")
        return cls(gpu, npu, gpu + npu if both is None else both, cost.power_w("idle") or 0.0)

    def joules(self, gpu_s: float, npu_s: float, both_s: float, total_s: float) -> float:
        """Return the energy of busy times (`both_s` is part of neither of the first two)."""
        idle_s = max(total_s - gpu_s - npu_s - both_s, 0.0)
        return self.gpu_w * gpu_s + self.npu_w * npu_s + self.both_w * both_s + self.idle_w * idle_s


@dataclass(frozen=True)
class Objective:
    """The objective: `seconds` weighs seconds, `joules` weighs joules."""

    seconds: float = 1.0
    joules: float = 0.0
    power: PowerModel | None = None

    def cost(self, option: Option, state: int) -> float:
        """Return the cost of an option entered from a state."""
        if state in option.forbidden:
            return INF
        total = option.elapsed_s + option.enter_s[state]  # `seconds`, without a call
        if total == INF:
            return INF  # 0 * INF is NaN where seconds weigh nothing
        value = self.seconds * total
        if self.joules and self.power is not None:
            value += self.joules * option.joules(self.power, state)
        return value

    def cost_alone(self, option: Option, state: int) -> float:
        """Return `cost` with what a GPU kernel after the option pays for the state."""
        return self.cost(option, state) + self.idle * option.back_s

    @property
    def idle(self) -> float:
        """Return the cost of a second in which no device computes."""
        watts = 0.0 if self.power is None else self.power.idle_w
        return self.seconds + self.joules * watts


class Option(NamedTuple):
    """One tiling of one operator, with its times.

    gpu_s, npu_s    how long each device is busy (contention included)
    cpu_rows, cpu_s rows of a third device, after the NPU's, and how long it is busy
    elapsed_s       from the start until both are done and (with stream signals) the next launches
                    are queued, without other synchronisation
    enter_s         T_sync + T_copy when entered from `GPU` and from `HOST`
    leaves          state after it
    back_s          what that costs a GPU kernel after it: a submission to an empty queue, or 0
    uncertainty     by which fraction the NPU's predicted time may be off
    forbidden       states from which it may not be entered (the margin)
    """

    strategy: Strategy
    mode: Mode
    elapsed_s: float
    gpu_s: float = 0.0
    npu_s: float = 0.0
    enter_s: tuple[float, float] = (0.0, 0.0)
    leaves: int = GPU
    back_s: float = 0.0
    rows: int = 0
    npu_tiles: NpuTiles | None = None
    tokens_first: bool = False
    cpu_rows: int = 0
    cpu_s: float = 0.0
    uncertainty: float = 0.0
    forbidden: frozenset[int] = frozenset()

    @property
    def is_cut(self) -> bool:
        """Return whether several devices compute."""
        return self.mode.endswith("dominant")

    @property
    def devices(self) -> frozenset[DeviceKind]:
        """Return the devices that compute."""
        if not self.is_cut:
            return frozenset({"gpu" if self.mode == "gpu" else "npu"})
        return BOTH | {"cpu"} if self.cpu_rows else BOTH

    @property
    def row_cuts(self) -> tuple[int, ...]:
        """Return the rows where one device's end and another's begin, or all rows."""
        return (self.rows, self.rows + self.cpu_rows) if self.cpu_rows else (self.rows,)

    def seconds(self, state: int = GPU) -> float:
        """Return the time on a path when entered from a state."""
        return self.elapsed_s + self.enter_s[state]

    def seconds_alone(self, state: int = GPU) -> float:
        """Return section 4.3's time of this matmul by itself, with a GPU kernel after it."""
        return self.seconds(state) + self.back_s

    def joules(self, power: PowerModel, state: int = GPU) -> float:
        """Return energy when entered from a state."""
        both = max(self.gpu_s + self.npu_s - self.elapsed_s, 0.0)
        alone = (self.gpu_s - both, self.npu_s - both)
        return power.joules(*alone, both, self.seconds(state))

    def forbid(self, *states: int) -> Option:
        """Return the same, closed to these states as well."""
        return self._replace(forbidden=self.forbidden | frozenset(states))

    def unrestricted(self) -> Option:
        """Return the same, open to both states."""
        return self._replace(forbidden=frozenset())

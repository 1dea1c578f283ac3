"""Weight bytes that plans need on each device, and what devices and budgets allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from hetero.backends.protocol import EVERY_KIND, KINDS, DeviceKind
from hetero.profiler.features import weight_bytes
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DeviceProfile
from hetero.solver.expert_choice import ExpertsChoice, bytes_of_experts
from hetero.solver.options import INF, Option
from hetero.solver.plan import Memory
from hetero.solver.solution import Solution


class Tables(Protocol):
    """Tables of a planner's model and profile."""

    spec: ModelGraph
    profile: DeviceProfile
    sizes: tuple[int, ...]

    @property
    def experts(self) -> ExpertsChoice | None:
        """Return the NPU's routed experts; None where one device has all without a choice."""

    def shape(self, name: OpName) -> tuple[int, int]:
        """Return (n, k) of a fused or separate matmul."""


class Limits(NamedTuple):
    """Most bytes of weights: of all devices together, of each, and of rows that several hold.

    Infinite without a limit.
    """

    both: float = INF
    gpu: float = INF
    npu: float = INF
    copies: float = INF
    cpu: float = INF

    def hold(self, memory: Memory) -> bool:
        """Return whether a plan with this memory fits."""
        parts = (
            memory.total_bytes,
            memory.gpu_bytes,
            memory.npu_bytes,
            memory.twice_bytes,
            memory.cpu_bytes,
        )
        return all(nbytes <= limit for nbytes, limit in zip(parts, self, strict=True))


def limits_of(profile: DeviceProfile, budget_bytes: float | None = None) -> Limits:
    """Return a budget for all devices together, and what each can hold (`memory_limit_bytes`)."""
    resident = {kind: x.capabilities.memory_limit_bytes for kind, x in profile.devices.items()}
    gpu, npu, cpu = (resident.get(kind) or INF for kind in EVERY_KIND)
    return Limits(INF if budget_bytes is None else budget_bytes, gpu, npu, cpu=cpu)


def without_experts(planner: Tables, limits: Limits) -> Limits:
    """Return what limits leave for matmuls; routed experts are stored once, where they are."""
    gpu, npu = (expert_bytes(planner, kind) for kind in KINDS)
    return limits._replace(both=limits.both - gpu - npu, gpu=limits.gpu - gpu, npu=limits.npu - npu)


class ResidentRows(NamedTuple):
    """Rows that live on each device: [0, npu), [gpu, n), and those of a CPU."""

    npu: int
    gpu: int
    cpu: tuple[int, int] = (0, 0)


def rows_needed(option: Option, m: int, n: int) -> ResidentRows:
    """Return what one tiling needs."""
    if option.npu_tiles is None or option.rows == 0:
        return ResidentRows(0, 0)
    if option.npu_tiles.tokens < m:
        return ResidentRows(option.rows, 0)
    if option.cpu_rows:
        first, stop = option.row_cuts
        return ResidentRows(first, stop, (first, stop))
    return ResidentRows(option.rows, option.rows if option.rows < n else n)


def union(resident: Iterable[ResidentRows], n: int) -> ResidentRows:
    """Return the rows for all of several tilings."""
    npu, gpu, cpu = 0, n, (0, 0)
    for rows in resident:
        npu, gpu = max(npu, rows.npu), min(gpu, rows.gpu)
        if rows.cpu[1]:
            cpu = (min(cpu[0], rows.cpu[0]) if cpu[1] else rows.cpu[0], max(cpu[1], rows.cpu[1]))
    return ResidentRows(npu, gpu, cpu)


def resident_by_op(planner: Tables, solutions: Iterable[Solution]) -> dict[OpName, ResidentRows]:
    """Return the resident rows of every matmul.

    Parts of a group that is unfused somewhere count as themselves.
    """
    needed: dict[OpName, list[ResidentRows]] = {}
    for solution in solutions:
        for name, option in solution.options.items():
            n, _ = planner.shape(name)
            m = planner.spec.tokens_of(name, solution.scenario.m)
            needed.setdefault(name, []).append(rows_needed(option, m, n))
    return {name: union(rows, planner.shape(name)[0]) for name, rows in needed.items()}


def weight_memory(planner: Tables, solutions: Iterable[Solution]) -> Memory:
    """Return the bytes by device (`memory_of_rows`)."""
    return memory_of_rows(planner, resident_by_op(planner, solutions))


def memory_of_rows(planner: Tables, rows: Mapping[OpName, ResidentRows]) -> Memory:
    """Return the bytes by device of the rows of every matmul that live there.

    A row on both counts twice, on each as the device holds it, and one of an NPU whose graphs own
    their weights once for each graph size.
    """
    gpu, npu = (expert_bytes(planner, kind) for kind in KINDS)
    twice = graphs = cpu = 0.0
    for name, resident in rows.items():
        on_gpu, on_npu = resident_bytes(planner, name, resident)
        gpu, npu = gpu + on_gpu, npu + on_npu
        twice += copy_bytes(planner, name, resident)
        cpu += row_bytes(planner, "cpu", name) * (resident.cpu[1] - resident.cpu[0])
        graphs += on_npu - row_bytes(planner, "npu", name) * resident.npu
    return Memory(
        gpu_bytes=round(gpu),
        npu_bytes=round(npu),
        cpu_bytes=round(cpu),
        twice_bytes=round(twice),
        graphs_bytes=round(graphs),
    )


def resident_bytes(planner: Tables, name: OpName, resident: ResidentRows) -> tuple[float, float]:
    """Return the bytes of a matmul in all layers: on the GPU, and on the NPU."""
    n, _ = planner.shape(name)
    gpu, npu = row_bytes(planner, "gpu", name), row_bytes(planner, "npu", name)
    return gpu * (n - resident.gpu), npu * resident.npu * copies(planner, name)


def copy_bytes(planner: Tables, name: OpName, resident: ResidentRows) -> float:
    """Return the bytes, in all layers, of the rows of a matmul that are on a device more.

    They are the NPU's that the GPU has as well, and the CPU's that either has.
    """
    twice = row_bytes(planner, "npu", name) * max(resident.npu - resident.gpu, 0)
    start, stop = resident.cpu
    alone = max(min(stop, resident.gpu) - max(start, resident.npu), 0)
    return twice + row_bytes(planner, "cpu", name) * (stop - start - alone)


def copies(planner: Tables, name: OpName) -> int:
    """Return how often the NPU holds the rows that it has of a matmul."""
    if name in planner.spec.sampled or not _graphs_own_weights(planner):  # prompts give it one row
        return 1
    return max(len(planner.sizes), 1)


def holds_alone(planner: Tables, device: DeviceKind) -> bool:
    """Return whether a device can hold all weights as plans hold theirs: for each graph size."""
    _, *limits = limits_of(planner.profile)
    on_npu, needed = device == "npu", expert_bytes(planner, device)
    for matmul in planner.spec.matmuls:
        n, _ = planner.shape(matmul.name)
        every = ResidentRows(n, n) if on_npu else ResidentRows(0, 0)
        needed += resident_bytes(planner, matmul.name, every)[on_npu]
    return needed <= limits[on_npu]


def expert_bytes(planner: Tables, device: DeviceKind) -> float:
    """Return the bytes of routed experts on a device, of all where it has them without a choice."""
    if planner.experts is not None:
        return planner.experts.bytes_on(planner.profile, device)
    home = "gpu" if "gpu" in planner.profile.devices else "npu"
    return bytes_of_experts(planner.spec, planner.profile, device) if device == home else 0.0


def graph_bytes(planner: Tables) -> float:
    """Return what one more graph size takes if the NPU has all rows of a block.

    0 where graphs share.
    """
    if not _graphs_own_weights(planner):
        return 0.0
    names = [x.name for x in planner.spec.matmuls if x.name not in planner.spec.sampled]
    return sum(row_bytes(planner, "npu", name) * planner.shape(name)[0] for name in names)


def _graphs_own_weights(planner: Tables) -> bool:
    record = planner.profile.devices.get("npu")
    return record is not None and record.capabilities.per_graph_size == "weights"


def row_bytes(planner: Tables, device: DeviceKind, name: OpName) -> float:
    """Return the bytes of one row in all layers, stored once, in the device's layout."""
    _, k = planner.shape(name)
    weight_format, record = planner.spec.weight_format, planner.profile.devices.get(device)
    own = None if record is None else record.capabilities.weight_bytes.get(weight_format)
    once = float(weight_bytes(weight_format, 1, k) if own is None else own * k)
    return planner.spec.counts[name] * once

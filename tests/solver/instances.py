"""Small random devices and models, and a solver that tries everything (no shared code)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Attention, Embed, GatedAct, MatMul, Op, RMSNorm, Rope
from hetero.backends.protocol import PerGraphSize
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph, Node, OpName
from hetero.profiler.records import (
    Bandwidth,
    CapabilityRecord,
    DeviceProfile,
    DeviceRecord,
    FittedUnit,
    Knots,
    MatMulPredictor,
    NonMatmulPredictor,
    Power,
    ShapeRange,
)
from hetero.solver import residency
from hetero.solver.chooser import Rules
from hetero.solver.host_queue import HostQueue
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.solution import Scenario, Solution
from hetero.solver.weight_memory import Limits

F32 = WeightFormat.F32
NAMES: tuple[OpName, ...] = ("qkv", "o", "gate_up", "down")
ALIGN = 4
# Of memory that gives two of three devices what each reads alone.
BANDWIDTH = Bandwidth(
    gpu_alone_bytes_per_s=1.0,
    npu_alone_bytes_per_s=1.0,
    gpu_together_bytes_per_s=1.0,
    npu_together_bytes_per_s=1.0,
)
CPU = FittedUnit(
    device="cpu",
    engine="llama.cpp",
    bytes_per_weight=4.0,
    call_tokens=1,
    bandwidth_bytes_per_s=1.0,
    flops_per_s=1.0,
    attention_flops_per_s=1.0,
    cache_bytes_per_s=1.0,
    call_s=0.0,
    state_flops_per_s=1.0,
)


@dataclass
class Instance:
    """Random tables: seconds[device][k][m, n]."""

    tables: dict[str, dict[int, np.ndarray]]
    sizes: tuple[int, ...]
    contention: tuple[float, float]
    sync: HostQueue
    non_matmul_s: dict[str, float]
    margin: float
    layers: int
    rows: dict[str, int]
    ks: dict[str, int]
    npu_scale: float = 1.0

    def seconds(self, device: str, m: int, n: int, k: int) -> float:
        if m == 0 or n == 0:
            return 0.0
        scale = self.npu_scale if device == "npu" else 1.0
        return scale * float(self.tables[device][k][m, n])


class TableCost(CostModel):
    """A cost model that answers from an instance."""

    def __init__(self, profile: DeviceProfile, instance: Instance) -> None:
        super().__init__(profile)
        self.instance = instance

    def with_profile(self, profile: DeviceProfile) -> CostModel:
        return TableCost(profile, self.instance)

    def table_s(
        self, device: Any, weight_format: Any, ms: Any, ns: Any, k: Any, order: Any = ""
    ) -> Any:
        m, n = np.asarray(ms, int)[:, None], np.asarray(ns, int)[None, :]
        scale = self.instance.npu_scale if device == "npu" else 1.0
        return scale * self.instance.tables[device][int(k)][m, n]

    def contention(self, device: Any, phase: Any, weight_format: Any = None) -> float:
        return self.instance.contention[0 if device == "gpu" else 1]


def random_instance(seed: int, *, monotone: bool | None = None, tiny: bool = True) -> Instance:
    rng = np.random.default_rng(seed)
    if monotone is None:
        monotone = bool(rng.integers(2))
    names = ("qkv", "o", "gate_up", "down")
    rows = {
        x: int(rng.integers(1, 4 if tiny else 9)) * ALIGN + int(rng.integers(0, 3)) for x in names
    }
    ks = {"qkv": 1, "gate_up": 1, "o": 2, "down": 3}
    sizes = tuple(sorted({int(x) for x in rng.integers(1, 9, rng.integers(1, 3 if tiny else 4))}))
    top = 20 if tiny else 30
    tables = {
        device: {k: _table(rng, top, max(rows.values()) + 1, monotone, slow) for k in (1, 2, 3)}
        for device, slow in (("gpu", 1.0), ("npu", float(rng.choice([0.2, 1.0, 2.0]))))
    }
    some = lambda: float(rng.choice([0.0, 0.1, 1.0]))  # noqa: E731
    sync = HostQueue(
        wait_s=some(), submit_s=some(), join_s=some() / 4, copy_s=some() / 4 * rng.integers(2)
    )
    sync = replace(sync, npu_restart_s=some() / 4, eager=bool(seed % 2))
    if rng.integers(2):  # gates, in steps of few tokens
        sync = replace(sync, ring_s=some() / 2, busy_s=some() / 2)
    if rng.integers(2):  # a GPU whose clock falls while it waits
        gaps, costs = rng.random((2, 3)).cumsum(axis=1)
        sync = replace(sync, idle=(tuple(2 * gaps), tuple(costs)))
    slow = (1 + 0.5 * rng.random(), 1 + 0.5 * rng.random()) if rng.integers(2) else (1.0, 1.0)
    return Instance(
        tables, sizes, slow, sync, {"gpu": 0.3, "npu": 0.5}, float(rng.choice([0.0, 0.03, 0.2])),
        int(rng.integers(1, 5)), rows, ks,
    )  # fmt: skip


def _table(rng: Any, ms: int, ns: int, monotone: bool, slow: float) -> np.ndarray:
    if monotone:
        base = rng.random((ms, ns)).cumsum(0).cumsum(1) / 8 + rng.random()
        return np.asarray(slow * base)
    return np.asarray(slow * rng.exponential(2.0, (ms, ns)) + 0.01)


def profile_of(
    instance: Instance,
    *,
    npu: bool = True,
    cpu: bool = False,
    non_matmul_on_npu: bool = False,
    npu_bytes: float | None = None,
    per_graph_size: PerGraphSize = "nothing",
) -> DeviceProfile:
    """A profile with the instance's capabilities; times come from `TableCost`. A weight takes
    `npu_bytes` in the NPU's own layout. With a `cpu` as third device no power is known.
    """
    own = {"weight_bytes": {F32: npu_bytes} if npu_bytes else {}, "per_graph_size": per_graph_size}
    knots = Knots(tokens=(1,), coefficients=((0.0, 0.0, 0.0, 0.0),))
    shape = ShapeRange(m=(1, 99), n=(1, 99), k=(1, 99))
    kinds = ("gpu", "npu") if npu else ("gpu",)
    kinds += ("cpu",) if cpu else ()
    devices = {
        kind: DeviceRecord(
            backend="null",
            name=kind,
            driver="",
            fingerprint=kind,
            capabilities=_capabilities(kind, instance).model_copy(
                update=own if kind == "npu" else {}
            ),
        )
        for kind in kinds
    }
    others = [
        NonMatmulPredictor(
            device=d,
            op=op,
            coefficients={"calls": instance.non_matmul_s[d]},
            max_m=99,
            max_context=999,
        )
        for d in (("gpu", "npu") if non_matmul_on_npu else ("gpu",))
        for op in ("Embed", "RMSNorm", "RMSNorm+add", "Rope", "Attention", "GatedAct")
    ]  # fmt: skip
    return DeviceProfile(
        name="random",
        created="now",
        hetero_version="0",
        devices=devices,
        power=None if cpu else Power(source="test", gpu_w=3.0, npu_w=1.0, both_w=3.5, idle_w=0.5),
        predictors=tuple(
            MatMulPredictor(device=d, weight_format=F32, knots=knots, measured=shape) for d in kinds
        ),
        other_predictors=tuple(others),
        bandwidth=BANDWIDTH if cpu else Bandwidth(),
        units=(CPU,) if cpu else (),
    )


def _capabilities(kind: str, instance: Instance) -> CapabilityRecord:
    if kind != "npu":
        return CapabilityRecord(asynchronous=True, weight_formats=(F32,))
    return CapabilityRecord(
        static_shapes=True, graph_sizes=instance.sizes, weight_formats=(F32,), row_alignment=ALIGN
    )


def spec_of(instance: Instance) -> ModelGraph:
    """Layers of the instance's matmuls with a Llama's operators between them; not validated, since
    their random sizes fit no tensors.
    """
    norm = RMSNorm(d=1, eps=1e-6, add=True)
    between: dict[str, tuple[Op, ...]] = {
        "qkv": (
            Rope(heads=1, kv_heads=1, head_dim=2, theta=1e4, max_position=99),
            Attention(heads=1, kv_heads=1, head_dim=2, capacity=99),
        ),
        "o": (norm,),
        "gate_up": (GatedAct(f=3),),
        "down": (norm,),
    }
    nodes = [
        _node("embed", Embed(vocab=9, d=1, weight_format=F32)),
        _node("norm", RMSNorm(d=1, eps=1e-6)),
    ]
    for layer in range(instance.layers):
        for name in NAMES:
            op = MatMul(n=instance.rows[name], k=instance.ks[name], weight_format=F32)
            nodes.append(_node(f"{layer}.{name}", op, layer=layer, plan_op=name))
            after = enumerate(between[name])
            nodes += [_node(f"{layer}.{name}.{i}", x, layer=layer) for i, x in after]
    return ModelGraph.model_construct(
        name="tiny", architecture="llama", max_position=99, weight_format=F32, nodes=tuple(nodes)
    )


def _node(name: str, op: Op, **own: Any) -> Node:
    return Node(name=name, op=op, slots=dict.fromkeys(op.ports, "any"), **own)


def planner_of(instance: Instance, *, unfused: bool = False, **changes: Any) -> Planner:
    """A planner whose shapes are the instance's."""
    known = ("cpu", "non_matmul_on_npu", "npu_bytes", "per_graph_size")
    own = {key: changes.pop(key) for key in known if key in changes}
    profile = profile_of(instance, **own)
    rules = Rules(margin=changes.pop("margin", instance.margin), **changes)
    settings = PlannerSettings(rules=rules, unfused=unfused)
    cost = TableCost(profile, instance)
    return Planner(spec_of(instance), profile, settings, cost=cost, overheads=instance.sync)


@dataclass
class Way:
    """One tiling in the naive solver: seconds, what it costs from each state, how it leaves."""

    kind: str
    gpu_s: float
    npu_s: float
    together: float
    enter: tuple[float, float]
    leaves: int
    back: float  # what that costs the GPU kernel behind it
    npu_rows: int = 0
    gpu_from: int = 0

    def cost(self, state: int) -> float:
        return self.together + self.enter[state]


def sync_at(instance: Instance, m: int) -> tuple[HostQueue, bool]:
    """Costs in a step of m tokens, and whether it has gates."""
    sync = instance.sync
    if sync.ring_s is None or m > 8:
        return sync, False
    return replace(sync, submit_s=sync.ring_s), True


def every_way(instance: Instance, name: str, m: int) -> list[Way]:
    """All tilings of one matmul, one after another."""
    n, k = instance.rows[name], instance.ks[name]
    sync, _ = sync_at(instance, m)
    moved = lambda count: sync.copy(4 * count)  # noqa: E731
    g = lambda mm, nn: instance.seconds("gpu", mm, nn, k)  # noqa: E731
    whole = g(m, n)
    ways = [Way("gpu", whole, 0, whole, (0, sync.submit_s + moved(m * k)), 0, 0.0)]
    spans: list[tuple[int, tuple[int, ...]]] = []
    for first in instance.sizes:
        spans.append((min(first, m), (first,)))
        if first < m:
            spans.extend((min(first + g, m), (first, g)) for g in instance.sizes)
    for t, graphs in spans:
        for r in [*range(ALIGN, n, ALIGN), n]:
            npu = sum(instance.seconds("npu", size, r, k) for size in graphs)
            if t == m and r == n:
                enter = (
                    sync.wait_s + sync.npu_restart_s + moved(m * k) + moved(m * n),
                    moved(m * n),
                )
                enter = (enter[0] + idle(sync, npu), enter[1])
                ways.append(Way("npu", 0, npu, npu, enter, 1, sync.submit_s, n, n))
                continue
            gpu = min(g(m, n - r) + g(m - t, r), g(m - t, n) + g(t, n - r))
            ways.append(_cut(instance, m, n, k, t, r, gpu, npu, sync.npu_restart_s))
    return ways


def idle(sync: HostQueue, gap: float) -> float:
    """What a gap costs, by hand: the line through the measured points from (0, 0) on."""
    before = (0.0, 0.0)
    for point in zip(*sync.idle, strict=True):
        if gap < point[0]:
            share = (gap - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def _cut(
    instance: Instance,
    m: int,
    n: int,
    k: int,
    t: int,
    r: int,
    gpu: float,
    npu: float,
    ahead: float,
) -> Way:
    a, b = instance.contention
    sync, _ = sync_at(instance, m)
    ends = sorted([(a * gpu, "gpu"), (b * npu, "npu")])
    if ends[0][1] == "gpu":
        gpu_s = a * gpu
        npu_s = gpu_s + (npu - gpu_s / b)
    else:
        npu_s = b * npu
        gpu_s = npu_s + (gpu - npu_s / a)
    npu_dominant = npu_s + ahead >= gpu_s
    copy = lambda count: sync.copy(4 * count)  # noqa: E731
    result = copy(m * n - t * r) if npu_dominant else copy(t * r)
    submit = sync.submit_s if npu_dominant and not sync.eager else 0.0
    result += idle(sync, npu_s + ahead - gpu_s) if npu_dominant else 0.0
    enter = (
        sync.wait_s + sync.join_s + submit + copy(t * k) + result,
        sync.submit_s + sync.join_s + copy(m * k) + result,
    )
    gpu_from = r if t == m else 0
    leaves, back = (1, sync.submit_s) if npu_dominant else (0, 0.0)
    return Way("cut", gpu_s, npu_s, max(gpu_s, npu_s + ahead), enter, leaves, back, r, gpu_from)


def allowed_costs(ways: list[Way], margin: float) -> np.ndarray:
    """[ways, 2] cost from each state, infinite where the margin forbids a cut."""
    best = [min(w.cost(s) + w.back for w in ways if w.kind != "cut") for s in (0, 1)]
    return np.asarray(
        [
            [
                np.inf
                if w.kind == "cut" and w.cost(s) + w.back > (1 - margin) * best[s]
                else w.cost(s)
                for s in (0, 1)
            ]
            for w in ways
        ]
    )  # fmt: skip


def brute_force_step(instance: Instance, m: int, ways: dict[str, list[Way]] | None = None) -> float:
    """Best whole step over all combinations of tilings; the rest on the GPU."""
    names = ("qkv", "o", "gate_up", "down")
    ways = ways or {x: every_way(instance, x, m) for x in names}
    costs = {x: allowed_costs(ways[x], instance.margin) for x in names}
    rest, layers = instance.non_matmul_s["gpu"], instance.layers
    total = np.zeros(tuple(len(ways[x]) for x in names))
    for i, x in enumerate(names):
        shape = [1] * 4
        shape[i] = len(ways[x])
        # A GPU operator is before every matmul, so it is always entered from the GPU.
        total = total + layers * costs[x][:, 0].reshape(shape)
        back = np.asarray([w.back for w in ways[x]])
        between = 2 * rest if x == "qkv" else rest
        total = total + layers * (between + back).reshape(shape)
    return float(total.min()) + 2 * rest


def combinations_of(*sizes: int) -> Any:
    return itertools.product(*(range(s) for s in sizes))


def solve_limited(
    planner: Planner, scenarios: list[Scenario], limits: Limits, places: int = residency.GRID_ROWS
) -> list[Solution]:
    """The best plans of all scenarios together within the limits; each step counts once."""
    parts, objective = [(planner, scenarios)], planner.objective()
    rows = residency.choose_rows(parts, objective, limits, lambda _: 1.0, places=places)
    (solved,) = residency.solve_with(parts, objective, rows)
    return solved

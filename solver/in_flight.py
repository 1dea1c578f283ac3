"""Forms of a prompt's calls that are in flight together, for `Plan.in_flight`.

Cut one after another a prompt takes Σ max(gpu, npu) over its matmuls, and the NPU idles while the
GPU attends. With other chunks' work in those gaps it takes about max(Σ gpu, Σ npu), which asks for
other cuts: such that both devices have as much to do in all, attention and norms included. Without
cuts that is mllm-NPU ("Fast On-device LLM Inference with NPUs", section 3.4), whose whole matmuls
are the NPU's; here each goes where the sums want it.

C: ways to compute one matmul, by the number of its first rows that are the NPU's.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import OpName
from hetero.profiler.records import phase_of
from hetero.solver.baselines import CHUNKED_AT, chunk_tokens
from hetero.solver.kernel_times import Bools, Floats
from hetero.solver.plan import InFlight, OpPlan, Strategy, Tile
from hetero.solver.planner import Planner
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario, Solution, uses_third
from hetero.solver.tilings import MatMulSpace
from hetero.solver.weight_memory import (
    Limits,
    ResidentRows,
    limits_of,
    resident_by_op,
    resident_bytes,
    union,
)

MAX_WAYS: Final = 8  # of one matmul
MAX_SUMS: Final = 4096  # ways of several matmuls together: all of those of four


class _Ways(NamedTuple):
    """Ways [C] of one matmul: rows of the NPU, seconds of each device, contention included.

    `share` is the part of all layers that have it.
    """

    name: OpName
    share: float
    space: MatMulSpace
    rows: Sequence[int]
    gpu_s: Floats
    npu_s: Floats

    @property
    def whole(self) -> Bools:
        """Return [C] where one device computes all rows."""
        rows = np.asarray(self.rows)
        return np.asarray((rows == 0) | (rows == self.space.n))


def in_flight(
    planner: Planner,
    non_matmul_device: DeviceKind,
    m: int,
    context: int,
    resident: Mapping[OpName, ResidentRows],
    limits: Limits,
) -> tuple[InFlight, ...]:
    """Return the modes that balance calls of m tokens after `context` others best.

    `whole` and, where that differs, `both`; none where one device has everything, or the NPU the
    other operators.

    Rows that a device does not hold yet (`resident`) may be used where all fit the `limits`.
    """
    if non_matmul_device != "gpu" or any(
        kind not in planner.profile.devices for kind in ("gpu", "npu")
    ):
        return ()
    names = [x.name for x in planner.spec.block if x.name not in planner.spec.sampled]
    every = [_ways(planner, name, m) for name in names]
    if not _fits(planner, every, resident, limits):
        every = [_within(x, resident.get(x.name, ResidentRows(0, x.space.n))) for x in every]
    non_matmul = planner.non_matmul_times(Scenario("prefill", m, context), non_matmul_device)[
        non_matmul_device
    ]
    factor = planner.cost.contention("gpu", phase_of(m), planner.kernels.weight_format)
    spec = planner.spec
    non_matmul_s = factor * sum(
        x.gpu_s * (spec.counts[name] / spec.prompt_layers)
        for name, x in non_matmul.after.items()
        if name in names
    )
    call_s = planner.overheads.wait_s + planner.overheads.submit_s
    whole = _best([_only(ways, ways.whole) for ways in every], non_matmul_s, call_s)
    both = _best(every, non_matmul_s, call_s)
    if whole is None or both is None:
        return ()
    modes = [InFlight(mode="whole", ops=_entries(every, whole, m))]
    if both != whole:
        modes.append(InFlight(mode="both", ops=_entries(every, both, m)))
    return tuple(x for x in modes if any(t.device == "npu" for op in x.ops for t in op.tiles))


def in_flight_of(
    planner: Planner, solutions: Sequence[Solution], request: PlanRequest
) -> tuple[InFlight, ...]:
    """Do the same as `in_flight`, given the rows that a plan's solutions keep resident.

    None where energy is what counts, or the GPU's share is bounded: those modes are for latency
    alone; and none where a CPU takes rows, since they are for two devices.
    """
    longest = max(x.scenario.m for x in solutions if x.scenario.phase == "prefill")
    chunk = min(chunk_tokens(planner, CHUNKED_AT), longest)
    if request.max_gpu_share < 1 or request.objective == "energy":
        return ()
    if any(map(uses_third, solutions)):
        return ()
    resident = resident_by_op(planner, solutions)
    limits = limits_of(planner.profile, request.memory_budget_bytes)
    non_matmul_device = next(
        x.non_matmul.device for x in solutions if x.scenario.phase == "prefill"
    )
    return in_flight(planner, non_matmul_device, chunk, 2 * chunk, resident, limits)


def _ways(planner: Planner, name: OpName, m: int) -> _Ways:
    """Return the NPU's rows end at a cut that the plan prepares, or nowhere, or at the last row."""
    space = planner.space(name)
    rows = [int(x) for x in space.rows]
    if len(rows) > MAX_WAYS:
        places = np.linspace(0, len(rows) - 1, MAX_WAYS).round().astype(int)
        rows = [rows[i] for i in dict.fromkeys(places.tolist())]
    columns = [int(np.searchsorted(space.rows, x)) for x in rows]
    if space.sizes:
        graph = min(bisect_left(space.sizes, m), len(space.sizes) - 1)
        npu = space.npu_table(np.zeros(0, np.intp))[graph]
    else:
        npu = space.npu_table(np.asarray([m]))[0]
    npu_s = np.concatenate(([0.0], npu[columns] + planner.overheads.npu_restart_s))
    left = np.asarray([space.n, *(space.n - x for x in rows)])
    gpu_s = space.gpu_table(np.asarray([m]), left)[0]
    key = (phase_of(m), planner.kernels.weight_format)
    a, b = (planner.cost.contention(kind, *key) for kind in ("gpu", "npu"))
    share = planner.spec.counts[name] / planner.spec.prompt_layers
    return _Ways(name, share, space, [0, *rows], a * gpu_s, b * npu_s)


def _only(ways: _Ways, allowed: Bools) -> _Ways:
    gpu_s, npu_s = (np.where(allowed, x, np.inf) for x in (ways.gpu_s, ways.npu_s))
    return ways._replace(gpu_s=gpu_s, npu_s=npu_s)


def _within(ways: _Ways, resident: ResidentRows) -> _Ways:
    """Return the rows that the devices hold."""
    rows = np.asarray(ways.rows)
    gpu_from = np.where(rows < ways.space.n, rows, ways.space.n)
    return _only(ways, (rows <= resident.npu) & (gpu_from >= resident.gpu))


def _fits(
    planner: Planner,
    every: Sequence[_Ways],
    resident: Mapping[OpName, ResidentRows],
    limits: Limits,
) -> bool:
    """Return whether both devices may hold all rows of these matmuls with the rows of others."""
    wanted = dict(resident)
    for ways in every:
        n = ways.space.n
        wanted[ways.name] = union(
            [wanted.get(ways.name, ResidentRows(0, n)), ResidentRows(n, 0)], n
        )
    sums = np.sum([resident_bytes(planner, name, rows) for name, rows in wanted.items()], axis=0)
    gpu, npu = sums.tolist()
    return bool(gpu + npu <= limits.both and gpu <= limits.gpu and npu <= limits.npu)


def _best(every: Sequence[_Ways], non_matmul_s: float, call_s: float) -> tuple[int, ...] | None:
    """Return the way of each matmul (places in C) that minimises max(Σ gpu, Σ npu).

    It includes what each call on the NPU costs the thread that drives it; None where none is
    possible.
    """
    sums: list[tuple[float, float, tuple[int, ...]]] = [(non_matmul_s, 0.0, ())]
    for ways in every:
        calls = call_s * (np.asarray(ways.rows) > 0)
        each = list(zip(ways.share * ways.gpu_s, ways.share * (ways.npu_s + calls), strict=True))
        longer = [
            (gpu_s + float(gpu), npu_s + float(npu), (*chosen, way))
            for gpu_s, npu_s, chosen in sums
            for way, (gpu, npu) in enumerate(each)
            if np.isfinite(gpu) and np.isfinite(npu)
        ]
        sums = _undominated(longer)
    if not sums:
        return None
    # Of equal ones the one with least work.
    return min(sums, key=lambda x: (max(x[:2]) + 1e-3 * (x[0] + x[1]), x[2]))[2]


def _undominated(
    sums: Sequence[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Return the sums that no other one beats on both devices, at most `MAX_SUMS` of them."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for one in sorted(sums):
        if not kept or one[1] < kept[-1][1]:
            kept.append(one)
    return kept[:: -(-len(kept) // MAX_SUMS) or 1]


def _entries(every: Sequence[_Ways], chosen: Sequence[int], m: int) -> tuple[OpPlan, ...]:
    return tuple(_entry(ways, way, m) for ways, way in zip(every, chosen, strict=True))


def _entry(ways: _Ways, way: int, m: int) -> OpPlan:
    space, cut = ways.space, ways.rows[way]
    edges = sorted({0, cut, space.n})
    tiles = [
        _tile(space, "npu" if rows[1] <= cut else "gpu", rows, m)
        for rows in itertools.pairwise(edges)
    ]
    strategy: Strategy = "row-cut"
    if len(tiles) == 1:
        strategy = "npu-only" if cut else "gpu-only"
    gpu_s, npu_s = float(ways.gpu_s[way]), float(ways.npu_s[way])
    return OpPlan(
        phase="prefill",
        m=None,
        op=ways.name,
        n=space.n,
        k=space.k,
        strategy=strategy,
        tiles=tuple(tiles),
        predicted_s=max(gpu_s, npu_s),
        gpu_s=gpu_s,
        npu_s=npu_s,
    )


def _tile(space: MatMulSpace, device: DeviceKind, rows: tuple[int, int], m: int) -> Tile:
    chosen = space.kernels.choice(device, m, rows[1] - rows[0], space.k)
    own = chosen.weight_format is space.kernels.base
    return Tile(
        device=device,
        tokens=(0, None),
        rows=rows,
        order=chosen.order,
        precision=None if own else chosen.weight_format,
    )

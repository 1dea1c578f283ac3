"""Depths of the context at which decode steps move to other devices.

Attention takes longer with every token before it, and by another amount on each device, so that
the devices that decode fastest at first may not be so later. A band is what decodes from a depth
on: the operators besides the matmuls are on the other device, and each matmul is computed where
that is best then, of rows that the devices hold anyway, or by that device alone, which then holds
all rows. Keys and values are in memory that both map, so nothing else changes between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from hetero.backends.ops import Attention
from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.solver.chooser import Chooser
from hetero.solver.copies import least_gain
from hetero.solver.expert_choice import model_bytes
from hetero.solver.non_matmul_devices import of_the_gpu
from hetero.solver.options import INF, Objective, Option
from hetero.solver.planner import Planner
from hetero.solver.residency import mask_of
from hetero.solver.solution import Scenario, Solution
from hetero.solver.weight_memory import Limits, ResidentRows, memory_of_rows, union

STEP: Final = 64  # tokens; bands begin at multiples
LONGEST: Final = (
    32768  # tokens of a context, where nothing is said: profiles measure no longer ones
)
Name = TypeVar("Name")


@dataclass(frozen=True, kw_only=True)
class BandRequest:
    """Bounds of bands.

    longest    most tokens of a context
    tolerance  gain that predictions are not sure of
    limits     of weights
    apart      whether the devices may never compute at once
    """

    longest: int
    tolerance: float
    limits: Limits
    apart: bool = False


class Band(NamedTuple):
    """A solved decode step from a depth on, and the seconds of what decodes before it there.

    `more_bytes` of weights are there for it alone.
    """

    depth: int
    solution: Solution
    before_s: float
    more_bytes: int
    resident: Mapping[OpName, ResidentRows]


class _Variant(NamedTuple):
    options: Mapping[OpName, Option]
    device: DeviceKind
    needed: float  # by which fraction it must be faster than what decodes before it
    resident: Mapping[OpName, ResidentRows]


def may_move(spec: ModelGraph) -> bool:
    """Return whether decoding a model may change devices: not with operators of the GPU alone."""
    return not any(of_the_gpu(node.op) for node in spec.nodes)


def decode_bands(
    planner: Planner,
    base: Solution,
    resident: Mapping[OpName, ResidentRows],
    request: BandRequest,
) -> list[Band]:
    """Return the bands after the steps that `base` solves, the depths rising.

    `resident` are the rows on each device without them. A band must be faster than what decodes
    before it by more than predictions are sure of; by a tenth where it has more than a quarter of
    the weights on both devices, and one of them has a limit (`copies.least_gain`).
    """
    names = [x.name for x in planner.spec.matmuls]
    if not may_move(planner.spec) or planner.experts or not resident.keys() >= set(names):
        return []
    first = _Variant(base.options, base.non_matmul.device, 0.0, resident)
    variants = [first, *_variants(planner, base, resident, request)]

    def at(index: int, depth: int) -> Solution:
        variant = variants[index]
        return planner.evaluate(Scenario("decode", 1, depth), variant.options, variant.device)

    token_bytes = cache_bytes(planner.spec)

    def needed(before: int, after: int, depth: int) -> float:
        """Return the gain that is needed; infinite where handing over takes more than a step."""
        handover_s = planner.overheads.copy(depth * token_bytes)
        moves = variants[before].device != variants[after].device
        if moves and handover_s > at(after, depth).seconds:
            return INF
        return variants[after].needed

    every = range(len(variants))
    bands, before = [], 0
    stored_bytes = memory_of_rows(planner, resident).total_bytes
    for depth, index in switches(
        0, every, lambda i, depth: at(i, depth).seconds, needed, request.longest
    ):
        rows = variants[index].resident
        more = memory_of_rows(planner, rows).total_bytes - stored_bytes
        bands.append(Band(depth, at(index, depth), at(before, depth).seconds, more, rows))
        before = index
    return bands


def switches(
    first: Name,
    names: Sequence[Name],
    seconds: Callable[[Name, int], float],
    needed: Callable[[Name, Name, int], float],
    longest: int,
) -> list[tuple[int, Name]]:
    """Return the depths at which others than the `first` become faster by what is needed.

    `needed` returns the fraction by which the second must be faster than the first at a depth.
    Between two depths that are looked at, of which each is twice the one before, what becomes
    faster stays so.
    """

    def wins(after: Name, before: Name, depth: int) -> bool:
        limit_s = seconds(before, depth) * (1 - needed(before, after, depth))
        return seconds(after, depth) < limit_s

    moves: list[tuple[int, Name]] = []
    current, low, last = first, 0, longest // STEP
    stop = 1
    while low < last:
        stop = min(stop, last)
        others = [x for x in names if x != current and wins(x, current, stop * STEP)]
        if others:
            best = min(others, key=lambda x: seconds(x, stop * STEP))
            high = stop
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if wins(best, current, middle * STEP) else (middle, high)
            moves.append((high * STEP, best))
            current = best
        low, stop = stop, 2 * stop
    return moves


def cache_bytes(spec: ModelGraph) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    ops = [node.op for node in spec.nodes if isinstance(node.op, Attention) and not node.op.reads]
    return sum(2 * x.kv_heads * x.kv.row(x.head_dim) * x.kv.dtype.itemsize for x in ops)


def _variants(
    planner: Planner,
    base: Solution,
    resident: Mapping[OpName, ResidentRows],
    request: BandRequest,
) -> list[_Variant]:
    """Return what decodes with the other device attending: on the rows that are there, or alone."""
    variants: list[_Variant] = []
    for kind in planner.non_matmul_devices(1):
        if kind == base.non_matmul.device:
            continue
        alone = {name: _with_all(planner, name, rows, kind) for name, rows in resident.items()}
        memory = memory_of_rows(planner, alone)
        gain = least_gain(memory, model_bytes(planner.spec), request.limits)
        ways = [(resident, 0.0, False), (alone, gain, True)]
        for rows, least, is_alone in ways:
            options = _options(planner, base, rows, kind if is_alone or request.apart else None)
            if options is None or least == INF:
                continue
            solution = planner.solve(
                Scenario("decode", 1, request.longest), options=options, non_matmul_device=kind
            )
            needed = max(request.tolerance, least)
            variants.append(_Variant(solution.options, kind, needed, rows))
    return variants


def _with_all(planner: Planner, name: OpName, rows: ResidentRows, kind: DeviceKind) -> ResidentRows:
    """Return the rows on each device with all of a block's matmul on one, too."""
    n, _ = planner.shape(name)
    if name in planner.spec.sampled:
        return rows
    return union([rows, ResidentRows(n, n) if kind == "npu" else ResidentRows(0, 0)], n)


def _options(
    planner: Planner,
    base: Solution,
    resident: Mapping[OpName, ResidentRows],
    only: DeviceKind | None,
) -> dict[OpName, list[Option]] | None:
    """Return what each matmul may choose from, of one device alone if given.

    None if a matmul has nothing. What sees sampled rows alone stays as it is.
    """
    chooser = Chooser(planner.overheads, planner.settings.rules, Objective(power=planner.power))
    choices: dict[OpName, list[Option]] = {}
    for name in (x.name for x in planner.spec.matmuls):
        if name in planner.spec.sampled:
            choices[name] = [base.options[name].unrestricted()]
            continue
        space = planner.space(name)
        grid, rows = space.grid(1), resident[name]
        mask = mask_of(grid, rows, 1, space.n)
        options = chooser.options(space, 1, grid=grid, mask=mask, gpu_alone=rows.gpu == 0)
        if only is not None:
            options = [x.unrestricted() for x in options if x.devices == {only}]
        if not any(option.elapsed_s < INF for option in options):
            return None
        choices[name] = options
    return choices

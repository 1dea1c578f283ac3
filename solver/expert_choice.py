"""The NPU's routed experts, layer by layer; each is stored once, for both phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from hetero.backends.ops import Experts
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.backends.weights import packed_bytes
from hetero.profiler.cost import CostModel
from hetero.profiler.features import weight_bytes
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.expert_shares import Routing
from hetero.solver.expert_times import ExpertTimes, Ids, Steps, candidates
from hetero.solver.options import INF
from hetero.solver.overheads import Overheads
from hetero.solver.plan import LayerExperts

DECODE: Final = ((1, 1.0),)
USUAL: Final = ((256, 1.0),)  # a prompt's call
STEPS: Final = 16  # sizes of the NPU's part that are tried
UNITS: Final = 4096  # of memory, at most, in which parts are counted where they have no common size


@dataclass(frozen=True, eq=False)
class ExpertsChoice:
    """The NPU's experts of each layer that has some there, and why, in words.

    `times` predicts them. Without a choice there is neither: one device has them. `in_file`: the
    budget has no room, so a GPU that computes in place reads them from the model's mapped file, at
    `read_s` for each byte (0: not known) of the share that is `missed` in memory.
    """

    npu: tuple[LayerExperts, ...] = ()
    note: str = ""
    times: ExpertTimes | None = None
    in_file: bool = False
    missed: float = 0.0
    read_s: float = 0.0

    @property
    def is_one(self) -> bool:
        """Return whether anything differs from one device that has all, in memory."""
        return bool(self.npu) or self.in_file

    @property
    def device(self) -> DeviceKind | None:
        """Return the NPU where it has all experts of all layers."""
        every = 0 if self.times is None else sum(x.op.experts for x in self.times.layers)
        return "npu" if every and sum(len(x.npu) for x in self.npu) == every else None

    def seconds(self, op: Experts, m: int) -> float:
        """Return the mean seconds of the layers with these experts, waits between devices too."""
        assert self.times is not None
        own = [x for x in self.times.layers if x.op == op]
        npu = {x.layer: x.npu for x in self.npu}
        reads_s = self.missed * self.read_s * op.distinct(m) * stored_bytes(op)
        return reads_s + sum(self.times.seconds(x, npu.get(x.layer, ()), m) for x in own) / len(own)

    def bytes_on(self, profile: DeviceProfile, kind: DeviceKind) -> float:
        """Return the bytes of the routed experts that a device has, in its own layout."""
        if self.in_file:
            return 0.0
        assert self.times is not None
        npu = {x.layer: len(x.npu) for x in self.npu}
        counts = ((x.op, npu.get(x.layer, 0)) for x in self.times.layers)
        return sum(
            (on_npu if kind == "npu" else op.experts - on_npu) * expert_bytes(op, profile, kind)
            for op, on_npu in counts
        )


def choose_experts(
    cost: CostModel,
    graph: ModelGraph,
    overheads: Overheads,
    *,
    routing: Routing | None = None,
    prompts: Steps = USUAL,
    margin: float = 0.0,
    budget_bytes: float | None = None,
) -> ExpertsChoice:
    """Return the experts of each layer that are faster on the NPU.

    No layer is slower in decoding or in the prompts' calls for it, and all layers, with the matmuls
    of the model on the GPU, are faster by more than the margin; else the GPU has all. What a device
    or the budget has no room for is the other's.
    """
    ops = [x.op for x in graph.nodes if isinstance(x.op, Experts)]
    if not ops or "gpu" not in cost.profile.devices:
        return ExpertsChoice()
    times, phases, why = ExpertTimes(cost, graph, overheads, routing), (DECODE, prompts), ""
    if budget_bytes is not None and _in_file(cost.profile, graph, budget_bytes):
        return _left_in_file(times, graph, budget_bytes)
    if not set(KINDS) <= set(cost.profile.devices) or (why := _refusal(cost, "npu", ops)):
        return ExpertsChoice((), f"routed experts: on the GPU ({why})" if why else "")
    if why := _refusal(cost, "gpu", ops):
        return ExpertsChoice(_all(times), f"routed experts: on the NPU ({why})", times)
    room = _room(cost.profile, graph, ops, budget_bytes)
    parts = shared_best(times, cost.profile, room, phases)
    if parts is None:
        lacks = f"they take {_gib(room.total)}, and both devices hold less"
        return ExpertsChoice((), f"routed experts: on the GPU ({lacks})")
    pairs = list(zip(times.layers, parts, strict=True))
    npu = tuple(LayerExperts(layer=x.layer, npu=ids) for x, ids in pairs if ids)
    alone = [sum(times.steps_s(x, (), steps) for x, _ in pairs) for steps in phases]
    own = [sum(times.steps_s(x, ids, steps) for x, ids in pairs) for steps in phases]
    rests = (_rest_s(cost, graph, steps) for steps in phases)
    gains = [1 - (b + x) / (a + x) for a, b, x in zip(alone, own, rests, strict=True)]
    if not room.least and max(gains) <= margin:
        npu, own = (), alone
    return ExpertsChoice(npu, _note(times, npu, alone, own, routing), times)


def _all(times: ExpertTimes) -> tuple[LayerExperts, ...]:
    """Return all experts of all layers."""
    return tuple(LayerExperts(layer=x.layer, npu=tuple(range(x.op.experts))) for x in times.layers)


@dataclass(frozen=True)
class Room:
    """Bytes of experts in the NPU's layout: at least and at most so many are its.

    `total` are all experts' bytes in the GPU's layout.
    """

    least: float = 0.0
    most: float = INF
    total: float = 0.0


def _room(
    profile: DeviceProfile, graph: ModelGraph, ops: Sequence[Experts], budget_bytes: float | None
) -> Room:
    """Return what the devices' limits and a budget leave.

    The NPU's matmuls get of its memory what all matmuls are of all weights.
    """
    gpu, npu = (sum(op.experts * expert_bytes(op, profile, kind) for op in ops) for kind in KINDS)
    limits = {kind: x.capabilities.memory_limit_bytes or INF for kind, x in profile.devices.items()}
    matmuls = matmul_bytes(graph)
    most = limits["npu"] * gpu / (gpu + matmuls)
    if budget_bytes is not None and npu > gpu:
        most = min(most, max(budget_bytes - matmuls - gpu, 0.0) * npu / (npu - gpu))
    return Room(max(gpu - limits["gpu"], 0.0) * npu / gpu, most, gpu)


def shared_best(
    times: ExpertTimes, profile: DeviceProfile, room: Room, phases: Sequence[Steps]
) -> list[Ids] | None:
    """Return the NPU's experts of each layer in the least time, each phase's relative to the GPU's.

    None where no choice has the room.
    """
    options: dict[tuple[Experts, tuple[float, ...]], list[tuple[Ids, float, float]]] = {}
    for routed in times.layers:
        if (key := routed[1:]) in options:
            continue
        alone = [times.steps_s(routed, (), steps) for steps in phases]
        each = expert_bytes(routed.op, profile, "npu")
        tried = options[key] = []
        for ids in candidates(routed, STEPS):
            own = [times.steps_s(routed, ids, steps) for steps in phases]
            if room.least or all(b <= a for a, b in zip(alone, own, strict=True)):
                relative = sum(b / a for a, b in zip(alone, own, strict=True))
                tried.append((ids, relative, each * len(ids)))
    layers = [options[x[1:]] for x in times.layers]
    taken = knapsack([[x[1:] for x in layer] for layer in layers], room.least, room.most)
    if taken is None:
        return None
    return [layer[i][0] for layer, i in zip(layers, taken, strict=True)]


def knapsack(
    options: Sequence[Sequence[tuple[float, float]]], least: float, most: float
) -> list[int] | None:
    """Return an option (cost, bytes) of each layer, of least cost, whose bytes are in a range.

    None if there is none. It is exact where bytes are multiples of one size, of which all together
    are at most `UNITS`; else bytes are rounded up.
    """
    cheapest = [min(range(len(x)), key=x.__getitem__) for x in options]
    chosen = sum(x[i][1] for x, i in zip(options, cheapest, strict=True))
    if least <= chosen <= most:
        return cheapest
    whole = sum(max(b for _, b in x) for x in options)
    unit = float(math.gcd(*(round(b) for x in options for _, b in x))) or 1.0
    unit = max(unit, whole / UNITS)
    sizes = [[math.ceil(b / unit - 1e-9) for _, b in x] for x in options]
    width = int(min(sum(map(max, sizes)), most // unit)) + 1
    best, taken = np.full(width, INF), []
    best[0] = 0.0
    for layer, own in zip(options, sizes, strict=True):
        costs = np.full((len(layer), width), INF)
        for i, ((cost, _), size) in enumerate(zip(layer, own, strict=True)):
            if size < width:
                costs[i, size:] = best[: width - size] + cost
        taken.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    first = math.ceil(least / unit - 1e-9)
    if first >= width or not np.isfinite(best[first:]).any():
        return None
    used, chosen_options = first + int(best[first:].argmin()), []
    for choice, own in zip(reversed(taken), reversed(sizes), strict=True):
        chosen_options.append(int(choice[used]))
        used -= own[chosen_options[-1]]
    return chosen_options[::-1]


def expert_bytes(op: Experts, profile: DeviceProfile, kind: DeviceKind) -> float:
    """Return the bytes of one expert in a device's own layout, in all graphs that have its own."""
    able = profile.devices[kind].capabilities
    once = able.weight_bytes.get(op.weight_format)
    copies = max(len(able.graph_sizes), 1) if able.per_graph_size == "weights" else 1
    return copies * sum(
        weight_bytes(x.weight_format, x.n, x.k) if once is None else once * x.n * x.k
        for x in op.matmuls.values()
    )


def bytes_of_experts(graph: ModelGraph, profile: DeviceProfile, device: DeviceKind) -> float:
    """Return the bytes of all routed experts in a device's own layout."""
    ops = (x.op for x in graph.nodes if isinstance(x.op, Experts))
    return sum(op.experts * expert_bytes(op, profile, device) for op in ops)


def matmul_bytes(graph: ModelGraph) -> float:
    """Return the bytes of the matmuls that plans cut, as stored."""
    return float(sum(x.count * weight_bytes(graph.weight_format, x.n, x.k) for x in graph.matmuls))


def model_bytes(graph: ModelGraph) -> float:
    """Return the bytes of a model's weights, as stored: of those matmuls and of all experts."""
    return matmul_bytes(graph) + graph.expert_weight_bytes


def _in_file(profile: DeviceProfile, graph: ModelGraph, budget_bytes: float) -> bool:
    """Return whether experts have no room, and the GPU reads them where they are stored."""
    gpu = profile.devices["gpu"].capabilities
    needed = matmul_bytes(graph) + bytes_of_experts(graph, profile, "gpu")
    return needed > budget_bytes and gpu.unified_memory and not gpu.static_shapes


def _left_in_file(times: ExpertTimes, graph: ModelGraph, budget_bytes: float) -> ExpertsChoice:
    """Return experts that stay in the file, the busiest of them in what memory is left."""
    whole, room = graph.expert_weight_bytes, max(budget_bytes - matmul_bytes(graph), 0.0)
    used = sum(x.op.chosen * stored_bytes(x.op) for x in times.layers)
    missed, storage = times.missed(room / whole), times.cost.profile.storage
    read_s = 0.0 if storage is None else 1 / storage.read_bytes_per_s
    note = (
        f"routed experts: on the GPU, {_gib(whole)} in the model's mapped file, of which the "
        f"budget has room for {_gib(room)}; a token uses {_gib(used)} of them and reads "
        f"{_gib(used * missed)} if the busiest stay in memory"
    )
    if storage is None:
        note += ", at the disk's speed, which this profile does not have (`hetero profile`)"
    else:
        token_s = _rest_s(times.cost, graph, DECODE) + used * missed * read_s
        token_s += sum(times.steps_s(x, (), DECODE) for x in times.layers)
        note += (
            f", at {storage.read_bytes_per_s / 1e6:.0f} MB/s of the disk: at most "
            f"{1 / token_s:.3g} tokens/s"
        )
    return ExpertsChoice((), note, times, in_file=True, missed=missed, read_s=read_s)


def stored_bytes(op: Experts) -> float:
    """Return the bytes of one expert as a file has them."""
    return sum(packed_bytes(x.weight_format.storage, x.n, x.k) for x in op.matmuls.values())


def _refusal(cost: CostModel, kind: DeviceKind, ops: Sequence[Experts]) -> str:
    """Return why a device computes no experts, in words; empty if it does."""
    if kind == "npu" and not cost.profile.devices[kind].capabilities.experts:
        return "the profile's NPU has no kernels of them"
    answers = (cost.allowed_op(kind, op, 1) for op in set(ops))
    return next((x.reason for x in answers if not x), "")


def _rest_s(cost: CostModel, graph: ModelGraph, steps: Steps) -> float:
    """Return the seconds of the model's matmuls on the GPU."""
    own = graph.weight_format
    return sum(
        weight * x.count * float(cost.matmul_s("gpu", own, m, x.n, x.k).seconds)
        for tokens, weight in steps
        for x in graph.matmuls
        for m in [graph.tokens_of(x.name, tokens)]
        if cost.allowed("gpu", own, m, x.n, x.k)
    )


def _note(
    times: ExpertTimes,
    npu: Sequence[LayerExperts],
    alone: Sequence[float],
    own: Sequence[float],
    routing: Routing | None,
) -> str:
    """Return where the experts are and why."""
    spans = "; ".join(
        f"{what} {1e3 * a:.4g} ms" + (f", on the GPU alone {1e3 * b:.4g} ms" if npu else "")
        for what, a, b in zip(("a token", "prompts"), own, alone, strict=True)
    )
    by = "by equal shares; `hetero eval --count-experts` counts them"
    if routing is not None:
        by = f"by their shares of {routing.tokens} tokens"
    if npu and times.cost.profile.devices["npu"].numbers == "fitted":
        by += "; fitted, with a graph for each expert"
    return f"routed experts: {describe(times, npu)} ({spans}; {by})"


def describe(times: ExpertTimes, npu: Sequence[LayerExperts]) -> str:
    """Return how many experts of which layers are on the NPU."""
    counts = {x.layer: len(x.npu) for x in npu}
    layers = [(x.layer, counts.get(x.layer, 0), x.op.experts) for x in times.layers]
    if not npu or all(count == every for _, count, every in layers):
        return f"on the {'NPU' if npu else 'GPU'}"
    runs = []
    for (count, every), group in groupby(layers, key=lambda x: x[1:]):
        own = [x[0] for x in group]
        where = f"layer {own[0]}" if len(own) == 1 else f"layers {own[0]} to {own[-1]}"
        runs.append(f"{count} of {every} in {where}")
    shown = ", ".join(runs[:4]) + (f" and {len(runs) - 4} other runs" if len(runs) > 4 else "")
    return f"on the NPU {shown}, the rest on the GPU"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"

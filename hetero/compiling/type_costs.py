"""Costs of a type for each tensor: bytes, or the predicted seconds of a step on a profile.

Seconds are those of the solver's cost model. A step is computed by one device, by every core of a
processor, or by several devices that share matmuls as the solver cuts them for uniform formats. A
cut of a matmul is that of all layers, whose tensors may have different types: so a choice of types
takes the cut of each matmul with it (`hetero.solver.knapsack.cheapest_set`). A tensor takes its
part, by rows, of a matmul that is made of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, Literal, NamedTuple, TypeAlias

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.tensors import stored_as
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DeviceProfile, DeviceRecord, EveryCore, Phase
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import OpPlan, Tile, Total
from hetero.solver.request import PlanRequest
from hetero.solver.storage_times import BLOCKS, FOUR_BITS, StorageTimes, format_of, not_measured

GoalName: TypeAlias = Literal["bytes", "prompt", "decode"]
StepName: TypeAlias = Literal["prompt", "decode"]
PHASE_OF: Final[Mapping[StepName, Phase]] = {"prompt": "prefill", "decode": "decode"}
PROMPT_TOKENS: Final = 256
CONTEXT: Final = 256  # tokens before a decode step
REFERENCE: Final = WeightFormat.GGUF_A16
_BYTE_S: Final = 1e-15  # of equal times the fewest bytes
CostOf: TypeAlias = Callable[[str, Kind, bool], float]
Rows: TypeAlias = Mapping[str, tuple[OpName, int]]  # `divergence.planned_rows`


class Way(NamedTuple):
    """A setting that some tensors share: its own cost, and that of a tensor in a type.

    The third argument is whether inputs of matmuls are rounded to int8.
    """

    cost: float
    of: CostOf


class Layout(NamedTuple):
    """A way to compute a step: what it costs besides its tensors, which come in groups."""

    devices: tuple[str, ...]
    fixed: float
    groups: Sequence[tuple[Sequence[str], Sequence[Way]]]

    def cost(self, kinds: Mapping[str, Kind], int8: bool) -> float:
        """Return the cost of tensors in these types."""
        return self.fixed + math.fsum(
            min(x.cost + math.fsum(x.of(y, kinds[y], int8) for y in names) for x in ways)
            for names, ways in self.groups
        )


@dataclass(frozen=True, eq=False)
class StepTimes:
    """The layouts of a prompt and of a decode step on a profile, and what to say of their times."""

    layouts: Mapping[StepName, Sequence[Layout]]
    notes: Sequence[str] = ()

    def seconds(self, step: StepName, kinds: Mapping[str, Kind], int8: bool) -> float:
        """Return the predicted seconds of a step in the fastest layout."""
        return self.fastest(step, kinds, int8)[0]

    def fastest(
        self, step: StepName, kinds: Mapping[str, Kind], int8: bool
    ) -> tuple[float, tuple[str, ...]]:
        """Return the predicted seconds of a step, and the devices that take the fewest."""
        return min((x.cost(kinds, int8), x.devices) for x in self.layouts[step])


def bytes_layout(names: Sequence[str], nbytes: Callable[[str, Kind], int]) -> Layout:
    """Return the layout that costs the bytes of each tensor."""
    return Layout((), 0.0, [(names, [Way(0.0, lambda name, kind, _: float(nbytes(name, kind)))])])


def step_times(
    rows: Rows,
    names: Sequence[str],
    nbytes: Callable[[str, Kind], int],
    spec: ModelGraph,
    profile: DeviceProfile,
) -> StepTimes:
    """Return the layouts of a model whose tensors are these.

    Raises `ProfileError` and `PlanError` where the profile cannot predict them.
    """
    cost = CostModel(profile)
    times, notes = StorageTimes(profile, cost), list[str]()
    npu = profile.devices.get("npu")
    if npu is not None and not computes_files(npu):
        notes.append(
            f"the NPU of profile {profile.name} computes matrices of one format, so files of "
            "several types are predicted on the other devices"
        )
        profile = _without_npu(profile)
    plans = _uniform_plans(spec, profile, cost)
    layouts: dict[StepName, Sequence[Layout]] = {}
    for step, phase in PHASE_OF.items():
        made = _Step(rows, names, nbytes, spec, times, phase, plans)
        layouts[step] = list(made.layouts())
    if guessed := not_measured(profile):
        notes.append(
            f"profile {profile.name} has no times of {', '.join(guessed)}: they are predicted from "
            "those of 4-bit weights"
        )
    return StepTimes(layouts, notes)


def computes_files(device: DeviceRecord) -> bool:
    """Return whether a device multiplies with the types of a file; old profiles do not say it."""
    return REFERENCE in device.capabilities.weight_formats or device.backend == "ort-cpu"


def _without_npu(profile: DeviceProfile) -> DeviceProfile:
    return profile.model_copy(
        update={
            "devices": {x: y for x, y in profile.devices.items() if x != "npu"},
            "predictors": tuple(x for x in profile.predictors if x.device != "npu"),
            "other_predictors": tuple(x for x in profile.other_predictors if x.device != "npu"),
        }
    )


def _uniform_plans(
    spec: ModelGraph, profile: DeviceProfile, cost: CostModel
) -> Mapping[WeightFormat, ExecutionPlan]:
    """Return the plans of uniform formats that the profile has times of, the reference first."""
    known = {x.weight_format for x in cost.profile.predictors}
    request = PlanRequest(seq_lens=(PROMPT_TOKENS,), context=CONTEXT, explain=False)
    formats = [REFERENCE, BLOCKS[True], *FOUR_BITS.values(), WeightFormat.W8A16, WeightFormat.F16]
    return {
        x: make_plan(spec.with_weight_format(x), profile, request)
        for x in formats
        if x in known or x is REFERENCE
    }


class _Step:
    """One step of one model on one profile."""

    def __init__(
        self,
        rows: Rows,
        names: Sequence[str],
        nbytes: Callable[[str, Kind], int],
        spec: ModelGraph,
        times: StorageTimes,
        phase: Phase,
        plans: Mapping[WeightFormat, ExecutionPlan],
    ) -> None:
        self.rows, self.nbytes, self.spec, self.times = rows, nbytes, spec, times
        self.phase, self.plans = phase, plans
        self.tokens = PROMPT_TOKENS if phase == "prefill" else 1
        self.names: dict[OpName | None, list[str]] = {}
        for name in names:
            self.names.setdefault(rows[name][0] if name in rows else None, []).append(name)

    @property
    def total(self) -> Total:
        """Return what the reference's plan says of the step."""
        return next(x for x in self.plans[REFERENCE].totals if x.phase == self.phase)

    def layouts(self) -> Iterator[Layout]:
        """Yield each device alone, every core, and the devices together."""
        cores = self._cores()
        for kind, whole_s in self.total.single_devices.items():
            rest_s = max(whole_s - self._alone_s(kind), 0.0)
            yield self._layout((kind,), rest_s, partial(self._whole_only, kind=kind))
            if kind == "gpu" and REFERENCE in cores:
                fixed = cores[REFERENCE].seconds(rest_s, self.spec.layers)
                yield self._layout(("cpu",), fixed, partial(self._on_cores, cores=cores))
        entries = [x for x in self.plans[REFERENCE].ops if x.phase == self.phase]
        if len({tile.device for x in self._entries() for tile in x.tiles}) > 1:
            matmuls_s = math.fsum(self.spec.counts[x.op] * (x.predicted_s or 0.0) for x in entries)
            rest_s = max(self.total.predicted_s - matmuls_s, 0.0)
            yield self._layout(("gpu", "npu"), rest_s, self._cuts)

    def _layout(
        self, devices: tuple[str, ...], fixed: float, ways: Callable[[OpName], list[Way]]
    ) -> Layout:
        groups = [
            (names, [Way(0.0, self._light)] if op is None else ways(op))
            for op, names in self.names.items()
        ]
        return Layout(devices, fixed, groups)

    def _light(self, name: str, kind: Kind, _: bool) -> float:
        """Return the cost of an embedding, whose rows are looked up."""
        return _BYTE_S * self.nbytes(name, kind)

    def _entries(self) -> list[OpPlan]:
        """Return all plans' entries of whole matmuls in the step."""
        known = {x.name for x in self.spec.matmuls}
        return [
            x
            for plan in self.plans.values()
            for x in plan.ops
            if x.phase == self.phase and x.op in known
        ]

    def _m(self, name: OpName) -> int:
        return 1 if name in self.spec.sampled_in(self.phase) else self.tokens

    def _alone_s(self, kind: DeviceKind) -> float:
        """Return the seconds of all matmuls in the reference's format on one device."""
        return math.fsum(
            x.count * self._format_s(REFERENCE, self._whole_tiles(x.name, kind), x.name)
            for x in self.spec.matmuls
        )

    def _whole_tiles(self, name: OpName, kind: DeviceKind) -> tuple[Tile, ...]:
        n = self.spec.matmul(name).n
        return (Tile(device=kind, tokens=(0, self._m(name)), rows=(0, n)),)

    def _whole(self, name: OpName, kind: DeviceKind) -> Way:
        return self._way(name, self._whole_tiles(name, kind), 0.0)

    def _whole_only(self, name: OpName, kind: DeviceKind) -> list[Way]:
        return [self._whole(name, kind)]

    def _on_cores(self, name: OpName, cores: Mapping[WeightFormat, EveryCore]) -> list[Way]:
        one = self._whole(name, "gpu").of

        def of(tensor: str, kind: Kind, int8: bool) -> float:
            own = cores.get(format_of(stored_as(kind), int8), cores[REFERENCE])
            return one(tensor, kind, int8) / own.speedup

        return [Way(0.0, of)]

    def _cores(self) -> dict[WeightFormat, EveryCore]:
        """Return what every core gains over one, by format."""
        records = self.times.cost.profile.every_core
        return {x.weight_format: x for x in records if x.phase == self.phase}

    def _cuts(self, name: OpName) -> list[Way]:
        """Return the tilings of a matmul that some uniform format has."""
        overheads: dict[tuple[Tile, ...], float] = {}
        for weight_format, plan in self.plans.items():
            for x in plan.ops:
                if (x.phase, x.op) == (self.phase, name):
                    tiles = tuple(
                        tile.resolved(self._m(name)).model_copy(update={"precision": None})
                        for tile in x.tiles
                    )
                    busy_s = self._format_s(weight_format, tiles, name)
                    overhead_s = max((x.predicted_s or 0.0) - busy_s, 0.0)
                    overheads[tiles] = min(overhead_s, overheads.get(tiles, math.inf))
        count = self.spec.matmul(name).count
        if not overheads:  # all plans have its members apart
            return [self._whole(name, "gpu")]
        return [self._way(name, tiles, count * x) for tiles, x in overheads.items()]

    def _way(self, name: OpName, tiles: tuple[Tile, ...], overhead_s: float) -> Way:
        n, k = self.spec.shapes[name]

        @cache
        def seconds(storage: StorageFormat, int8: bool) -> float:
            def kernel_s(tile: Tile, m: int, rows: int) -> float:
                return self.times.seconds(tile.device, storage, int8, m, rows, k)

            return self._busy_s(tiles, format_of(storage, int8), kernel_s)

        def of(tensor: str, kind: Kind, int8: bool) -> float:
            part = self.rows[tensor][1] / n
            return part * seconds(stored_as(kind), int8) + self._light(tensor, kind, int8)

        return Way(overhead_s, of)

    def _format_s(self, weight_format: WeightFormat, tiles: tuple[Tile, ...], op: OpName) -> float:
        """Return the seconds of a layer's matmul in a uniform format."""
        k = self.spec.shapes[op][1]

        def kernel_s(tile: Tile, m: int, rows: int) -> float:
            return float(self.times.cost.matmul_s(tile.device, weight_format, m, rows, k).seconds)

        return self._busy_s(tiles, weight_format, kernel_s)

    def _busy_s(
        self,
        tiles: tuple[Tile, ...],
        weight_format: WeightFormat,
        kernel_s: Callable[[Tile, int, int], float],
    ) -> float:
        """Return how long the last device is busy with its tiles."""
        busy: dict[DeviceKind, float] = {}
        for tile in tiles:
            start, stop = tile.tokens
            assert stop is not None
            m, rows = tile.graph_size or stop - start, tile.rows[1] - tile.rows[0]
            busy[tile.device] = busy.get(tile.device, 0.0) + kernel_s(tile, m, rows)
        contention = self.times.cost.contention
        if len(busy) > 1:
            busy = {x: y * contention(x, self.phase, weight_format) for x, y in busy.items()}
        return max(busy.values())


@dataclass(frozen=True, eq=False)
class Goal:
    """Bytes, or the seconds of a step, as what is minimised.

    `times` may be None where bytes are, and then nothing is said of times.
    """

    name: GoalName = "bytes"
    times: StepTimes | None = None

    @property
    def activations(self) -> tuple[bool, ...]:
        """Return whether inputs may be rounded to int8: with floats alone files need no option."""
        return (False,) if self.name == "bytes" else (False, True)

    def layouts(self, names: Sequence[str], nbytes: Callable[[str, Kind], int]) -> list[Layout]:
        """Return what tensors cost."""
        if self.name == "bytes":
            return [bytes_layout(names, nbytes)]
        assert self.times is not None
        return list(self.times.layouts[self.name])

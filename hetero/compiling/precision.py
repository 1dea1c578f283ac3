"""A type for each tensor of a GGUF model: the least cost whose KL divergence is within a budget.

The cost is bytes, or the predicted seconds of a prompt or of a decode step (`type_costs`).

1. *Loss of one tensor.* On some tokens each matmul's tensor is quantised alone, to its smallest
   type, and the divergence of the model's predictions is measured. Other types are scaled by the
   squared error of the matmul's output, ‖X·(W - W')ᵀ‖², on the same tokens; to second order
   divergence is proportional to it. So are inputs that are rounded to int8, where they may be.
   Embeddings and the output head are measured in every type.
2. *TypeChoice.* `hetero.solver.knapsack` minimises the cost subject to the sum of losses.
3. *Together.* Errors of tensors add up only roughly, so the choices for several budgets, and the
   uniform types, are measured whole on more tokens; what the sum of losses becomes is interpolated
   between them, and the choice for the asked budget is made with that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from hetero.backends.formats import INT8_GROUPS, activations_of
from hetero.backends.reference.compute import quantized_activations
from hetero.backends.weights import Float32Array
from hetero.compiling.calibration import first_tokens
from hetero.compiling.divergence import (
    Variant,
    divergences,
    end_tensors,
    matmul_tensors,
    operations,
    planned_rows,
)
from hetero.compiling.type_costs import (
    PROMPT_TOKENS,
    Goal,
    Layout,
    Rows,
    StepName,
    StepTimes,
    Way,
    step_times,
)
from hetero.compiling.walk import Progress
from hetero.errors import UserError
from hetero.models import LoadedModel, open_model
from hetero.models.gguf.file import GgufFile
from hetero.models.gguf.float_rows import GgufRows
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.requantising import WRITTEN, fits, rounded, tensor_bytes
from hetero.models.gguf.tensors import FLOATS, GgufTensor, stored_as
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.profiler.table_data import TableData
from hetero.solver.knapsack import Alternative, Setting, cheapest_set, lower_bound

Tokens: TypeAlias = Sequence[int]
ByKind: TypeAlias = Mapping[str, Mapping[Kind, float]]
MIN_TOKENS: Final = 256
UNSEEN: Final = 4  # the last quarter of the text is not used to choose
ALONE_TOKENS: Final = 128  # of a sequence on which tensors are quantised alone
ALONE_COUNTS: Final = (1, 16)  # the least and the most of these sequences
ALONE_FLOPS: Final = 1e13  # what they may cost: a minute or two of two cores
TOGETHER: Final = (4, 256)  # sequences and their tokens
NAMES: Final = {"bytes": "fewest bytes", "prompt": "fastest prompt", "decode": "fastest answers"}
BUDGETS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the one that is asked for


@dataclass(frozen=True, eq=False)
class SplitText:
    """Parts of a text: for tensors alone, for choices together, and to measure what was chosen."""

    alone: list[Tokens]
    together: list[Tokens]
    unseen: list[Tokens]

    @classmethod
    def of(cls, model: LoadedModel, path: Path, limit: int, alone: int) -> SplitText:
        """Read at most `limit` tokens; sequences are spread over their part, and fit the context.

        `alone` is the number of those for tensors alone. Raises `UserError`.
        """
        _, tokens = first_tokens(model, path, limit)
        if len(tokens) < MIN_TOKENS:
            raise UserError(
                f"{path}: has {len(tokens)} tokens, --quality needs at least {MIN_TOKENS} to "
                "choose by and to measure on; give more text"
            )
        longest = model.config.max_position
        first = len(tokens) - len(tokens) // UNSEEN
        unseen = tokens[first:]
        return cls(
            _spread(tokens[:first], alone, ALONE_TOKENS, longest),
            _spread(tokens[:first], *TOGETHER, longest),
            _spread(unseen, *TOGETHER, longest),
        )


def _spread(tokens: Tokens, count: int, length: int, longest: int) -> list[Tokens]:
    """Return at most `count` sequences that do not overlap."""
    length = min(length, longest, len(tokens))
    count = min(count, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [tokens[i : i + length] for i in starts.tolist()]


@dataclass(frozen=True, eq=False)
class TypeChoice:
    """Types of tensors that are not as the file has them.

    With `int8` inputs of matmuls are rounded where the type has at most 6 bits (`gguf-a8`).
    `nbytes` are those of all tensors, `kl` is the measured or predicted divergence in nats a token;
    `seconds` are predicted for a prompt and a decode step, if asked for, on `devices`; `gap` says
    by which part the cost may be above the least.
    """

    name: str
    kinds: Variant
    nbytes: int
    kl: float
    gap: float = 0.0
    int8: bool = False
    seconds: Mapping[StepName, float] = field(default_factory=dict)
    devices: Mapping[StepName, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Losses:
    """Nats a token that each tensor loses alone in a type: its input in floats, or in int8.

    `int8` has the file's own types, too, and is empty where nothing was asked of it.
    """

    floats: ByKind
    int8: ByKind = field(default_factory=dict)

    def of(self, name: str, kind: Kind, *, int8: bool) -> float:
        """Return the loss of a tensor in a type; its own costs nothing where inputs are floats."""
        return (self.int8 if int8 else self.floats).get(name, {}).get(kind, 0.0)

    def total(self, kinds: Variant, *, int8: bool) -> float:
        """Return the sum of losses of tensors in these types."""
        return math.fsum(self.of(name, kind, int8=int8) for name, kind in kinds.items())


def rounds(kind: Kind) -> bool:
    """Return whether a matmul of a type may round its input to int8 (`gguf-a8`)."""
    return not activations_of(INT8_GROUPS, stored_as(kind)).are_floats


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a file that may have another type, with the smaller types for each."""

    weights: GgufRows
    smaller: Mapping[str, tuple[Kind, ...]]

    @classmethod
    def of(cls, weights: GgufRows) -> Tensors:
        """Return the tensors of a model. Raises `UserError` where no type is smaller."""
        path, smaller = weights.file.path, {}
        if weights.config.experts is not None:
            raise UserError(
                f"{path}: has routed experts, whose types --quality does not choose; quantise it "
                "with --weights instead"
            )
        for name in matmul_tensors(weights):
            info = weights.file.tensors[name]
            own = info.stop - info.start
            kinds = [
                x for x in WRITTEN if fits(info.shape, x) and tensor_bytes(info.shape, x) < own
            ]
            if kinds:
                smaller[name] = tuple(kinds)
        if not smaller:
            raise UserError(
                f"{path}: {WRITTEN[0].name} is the smallest type that is written, and no tensor is "
                "larger; give a file of the model in floats, or in more bits"
            )
        return cls(weights, smaller)

    def quantised(self) -> list[str]:
        """Return the types of these tensors in the file that are no floats."""
        kinds = {self.weights.file.tensors[name].kind for name in self.smaller}
        return sorted(x.name for x in kinds - FLOATS.keys())

    def nbytes(self, kinds: Variant) -> int:
        """Return the bytes of all tensors of the file, with some in other types."""
        infos = self.weights.file.tensors
        return sum(tensor_bytes(x.shape, kinds.get(name, x.kind)) for name, x in infos.items())

    def kinds(self, chosen: Variant) -> dict[str, Kind]:
        """Return the types of all matmuls' tensors of the file, with some in other types."""
        infos = self.weights.file.tensors
        return {x: chosen.get(x, infos[x].kind) for x in matmul_tensors(self.weights)}

    @property
    def weight_count(self) -> int:
        """Return the numbers in all tensors of the file."""
        return sum(math.prod(x.shape) for x in self.weights.file.tensors.values())

    def uniform(self) -> dict[str, Variant]:
        """Return the tensors in one type each, where that is smaller than what the file has."""
        types = {x: {name: x for name, y in self.smaller.items() if x in y} for x in WRITTEN}
        return {kind.name: variant for kind, variant in types.items() if variant}

    @cached_property
    def rows(self) -> Rows:
        """Return the matmul of each tensor in plans, and how many of its rows are the tensor's."""
        return planned_rows(self.weights)

    @cached_property
    def options(self) -> dict[str, tuple[Kind, ...]]:
        """Return the types that each matmul's tensor may have, its own first."""
        infos = self.weights.file.tensors
        names = dict.fromkeys([*matmul_tensors(self.weights), *self.rows])
        return {x: (infos[x].kind, *self.smaller.get(x, ())) for x in names}

    def tensor_nbytes(self, name: str, kind: Kind) -> int:
        """Return the bytes of a tensor in a type."""
        return tensor_bytes(self.weights.file.tensors[name].shape, kind)

    def int8_inputs(self, kinds: Variant) -> frozenset[str]:
        """Return the tensors whose inputs `gguf-a8` rounds, with some in other types."""
        return frozenset(x for x, y in self.kinds(kinds).items() if x in self.rows and rounds(y))

    @cached_property
    def alone(self) -> list[Variant]:
        """Return what is measured of tensors alone: the smallest types, and all of the ends."""
        ends = end_tensors(self.weights)
        return [
            {name: kind}
            for name, kinds in self.smaller.items()
            for kind in (kinds if name in ends else kinds[:1])
        ]

    @cached_property
    def alone_int8(self) -> list[tuple[str, Kind]]:
        """Return what is measured with an int8 input: what has no other loss to scale by."""
        heads = end_tensors(self.weights) & self.rows.keys()
        return [
            (name, kind)
            for name in self.rows
            for kind in (self.options[name] if name in heads else self.options[name][:1])
            if rounds(kind) and (name in heads or name not in self.smaller)
        ]

    def alone_count(self, *, int8: bool = False) -> int:
        """Return the number of sequences on which that is affordable."""
        least, most = ALONE_COUNTS
        variants, inputs = self._alone(int8)
        each = ALONE_TOKENS * operations(self.weights, variants, inputs)
        return int(min(max(ALONE_FLOPS // each, least), most))

    def _alone(self, int8: bool) -> tuple[list[Variant], list[frozenset[str]]]:
        measured = self.alone_int8 if int8 else []
        others = ({} if y is self.options[x][0] else {x: y} for x, y in measured)
        variants: list[Variant] = [*self.alone, *others]
        none = frozenset[str]()
        return variants, [*([none] * len(self.alone)), *(frozenset({x}) for x, _ in measured)]

    def step_times(self, spec: ModelGraph, profile: DeviceProfile) -> StepTimes:
        """Return what a profile predicts of a prompt and of a decode step.

        Raises `ProfileError` and `PlanError`.
        """
        return step_times(self.rows, [*self.options], self.tensor_nbytes, spec, profile)

    def losses(
        self, sequences: Sequence[Tokens], progress: Progress | None = None, *, int8: bool = False
    ) -> Losses:
        """Return the loss of each tensor alone in each type, measured and scaled.

        With `int8` also where its input is rounded.
        """
        errors = _OutputErrors(self.options, int8=int8)
        variants, inputs = self._alone(int8)
        means = divergences(
            self.weights, sequences, variants, int8=inputs, at_tensor=errors.add, progress=progress
        ).mean(axis=1)
        floats: dict[str, dict[Kind, float]] = {name: {} for name in self.smaller}
        for variant, mean in zip(self.alone, means, strict=False):
            ((name, kind),) = variant.items()
            floats[name][kind] = float(mean)
        for name, kinds in self.smaller.items():
            for kind in kinds:
                if kind not in floats[name]:
                    scale = errors.of(name, kind) / (errors.of(name, kinds[0]) or 1.0)
                    floats[name][kind] = floats[name][kinds[0]] * scale
        if not int8:
            return Losses(floats)
        measured = dict(zip(self.alone_int8, means[len(self.alone) :].tolist(), strict=True))
        rounded_inputs: dict[str, dict[Kind, float]] = {}
        for name, kinds in self.options.items():
            smallest = self.smaller.get(name, kinds)[0]
            own = floats.get(name, {})
            nats = own.get(smallest, 0.0) / (errors.of(name, smallest) or 1.0)
            rounded_inputs[name] = {
                kind: own.get(kind, 0.0)
                if name not in self.rows or not rounds(kind)
                else measured[name, kind]
                if (name, kind) in measured
                else nats * errors.of(name, kind, int8=True)
                for kind in kinds
            }
        return Losses(floats, rounded_inputs)


class _OutputErrors:
    """Squared errors of matmuls' outputs by tensor and type, Σ ‖X'·W'ᵀ - X·Wᵀ‖²."""

    def __init__(self, options: Mapping[str, Sequence[Kind]], *, int8: bool) -> None:
        self._options, self._int8 = options, int8
        self._sums: dict[tuple[str, Kind, bool], float] = {}

    def add(self, name: str, rows: Float32Array, inputs: Sequence[Float32Array]) -> None:
        """Count a tensor with its inputs."""
        x = np.concatenate(list(inputs))
        lost = quantized_activations(x).astype(np.float32) - x if self._int8 else None
        for place, kind in enumerate(self._options.get(name, ())):
            stored = rounded(rows, kind) if place else rows
            error = x @ (stored - rows).T
            self._count(name, kind, False, error)
            if lost is not None and rounds(kind):
                self._count(name, kind, True, error + lost @ stored.T)

    def _count(self, name: str, kind: Kind, int8: bool, error: Float32Array) -> None:
        lost = float(np.square(error).sum(dtype=np.float64))
        self._sums[name, kind, int8] = self._sums.get((name, kind, int8), 0.0) + lost

    def of(self, name: str, kind: Kind, *, int8: bool = False) -> float:
        """Return the error of a tensor in a type; 0 of one that was not seen."""
        return self._sums.get((name, kind, int8), 0.0)


@dataclass(frozen=True, eq=False)
class Together:
    """Sums of losses, rising from 0, and the divergences that were measured for them."""

    sums: Sequence[float]
    measured: Sequence[float]

    def predicted(self, total: float) -> float:
        """Return the divergence for a sum of losses: a factor, interpolated."""
        if not total:
            return 0.0
        known = [(s, m / s) for s, m in zip(self.sums, self.measured, strict=True) if s * m > 0]
        if not known:
            return total
        places = np.log([s for s, _ in known])
        return total * float(np.interp(np.log(total), places, [x for _, x in known]))

    def allowed(self, budget: float) -> float:
        """Return the largest sum of losses whose divergence is within a budget."""
        low, high = 0.0, max([budget, *self.sums])
        while self.predicted(high) < budget:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.predicted(middle) <= budget else (low, middle)
        return low


@dataclass(frozen=True, eq=False)
class Precision:
    """A model's types under a budget, for each goal; `frontier` are other choices, measured.

    `refused` says why other goals have no choice.
    """

    choices: Sequence[TypeChoice]
    frontier: Sequence[TypeChoice] = ()
    refused: Sequence[str] = ()

    @property
    def choice(self) -> TypeChoice:
        """Return the choice for the first goal."""
        return self.choices[0]

    def points(self, by: StepName | None = None) -> list[TypeChoice]:
        """Return all choices, those of the least bytes, or time, first."""
        points = [*self.choices, *self.frontier]
        return sorted(points, key=lambda x: x.nbytes if by is None else x.seconds[by])

    def table(self, weights: int, by: StepName | None = None) -> TableData:
        """Return cost against divergence, for a model of so many weights."""
        head = ["types", "MiB", "bits a weight", "KL (nats)"]
        timed = bool(self.choice.seconds)
        if timed:
            head[3:3] = [
                f"prompt of {PROMPT_TOKENS}, ms (predicted)",
                "answers, tokens/s (predicted)",
            ]
        rows = []
        for x in self.points(by):
            row = [x.name, f"{x.nbytes / 2**20:.1f}", f"{8 * x.nbytes / weights:.2f}"]
            if timed:
                row += [f"{1e3 * x.seconds['prompt']:.1f}", f"{1 / x.seconds['decode']:.0f}"]
            rows.append((*row, f"{x.kl:.3g}"))
        return TableData("", tuple(head), tuple(rows), numbers=tuple(head[1:]))


def open_tensors(model: str) -> tuple[LoadedModel, Tensors]:
    """Open a GGUF file. Raises `UserError` for another MODEL, and `ModelError`."""
    loaded = open_model(model, weights="f32")
    if loaded.source is None or not loaded.source.is_file():
        raise UserError(
            f"{model}: --quality chooses among the types of GGUF files; give a .gguf file of the "
            "model, or leave out --quality"
        )
    return loaded, Tensors.of(GgufRows(GgufFile.opened(loaded.source)))


@dataclass(frozen=True, eq=False)
class Draft:
    """The types that minimise a cost for a sum of losses."""

    kinds: dict[str, Kind]
    int8: bool
    cost: float
    total: float
    gap: float

    @property
    def key(self) -> object:
        """Return what equal drafts have in common."""
        return _key(self.kinds, self.int8)


def choose(
    tensors: Tensors,
    losses: Losses,
    sequences: Sequence[Tokens],
    budget: float,
    progress: Progress | None = None,
    goals: Sequence[Goal] = (Goal(),),
) -> Precision:
    """Return the types of least cost within a budget of nats a token, for each goal.

    Raises `UserError` where nothing but the file's own types is within it, or costs less, for any.
    """
    drafts = {
        goal.name: [least_cost(tensors, losses, part * budget, goal) for part in BUDGETS]
        for goal in goals
    }
    mixed = {x.key: x for own in drafts.values() for x in own if x.kinds or x.int8}
    plain = [(name, x, False) for name, x in tensors.uniform().items()]
    if any(True in goal.activations for goal in goals):
        plain += [
            (f"{name}, int8 inputs", x, True)
            for name, x in {"as stored": {}, **tensors.uniform()}.items()
            if tensors.int8_inputs(x) & (x.keys() or tensors.rows.keys())
        ]
    variants = [*(("mixed", x.kinds, x.int8) for x in mixed.values()), *plain]
    means = divergences(
        tensors.weights,
        sequences,
        [kinds for _, kinds, _ in variants],
        int8=[tensors.int8_inputs(x) if int8 else frozenset() for _, x, int8 in variants],
        progress=progress,
    ).mean(axis=1)
    measured = dict(zip(mixed, means.tolist(), strict=False))
    choices, refused = list[TypeChoice](), list[str]()
    for goal in goals:
        try:
            choices.append(_choice(tensors, losses, budget, goal, drafts[goal.name], measured))
        except UserError as error:
            refused.append(str(error))
    if not choices:
        raise UserError(refused[0])
    times = next((goal.times for goal in goals if goal.times is not None), None)
    choices = [_best(goal, choices) for goal in goals if goal.name in {x.name for x in choices}]
    points = {_key({}, False): TypeChoice("as stored", {}, tensors.nbytes({}), 0.0)}
    for (name, kinds, int8), kl in zip(variants, means.tolist(), strict=True):
        point = TypeChoice(name, kinds, tensors.nbytes(kinds), kl, int8=int8)
        points[_key(kinds, int8)] = point  # a mix that is uniform goes by its type
    taken = {_key(x.kinds, x.int8) for x in choices}
    frontier = [_timed(tensors, times, x) for key, x in points.items() if key not in taken]
    return Precision(choices, frontier, refused)


def _best(goal: Goal, choices: Sequence[TypeChoice]) -> TypeChoice:
    """Return the best choice for a goal: that of another one may be better, as predicted."""
    able = [x for x in choices if not x.int8 or True in goal.activations]
    best = min(able, key=lambda x: x.nbytes if goal.name == "bytes" else x.seconds[goal.name])
    name = NAMES[goal.name]
    return replace(best, name=f"{name}, int8 inputs" if best.int8 else name)


def _key(kinds: Variant, int8: bool) -> object:
    return int8, frozenset(kinds.items())


def _choice(
    tensors: Tensors,
    losses: Losses,
    budget: float,
    goal: Goal,
    drafts: Iterable[Draft],
    measured: Mapping[object, float],
) -> TypeChoice:
    """Return the choice of a goal for the budget, by what its drafts were measured to lose."""
    points = sorted({(x.total, measured[x.key]) for x in drafts if x.key in measured})
    relation = Together([0.0, *(x for x, _ in points)], [0.0, *(y for _, y in points)])
    best = least_cost(tensors, losses, relation.allowed(budget), goal)
    if not best.kinds and not best.int8:
        raise UserError(_unreachable(tensors, losses, relation, budget, goal))
    choice = TypeChoice(
        goal.name,
        best.kinds,
        tensors.nbytes(best.kinds),
        relation.predicted(best.total),
        best.gap,
        best.int8,
    )
    return _timed(tensors, goal.times, choice)


def _timed(tensors: Tensors, times: StepTimes | None, choice: TypeChoice) -> TypeChoice:
    """Return the same with predicted times."""
    if times is None:
        return choice
    kinds = {x: choice.kinds.get(x, own) for x, (own, *_) in tensors.options.items()}
    known = {x: times.fastest(x, kinds, choice.int8) for x in times.layouts}
    return replace(
        choice,
        seconds={x: seconds for x, (seconds, _) in known.items()},
        devices={x: devices for x, (_, devices) in known.items()},
    )


def least_cost(tensors: Tensors, losses: Losses, budget: float, goal: Goal) -> Draft:
    """Return the types of least cost whose losses add up to at most a budget."""
    problems = []
    for int8 in goal.activations:
        for layout in goal.layouts([*tensors.options], tensors.tensor_nbytes):
            groups = _settings(tensors, losses, layout, int8)
            least = layout.fixed + lower_bound(groups, budget)
            problems.append((least, int8, layout, groups))
    best: Draft | None = None
    for least, int8, layout, groups in sorted(problems, key=itemgetter(0)):
        if best is not None and least >= best.cost:
            break
        try:
            selected = cheapest_set(groups, budget).selection
        except ValueError:  # inputs in int8 lose more than the budget, whatever the types
            continue
        cost = layout.fixed + selected.cost
        if best is not None and cost >= best.cost:
            continue
        names = [x for group, _ in layout.groups for x in group]
        kinds = {x: tensors.options[x][i] for x, i in zip(names, selected.chosen, strict=True)}
        total = losses.total(kinds, int8=int8)
        others = {x: kinds[x] for x in tensors.smaller if kinds[x] is not tensors.options[x][0]}
        best = Draft(others, int8, cost, total, selected.gap)
    assert best is not None, "the file's own types lose nothing"
    return best


def _settings(tensors: Tensors, losses: Losses, layout: Layout, int8: bool) -> list[list[Setting]]:
    """Return the options of all tensors in a layout."""

    def alternatives(way: Way, name: str) -> list[Alternative]:
        return [
            Alternative(way.of(name, kind, int8), losses.of(name, kind, int8=int8))
            for kind in tensors.options[name]
        ]

    return [
        [Setting(way.cost, [alternatives(way, x) for x in names]) for way in ways]
        for names, ways in layout.groups
    ]


def _unreachable(
    tensors: Tensors, losses: Losses, relation: Together, budget: float, goal: Goal
) -> str:
    path = tensors.weights.file.path
    least = min(x for by_kind in losses.floats.values() for x in by_kind.values())
    if goal.name != "bytes" and relation.predicted(least) <= budget:
        return (
            f"--objective {goal.name}: no types within --quality {budget:g} are predicted to be "
            f"faster than those of {path}; use it as it is, or give a larger --quality"
        )
    return (
        f"--quality {budget:g}: every smaller type of any tensor of {path} costs more; give "
        f"{relation.predicted(least) * 1.01:.2g} or more"
    )


def measured_kl(
    tensors: Tensors, choice: TypeChoice, written: GgufFile, sequences: Sequence[Tokens]
) -> tuple[float, int]:
    """Return the divergence of a written file from its source, and of how many tokens it is.

    Tensors that the file should have copied are compared by their bytes.
    """
    weights, kinds = tensors.weights, choice.kinds
    for name in weights.file.tensors.keys() - kinds.keys():
        if not np.array_equal(weights.file.raw(name), written.raw(name)):
            raise UserError(f"{written.path}: tensor {name} is not as it was written; try again")

    def rows(source: GgufTensor, _: Float32Array, __: Kind) -> Float32Array:
        return GgufTensor(written, source.name, order=source.order).rows(0, source.shape[0])

    int8 = [tensors.int8_inputs(kinds) if choice.int8 else frozenset[str]()]
    lost = divergences(weights, sequences, [kinds], int8=int8, rows=rows)[0]
    return float(lost.mean()), len(lost)

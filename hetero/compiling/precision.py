"""A type for each tensor of a GGUF model: the fewest bytes whose KL divergence is within a budget.

1. *Loss of one tensor.* On some tokens each matmul's tensor is quantised alone, to its smallest
   type, and the divergence of the model's predictions is measured. Other types are scaled by the
   squared error of the matmul's output, ‖X·(W - W')ᵀ‖², on the same tokens; to second order
   divergence is proportional to it. Embeddings and the output head are measured in every type.
2. *TypeChoice.* `hetero.solver.knapsack` minimises bytes subject to the sum of losses.
3. *Together.* Errors of tensors add up only roughly, so the choices for several budgets, and the
   uniform types, are measured whole on more tokens; what the sum of losses becomes is interpolated
   between them, and the choice for the asked budget is made with that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from hetero.backends.weights import Float32Array
from hetero.compiling.calibration import first_tokens
from hetero.compiling.divergence import (
    Variant,
    divergences,
    end_tensors,
    matmul_tensors,
    operations,
)
from hetero.compiling.walk import Progress
from hetero.errors import UserError
from hetero.models import LoadedModel, open_model
from hetero.models.gguf.file import GgufFile
from hetero.models.gguf.float_rows import GgufRows
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.requantising import WRITTEN, fits, rounded, tensor_bytes
from hetero.models.gguf.tensors import FLOATS, GgufTensor
from hetero.profiler.table_data import TableData
from hetero.solver.knapsack import Alternative, Selection, cheapest

Tokens: TypeAlias = Sequence[int]
Losses: TypeAlias = Mapping[str, Mapping[Kind, float]]
MIN_TOKENS: Final = 256
UNSEEN: Final = 4  # the last quarter of the text is not used to choose
ALONE_TOKENS: Final = 128  # of a sequence on which tensors are quantised alone
ALONE_COUNTS: Final = (1, 16)  # the least and the most of these sequences
ALONE_FLOPS: Final = 1e13  # what they may cost: a minute or two of two cores
TOGETHER: Final = (4, 256)  # sequences and their tokens
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

    `nbytes` are those of all tensors, `kl` is the measured or predicted divergence in nats a token;
    `gap` says by which part the bytes may be above the fewest.
    """

    name: str
    kinds: Variant
    nbytes: int
    kl: float
    gap: float = 0.0


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
    def alone(self) -> list[Variant]:
        """Return what is measured of tensors alone: the smallest types, and all of the ends."""
        ends = end_tensors(self.weights)
        return [
            {name: kind}
            for name, kinds in self.smaller.items()
            for kind in (kinds if name in ends else kinds[:1])
        ]

    @property
    def alone_count(self) -> int:
        """Return the number of sequences on which that is affordable."""
        least, most = ALONE_COUNTS
        each = ALONE_TOKENS * operations(self.weights, self.alone)
        return int(min(max(ALONE_FLOPS // each, least), most))

    def losses(self, sequences: Sequence[Tokens], progress: Progress | None = None) -> Losses:
        """Return the loss of each tensor alone in each type, measured and scaled."""
        errors = _OutputErrors(self.smaller)
        means = divergences(
            self.weights, sequences, self.alone, at_tensor=errors.add, progress=progress
        ).mean(axis=1)
        losses: dict[str, dict[Kind, float]] = {name: {} for name in self.smaller}
        for variant, mean in zip(self.alone, means, strict=True):
            ((name, kind),) = variant.items()
            losses[name][kind] = float(mean)
        for name, kinds in self.smaller.items():
            for kind in kinds:
                if kind not in losses[name]:
                    losses[name][kind] = losses[name][kinds[0]] * errors.ratio(name, kind)
        return losses


class _OutputErrors:
    """Squared errors of matmuls' outputs by tensor and type, Σ ‖X·(W - W')ᵀ‖²."""

    def __init__(self, smaller: Mapping[str, Sequence[Kind]]) -> None:
        self._smaller = smaller
        self._sums: dict[tuple[str, Kind], float] = {}

    def add(self, name: str, rows: Float32Array, inputs: Sequence[Float32Array]) -> None:
        """Count a tensor with its inputs."""
        x = np.concatenate(list(inputs))
        for kind in self._smaller.get(name, ()):
            lost = np.square(x @ (rounded(rows, kind) - rows).T).sum(dtype=np.float64)
            self._sums[name, kind] = self._sums.get((name, kind), 0.0) + float(lost)

    def ratio(self, name: str, kind: Kind) -> float:
        """Return the error in a type, of that in the smallest one."""
        smallest = self._sums[name, self._smaller[name][0]]
        return self._sums[name, kind] / smallest if smallest else 0.0


@dataclass(frozen=True, eq=False)
class Together:
    """Sums of losses, rising from 0, and the divergences that were measured for them."""

    sums: Sequence[float]
    measured: Sequence[float]

    def predicted(self, total: float) -> float:
        """Return the divergence for a sum of losses: a factor, interpolated."""
        if not total:
            return 0.0
        known = [(s, m / s) for s, m in zip(self.sums, self.measured, strict=True) if s > 0]
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
    """A model's types under a budget; `frontier` are other choices, measured."""

    choice: TypeChoice
    frontier: list[TypeChoice] = field(default_factory=list)

    def table(self, weights: int) -> TableData:
        """Return bytes against divergence, for a model of so many weights."""
        head = ("types", "MiB", "bits a weight", "KL (nats)")
        rows = (
            (x.name, f"{x.nbytes / 2**20:.1f}", f"{8 * x.nbytes / weights:.2f}", f"{x.kl:.3g}")
            for x in sorted((self.choice, *self.frontier), key=lambda x: x.nbytes)
        )
        return TableData("", head, tuple(rows), numbers=head[1:])


def open_tensors(model: str) -> tuple[LoadedModel, Tensors]:
    """Open a GGUF file. Raises `UserError` for another MODEL, and `ModelError`."""
    loaded = open_model(model, weights="f32")
    if loaded.source is None or not loaded.source.is_file():
        raise UserError(
            f"{model}: --quality chooses among the types of GGUF files; give a .gguf file of the "
            "model, or leave out --quality"
        )
    return loaded, Tensors.of(GgufRows(GgufFile.opened(loaded.source)))


def choose(
    tensors: Tensors,
    losses: Losses,
    sequences: Sequence[Tokens],
    budget: float,
    progress: Progress | None = None,
) -> Precision:
    """Return the types of fewest bytes within a budget of nats a token.

    Raises `UserError` where only the file's own types are within it.
    """
    drafts = [_kinds(tensors, _solved(tensors, losses, part * budget)) for part in BUDGETS]
    mixed = list({tuple(x.items()): x for x in drafts if x}.values())
    uniform = tensors.uniform()
    variants = [*mixed, *uniform.values()]
    means = divergences(tensors.weights, sequences, variants, progress=progress).mean(axis=1)
    points = sorted((_total(losses, x), float(y)) for x, y in zip(mixed, means, strict=False))
    relation = Together([0.0, *(x for x, _ in points)], [0.0, *(y for _, y in points)])
    selection = _solved(tensors, losses, relation.allowed(budget))
    kinds = _kinds(tensors, selection)
    if not kinds:
        raise UserError(_unreachable(tensors, losses, relation, budget))
    kl = relation.predicted(_total(losses, kinds))
    choice = TypeChoice("mixed (written)", kinds, tensors.nbytes(kinds), kl, selection.gap)
    names = ["mixed"] * len(mixed) + list(uniform)
    measured = [
        TypeChoice(name, variant, tensors.nbytes(variant), float(mean))
        for name, variant, mean in zip(names, variants, means, strict=True)
    ]
    return Precision(choice, [x for x in measured if x.kinds != kinds])


def _solved(tensors: Tensors, losses: Losses, budget: float) -> Selection:
    """Return the first option, the file's own type, or that of a smaller one, for each tensor."""
    infos = tensors.weights.file.tensors
    items = []
    for name, kinds in tensors.smaller.items():
        info = infos[name]
        options = [Alternative(tensor_bytes(info.shape, x), losses[name][x]) for x in kinds]
        items.append([Alternative(info.stop - info.start, 0.0), *options])
    return cheapest(items, budget)


def _kinds(tensors: Tensors, selection: Selection) -> dict[str, Kind]:
    chosen = zip(tensors.smaller.items(), selection.chosen, strict=True)
    return {name: kinds[i - 1] for (name, kinds), i in chosen if i}


def _total(losses: Losses, kinds: Variant) -> float:
    return sum(losses[name][kind] for name, kind in kinds.items())


def _unreachable(tensors: Tensors, losses: Losses, relation: Together, budget: float) -> str:
    least = min(loss for by_kind in losses.values() for loss in by_kind.values())
    return (
        f"--quality {budget:g}: every smaller type of any tensor of {tensors.weights.file.path} "
        f"costs more; give {relation.predicted(least) * 1.01:.2g} or more"
    )


def measured_kl(
    weights: GgufRows, kinds: Variant, written: GgufFile, sequences: Sequence[Tokens]
) -> tuple[float, int]:
    """Return the divergence of a written file from its source, and of how many tokens it is.

    Tensors that the file should have copied are compared by their bytes.
    """
    for name in weights.file.tensors.keys() - kinds.keys():
        if not np.array_equal(weights.file.raw(name), written.raw(name)):
            raise UserError(f"{written.path}: tensor {name} is not as it was written; try again")

    def rows(source: GgufTensor, _: Float32Array, __: Kind) -> Float32Array:
        return GgufTensor(written, source.name, order=source.order).rows(0, source.shape[0])

    lost = divergences(weights, sequences, [kinds], rows=rows)[0]
    return float(lost.mean()), len(lost)

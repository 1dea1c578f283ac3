"""Options of a profiling run, and the events that report its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Op
from hetero.profiler import grid
from hetero.profiler.errors import ProfileError
from hetero.profiler.fit import Fitting
from hetero.profiler.grid import Shape
from hetero.profiler.measure import MeasureSettings
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.non_matmul_ops import BLOCKS, ReferenceBlock, graph_ops, sizes_of
from hetero.profiler.predict import op_name

DEFAULT_BUDGET_S: Final = 600.0
QUICK_BUDGET_S: Final = 50.0


class Event(NamedTuple):
    """Progress: what is being done, tasks done and in all, seconds of the budget that are left."""

    what: str
    done: int
    total: int
    left_s: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of what to measure and how long.

    shapes         a model's matmuls; empty: the default grid
    weight_formats formats; the first is also that of the reference kernels
    tokens         token counts; empty: the default ones
    blocks         sizes at which kernels besides matmuls are timed, of a quick profile the first
    graph          the one model that the profile is for, with `shapes`: its own kernels come first
    cold_bytes     read between two uses of a weight: a small model's other weights, which leave it
                   in the caches; None: more than fits in all caches
    share          largest part of the grid that is measured (active sampling chooses which)
    power          whether to look for a power meter
    reserved       share of the budget that is kept for fitting and writing
    block          tasks that are measured in turns with each other
    stage_checks   sizes of a device that its stages leave out and that are measured after all,
    stage_wrong    and by what share one may differ before the stages are dropped
    settings       how carefully
    fitting        how predictors are made of the rows
    least          part of the grid that is measured even where the budget is used up, within three
                   times as long: for a default budget on a slow machine
    keep_budget    a budget that is used up before the first matmul is an error
    between        called some times a second, when something else may run
    """

    name: str = "host"
    quick: bool = False
    budget_s: float = DEFAULT_BUDGET_S
    shapes: tuple[Shape, ...] = ()
    weight_formats: tuple[WeightFormat, ...] = (WeightFormat.W4A16,)
    tokens: tuple[int, ...] = ()
    blocks: tuple[ReferenceBlock, ...] = BLOCKS
    graph: ModelGraph | None = None
    cold_bytes: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    share: float = 1.0
    seed: int = 0
    power: bool = True
    gpu_core: int | None = None
    control_core: int | None = None
    keep_budget: bool = False
    least: float = 0.0
    between: Callable[[], None] | None = None
    reserved: float = 0.06
    block: int = 32
    stage_checks: int = 6
    stage_wrong: float = 0.10
    settings: MeasureSettings = field(default_factory=MeasureSettings)
    fitting: Fitting = field(default_factory=Fitting)

    def __post_init__(self) -> None:
        if not self.budget_s > 0 or not self.weight_formats or not 0 < self.share <= 1:
            raise ProfileError(
                "a profile needs a budget above 0 s, a weight format and a share of the grid in "
                f"(0, 1], got {self.budget_s:g} s, {self.weight_formats} and {self.share:g}"
            )

    @property
    def own_ops(self) -> list[Op]:
        """Return the operations of the one model that is measured for, besides its matmuls."""
        return [] if self.graph is None else graph_ops(self.graph)

    def grid_pairs(self) -> tuple[tuple[int, int], ...]:
        """Return (n, k) to measure."""
        if self.shapes:
            return grid.model_pairs(self.shapes)
        return self.pairs or (grid.QUICK_PAIRS if self.quick else grid.DEFAULT_PAIRS)

    def grid_tokens(self) -> tuple[int, ...]:
        """Return m to measure."""
        default = grid.QUICK_SIZES if self.quick else grid.DECODE_SIZES + grid.PREFILL_SIZES
        return self.tokens or default

    def header(self) -> dict[str, Any]:
        """Return what must be the same for a run to go on from another's journal."""
        return {
            "quick": self.quick,
            "pairs": [list(pair) for pair in self.grid_pairs()],
            "tokens": list(self.grid_tokens()),
            "weight_formats": [f.value for f in self.weight_formats],
            "blocks": [list(block) for block in self.blocks],
            "own": [[op_name(op), sizes_of(op)] for op in self.own_ops],
            "cold_bytes": self.cold_bytes,
            "share": self.share,
            "seed": self.seed,
        }

"""The tilings of several matmuls costed at once, for a few row cuts of each.

What the run-time query needs: with four row cuts of four matmuls an array operation costs more to
start than to do, so one for all columns replaces one for each matmul.

Notation: L token counts, G graphs, T token cuts, P choices of tiles, C columns (a matmul and a row
cut; as many for each matmul, its first one several times where others have more).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from hetero.profiler.model_graph import OpName
from hetero.solver.chooser import Chooser, SelectedCuts
from hetero.solver.kernel_times import Bools, Floats, Ints
from hetero.solver.npu_tiles import Choices, npu_choices
from hetero.solver.options import INF, Option
from hetero.solver.tilings import Grid, MatMulSpace, complement, contend
from hetero.solver.weight_memory import ResidentRows

Cells = TypeVar("Cells", Floats, Ints, Bools)


class Column(NamedTuple):
    """A matmul's last column, for all rows, and the rows that live on each device."""

    space: MatMulSpace
    whole: int
    resident: ResidentRows


class JointSpace:
    """Tables of matmuls with an NPU, up to `longest` tokens; `options` is then quick."""

    def __init__(
        self,
        spaces: Mapping[OpName, MatMulSpace],
        resident: Mapping[OpName, ResidentRows],
        longest: int,
    ) -> None:
        self.longest = longest
        members = self._members = list(spaces.values())
        width = max(len(x.rows) for x in members)
        self.columns: dict[OpName, Column] = {
            name: Column(space, (i + 1) * width - 1, resident[name])
            for i, (name, space) in enumerate(spaces.items())
        }
        counts = np.arange(longest + 1)
        self._margin = _wide([x.gpu_table(counts, x.rows) for x in members])
        self._low = _wide([x.gpu_table(counts, x.n - x.rows) for x in members])
        self._npu = _wide([x.npu_table(counts) for x in members])
        self._pieces = self._by_smaller_graphs(members[0])
        self._rows = _wide([x.rows[None] for x in members])[0]
        whole = [x.whole for x in self.columns.values()]
        self._all_rows = np.repeat(self._margin[:, whole], width, axis=1)
        fits = _wide([_fitting(c) for c in self.columns.values()])
        self._allowed = np.repeat(fits[:1], longest, axis=0)
        self._allowed[-1] = fits[1]  # the last cut takes all tokens

    def options(self, m: int, chooser: Chooser) -> dict[OpName, list[Option]]:
        """Return what every matmul may choose from at m tokens (`Chooser.options` with a mask)."""
        grid = self._grid(m)
        last = len(grid.cuts) - 1
        cost = chooser.cost_of(grid, self._allowed[-last - 1 :])
        cheapest = chooser.cheapest(self._members, m, grid, cost)
        options: dict[OpName, list[Option]] = {}
        for i, (name, (space, whole, resident)) in enumerate(self.columns.items()):
            gpu_s = float(self._margin[m, whole]) if resident.gpu == 0 else None
            on_npu = resident.npu == space.n and grid.npu_s[last, whole] < INF
            picked = SelectedCuts(gpu_s, (last, whole) if on_npu else None, cheapest.of(i))
            options[name] = chooser.made(space, m, grid, picked)
        return options

    def _grid(self, m: int) -> Grid:
        """Return all columns as if they were one matmul."""
        first = self._members[0]
        choices = npu_choices(m, first.sizes, first.alignment)
        cuts: Ints = choices.cuts
        npu, every = self._npu_times(choices)
        left = m - cuts
        gpu, tokens_first = complement(
            self._margin[left], self._all_rows[left], self._low[cuts], self._low[m]
        )
        gpu, npu = contend(first.kernels, m, gpu, npu)
        return Grid(
            0.0,
            first.overheads.cut(first.kernels, m, gpu, npu),
            self._rows,
            choices,
            every,
            tokens_first,
        )

    def _by_smaller_graphs(self, space: MatMulSpace) -> list[tuple[Floats, Floats]]:
        """Return `MatMulSpace.fastest` of the longest call with so many smaller graphs."""
        tops = (*space.sizes, 2 * space.sizes[-1]) if space.sizes else ()
        return [space.fastest(npu_choices(top, space.sizes), self._npu) for top in tops]

    def _npu_times(self, choices: Choices) -> tuple[Floats, Floats]:
        """Return the same as `MatMulSpace.fastest` from the tables.

        What ends before m tokens ends there in a longer call as well.
        """
        if not choices.sizes:
            free = self._npu[choices.cuts]
            return free, free
        fastest, every = self._pieces[choices.smaller]
        npu = fastest[: len(choices.cuts)].copy()
        npu[-1] = every[choices.starts[-1] :].min(axis=0)
        return npu, every


def _wide(tables: Sequence[Cells]) -> Cells:
    """Return the columns of all tables, a table's first one repeated where others have more."""
    width = max(x.shape[1] for x in tables)
    return np.concatenate(
        [np.pad(x, ((0, 0), (width - x.shape[1], 0)), mode="edge") for x in tables], axis=1
    )


def _fitting(column: Column) -> Bools:
    """Return [2, R] whether a cut fits the resident rows: of some tokens, and of all.

    Where a cut takes all tokens, all rows are no cut.
    """
    space, resident = column.space, column.resident
    rows, on_npu = space.rows, space.rows <= resident.npu
    return np.stack(
        (on_npu & (resident.gpu == 0), on_npu & (rows >= resident.gpu) & (rows < space.n))
    )

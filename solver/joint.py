"""The tilings of several matmuls costed at once, for a few row cuts of each.

What the run-time query needs: with four row cuts of four matmuls an array operation costs more to
start than to do, so one for all columns replaces one for each matmul.

Notation: L token counts, G graphs, T token cuts, P choices of pieces, C columns (a matmul and a row
cut).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetero.solver.kernels import Bools, Floats, Ints
from hetero.solver.memory import Held
from hetero.solver.options import Option
from hetero.solver.pieces import npu_choices
from hetero.solver.plan import OpName
from hetero.solver.tilings import Chooser, Grid, MatMulSpace, complement, contend, spread_of


class Column(NamedTuple):
    """A matmul's place among the columns, and the rows that live on each device."""

    space: MatMulSpace
    place: slice
    held: Held


class JointSpace:
    """Tables of matmuls with an NPU, up to `longest` tokens; `options` is then quick."""

    def __init__(
        self, spaces: Mapping[OpName, MatMulSpace], held: Mapping[OpName, Held], longest: int
    ) -> None:
        self.longest = longest
        self.columns: dict[OpName, Column] = {}
        start = 0
        for name, space in spaces.items():
            place = slice(start, start + len(space.rows))
            self.columns[name] = Column(space, place, held[name])
            start = place.stop
        counts = np.arange(longest + 1)
        members = list(spaces.values())
        self._margin = _wide([x.gpu_table(counts, x.rows) for x in members])
        self._low = _wide([x.gpu_table(counts, x.n - x.rows) for x in members])
        self._npu = _wide([x.npu_table(counts) for x in members])
        self._rows = np.concatenate([x.rows for x in members])
        self._launches = np.concatenate([np.full(len(x.rows), x.launches) for x in members])
        self._whole = np.concatenate(
            [np.full(len(x.rows), self.columns[n].place.stop - 1) for n, x in spaces.items()]
        )
        self._fits: Bools = np.concatenate([_fitting(c) for c in self.columns.values()], axis=1)

    def options(self, m: int, chooser: Chooser) -> dict[OpName, list[Option]]:
        """What every matmul may choose from at m tokens (`Chooser.options` with a mask)."""
        joint = self._grid(m)
        mask = np.repeat(self._fits[:1], len(joint.cuts), axis=0)
        mask[-1] = self._fits[1]  # the last cut takes all tokens
        price = chooser.price(joint, m, mask, alone=self._whole)
        _ = joint.npu_dominant  # for all columns at once
        found: dict[OpName, list[Option]] = {}
        for name, (space, place, held) in self.columns.items():
            alone_s = float(self._margin[m, place.stop - 1])
            grid = joint.columns(place, alone_s, space.rows)
            found[name] = chooser.options(
                space, m, grid=grid, mask=mask[:, place], price=price[:, place],
                gpu_alone=held.gpu == 0,
            )  # fmt: skip
        return found

    def _grid(self, m: int) -> Grid:
        """All columns as if they were one matmul."""
        first = next(iter(self.columns.values())).space
        choices = npu_choices(m, first.sizes, first.alignment)
        cuts: Ints = choices.cuts
        npu, every = first.fastest(choices, self._npu)
        margin = self._margin[m - cuts]
        gpu, tokens_first = complement(
            margin, margin[:, self._whole], self._low[cuts], self._low[m]
        )
        gpu, npu = contend(first.kernels, m, gpu, npu)
        ahead_s = first.sync.ahead_s(m, self._launches)
        spread = spread_of(first.kernels, m)
        return Grid(0.0, gpu, npu, self._rows, choices, every, tokens_first, ahead_s, spread)


def _wide(tables: Sequence[Floats]) -> Floats:
    return np.concatenate(tables, axis=1)


def _fitting(column: Column) -> Bools:
    """[2, R] whether a row cut fits the rows that live where: of part of the tokens, of all."""
    rows, held = column.space.rows, column.held
    on_npu = rows <= held.npu
    return np.stack((on_npu & (held.gpu == 0), on_npu & (rows >= held.gpu)))

"""All tilings of one matmul, costed at once with numpy (paper sections 4.1 and 4.3).

Notation: T token cuts t, R row cuts r (the last one is n), A token counts of GPU kernels. Times are
seconds [T, R]; impossible ones are infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from hetero.profiler.records import phase_of
from hetero.solver.kernels import Bools, Floats, Ints, Kernels, graph_sizes
from hetero.solver.options import Sync
from hetero.solver.pieces import Choices, Pieces, npu_choices

FREE = Sync()
FAR: Final = 9.0  # deviations between two times of which the shorter one does not matter


@dataclass(frozen=True)
class Grid:
    """Costed tilings of one matmul at m tokens.

    `ahead_s` (of the matmul or of each column) passes on the NPU's thread before its tile, and
    `restart_s` if the thread did something else before. `spread` is how much the GPU's and the
    NPU's times vary, as fractions of them (standard deviations), `starting` as in `Sync`.
    """

    gpu_only_s: float
    gpu_s: Floats
    npu_s: Floats
    rows: Ints
    choices: Choices
    every_npu_s: Floats
    tokens_first: Bools
    ahead_s: Floats | float = 0.0
    spread: tuple[float, float] = (0.0, 0.0)
    restart_s: float = 0.0
    starting: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def together_s(self) -> Floats:
        """[T, R] until both are done."""
        return longer(self.gpu_s, self.npu_thread_s, self.spread)

    @cached_property
    def dry_s(self) -> Floats | float:
        """[T, R] what starting the GPU again is expected to cost beyond what the mode says: all of
        it where the NPU's thread is done last, else nothing. Times that vary make that a chance.
        """
        start_s, behind_s = self.starting
        if not start_s or self.spread == (0.0, 0.0):
            return 0.0
        chance = later(self.npu_thread_s + behind_s, self.gpu_s, self.spread[::-1])
        return np.asarray(start_s * (chance - self.npu_dominant))

    @cached_property
    def npu_thread_s(self) -> Floats:
        """[T, R] until the NPU's thread is done."""
        return np.asarray(self.npu_s + (self.ahead_s + self.restart_s))

    def behind_gpu_s(self, place: tuple[int, int]) -> float:
        """How much longer a tiling without the GPU takes behind the GPU than behind other calls."""
        ahead_s = np.broadcast_to(self.ahead_s, self.npu_s.shape)
        return float(ahead_s[place]) + self.restart_s

    @cached_property
    def npu_dominant(self) -> Bools:
        """[T, R] whether the NPU's thread is done last."""
        return np.asarray(self.npu_thread_s >= self.gpu_s)

    @property
    def cuts(self) -> Ints:
        """[T] token cuts."""
        return self.choices.cuts

    def pieces(self, cut: int, row: int) -> Pieces:
        """The fastest pieces for a cut and a number of rows (places in `cuts` and `rows`)."""
        group = self.choices.group(cut)
        choice = group.start
        if group.stop > choice + 1:
            choice += int(self.every_npu_s[group, row].argmin())
        return self.choices.pieces(choice)


class MatMulSpace:
    """One matmul: n rows, k features. Everything that does not depend on m is looked up once.

    `rows` limits the row cuts, `row_steps` their number; every alignment step by default. `rows`
    are prepared, so an NPU with graphs computes each run of rows between them by a call of its own.
    `launches` are the GPU's whose submission delays an NPU tile in decoding (`Sync.ahead_s`).
    """

    def __init__(
        self,
        kernels: Kernels,
        n: int,
        k: int,
        *,
        row_steps: int | None = None,
        rows: Sequence[int] | None = None,
        sync: Sync = FREE,
        launches: float = 0.0,
    ) -> None:
        self.kernels, self.n, self.k = kernels, n, k
        self.sync, self.launches = sync, launches
        self.has_npu = kernels.has("npu")
        record = kernels.cost.profile.devices.get("npu")
        self.sizes = graph_sizes(record) if record is not None else ()
        self.alignment = record.capabilities.token_alignment if record is not None else 1
        step = record.capabilities.row_alignment if record is not None else n
        if row_steps is not None:
            step *= max(1, -(-n // (step * row_steps)))
        cuts = range(step, n, step) if rows is None else sorted({r for r in rows if 0 < r < n})
        self.rows = np.asarray([*cuts, n], dtype=np.intp)
        self._limited = rows is not None
        if self.sizes and self.has_npu:
            self._graphs = self.npu_table(np.zeros(0, np.intp))

    def grid(self, m: int, *, every: bool = False) -> Grid:
        """Cost every tiling of m tokens. Pieces that end at the same token share a row of the grid
        (the fastest counts) unless `every` is set.
        """
        if not self.has_npu:
            return self._gpu_grid(m)
        choices = npu_choices(m, self.sizes, self.alignment, every=every)
        npu, every_npu = self._npu_times(choices)
        gpu, tokens_first, alone = self._gpu_times(m, choices.cuts)
        gpu, npu = contend(self.kernels, m, gpu, npu)
        return Grid(
            alone,
            gpu,
            npu,
            self.rows,
            choices,
            every_npu,
            tokens_first,
            self.ahead_s(m),
            spread_of(self.kernels, m),
            self.sync.restart_s,
            self.sync.starting(m),
        )

    def ahead_s(self, m: int) -> float:
        """How late an NPU tile of m tokens is because of submissions."""
        return self.sync.ahead_s(m, self.launches)

    def _gpu_grid(self, m: int) -> Grid:
        alone = float(self.kernels.table("gpu", [m], [self.n], self.k).seconds[0, 0])
        none = np.full((1, 1), np.inf)
        choices = npu_choices(m, (), m)
        return Grid(alone, none, none, self.rows[-1:], choices, none, none < 0)

    def npu_table(self, counts: Ints) -> Floats:
        """[G + 1, R] NPU seconds of every graph, the last row nothing; [L, R] of these token counts
        where the NPU takes any.
        """
        if not self.sizes:
            return self.kernels.table("npu", counts, self.rows, self.k).seconds
        whole = self.graph_table(self.rows)
        if not self._limited:
            return whole
        segments = self.graph_table(np.diff(self.rows, prepend=0)).cumsum(axis=1)
        return np.asarray(np.maximum(whole, segments))

    def graph_table(self, rows: Ints) -> Floats:
        """[G + 1, R] NPU seconds of every graph with so many rows, the last row nothing."""
        table = self.kernels.table("npu", self.sizes, rows, self.k).seconds
        return np.concatenate((table, np.zeros((1, len(rows)))))

    def gpu_table(self, counts: Ints, rows: Ints) -> Floats:
        """[L, R] GPU seconds of these token counts and rows."""
        return self.kernels.table("gpu", counts, rows, self.k).seconds

    def fastest(self, choices: Choices, table: Floats) -> tuple[Floats, Floats]:
        """[T, R] times of the fastest pieces for each cut, and [P, R] of every choice, from a table
        of graphs (or, where the NPU takes any token count, of all token counts).
        """
        if not self.sizes:
            free = table[choices.cuts]
            return free, free
        sums = table[choices.first] + table[choices.second]
        if len(choices.starts) == len(sums):
            return sums, sums
        return np.minimum.reduceat(sums, choices.starts, axis=0), sums

    def _npu_times(self, choices: Choices) -> tuple[Floats, Floats]:
        if self.sizes:
            return self.fastest(choices, self._graphs)
        free = self.npu_table(choices.cuts)
        return free, free

    def _gpu_times(self, m: int, cuts: Ints) -> tuple[Floats, Bools, float]:
        """[T, R] times of the complement, cut either way; and of the whole."""
        margin = self.gpu_table(np.append(m - cuts, m), self.rows)
        low = self.gpu_table(np.append(cuts, m), self.n - self.rows)
        gpu, tokens_first = complement(margin[:-1], margin[:-1, -1:], low[:-1], low[-1])
        return gpu, tokens_first, float(margin[-1, -1])


def complement(
    margin: Floats, whole_margin: Floats, low: Floats, low_all: Floats
) -> tuple[Floats, Bools]:
    """[T, R] GPU seconds of what the NPU leaves, cut the faster way; whether tokens come first.

    margin          [T, R] of m - t tokens and r rows
    whole_margin    of m - t tokens and all rows
    low             [T, R] of t tokens and n - r rows
    low_all         of m tokens and n - r rows
    """
    rows_first, tokens_first = low_all + margin, whole_margin + low
    return np.minimum(tokens_first, rows_first), tokens_first < rows_first


def contend(kernels: Kernels, m: int, gpu_s: Floats, npu_s: Floats) -> tuple[Floats, Floats]:
    """Seconds of both devices, slowed down while both work; infinite where one is."""
    cost, key = kernels.cost, (phase_of(m), kernels.weight_format)
    a, b = cost.contention("gpu", *key), cost.contention("npu", *key)
    if a == b == 1:
        return gpu_s, npu_s
    impossible = np.isinf(gpu_s + npu_s)
    if some := impossible.any():
        gpu_s, npu_s = np.where(impossible, 0.0, gpu_s), np.where(impossible, 0.0, npu_s)
    gpu, npu = a * gpu_s, b * npu_s
    longer = gpu >= npu
    gpu_all = np.where(longer, npu + gpu_s - npu / a, gpu)
    npu_all = np.where(longer, npu, gpu + npu_s - gpu / b)
    if some:
        gpu_all[impossible] = npu_all[impossible] = np.inf
    return gpu_all, npu_all


def spread_of(kernels: Kernels, m: int) -> tuple[float, float]:
    """How much the GPU's and the NPU's kernels of m tokens vary (`CostModel.spread`)."""
    cost, key = kernels.cost, (phase_of(m), kernels.weight_format)
    return cost.spread("gpu", *key), cost.spread("npu", *key)


def longer(a: Floats, b: Floats, spread: tuple[float, float]) -> Floats:
    """Expected value of the longer of two times with these relative standard deviations.

    Two times that vary are never both at their mean: what takes 10 ms on either device, give or
    take 1 ms, takes 10.6 ms on both (C. E. Clark, "The greatest of a finite set of random
    variables", Operations Research 9, 1961; independent and normal). With no spread the maximum.
    """
    top = np.maximum(a, b)
    if spread == (0.0, 0.0):
        return top
    deviation = _deviation(a, b, spread)
    with np.errstate(invalid="ignore", divide="ignore"):  # impossible ones, and those of no time
        apart = np.abs(a - b) / -deviation
    near = np.flatnonzero(apart > -FAR)  # elsewhere nothing is added that a float64 could hold
    x, deviation = apart.ravel()[near], deviation.ravel()[near]
    more = deviation * (0.3989423 * np.exp(-0.5 * x * x) + x * _below(x))
    total = top.ravel()
    total[near] += np.maximum(more, 0.0)
    return total.reshape(top.shape)


def later(a: Floats, b: Floats, spread: tuple[float, float]) -> Floats:
    """The chance that the first of two times is the longer one, as in `longer`; 0 where either is
    infinite.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = (a - b) / _deviation(a, b, spread)
    return np.where(np.isfinite(a + b), _below(np.clip(apart, -FAR, FAR)), 0.0)


def _deviation(a: Floats, b: Floats, spread: tuple[float, float]) -> Floats:
    """Standard deviation of the difference of two times with these relative ones."""
    with np.errstate(invalid="ignore"):  # no spread, and a time that is infinite
        return np.sqrt((spread[0] * a) ** 2 + (spread[1] * b) ** 2)


def _below(x: Floats) -> Floats:
    """The normal distribution function to 5e-4 (numpy has none)."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.7978846 * x + 0.0356774 * x**3))

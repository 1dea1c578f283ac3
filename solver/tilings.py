"""All tilings of one matmul, costed at once with numpy (paper sections 4.1 and 4.3).

Notation: T token cuts t, R row cuts r (the last one is n), A token counts of GPU kernels. Times are
seconds [T, R]; impossible ones are infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hetero.backends.protocol import prepared_sizes
from hetero.profiler.records import phase_of
from hetero.solver.kernel_times import Bools, Floats, Ints, KernelTimes
from hetero.solver.npu_tiles import Choices, NpuTiles, npu_choices
from hetero.solver.overheads import CutTimes, Overheads

FREE: Final = Overheads()


@dataclass(frozen=True)
class Grid:
    """Costed tilings of one matmul at m tokens.

    `times` has what both halves of each tiling make together.
    """

    gpu_only_s: float
    times: CutTimes
    rows: Ints
    choices: Choices
    every_npu_s: Floats
    tokens_first: Bools

    @property
    def gpu_s(self) -> Floats:
        """Return [T, R] seconds of the GPU's part."""
        return self.times.gpu_s

    @property
    def npu_s(self) -> Floats:
        """Return [T, R] seconds of the NPU's part."""
        return self.times.npu_s

    @property
    def elapsed_s(self) -> Floats:
        """[T, R] until both are done."""
        return self.times.elapsed_s

    @property
    def npu_dominant(self) -> Bools:
        """[T, R] whether the NPU is done last."""
        return self.times.npu_dominant

    @property
    def cuts(self) -> Ints:
        """Return [T] token cuts."""
        return self.choices.cuts

    def npu_tiles(self, cut: int, row: int) -> NpuTiles:
        """Return the fastest tiles for a cut and a number of rows.

        Both are places in `cuts` and `rows`.
        """
        group = self.choices.group(cut)
        choice = group.start
        if group.stop > choice + 1:
            choice += int(self.every_npu_s[group, row].argmin())
        return self.choices.npu_tiles(choice)


class MatMulSpace:
    """One matmul: n rows, k features. Everything that does not depend on m is looked up once.

    `rows` limits the row cuts, `row_steps` their number; every alignment step by default. `rows`
    are prepared, so an NPU with graphs computes each run of rows between them by a call of its own.
    """

    def __init__(
        self,
        kernels: KernelTimes,
        n: int,
        k: int,
        *,
        row_steps: int | None = None,
        rows: Sequence[int] | None = None,
        overheads: Overheads = FREE,
    ) -> None:
        self.kernels, self.n, self.k = kernels, n, k
        self.overheads = overheads
        self.has_npu = kernels.has("npu")
        record = kernels.cost.profile.devices.get("npu")
        self.sizes = prepared_sizes(record.capabilities) if record is not None else ()
        self.alignment = record.capabilities.token_alignment if record is not None else 1
        step = record.capabilities.row_alignment if record is not None else n
        if row_steps is not None:
            step *= max(1, -(-n // (step * row_steps)))
        cuts = range(step, n, step) if rows is None else sorted({r for r in rows if 0 < r < n})
        self.rows = np.asarray([*cuts, n], dtype=np.intp)
        self._limited = rows is not None
        self._uncertain: dict[tuple[int, int], float] = {}  # by tokens of a graph and rows
        if self.sizes and self.has_npu:
            self._graphs = self.npu_table(np.zeros(0, np.intp))

    def grid(self, m: int, *, every: bool = False) -> Grid:
        """Return cost every tiling of m tokens.

        Tiles that end at the same token share a row of the grid (the fastest counts) unless
        `every` is set.
        """
        if not self.has_npu:
            return self._gpu_grid(m)
        choices = npu_choices(m, self.sizes, self.alignment, every=every)
        npu, every_npu = self.npu_times(choices)
        gpu, tokens_first, alone = self._gpu_times(m, choices.cuts)
        gpu, npu = contend(self.kernels, m, gpu, npu)
        return Grid(
            alone,
            self.overheads.cut(self.kernels, m, gpu, npu),
            self.rows,
            choices,
            every_npu,
            tokens_first,
        )

    def _gpu_grid(self, m: int) -> Grid:
        alone = float(self.kernels.table("gpu", [m], [self.n], self.k).seconds[0, 0])
        none = np.full((1, 1), np.inf)
        choices = npu_choices(m, (), m)
        return Grid(alone, CutTimes(none, none), self.rows[-1:], choices, none, none < 0)

    def npu_table(self, counts: Ints) -> Floats:
        """Return [G + 1, R] NPU seconds of every graph, the last row nothing.

        [L, R] of these token counts where the NPU takes any.
        """
        if not self.sizes:
            return self.kernels.table("npu", counts, self.rows, self.k).seconds
        whole = self.graph_table(self.rows)
        if not self._limited:
            return whole
        segments = self.graph_table(np.diff(self.rows, prepend=0)).cumsum(axis=1)
        return np.asarray(np.maximum(whole, segments))

    def graph_table(self, rows: Ints) -> Floats:
        """Return [G + 1, R] NPU seconds of every graph with so many rows, the last row nothing."""
        table = self.kernels.table("npu", self.sizes, rows, self.k).seconds
        return np.concatenate((table, np.zeros((1, len(rows)))))

    def uncertainty(self, tiles: NpuTiles, rows: int) -> float:
        """Return by which fraction the NPU's time may be off: that of its least known tile."""
        return max(self._uncertainty(size or tiles.tokens, rows) for size in tiles.sizes)

    def _uncertainty(self, tokens: int, rows: int) -> float:
        key = tokens, rows
        if key not in self._uncertain:
            sizes = self.sizes if tokens in self.sizes else (tokens,)
            cuts = self.rows if rows in self.rows else np.asarray([rows])
            table = self.kernels.uncertainty("npu", sizes, cuts, self.k).tolist()
            for size, fractions in zip(sizes, table, strict=True):
                known = zip(cuts.tolist(), fractions, strict=True)
                self._uncertain |= {(size, cut): fraction for cut, fraction in known}
        return self._uncertain[key]

    def gpu_table(self, counts: Ints, rows: Ints) -> Floats:
        """Return [L, R] GPU seconds of these token counts and rows."""
        return self.kernels.table("gpu", counts, rows, self.k).seconds

    def fastest(self, choices: Choices, table: Floats) -> tuple[Floats, Floats]:
        """Return [T, R] times of the fastest tiles for each cut, and [P, R] of every choice.

        They come from a table of graphs (or, where the NPU takes any token count, of all token
        counts).
        """
        if not self.sizes:
            free = table[choices.cuts]
            return free, free
        sums = table[choices.first] + table[choices.second]
        if len(choices.starts) == len(sums):
            return sums, sums
        return np.minimum.reduceat(sums, choices.starts, axis=0), sums

    def npu_times(self, choices: Choices) -> tuple[Floats, Floats]:
        """Return `fastest` of the NPU's tiles, each row cut in the runs that are prepared."""
        if self.sizes:
            return self.fastest(choices, self._graphs)
        free = self.npu_table(choices.cuts)
        return free, free

    def _gpu_times(self, m: int, cuts: Ints) -> tuple[Floats, Bools, float]:
        """Return [T, R] times of the complement, cut either way; and of the whole."""
        margin = self.gpu_table(np.append(m - cuts, m), self.rows)
        low = self.gpu_table(np.append(cuts, m), self.n - self.rows)
        gpu, tokens_first = complement(margin[:-1], margin[:-1, -1:], low[:-1], low[-1])
        return gpu, tokens_first, float(margin[-1, -1])


def complement(
    margin: Floats, whole_margin: Floats, low: Floats, low_all: Floats
) -> tuple[Floats, Bools]:
    """Return [T, R] GPU seconds of what the NPU leaves, cut the faster way.

    Whether tokens come first.

    margin          [T, R] of m - t tokens and r rows
    whole_margin    of m - t tokens and all rows
    low             [T, R] of t tokens and n - r rows
    low_all         of m tokens and n - r rows
    """
    rows_first, tokens_first = low_all + margin, whole_margin + low
    return np.minimum(tokens_first, rows_first), tokens_first < rows_first


def contend(kernels: KernelTimes, m: int, gpu_s: Floats, npu_s: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of both devices, slowed down while both work; infinite where one is."""
    cost, key = kernels.cost, (phase_of(m), kernels.weight_format)
    return contended(cost.contention("gpu", *key), cost.contention("npu", *key), gpu_s, npu_s)


def contended(a: float, b: float, gpu_s: Floats, npu_s: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of GPU and NPU that take a and b times as long while both work."""
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

"""All tilings of one matmul, costed at once with numpy (paper sections 4.1 and 4.3).

Notation: T token cuts t, R row cuts r (the last one is n), A token counts of GPU kernels. Times are
seconds [T, R]; impossible ones are infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetero.profiler.records import phase_of
from hetero.solver.kernels import Floats, Ints, Kernels, graph_sizes
from hetero.solver.options import GPU, HOST, INF, Objective, Option, Sync
from hetero.solver.pieces import Pieces, npu_pieces
from hetero.solver.plan import Strategy

ACTIVATION_BYTES = 4  # float32


@dataclass(frozen=True)
class Rules:
    """What a tiling must keep to.

    margin          a cut must be this much (a fraction) faster than the best single device
    max_gpu_share   the GPU is busy for at most this share of a matmul's time
    """

    margin: float = 0.03
    max_gpu_share: float = 1.0


@dataclass(frozen=True)
class Grid:
    """Costed tilings of one matmul at m tokens."""

    gpu_only_s: float
    gpu_s: Floats
    npu_s: Floats
    cuts: tuple[int, ...]
    rows: Ints
    pieces: tuple[tuple[Pieces, ...], ...]
    which: Ints
    tokens_first: np.ndarray

    @cached_property
    def together_s(self) -> Floats:
        """[T, R] until both are done."""
        return np.maximum(self.gpu_s, self.npu_s)


class MatMulSpace:
    """One matmul: n rows, k features. Everything that does not depend on m is looked up once."""

    def __init__(self, kernels: Kernels, n: int, k: int, *, row_steps: int | None = None) -> None:
        self.kernels, self.n, self.k = kernels, n, k
        self.has_npu = kernels.has("npu")
        record = kernels.cost.profile.devices.get("npu")
        self.sizes = graph_sizes(record) if record is not None else ()
        self.alignment = record.capabilities.token_alignment if record is not None else 1
        step = record.capabilities.row_alignment if record is not None else n
        if row_steps is not None:
            step *= max(1, -(-n // (step * row_steps)))
        self.rows = np.asarray([*range(step, n, step), n], dtype=np.intp)
        if self.sizes and self.has_npu:
            self._graphs = kernels.table("npu", self.sizes, self.rows, k)

    def grid(self, m: int, *, every: bool = False) -> Grid:
        """Cost every tiling of m tokens. Pieces that end at the same token share a row of the grid
        (the fastest counts) unless `every` is set.
        """
        if not self.has_npu:
            alone = float(self.kernels.table("gpu", [m], [self.n], self.k).seconds[0, 0])
            none = np.full((1, 1), np.inf)
            return Grid(
                alone, none, none, (m,), self.rows[-1:], ((),), np.zeros((1, 1), np.intp), none > 0
            )
        cuts, pieces = self._cuts(m, every)
        npu, which = self._npu_times(cuts, pieces)
        gpu, tokens_first, alone = self._gpu_times(m, cuts)
        return self._contend(m, Grid(alone, gpu, npu, cuts, self.rows, pieces, which, tokens_first))

    def _cuts(self, m: int, every: bool) -> tuple[tuple[int, ...], tuple[tuple[Pieces, ...], ...]]:
        pieces = npu_pieces(m, self.sizes, self.alignment)
        if every:
            return tuple(p.tokens for p in pieces), tuple((p,) for p in pieces)
        by_tokens: dict[int, list[Pieces]] = {}
        for found in pieces:
            by_tokens.setdefault(found.tokens, []).append(found)
        cuts = tuple(sorted(by_tokens))
        return cuts, tuple(tuple(by_tokens[t]) for t in cuts)

    def _npu_times(
        self, cuts: tuple[int, ...], pieces: tuple[tuple[Pieces, ...], ...]
    ) -> tuple[Floats, Ints]:
        """[T, R] times of the fastest pieces for each cut, and which those are."""
        if not self.sizes:
            free = self.kernels.table("npu", cuts, self.rows, self.k).seconds
            return free, np.zeros(free.shape, dtype=np.intp)
        at = {g: i for i, g in enumerate(self.sizes)}
        table = self._graphs.seconds
        times = np.empty((len(cuts), len(self.rows)))
        which = np.zeros(times.shape, dtype=np.intp)
        for i, choices in enumerate(pieces):
            sums = [sum(table[at[g]] for g in c.sizes if g is not None) for c in choices]
            if len(sums) == 1:
                times[i] = sums[0]
            else:
                stacked = np.stack(sums)
                which[i] = stacked.argmin(axis=0)
                times[i] = stacked.min(axis=0)
        return times, which

    def _gpu_times(self, m: int, cuts: tuple[int, ...]) -> tuple[Floats, np.ndarray, float]:
        """[T, R] times of the complement, cut either way; and of the whole."""
        t, r, n = np.asarray(cuts), self.rows, self.n
        counts = np.unique(np.concatenate((t, m - t, [m])))
        at = {int(c): i for i, c in enumerate(counts)}
        table = self.kernels.table("gpu", counts, np.concatenate((r, n - r, [n])), self.k).seconds
        low, rest, whole = table[:, : len(r)], table[:, len(r) : -1], table[:, -1]
        margin = [at[int(m - x)] for x in t]
        rows_first = rest[at[m]][None, :] + low[margin]
        tokens_first = whole[margin][:, None] + rest[[at[int(x)] for x in t]]
        better = tokens_first < rows_first
        return np.where(better, tokens_first, rows_first), better, float(whole[at[m]])

    def _contend(self, m: int, grid: Grid) -> Grid:
        """Slow both devices down while both work."""
        cost, phase = self.kernels.cost, phase_of(m)
        a, b = cost.contention("gpu", phase), cost.contention("npu", phase)
        possible = np.isfinite(grid.gpu_s) & np.isfinite(grid.npu_s)
        gpu = np.where(possible, grid.gpu_s, 0.0)
        npu = np.where(possible, grid.npu_s, 0.0)
        longer = a * gpu >= b * npu
        gpu_s = np.where(longer, b * npu + gpu - b * npu / a, a * gpu)
        npu_s = np.where(longer, b * npu, a * gpu + npu - a * gpu / b)
        return Grid(
            grid.gpu_only_s,
            np.where(possible, gpu_s, np.inf),
            np.where(possible, npu_s, np.inf),
            grid.cuts,
            grid.rows,
            grid.pieces,
            grid.which,
            grid.tokens_first,
        )


class Chooser:
    """Reduces the tilings of a matmul to the few that can be part of a best chain."""

    def __init__(self, sync: Sync, rules: Rules, objective: Objective) -> None:
        self.sync, self.rules, self.objective = sync, rules, objective

    def options(
        self,
        space: MatMulSpace,
        m: int,
        *,
        grid: Grid | None = None,
        mask: np.ndarray | None = None,
        gpu_alone: bool = True,
    ) -> list[Option]:
        """Best single-device options and best cuts of each mode, the margin applied.

        `mask` [T, R] says which tilings may be used (residency); all if None; `gpu_alone`
        whether the GPU holds all rows. A gpu-only option comes first and is closed where the rules
        forbid it, unless nothing else can compute the matmul.
        """
        grid = grid or space.grid(m)
        gpu = self._gpu_only(space, grid, m)
        npu = list(self._npu_options(space, grid, m, mask))
        singles = [gpu, *npu] if gpu_alone else npu
        cuts = list(self._cut_options(space, grid, m, mask))
        if gpu_alone and not npu and not cuts:
            return [replace(gpu, barred=frozenset())]  # nothing else can compute it
        return [*singles, *self._with_margin(singles, cuts)]

    def named(self, space: MatMulSpace, m: int) -> list[Option]:
        """The best option of every strategy, entered from `GPU`; for explanations."""
        grid = space.grid(m, every=True)
        best: dict[str, Option] = {}
        for state_only in self._every_strategy(space, grid, m):
            known = best.get(state_only.strategy)
            if known is None or self.objective.cost(state_only, GPU) < self.objective.cost(
                known, GPU
            ):
                best[state_only.strategy] = state_only
        return list(best.values())

    def _every_strategy(self, space: MatMulSpace, grid: Grid, m: int) -> Iterator[Option]:
        yield self._gpu_only(space, grid, m)
        codes = _strategy_codes(grid, m)
        for code in np.unique(codes):
            mask = (codes == code) & np.isfinite(grid.together_s)
            yield from self._npu_options(space, grid, m, mask)
            yield from self._cut_options(space, grid, m, mask)

    def _gpu_only(self, space: MatMulSpace, grid: Grid, m: int) -> Option:
        into = self.sync.copy(ACTIVATION_BYTES * m * space.k)
        option = Option(
            "gpu-only",
            "gpu",
            together_s=grid.gpu_only_s,
            gpu_s=grid.gpu_only_s,
            enter_s=(0.0, self.sync.submit_s + into),
            leaves=GPU,
        )
        return option if self.rules.max_gpu_share >= 1 else option.bar(GPU, HOST)

    def _npu_options(
        self, space: MatMulSpace, grid: Grid, m: int, mask: np.ndarray | None
    ) -> Iterator[Option]:
        allowed = (np.asarray(grid.cuts) == m) & np.isfinite(grid.npu_s[:, -1])
        if mask is not None:
            allowed &= mask[:, -1]
        if not allowed.any():
            return
        i = int(np.where(allowed, grid.npu_s[:, -1], np.inf).argmin())
        seconds, pieces = float(grid.npu_s[i, -1]), grid.pieces[i][grid.which[i, -1]]
        sync = self.sync
        enter = sync.wait_s + sync.copy(ACTIVATION_BYTES * m * space.k)
        leave = sync.copy(ACTIVATION_BYTES * m * space.n)
        yield Option(
            "npu-only" if len(pieces.spans) == 1 else "multi-sequence-cut",
            "npu",
            together_s=seconds,
            npu_s=seconds,
            enter_s=(enter + leave, leave),
            leaves=HOST,
            rows=space.n,
            pieces=pieces,
        )

    def _cut_options(
        self, space: MatMulSpace, grid: Grid, m: int, mask: np.ndarray | None
    ) -> Iterator[Option]:
        possible = np.isfinite(grid.together_s)
        possible[np.asarray(grid.cuts) == m, -1] = False  # the NPU alone
        if self.rules.max_gpu_share < 1:
            share = self.rules.max_gpu_share * (1 + 1e-12)
            possible &= grid.gpu_s <= share * np.where(possible, grid.together_s, 0.0)
        if mask is not None:
            possible &= mask
        if not possible.any():
            return
        npu_dominant = grid.npu_s >= grid.gpu_s
        base = self._price(grid, possible)
        for dominant in (True, False):
            allowed = possible & (npu_dominant == dominant)
            if not allowed.any():
                continue
            chosen: set[tuple[int, int]] = set()
            for state in (GPU, HOST):
                price = np.where(
                    allowed, base + self._copies(space, grid, m, state, dominant), np.inf
                )
                flat = int(price.argmin())
                chosen.add((flat // price.shape[1], flat % price.shape[1]))
            for i, j in sorted(chosen):
                yield self._cut(space, grid, m, i, j, dominant)

    def _price(self, grid: Grid, possible: np.ndarray) -> Floats:
        """[T, R] objective without synchronisation."""
        objective, power = self.objective, self.objective.power
        total = grid.together_s
        price = objective.seconds * np.where(possible, total, 0.0)
        if objective.joules and power is not None:
            gpu, npu = (np.where(possible, x, 0.0) for x in (grid.gpu_s, grid.npu_s))
            both = np.minimum(gpu, npu)
            joules = power.gpu_w * (gpu - both) + power.npu_w * (npu - both) + power.both_w * both
            price = price + objective.joules * joules
        return price

    def _copies(
        self, space: MatMulSpace, grid: Grid, m: int, state: int, dominant: bool
    ) -> Floats | float:
        """Objective of the copies of a cut, [T, R]; nothing where memory is unified."""
        if self.sync.copy_s == 0 and self.sync.copy_s_per_byte == 0:
            return 0.0
        weigh = self.objective.seconds
        if self.objective.joules and self.objective.power is not None:
            weigh += self.objective.joules * self.objective.power.idle_w
        shape = grid.together_s.shape
        found = np.empty(shape)
        for i, t in enumerate(grid.cuts):
            for j, r in enumerate(grid.rows):
                found[i, j] = self._copy_s(space, m, t, int(r), state, dominant)
        return weigh * found

    def _copy_s(
        self, space: MatMulSpace, m: int, t: int, r: int, state: int, dominant: bool
    ) -> float:
        """Operand to the device that lacks it; piece of the result to where it goes on."""
        operand = t * space.k if state == GPU else m * space.k
        piece = t * r
        moved = m * space.n - piece if dominant else piece
        return self.sync.copy(ACTIVATION_BYTES * operand) + self.sync.copy(ACTIVATION_BYTES * moved)

    def _cut(
        self, space: MatMulSpace, grid: Grid, m: int, i: int, j: int, dominant: bool
    ) -> Option:
        sync, r, t = self.sync, int(grid.rows[j]), grid.cuts[i]
        pieces = grid.pieces[i][grid.which[i, j]]
        submit = sync.submit_s + sync.join_s if dominant else sync.join_s
        from_gpu = sync.wait_s + submit + self._copy_s(space, m, t, r, GPU, dominant)
        from_host = sync.submit_s + sync.join_s + self._copy_s(space, m, t, r, HOST, dominant)
        return Option(
            strategy_name(m, space.n, r, pieces),
            "npu-dominant" if dominant else "gpu-dominant",
            together_s=float(grid.together_s[i, j]),
            gpu_s=float(grid.gpu_s[i, j]),
            npu_s=float(grid.npu_s[i, j]),
            enter_s=(from_gpu, from_host),
            leaves=HOST if dominant else GPU,
            rows=r,
            pieces=pieces,
            tokens_first=bool(grid.tokens_first[i, j]),
        )

    def _with_margin(self, singles: list[Option], cuts: list[Option]) -> Iterator[Option]:
        """Cuts, closed from each state where they do not beat the best single device enough."""
        best = [
            min((self.objective.cost(s, state) for s in singles), default=INF)
            for state in (GPU, HOST)
        ]
        for cut in cuts:
            limits = [(1 - self.rules.margin) * b for b in best]
            closed = [
                state for state in (GPU, HOST) if self.objective.cost(cut, state) > limits[state]
            ]
            if len(closed) < 2:
                yield cut.bar(*closed) if closed else cut


def strategy_name(m: int, n: int, rows: int, pieces: Pieces) -> Strategy:
    """The paper's name of a tiling (docs/solver.md)."""
    one, whole = len(pieces.spans) == 1, pieces.tokens == m
    exact = pieces.sizes[-1] in (None, pieces.spans[-1][1] - pieces.spans[-1][0])
    if rows == n:
        if one and whole:
            return "npu-only"
        return "sequence-cut" if one else "multi-sequence-cut"
    return "row-cut" if one and whole and exact else "hybrid-cut"


def _strategy_codes(grid: Grid, m: int) -> Ints:
    """[T, R] numbers that differ between strategies; for grids with one choice for each row."""
    codes = np.empty(grid.together_s.shape, dtype=np.intp)
    known: dict[str, int] = {}
    n = int(grid.rows[-1])
    for i, choices in enumerate(grid.pieces):
        for j, columns in ((0, slice(0, -1)), (-1, slice(-1, None))):
            rows = n if j else min(int(grid.rows[0]), n - 1)
            name = strategy_name(m, n, rows, choices[0]) if choices else ""
            codes[i, columns] = known.setdefault(name, len(known))
    return codes

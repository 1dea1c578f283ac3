"""Select the tilings of a matmul that can be part of a best path.

Notation: T token cuts t, R row cuts r (the last one is n), C columns (a matmul and a row cut), S
states. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from hetero.solver.kernel_times import Bools, Floats, Ints
from hetero.solver.npu_tiles import NpuTiles
from hetero.solver.options import GPU, HOST, INF, Objective, Option
from hetero.solver.overheads import Overheads
from hetero.solver.plan import Strategy
from hetero.solver.third_device import Spans, cuts_for_three, takes_third
from hetero.solver.tilings import Grid, MatMulSpace

ACTIVATION_BYTES = 4  # float32
MODES: Final = (True, False)  # whether the NPU's thread is done last
_BY_MODE: Final = np.reshape(MODES, (2, 1, 1))
Cell: TypeAlias = tuple[int, int]  # a place [T, R] in a grid


@dataclass(frozen=True)
class Rules:
    """Rules that a tiling must obey.

    margin          a cut must be this much (a fraction) faster than the best single device, and by
                    more than the NPU's predicted time may be off; 0: any gain will do
    max_gpu_share   the GPU is busy for at most this share of a matmul's time
    shared          both devices work in every prompt, also where one alone would be faster
    third           a CPU that the profile has may take rows of a matmul besides both
    """

    margin: float = 0.03
    max_gpu_share: float = 1.0
    shared: bool = False
    third: bool = False

    def least_gain(self, cut: Option) -> float:
        """Return by which fraction a cut must be faster than the best single device."""
        return max(self.margin, cut.uncertainty) if self.margin > 0 else self.margin


class SelectedCuts(NamedTuple):
    """The tilings of a grid that can be part of a best path.

    The GPU's seconds alone (None where it lacks rows), and the places of the NPU alone and of cuts,
    with their mode.
    """

    gpu_s: float | None
    npu: Cell | None
    cuts: list[tuple[int, int, bool]]


class CheapestCuts:
    """The cheapest cut of each of some matmuls, in each mode and from each state.

    `costs` [S, 2, T, C] by state (one where it makes no difference) and by `MODES`, with as many
    columns for each matmul.
    """

    def __init__(self, costs: Floats, matmuls: int) -> None:
        states, modes, cuts, columns = costs.shape
        self._width = columns // matmuls
        by_matmul = costs.reshape(states, modes, cuts, matmuls, self._width).swapaxes(2, 3)
        by_matmul = by_matmul.reshape(states, modes, matmuls, -1)
        self._least, self._places = (
            by_matmul.min(axis=-1).tolist(),
            by_matmul.argmin(axis=-1).tolist(),
        )

    def of(self, matmul: int) -> list[tuple[int, int, bool]]:
        """Return places in the grid, the first of equal ones, with the mode."""
        places_and_modes: list[tuple[int, int, bool]] = []
        for mode, dominant in enumerate(MODES):
            best = {
                places[mode][matmul]
                for least, places in zip(self._least, self._places, strict=True)
                if least[mode][matmul] < INF
            }
            for place in sorted(best):
                i, j = divmod(place, self._width)
                places_and_modes.append((i, matmul * self._width + j, dominant))
        return places_and_modes


class Chooser:
    """Reduces the tilings of a matmul to the few that can be part of a best path."""

    def __init__(self, overheads: Overheads, rules: Rules, objective: Objective) -> None:
        self.overheads, self.rules, self.objective = overheads, rules, objective

    def options(
        self,
        space: MatMulSpace,
        m: int,
        *,
        grid: Grid | None = None,
        mask: Bools | None = None,
        gpu_alone: bool = True,
        spans: Spans | None = None,
    ) -> list[Option]:
        """Return best single-device options and best cuts of each mode, the margin applied.

        `mask` [T, R] says which tilings may be used (residency); all if None; `gpu_alone`
        whether the GPU holds all rows. A gpu-only option comes first and is closed where the rules
        forbid it, unless nothing else can compute the matmul. Without a mask a CPU may take rows,
        of these `spans`, where that beats every other option by as much as a cut must
        beat a device.
        """
        grid = grid or space.grid(m)
        gpu_s = grid.gpu_only_s if gpu_alone else None
        options = self.made(space, m, grid, self._pick(space, m, grid, mask, gpu_s))
        if mask is not None and not spans:
            return options
        if self.rules.third and takes_third(space):
            share = self.rules.max_gpu_share
            three = cuts_for_three(space, m, self.objective, share, spans)
            options += self._with_margin(options, three)
        return options

    def made(self, space: MatMulSpace, m: int, grid: Grid, picked: SelectedCuts) -> list[Option]:
        """Return the options of these places, the margin applied (`options`)."""
        overheads = self.overheads.at(m)
        gpu = [] if picked.gpu_s is None else [self._gpu_only(space, m, overheads, picked.gpu_s)]
        npu = [] if picked.npu is None else [self._npu_only(space, m, grid, picked.npu)]
        cuts = [self._cut(space, m, overheads, grid, *place) for place in picked.cuts]
        if not npu and not cuts:
            return [option.unrestricted() for option in gpu]  # nothing else can compute it
        singles = gpu + npu
        return [*singles, *self._with_margin(singles, cuts)]

    def named(self, space: MatMulSpace, m: int) -> list[Option]:
        """Return the best option of every strategy, entered from `GPU`; for explanations."""
        grid = space.grid(m, every=True)
        best: dict[str, Option] = {}
        for state_only in self._every_strategy(space, grid, m):
            known = best.get(state_only.strategy)
            cost = self.objective.cost_alone
            if known is None or cost(state_only, GPU) < cost(known, GPU):
                best[state_only.strategy] = state_only
        return list(best.values())

    def _every_strategy(self, space: MatMulSpace, grid: Grid, m: int) -> Iterator[Option]:
        overheads = self.overheads.at(m)
        yield self._gpu_only(space, m, overheads, grid.gpu_only_s)
        codes = _strategy_codes(grid, m)
        for code in np.unique(codes):
            mask = (codes == code) & np.isfinite(grid.elapsed_s)
            picked = self._pick(space, m, grid, mask, None)
            if picked.npu is not None:
                yield self._npu_only(space, m, grid, picked.npu)
            for place in picked.cuts:
                yield self._cut(space, m, overheads, grid, *place)

    def _pick(
        self, space: MatMulSpace, m: int, grid: Grid, mask: Bools | None, gpu_s: float | None
    ) -> SelectedCuts:
        alone = np.where(grid.cuts == m, grid.npu_s[:, -1], INF)
        if mask is not None:
            alone = np.where(mask[:, -1], alone, INF)
        i = int(alone.argmin())
        npu = (i, -1) if alone[i] < INF else None
        cheapest = self.cheapest([space], m, grid, self.cost(grid, m, mask))
        return SelectedCuts(gpu_s, npu, cheapest.of(0))

    def cheapest(
        self, spaces: Sequence[MatMulSpace], m: int, grid: Grid, cost: Floats
    ) -> CheapestCuts:
        """Return the cheapest cuts of a grid of these matmuls, each with as many columns."""
        costs = np.where(grid.npu_dominant == _BY_MODE, cost, INF)[None]
        if self.overheads.copies:
            rows = grid.rows.reshape(len(spaces), -1)
            copies = [self._copies(x, m, grid.cuts, r) for x, r in zip(spaces, rows, strict=True)]
            costs = costs + np.concatenate(copies, axis=-1)
        return CheapestCuts(costs, len(spaces))

    def cost(self, grid: Grid, m: int, mask: Bools | None = None) -> Floats:
        """Return the [T, R] objective of every cut of a matmul, infinite where it is not allowed.

        Synchronisation that is the same for all cuts of a mode is not in it. The NPU alone (all
        tokens, all rows) is no cut.
        """
        allowed = np.ones(grid.gpu_s.shape, dtype=np.bool_) if mask is None else mask.copy()
        allowed[grid.cuts == m, -1] = False
        return self.cost_of(grid, allowed)

    def cost_of(self, grid: Grid, allowed: Bools) -> Floats:
        """Return `cost` of those [T, R] that are allowed, of several matmuls."""
        objective, power, total = self.objective, self.objective.power, grid.elapsed_s
        possible = np.isfinite(total) & allowed
        if self.rules.max_gpu_share < 1:
            share = self.rules.max_gpu_share * (1 + 1e-12)
            possible &= grid.gpu_s <= share * np.where(possible, total, 0.0)
        cost = objective.seconds * np.where(possible, total, 0.0)
        if objective.joules and power is not None:
            gpu, npu, all_s = (np.where(possible, x, 0.0) for x in (grid.gpu_s, grid.npu_s, total))
            both = np.maximum(gpu + npu - all_s, 0.0)  # as in `Option.joules`
            joules = power.gpu_w * (gpu - both) + power.npu_w * (npu - both) + power.both_w * both
            joules += power.idle_w * (all_s - (gpu + npu - both))
            cost = cost + objective.joules * joules
        cost = cost + objective.idle * grid.times.restarts_s
        return np.where(possible, cost, INF)

    def _gpu_only(self, space: MatMulSpace, m: int, overheads: Overheads, seconds: float) -> Option:
        into = overheads.copy(ACTIVATION_BYTES * m * space.k)
        option = Option(
            "gpu-only",
            "gpu",
            elapsed_s=seconds,
            gpu_s=seconds,
            enter_s=(0.0, overheads.submit_s + into),
            leaves=GPU,
        )
        return option if self.rules.max_gpu_share >= 1 else option.forbid(GPU, HOST)

    def _npu_only(self, space: MatMulSpace, m: int, grid: Grid, place: Cell) -> Option:
        npu_tiles, overheads = grid.npu_tiles(*place), self.overheads
        enter = overheads.wait_s + overheads.copy(ACTIVATION_BYTES * m * space.k)
        leave = overheads.copy(ACTIVATION_BYTES * m * space.n)
        gap = overheads.resume_s(float(grid.npu_s[place]))  # of a GPU that had work before
        return Option(
            "npu-only" if len(npu_tiles.spans) == 1 else "multi-sequence-cut",
            "npu",
            elapsed_s=float(grid.npu_s[place]),
            npu_s=float(grid.npu_s[place]),
            enter_s=(enter + leave + gap + grid.times.after_gpu_s, leave),
            leaves=HOST,
            back_s=overheads.at(m).submit_s,
            rows=space.n,
            npu_tiles=npu_tiles,
        )

    def _copies(self, space: MatMulSpace, m: int, cuts: Ints, rows: Ints) -> Floats:
        """Return [2, 2, T, R] objective of `_copied_s`."""
        return self.objective.idle * self._copied_s(space, m, cuts, rows)

    def _copied_s(self, space: MatMulSpace, m: int, cuts: Ints, rows: Ints) -> Floats:
        """Return [2, 2, T, R] seconds of the copies of a cut, by state and by `MODES`.

        The operand to the device that lacks it, a tile of the result to the device that continues.
        """
        tokens = cuts[:, None]
        operand = np.stack((tokens, np.full_like(tokens, m)))[:, None] * space.k
        tile = tokens * rows
        moved = np.stack((m * space.n - tile, tile))
        copied_s = (self.overheads.copies_s(ACTIVATION_BYTES * x) for x in (operand, moved))
        return np.asarray(sum(copied_s))

    def _cut(
        self,
        space: MatMulSpace,
        m: int,
        overheads: Overheads,
        grid: Grid,
        i: int,
        j: int,
        dominant: bool,
    ) -> Option:
        r, npu_tiles = int(grid.rows[j]), grid.npu_tiles(i, j)
        copied_s = [0.0, 0.0]  # by state
        if overheads.copies:
            every = self._copied_s(space, m, grid.cuts[[i]], grid.rows[[j]])
            copied_s = every[:, MODES.index(dominant), 0, 0].tolist()
        both = overheads.join_s + float(
            np.broadcast_to(grid.times.restarts_s, grid.gpu_s.shape)[i, j]
        )
        submit = overheads.submit_s if dominant and not overheads.eager else 0.0
        from_gpu = overheads.wait_s + submit + both + copied_s[GPU]
        from_host = overheads.submit_s + both + copied_s[HOST]
        return Option(
            strategy_name(m, space.n, r, npu_tiles),
            "npu-dominant" if dominant else "gpu-dominant",
            elapsed_s=float(grid.elapsed_s[i, j]),
            gpu_s=float(grid.gpu_s[i, j]),
            npu_s=float(grid.npu_s[i, j]),
            enter_s=(from_gpu, from_host),
            leaves=HOST if dominant else GPU,
            back_s=overheads.submit_s if dominant else 0.0,
            rows=r,
            npu_tiles=npu_tiles,
            tokens_first=bool(grid.tokens_first[i, j]),
            uncertainty=space.uncertainty(npu_tiles, r),
        )

    def _with_margin(self, others: list[Option], cuts: Iterable[Option]) -> list[Option]:
        """Return cuts, forbidden from each state where they do not beat the others enough."""
        cost, states = self.objective.cost_alone, (GPU, HOST)
        best = [min([cost(x, state) for x in others], default=INF) for state in states]
        worth = []
        for cut in cuts:
            most = 1 - self.rules.least_gain(cut)
            closed = [state for state in states if cost(cut, state) > most * best[state]]
            if len(closed) < 2 or self.rules.shared:  # a prompt may need a cut that loses
                worth.append(cut.forbid(*closed) if closed else cut)
        return worth


def strategy_name(m: int, n: int, rows: int, npu_tiles: NpuTiles) -> Strategy:
    """Return the paper's name of a tiling (docs/explanation/solver.md)."""
    one, whole = len(npu_tiles.spans) == 1, npu_tiles.tokens == m
    exact = npu_tiles.sizes[-1] in (None, npu_tiles.spans[-1][1] - npu_tiles.spans[-1][0])
    if rows == n:
        if one and whole:
            return "npu-only"
        return "sequence-cut" if one else "multi-sequence-cut"
    return "row-cut" if one and whole and exact else "hybrid-cut"


def _strategy_codes(grid: Grid, m: int) -> Ints:
    """Return [T, R] numbers that differ between strategies.

    For grids with one choice for each row.
    """
    codes = np.empty(grid.elapsed_s.shape, dtype=np.intp)
    known: dict[str, int] = {}
    n = int(grid.rows[-1])
    for i in range(len(grid.cuts)):
        for j, columns in ((0, slice(0, -1)), (-1, slice(-1, None))):
            rows = n if j else min(int(grid.rows[0]), n - 1)
            name = strategy_name(m, n, rows, grid.choices.npu_tiles(i))
            codes[i, columns] = known.setdefault(name, len(known))
    return codes

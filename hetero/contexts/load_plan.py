"""The chunks of a context to read and those to compute again, decided before either begins.

LLMS (equation 4) minimises max(T_recompute, T_read) over the number of chunks to compute again,
both taken as linear. Here any set of chunks may be computed again, in the prompt's own call, whose
weights are read anyway. What such a call takes is that of a prompt of as many tokens (the solver's
cost model, calibrated by what this machine was measured to take: `hetero.contexts.prompt_times`),
after as many others as its tokens see, on average, that are not among them; and `run_s` for each
run of them but the one that the prompt is part of. Layer by layer, reading and decoding (r seconds
a layer) and computing (c a layer) take r + max(r, c)·(L - 1) + c: a layer is computed when it has
arrived. A device that both computes and decodes cannot overlap the two: its decoding is then part
of c, and r is reading alone. To load anything at all adds `load_s`.

Chunks in memory are always used; missing ones are always computed. Where a plan has no such call
only the end of the text can be computed, and it begins at the first missing chunk at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.contexts.codec import CHUNK_TOKENS

Array: TypeAlias = npt.NDArray[Any]
# Time to compute `m` tokens of a prompt after `n` others; arrays of one shape, or numbers.
Seconds: TypeAlias = Callable[[Any, Any], Any]
TRIED: Final = 8  # chunks on the disk of which every set is tried


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of this machine.

    `chunk_s` are the seconds to decode a chunk into the cache, by bits; `decodes_overlapped` says
    whether that overlaps with the prompt; `read_chunk_s` is the time to read a chunk, without its
    bytes. `run_s` is what another run of tokens to compute adds to a call; None where a call has
    one run only. `load_s` is what it adds that anything is loaded at all.
    """

    prefill_s: Seconds
    read_bytes_per_s: float
    read_latency_s: float = 0.0
    read_chunk_s: float = 0.0
    chunk_s: Mapping[int, float] = field(default_factory=dict)
    decodes_overlapped: bool = True
    run_s: float | None = None
    load_s: float = 0.0

    def break_even_bytes_per_s(self, bytes_per_token: float, tokens: int = 256) -> float:
        """Return the disk speed above which reading keys and values is faster than computing them.

        It is the bytes of a token times tokens a second.
        """
        return float(bytes_per_token * tokens / max(self.prefill_s(tokens, 0), 1e-9))

    def load_item(self, tokens: int, bits: int, disk_bytes: int) -> LoadItem:
        """Return the load item of a chunk in memory or, with `disk_bytes`, on the disk."""
        work_s = self.chunk_s.get(bits, 0.0) * tokens / CHUNK_TOKENS
        read_s = self.read_chunk_s + disk_bytes / self.read_bytes_per_s if disk_bytes else 0.0
        return LoadItem(tokens, work_s, disk_bytes, read_s=read_s)


class LoadItem(NamedTuple):
    """A chunk to load: seconds to decode and read it; `missing`: neither in memory nor on disk."""

    tokens: int
    work_s: float
    disk_bytes: int
    missing: bool = False
    read_s: float = 0.0


class LoadPlan(NamedTuple):
    """A decision which items to `load`; the prompt's call computes the others.

    `predicted_s` is the time until the prompt's first token.
    """

    load: tuple[bool, ...]
    predicted_s: float


def plan_load(
    items: Sequence[LoadItem],
    prompt_tokens: int,
    rates: Rates,
    layers: int,
    *,
    before: int = 0,
    recompute: bool = True,
) -> LoadPlan:
    """Return what to load, with the least predicted time; of equal ones what was tried first.

    Every set is tried where at most `TRIED` chunks may be read or computed. Where there are more,
    those to compute are the first ones of several orders. `before`: tokens already in place; with
    `recompute` false everything that can be read is read.
    """
    tokens, work_s, disk_bytes, missing, read_s = np.array(items, float).T
    forced, choices = _choices(missing > 0, disk_bytes > 0, rates, recompute=recompute)
    sets = _Sets(forced, choices, _orders((read_s + work_s) / tokens, choices, rates))
    starts = np.cumsum(tokens) - tokens
    values = np.stack([tokens, tokens * starts, tokens**2, read_s, work_s, disk_bytes])
    added, weighted, squares, *taken = sets.sums(values)
    left = values[3:, ~forced].sum(axis=1)
    fetch_s, work_s, disk_bytes = (x - y for x, y in zip(left, taken, strict=True))
    fixed = float(tokens[forced].sum()) + prompt_tokens
    count = fixed + added
    # Sums over the computed tokens of those in front of them, without the computed ones: pairs
    # of chunks that are both computed do not count.
    seen = float(tokens[forced] @ starts[forced]) + prompt_tokens * float(tokens.sum())
    seen -= (fixed**2 - float(tokens[forced] @ tokens[forced]) - prompt_tokens**2) / 2
    others = seen + weighted - added * fixed - (added**2 - squares) / 2
    compute_s = rates.prefill_s(count, before + others / count)
    compute_s = compute_s + sets.runs * (rates.run_s or 0.0)
    if rates.decodes_overlapped:
        fetch_s = fetch_s + work_s
    else:
        compute_s = compute_s + work_s
    each, computing = fetch_s / layers, compute_s / layers
    seconds = each + np.maximum(each, computing) * (layers - 1) + computing
    seconds = seconds + np.where(disk_bytes > 0.5, rates.read_latency_s, 0.0)
    seconds = seconds + np.where(tokens.sum() + prompt_tokens - count > 0.5, rates.load_s, 0.0)
    best = int(np.argmin(seconds))
    return LoadPlan(tuple(map(bool, ~sets.computed(best))), float(seconds[best]))


def _choices(
    forced: Array, on_disk: Array, rates: Rates, *, recompute: bool
) -> tuple[Array, Array]:
    """Return which items must be computed, missing or not, and the indices of those that may be."""
    if rates.run_s is None:
        forced = np.cumsum(forced) > 0
        on_disk &= np.cumsum((~on_disk & ~forced)[::-1])[::-1] == 0
    return forced, np.flatnonzero(on_disk & ~forced) if recompute else np.empty(0, int)


def _orders(token_s: Array, choices: Array, rates: Rates) -> list[Array]:
    """Return orders in which items are added to those to compute; none to try every set.

    The end of the text joins the prompt's run; its beginning sees the fewest others; or those come
    first whose reading takes longest, for each token (`token_s`).
    """
    if rates.run_s is None:
        return [choices[::-1]]
    if len(choices) <= TRIED:
        return []
    cost_s = token_s[choices]
    if np.ptp(cost_s) == 0:
        return [choices[::-1], choices]
    dear, late = (np.argsort(-x, kind="stable") for x in (cost_s, cost_s[::-1]))
    return [choices[::-1], choices, choices[dear], choices[::-1][late]]


class _Sets:
    """Sets of items that are computed: the forced ones, and some of the choices.

    They are the first ones of each order, none to all; or without orders every set.
    """

    def __init__(self, forced: Array, choices: Array, orders: Sequence[Array]) -> None:
        self._forced, self._choices = forced, choices
        self._orders = np.array(orders, int)
        if not orders:
            bits = np.arange(len(choices))
            self._every = np.arange(1 << len(choices))[:, None] >> bits & 1

    def sums(self, values: Array) -> Array:
        """Return the sums [rows, sets] of each row of values of the choices that are computed."""
        if not len(self._orders):
            return np.asarray(values[:, self._choices] @ self._every.T)
        count, length = self._orders.shape
        sums = np.zeros((len(values), count, length + 1))
        np.cumsum(values[:, self._orders], axis=2, out=sums[:, :, 1:])
        return sums.reshape(len(values), -1)

    @property
    def runs(self) -> Array:
        """Return the runs of computed items of each set that do not reach the prompt."""
        if not len(self._orders):
            computed = np.stack([self.computed(i) for i in range(len(self._every))])
            after = np.pad(computed[:, 1:], ((0, 0), (0, 1)), constant_values=True)
            return np.asarray((computed & ~after).sum(axis=1))
        parts = []
        for order in self._orders:
            ranks = self._ranks(order)
            both = np.maximum(ranks, np.append(ranks[1:], -1))
            parts.append(_below(ranks, len(order)) - _below(both, len(order)))
        return np.concatenate(parts)

    def computed(self, number: int) -> Array:
        """Return whether each item is computed in the set of this number."""
        if len(self._orders):
            order, size = divmod(number, len(self._choices) + 1)
            return np.asarray(self._ranks(self._orders[order]) < size)
        computed = self._forced.copy()
        computed[self._choices] = self._every[number]
        return computed

    def _ranks(self, order: Array) -> Array:
        """Return the size of the largest set of an order that is without an item; -1: none is."""
        ranks = np.where(self._forced, -1, len(order))
        ranks[order] = np.arange(len(order))
        return ranks


def _below(ranks: Array, most: int) -> Array:
    """Return how many ranks are below 0, 1, ... `most`."""
    return np.asarray(np.cumsum(np.bincount(ranks + 1, minlength=most + 2))[: most + 1])

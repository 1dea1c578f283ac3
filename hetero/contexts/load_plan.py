"""The chunks of a context to read and those to compute again, decided before either begins.

LLMS (equation 4) minimises max(T_recompute, T_read) over the number of chunks to compute again,
both taken as linear. Here T_recompute is the solver's cost model for that many tokens of a prompt
after that many others, calibrated by what this machine was measured to take
(`hetero.contexts.prompt_times`). The end of the text is computed again, because it joins the
prompt's own call, whose weights are read anyway. Layer by layer, reading and decoding (r seconds a
layer) and computing (c a layer) take r + max(r, c)·(L - 1) + c: a layer is computed when it has
arrived. A device that both computes and decodes cannot overlap the two: its decoding is then part
of c, and r is reading alone.

Chunks in memory are always used; missing ones are computed, each run of them in a call of its own,
between the chunks before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.contexts.codec import CHUNK_TOKENS

Floats: TypeAlias = npt.NDArray[np.float64]
# Time to compute `m` tokens of a prompt after `n` others; arrays of one shape, or numbers.
Seconds: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of this machine.

    `chunk_s` are the seconds to decode a chunk into the cache, by bits; `decodes_overlapped` says
    whether that overlaps with the prompt; `read_chunk_s` is the time to read a chunk, without its
    bytes.
    """

    prefill_s: Seconds
    read_bytes_per_s: float
    read_latency_s: float = 0.0
    read_chunk_s: float = 0.0
    chunk_s: Mapping[int, float] = field(default_factory=dict)
    decodes_overlapped: bool = True

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
    """A decision to load the first `stop` items; the prompt's call computes the others.

    `missing` items among the first are computed too. `predicted_s` is the time until the prompt's
    first token, `whole_s` that of loading everything that can be read.
    """

    stop: int
    predicted_s: float
    whole_s: float


def plan_load(
    items: Sequence[LoadItem],
    prompt_tokens: int,
    rates: Rates,
    layers: int,
    *,
    before: int = 0,
    recompute: bool = True,
) -> LoadPlan:
    """Return the stop with the least predicted time; of equal ones the last.

    Only stops after the last chunk in memory count. `before`: tokens already in place; with
    `recompute` false everything that can be read is read.
    """
    last = _after_last(items, lambda item: not item.missing)
    first = _after_last(items, lambda item: not item.missing and not item.disk_bytes)
    times = _seconds(items, prompt_tokens, rates, layers, before)[first : last + 1]
    best = len(times) - 1 - int(np.argmin(times[::-1])) if recompute else len(times) - 1
    return LoadPlan(first + best, float(times[best]), float(times[-1]))


def _after_last(items: Sequence[LoadItem], wanted: Callable[[LoadItem], bool]) -> int:
    return next((i + 1 for i in reversed(range(len(items))) if wanted(items[i])), 0)


def _sums(values: Iterable[float]) -> Floats:
    return np.array(list(accumulate(values, initial=0.0)))


def _seconds(
    items: Sequence[LoadItem], prompt: int, rates: Rates, layers: int, before: int
) -> Floats:
    """Return the time until the first token if the first 0, 1, … items are loaded."""
    loaded = [item for item in items if not item.missing]
    starts = before + _sums(item.tokens for item in items)
    left = starts[-1] - starts
    compute_s = rates.prefill_s(left + prompt, starts)
    work_s = _sums(0.0 if item.missing else item.work_s for item in items)
    read_bytes = _sums(0 if item.missing else item.disk_bytes for item in items)
    fetch_s = _sums(0.0 if item.missing else item.read_s for item in items)
    if rates.decodes_overlapped:
        fetch_s = fetch_s + work_s
    else:
        compute_s = compute_s + work_s
    each, computed = fetch_s / layers, compute_s / layers
    seconds: Floats = each + np.maximum(each, computed) * (layers - 1) + computed
    seconds = seconds + np.where(read_bytes > 0, rates.read_latency_s, 0.0)
    if len(loaded) < len(items):
        seconds = seconds + _alone_s(items, rates, starts)
    return seconds


def _alone_s(items: Sequence[LoadItem], rates: Rates, starts: Floats) -> Floats:
    """Return the seconds of missing runs in calls of their own, up to each chunk."""
    runs = [0.0]
    for item in items:
        runs.append(runs[-1] + item.tokens if item.missing else 0.0)
    run = np.array(runs)
    begun = starts - run
    times = np.where(run > 0, rates.prefill_s(np.maximum(run, 1), begun), 0.0)
    steps = [times[i + 1] - times[i] if run[i + 1] else 0.0 for i in range(len(items))]
    return _sums(steps)

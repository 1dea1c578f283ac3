"""What of a context to read and what to compute again, decided before either begins.

LLMS (equation 4) minimises max(T_recompute, T_read) over how many chunks are computed again, both
taken as linear. Here T_recompute is what the solver's cost model predicts for so many tokens of a
prompt behind so many others, held to what this machine was measured to take
(`hetero.contexts.prompt_times`), and what is computed again is the end of the text, because that
rides in the prompt's own call, whose weights are read anyway. Layer by layer, reading and decoding
(r seconds a layer) and computing (c a layer) take r + max(r, c)·(L - 1) + c: a layer is computed
when it is there. A device that computes and decodes does not do both at once: what it decodes is
then part of c, and reading alone is r.

Chunks that are in memory are always taken; those that are nowhere are computed, each run of them in
a call of its own, between what lies before them and what lies behind.
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
# To compute so many tokens of a prompt behind so many others; arrays of one shape, or numbers.
Seconds: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of this machine. `chunk_s` are the seconds to decode a chunk into the
    cache, by its bits, `decodes_beside` whether that is beside the prompt; `read_chunk_s` what one
    takes to be read, whatever its bytes are.
    """

    prefill_s: Seconds
    read_bytes_per_s: float
    read_latency_s: float = 0.0
    read_chunk_s: float = 0.0
    chunk_s: Mapping[int, float] = field(default_factory=dict)
    decodes_beside: bool = True

    def break_even_bytes_per_s(self, bytes_per_token: float, tokens: int = 256) -> float:
        """Return the speed of a disk from which on reading keys and values is faster than computing
        them: bytes of a token times tokens a second.
        """
        return float(bytes_per_token * tokens / max(self.prefill_s(tokens, 0), 1e-9))

    def piece(self, tokens: int, bits: int, disk_bytes: int) -> Piece:
        """Return a chunk of so many bits, in memory or (with `disk_bytes`) to be read."""
        work_s = self.chunk_s.get(bits, 0.0) * tokens / CHUNK_TOKENS
        read_s = self.read_chunk_s + disk_bytes / self.read_bytes_per_s if disk_bytes else 0.0
        return Piece(tokens, work_s, disk_bytes, read_s=read_s)


class Piece(NamedTuple):
    """A chunk to be had: seconds to be decoded and read; `missing`: nowhere."""

    tokens: int
    work_s: float
    disk_bytes: int
    missing: bool = False
    read_s: float = 0.0


class LoadPlan(NamedTuple):
    """The first `stop` pieces are had, by reading where they are not `missing`; the rest is
    computed with the prompt. `predicted_s` until the prompt's first token, `whole_s` if all were
    read that can be.
    """

    stop: int
    predicted_s: float
    whole_s: float


def plan_load(
    pieces: Sequence[Piece],
    prompt_tokens: int,
    rates: Rates,
    layers: int,
    *,
    before: int = 0,
    recompute: bool = True,
) -> LoadPlan:
    """Return the stop with the least predicted time, of all behind the last chunk that is in
    memory; of equal ones the last. `before`: tokens in place; `recompute` false: all that can be is
    read.
    """
    last = _behind_last(pieces, lambda piece: not piece.missing)
    first = _behind_last(pieces, lambda piece: not piece.missing and not piece.disk_bytes)
    times = _seconds(pieces, prompt_tokens, rates, layers, before)[first : last + 1]
    best = len(times) - 1 - int(np.argmin(times[::-1])) if recompute else len(times) - 1
    return LoadPlan(first + best, float(times[best]), float(times[-1]))


def _behind_last(pieces: Sequence[Piece], wanted: Callable[[Piece], bool]) -> int:
    return next((i + 1 for i in reversed(range(len(pieces))) if wanted(pieces[i])), 0)


def _sums(values: Iterable[float]) -> Floats:
    return np.array(list(accumulate(values, initial=0.0)))


def _seconds(
    pieces: Sequence[Piece], prompt: int, rates: Rates, layers: int, before: int
) -> Floats:
    """Until the first token where the first 0, 1, … pieces are had."""
    had = [piece for piece in pieces if not piece.missing]
    starts = before + _sums(piece.tokens for piece in pieces)
    left = starts[-1] - starts
    compute_s = rates.prefill_s(left + prompt, starts)
    work_s = _sums(0.0 if piece.missing else piece.work_s for piece in pieces)
    read_bytes = _sums(0 if piece.missing else piece.disk_bytes for piece in pieces)
    fetch_s = _sums(0.0 if piece.missing else piece.read_s for piece in pieces)
    if rates.decodes_beside:
        fetch_s = fetch_s + work_s
    else:
        compute_s = compute_s + work_s
    each, computed = fetch_s / layers, compute_s / layers
    found: Floats = each + np.maximum(each, computed) * (layers - 1) + computed
    found = found + np.where(read_bytes > 0, rates.read_latency_s, 0.0)
    if len(had) < len(pieces):
        found = found + _alone_s(pieces, rates, starts)
    return found


def _alone_s(pieces: Sequence[Piece], rates: Rates, starts: Floats) -> Floats:
    """Return the seconds of missing runs in calls of their own, up to each chunk."""
    runs = [0.0]
    for piece in pieces:
        runs.append(runs[-1] + piece.tokens if piece.missing else 0.0)
    run = np.array(runs)
    begun = starts - run
    times = np.where(run > 0, rates.prefill_s(np.maximum(run, 1), begun), 0.0)
    steps = [times[i + 1] - times[i] if run[i + 1] else 0.0 for i in range(len(pieces))]
    return _sums(steps)

"""What of a context to read and what to compute again, decided before either begins.

LLMS (equation 4) minimises max(T_recompute, T_read) over how many chunks are computed again, both
taken as linear. Here T_recompute is what this machine was measured to take for so many tokens, and
what is computed again is the end of the text, because that rides in the prompt's own call, whose
weights are read anyway. Layer by layer, reading (r seconds a layer) and computing (c a layer) take
r + max(r, c)·(L - 1) + c: a layer is computed when it is there.

Chunks that are in memory are always taken; those that are nowhere are computed, each run of them in
a call of its own, between what lies before them and what lies behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Seconds = Callable[[int], float]  # to compute so many tokens of a prompt


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured of this machine. `prefill_s` is a prompt's time by its tokens."""

    prefill_s: Seconds
    read_bytes_per_s: float
    read_latency_s: float = 0.0
    decode_bytes_per_s: float = float("inf")

    def break_even_bytes_per_s(self, bytes_per_token: float, tokens: int = 256) -> float:
        """The speed of a disk from which on reading keys and values is faster than computing them:
        bytes of a token times tokens a second.
        """
        return bytes_per_token * tokens / max(self.prefill_s(tokens), 1e-9)


class Piece(NamedTuple):
    """A chunk to be had: `disk_bytes` to be read, `bytes` to be decoded; `missing`: nowhere."""

    tokens: int
    nbytes: int
    disk_bytes: int
    missing: bool


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
    recompute: bool = True,
) -> LoadPlan:
    """The stop with the least predicted time, of all behind the last chunk that is in memory.
    `recompute` false: read whatever can be.
    """
    last = _behind_last(pieces, lambda piece: not piece.missing)
    first = _behind_last(pieces, lambda piece: not piece.missing and not piece.disk_bytes)
    sums = _Sums(pieces, rates)
    times = {stop: sums.seconds(stop, prompt_tokens, layers) for stop in range(first, last + 1)}
    best = min(times, key=lambda stop: (times[stop], -stop)) if recompute else last
    return LoadPlan(best, times[best], times[last])


def _behind_last(pieces: Sequence[Piece], wanted: Callable[[Piece], bool]) -> int:
    found = [i for i, piece in enumerate(pieces) if wanted(piece)]
    return found[-1] + 1 if found else 0


class _Sums:
    """Sums over the first pieces."""

    def __init__(self, pieces: Sequence[Piece], rates: Rates) -> None:
        self.rates = rates
        self.tokens, self.read_s, self.alone_s = [0], [0.0], [0.0]
        run = 0
        for piece in pieces:
            read_s = 0.0 if piece.missing else piece.nbytes / rates.decode_bytes_per_s
            if piece.disk_bytes and not piece.missing:
                read_s += piece.disk_bytes / rates.read_bytes_per_s
            self.tokens.append(self.tokens[-1] + piece.tokens)
            self.read_s.append(self.read_s[-1] + read_s)
            # A run of missing pieces that ends here is one call of its own.
            run = run + piece.tokens if piece.missing else 0
            before = run - piece.tokens
            alone = (
                (rates.prefill_s(run) - (rates.prefill_s(before) if before else 0)) if run else 0
            )
            self.alone_s.append(self.alone_s[-1] + alone)

    def seconds(self, stop: int, prompt_tokens: int, layers: int) -> float:
        """Until the first token where the first `stop` pieces are had."""
        left = self.tokens[-1] - self.tokens[stop]
        compute_s = self.rates.prefill_s(left + prompt_tokens)
        latency_s = self.rates.read_latency_s if self.read_s[stop] else 0.0
        read_s, compute = self.read_s[stop] / layers, compute_s / layers
        return (
            latency_s + read_s + max(read_s, compute) * (layers - 1) + compute + self.alone_s[stop]
        )


def interpolated(measured: Sequence[tuple[int, float]]) -> Seconds:
    """Seconds by tokens, straight between measured counts, the last slope beyond the longest. A
    count takes no longer than a larger one: what was measured so was disturbed.
    """
    points: list[tuple[int, float]] = []
    for count, taken_s in sorted(measured, reverse=True):
        points.insert(0, (count, min([taken_s, *(s for _, s in points[:1])])))

    def seconds(tokens: int) -> float:
        if len(points) == 1 or tokens <= points[0][0]:
            return points[0][1] * (1.0 if tokens <= points[0][0] else tokens / points[0][0])
        behind = next((i for i, (m, _) in enumerate(points) if m >= tokens), len(points) - 1)
        (low, low_s), (high, high_s) = points[behind - 1], points[behind]
        return max(low_s + (tokens - low) * (high_s - low_s) / (high - low), 0.0)

    return seconds

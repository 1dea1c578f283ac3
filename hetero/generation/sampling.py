"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hetero.errors import UserError

Logits = npt.NDArray[np.float32]
LARGEST_BIAS = 1e4
SMALLEST_SHARE: Final = 1e-12  # of the likeliest token's probability, that it is worth to look for
LARGEST_FACTOR = 1e30  # of a temperature, and its inverse: the arithmetic stays finite


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options. `temperature` 0 is greedy; the filters apply in the order listed.

    repetition_penalty   logits of tokens already in the context are divided (if positive) or
                         multiplied (CTRL, arXiv 1909.05858)
    frequency_penalty    subtracted for every time that a token was generated
    presence_penalty     subtracted once if a token was generated
    logit_bias           added to the logits of these ids
    temperature          divides the logits
    top_k                keep the k most likely (0: all)
    top_p                keep the smallest set with at least this probability (1: all)
    min_p                keep tokens at least this likely relative to the most likely (0: all)
    seed                 None draws a fresh one
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("temperature", not self.temperature or _is_factor(self.temperature), _FACTOR_OR_0),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("repetition_penalty", _is_factor(self.repetition_penalty), _FACTOR),
            ("frequency_penalty", abs(self.frequency_penalty) < math.inf, "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) <= LARGEST_BIAS, _BIAS),
            ("presence_penalty", abs(self.presence_penalty) < math.inf, "a finite number"),
            ("presence_penalty", abs(self.presence_penalty) <= LARGEST_BIAS, _BIAS),
            ("seed", self.seed is None or self.seed >= 0, "at least 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise UserError(f"{name} must be {rule}, got {getattr(self, name)}")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= LARGEST_BIAS:
                raise UserError(
                    f"logit_bias of token {token} must be within ±{LARGEST_BIAS:g}, got {bias}"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `UserError` for a biased id that is no token."""
        bad = next((x for x in self.logit_bias if not 0 <= x < vocab_size), None)
        if bad is not None:
            raise UserError(f"logit_bias: token id {bad} is outside the vocabulary of {vocab_size}")

    def _check_types(self) -> None:
        if not _is_whole(self.top_k):
            raise UserError(f"top_k must be a whole number, got {self.top_k!r}")
        if self.seed is not None and not _is_whole(self.seed):
            raise UserError(f"seed must be a whole number, got {self.seed!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not _is_number(value):
                raise UserError(f"{name} must be a number, got {value!r}")
        bias: object = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is_whole(token) and _is_number(value) for token, value in bias.items()
        ):
            raise UserError(f"logit_bias must map token ids to numbers, got {bias!r}")


_BIAS = f"within ±{LARGEST_BIAS:g}"
_FACTOR = f"from {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}"
_FACTOR_OR_0 = f"0 (the likeliest token) or {_FACTOR}"
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _is_factor(value: float) -> bool:
    return 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of a token's probability before any penalty or filter, and the likeliest.

    `top` are (id, log-probability) pairs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """Restricts an answer token by token (a grammar)."""

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return the tokens [vocab] that may come next, at least one. None: all.

        An id that ends a text is among them where it may end.
        """

    def accept(self, token: int) -> None:
        """Advance by a token that does not end the text."""


class Sampler:
    """A sampler of tokens; equal seeds and logits give equal tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)
        self._biased = np.fromiter(params.logit_bias, dtype=np.int64)
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty
        greedy = not (params.temperature or penalised or params.presence_penalty)
        self._only_biased = bool(params.logit_bias) and greedy

    def choose(
        self,
        logits: Logits,
        context: Sequence[int] = (),
        generated: Sequence[int] = (),
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        """Return the next token id from logits [vocab].

        `context` (prompt and answer) is used by repetition_penalty, `generated` (the answer) by the
        other penalties; only tokens of `allowed` [vocab] are chosen. Ties go to the lowest id.
        Raises `ValueError` if a logit is not a number, which the engine would have seen before.
        """
        if self._only_biased and allowed is None:
            return self._likeliest(logits)
        scores = self._penalised(logits, context, generated)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise _not_finite()
        if self.params.temperature == 0:
            return best
        ids, weights = self._distribution(scores, float(scores[best]))
        sums = weights.cumsum()
        at = int(sums.searchsorted(self._random.random() * sums[-1], side="right"))
        at = min(at, len(sums) - 1)  # the product may be rounded up to the last sum
        return at if ids is None else int(ids[at])

    def _likeliest(self, logits: Logits) -> int:
        """Return what `choose` does without any option but a bias of some ids."""
        others = logits.copy()
        others[self._biased] = -np.inf
        best = int(others.argmax())
        score = float(others[best])
        for token, bias in self.params.logit_bias.items():
            own = float(logits[token]) + bias
            if own > score or (own == score and token < best):
                best, score = token, own
        if not math.isfinite(score):
            raise _not_finite()
        return best

    def _penalised(
        self, logits: Logits, context: Sequence[int], generated: Sequence[int]
    ) -> npt.NDArray[np.floating[Any]]:
        """Return logits in float64 if anything is changed: no allowed penalty overflows it."""
        params = self.params
        counted = params.frequency_penalty or params.presence_penalty
        if params.repetition_penalty == 1.0 and not counted and not params.logit_bias:
            return logits
        scores = logits.astype(np.float64)
        if params.repetition_penalty != 1.0 and len(context):
            seen = np.unique(np.asarray(context, dtype=np.int64))
            penalty = params.repetition_penalty
            scores[seen] = np.where(
                scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty
            )
        if counted and len(generated):
            ids, counts = np.unique(np.asarray(generated, dtype=np.int64), return_counts=True)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        return scores

    def _distribution(
        self, scores: npt.NDArray[np.floating[Any]], most: float
    ) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float64]]:
        """Return the token ids left after all filters, most likely first, and their weights.

        Weights are in proportion to probabilities. Without filters all logits are returned
        unsorted, and None for their ids: sorting a vocabulary to draw one token is slow.
        """
        params = self.params
        wide = scores.astype(np.float64)
        wide -= most
        wide /= params.temperature
        weights = np.exp(wide)
        keep = min(params.top_k or len(wide), len(wide))
        if keep == len(wide) and params.top_p == 1 and not params.min_p:
            return None, weights
        if keep < len(wide):
            ids = np.argpartition(-wide, keep - 1)[:keep]
            total = float(weights[ids].sum())
        else:
            total = float(weights.sum())
            ids = np.flatnonzero(weights >= self._least(weights, total))
        ids = ids[np.lexsort((ids, -wide[ids]))]
        weights = weights[ids]
        if params.top_p < 1:
            count = int(np.searchsorted(np.cumsum(weights / total), params.top_p)) + 1
            ids, weights = ids[:count], weights[:count]
        if params.min_p > 0:
            likely = weights >= params.min_p * weights[0]
            ids, weights = ids[likely], weights[likely]
        return ids, weights

    def _least(self, weights: npt.NDArray[np.float64], total: float) -> float:
        """Return the weight below which the filters leave no token; the likeliest one's is 1."""
        least, wanted = self.params.min_p, self.params.top_p * total
        if self.params.top_p < 1:
            share = 1 / 16
            while share > SMALLEST_SHARE and share > least:
                if weights[weights >= share].sum() > wanted * (1 + 1e-9):
                    return share
                share /= 16
        return least


def _not_finite() -> ValueError:
    return ValueError("the model's logits are not finite: its weights or kernels are broken")


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return log-probabilities [..., vocab] in float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    logs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def token_logprob(logits: Logits, token: int, alternatives: int) -> TokenLogprob:
    """Return the log-probability of a token, and of the `alternatives` likeliest ones.

    `logits` are [vocab].
    """
    logs = log_softmax(logits)
    best = np.empty(0, np.int64)
    if count := min(alternatives, len(logs)):
        best = np.flatnonzero(logs >= np.partition(logs, -count)[-count])  # and who equals the last
        best = best[np.argsort(-logs[best], kind="stable")[:count]]
    top = tuple((int(i), float(logs[i])) for i in best)
    return TokenLogprob(token=token, logprob=float(logs[token]), top=top)

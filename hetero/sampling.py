"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero.errors import UserError

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; the filters apply in the order listed.

    repetition_penalty   logits of tokens already in the context are divided (if positive) or
                         multiplied (CTRL, arXiv 1909.05858)
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
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", self.seed is None or self.seed >= 0, "at least 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise UserError(f"{name} must be {rule}, got {getattr(self, name)}")


class Sampler:
    """Draws tokens; equal seeds and logits give equal tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)

    def choose(self, logits: Logits, context: Sequence[int] = ()) -> int:
        """Next token id from logits [vocab]; `context` is what repetition_penalty looks at.

        Ties go to the lowest id. Raises `ValueError` if a logit is not a number.
        """
        scores = self._penalised(logits, context)
        best = int(np.argmax(scores))
        if not np.isfinite(scores[best]):
            raise ValueError("the model's logits are not finite: its weights or kernels are broken")
        if self.params.temperature == 0:
            return best
        ids, probabilities = self._distribution(scores)
        return int(self._random.choice(ids, p=probabilities))

    def _penalised(self, logits: Logits, context: Sequence[int]) -> Logits:
        penalty = self.params.repetition_penalty
        if penalty == 1.0 or not context:
            return logits
        scores = logits.copy()
        seen = np.unique(np.asarray(context, dtype=np.int64))
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        return scores

    def _distribution(
        self, scores: Logits
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Token ids, most likely first, and their probabilities after all filters."""
        params = self.params
        wide = scores.astype(np.float64) / params.temperature
        keep = min(params.top_k or len(wide), len(wide))
        cut = keep < len(wide)
        ids = np.argpartition(-wide, keep - 1)[:keep] if cut else np.arange(len(wide))
        ids = ids[np.lexsort((ids, -wide[ids]))]
        probabilities = np.exp(wide[ids] - wide[ids[0]])
        probabilities /= probabilities.sum()
        if params.top_p < 1:
            count = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
            ids, probabilities = ids[:count], probabilities[:count]
        if params.min_p > 0:
            likely = probabilities >= params.min_p * probabilities[0]
            ids, probabilities = ids[likely], probabilities[likely]
        return ids, probabilities / probabilities.sum()

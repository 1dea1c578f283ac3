"""Chooses the tokens of one answer."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.generation.options import GenerationConfig
from hetero.generation.sampling import Logits, Sampler, TokenLogprob, token_logprob


class TokenChooser:
    """Samples tokens within a constraint, if there is one; `end_tokens` it does not see.

    With `config.logprobs` (how many alternatives) `logprobs` has an entry for each token.
    """

    def __init__(self, config: GenerationConfig, end_tokens: frozenset[int]) -> None:
        self._sampler, self._config = Sampler(config.sampling), config
        self._end_tokens = end_tokens
        self.logprobs: list[TokenLogprob] = []

    def choose(self, logits: Logits, seen: Sequence[int], answer: Sequence[int]) -> int:
        """Return the next token of a text `seen`, of which `answer` was chosen here."""
        constraint = self._config.constraint
        allowed = None if constraint is None else constraint.allowed()
        token = self._sampler.choose(logits, seen, answer, allowed)
        if constraint is not None and token not in self._end_tokens:
            constraint.accept(token)
        if self._config.logprobs is not None:
            self.logprobs.append(token_logprob(logits, token, self._config.logprobs))
        return token

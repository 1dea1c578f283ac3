"""The choices of one request: which of them have begun, and what is said when all have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hetero.contexts.scratch import SharedPrompt
from hetero.contexts.working_set import Switch
from hetero.generation.answer_stats import DeviceShare
from hetero.generation.loop import GenerationResult
from hetero.generation.sampling import TokenLogprob
from hetero.serving.messages import Done, GenerateRequest


@dataclass(eq=False)
class RequestChoices:
    """The choices of a request, which has waited for `queued_s`.

    `prompt` is shared by those that run together with another one.
    `switch` and `chunks` are the first choice's: what loading its context cost, and where its
    chunks are.
    """

    request: GenerateRequest
    queued_s: float
    prompt: SharedPrompt = field(default_factory=SharedPrompt)
    results: dict[int, GenerationResult] = field(default_factory=dict)
    begun: int = 0
    switch: Switch = field(default_factory=Switch)
    chunks: Any = None

    def next(self) -> int | None:
        """Return the next choice to begin, which has then begun; None after the last."""
        if self.begun == self.request.choices:
            return None
        self.begun += 1
        return self.begun - 1

    def ended(
        self,
        choice: int,
        result: GenerationResult,
        switch: Switch | None = None,
        chunks: Any = None,
    ) -> Iterator[Done]:
        """Record the end of a choice; yield the request's last message if all have ended."""
        self.results[choice] = result
        if choice == 0:
            self.switch, self.chunks = switch or Switch(), chunks
        if len(self.results) == self.request.choices:
            yield self._done([self.results[i] for i in range(self.request.choices)])

    def _done(self, results: list[GenerationResult]) -> Done:
        request, switch, stats = self.request, self.switch, results[0].stats
        apart = switch.recomputed_tokens - switch.tail_tokens
        usage = {
            "prompt_tokens": len(request.tokens),
            "completion_tokens": sum(len(result.tokens) for result in results),
            "cached_tokens": max(stats.reused_tokens - apart, 0),
        }
        about: dict[str, Any] = {
            "switch_s": switch.switch_s,
            "loaded_bytes": switch.loaded_bytes,
            "recomputed_tokens": switch.recomputed_tokens,
            "shifted_tokens": stats.shifted_tokens,
            "bits": self.chunks,
            "placement": {
                kind: {"ops": share.ops, "busy_s": share.busy_s}
                if isinstance(share, DeviceShare)
                else share
                for kind, share in stats.placement.items()
            },
            "queued_s": self.queued_s,
            "ttft_s": stats.ttft_s,
            "prefill_tokens_per_s": stats.prefill_tokens_per_s,
            "decode_tokens_per_s": stats.decode_tokens_per_s,
        }
        scores = [[x.token, *(scored(x) or ())] for x in results[0].prompt_logprobs]
        return Done(
            id=request.id,
            usage=usage,
            about=about,
            prompt_logprobs=scores,
            tokens=list(results[0].tokens),
            stops=[result.stop for result in results],
        )


def scored(score: TokenLogprob | None) -> list[Any] | None:
    """Return a token's log-probability and those of the alternatives, as `TokenEvent` has them."""
    return None if score is None else [score.logprob, [list(pair) for pair in score.top]]

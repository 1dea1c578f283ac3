"""Options of a generation: what callers may pass, checked before anything is opened or run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from hetero.arguments import check_count, check_stop
from hetero.errors import UserError
from hetero.generation.constants import DEFAULT_MAX_TOKENS
from hetero.generation.sampling import Constraint, SamplingParams
from hetero.runtime.kv.constants import SINKS
from hetero.runtime.kv.context import Context


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `LLM.generate` and `LLM.stream`.

    context      what the prompt goes on from; afterwards it holds prompt and answer as well
                 (default: nothing)
    max_tokens   longest answer (default 256)
    stop         texts that end the answer; they are not part of it
    chat         a text goes through the chat template; the answer is a text of its own
    reuse        the prompt is the whole text: what the context shares with its beginning is kept
                 and not prefilled again, the rest is forgotten (conversations); the numbers may
                 differ in their last bits from those of a fresh context
    logprobs     keep every token's log-probability, and those of this many alternatives
    echo         the prompt is part of the result's text (and of its log-probabilities)
    constraint   which tokens an answer may go on with (`hetero.generation.sampling.Constraint`)
    sampling     a `SamplingParams`, in place of its fields one by one
    speculative  at most so many tokens are guessed ahead, by the draft model if the LLM has one
                 (default then: 7), else from the text so far; changes no answer
    context_shift  go on where prompt and answer fill the context: half of the tokens behind the
                 first `keep` are forgotten, the rest moves up without being computed again. Only
                 nearly what the model would say (`hetero.runtime.kv.shift`)
    keep         tokens that a shift leaves at the beginning (default 4)
    shown_tokens  special tokens whose text is part of the answer's text
    """

    context: Context | None
    max_tokens: int
    stop: Sequence[str]
    chat: bool
    reuse: bool
    logprobs: int | None
    speculative: int | None
    echo: bool
    constraint: Constraint | None
    sampling: SamplingParams | None
    context_shift: bool
    keep: int
    shown_tokens: Collection[int]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Checked options, with their defaults; `speculative` is None for the model's."""

    context: Context | None
    max_tokens: int
    stop: tuple[str, ...]
    chat: bool
    reuse: bool
    logprobs: int | None
    speculative: int | None
    echo: bool
    constraint: Constraint | None
    sampling: SamplingParams
    context_shift: bool
    keep: int
    shown_tokens: Collection[int]


def read_options(options: GenerateOptions) -> GenerationConfig:
    """Check everything that needs no model. Raises `UserError`."""
    given: dict[str, Any] = {**options}
    logprobs, guesses = given.pop("logprobs", None), given.pop("speculative", None)
    constraint = given.pop("constraint", None)
    if constraint is not None and guesses:
        raise UserError("speculative tokens cannot be guessed under a constraint: ask for 0")
    shift = bool(given.pop("context_shift", False))
    if shift and guesses:
        raise UserError("speculative tokens cannot be guessed with context_shift: ask for 0")
    guesses = 0 if constraint is not None or shift else guesses
    return GenerationConfig(
        context=given.pop("context", None),
        max_tokens=check_count("max_tokens", given.pop("max_tokens", DEFAULT_MAX_TOKENS)),
        stop=check_stop(given.pop("stop", ())),
        chat=bool(given.pop("chat", False)),
        reuse=bool(given.pop("reuse", False)),
        logprobs=None if logprobs is None else check_count("logprobs", logprobs, 0),
        speculative=None if guesses is None else check_count("speculative", guesses, 0),
        echo=bool(given.pop("echo", False)),
        context_shift=shift,
        keep=check_count("keep", given.pop("keep", SINKS), 0),
        shown_tokens=frozenset(given.pop("shown_tokens", ())),
        constraint=constraint,
        sampling=_sampling(given, given.pop("sampling", None)),
    )


def _sampling(options: dict[str, Any], whole: object) -> SamplingParams:
    """Return sampling parameters; an error about an unknown name suggests the nearest."""
    if whole is not None and not isinstance(whole, SamplingParams):
        raise UserError(f"sampling must be a hetero.SamplingParams, got {type(whole).__name__}")
    known = SamplingParams.__dataclass_fields__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(
                name, [*known, "max_tokens", "stop", "chat", "context_shift"], n=1
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name!r} is not an option of generate{hint}")
    if whole is None:
        return SamplingParams(**options)
    if options:
        raise UserError(f"{next(iter(options))!r} conflicts with sampling=: set it there")
    return whole

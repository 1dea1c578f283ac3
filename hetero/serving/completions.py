"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.answers import Answer, AnswerChoice, AnswerOptions, usage
from hetero.serving.chat_completions import ChunkWriter, StreamOptions
from hetero.serving.errors import ApiError
from hetero.serving.messages import Done, Run, TokenEvent
from hetero.serving.requests import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Guided,
    Inputs,
    NotDone,
    Penalties,
    checked_grammar,
    inputs,
    most_tokens,
    seconds,
)
from hetero.serving.served_models import acquire
from hetero.serving.state import State

router = APIRouter()
MAX_PROMPTS = 256


class CompletionRequest(Penalties, Guided):
    """OpenAI's request. With `echo` and `max_tokens` 0 a text is only scored."""

    model: str | None = None
    prompt: Inputs = Field(default="", description="A text, token ids, or several of them.")
    max_tokens: int | None = Field(16, ge=-1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    suffix: NotDone = None
    cache_salt: str = Field("", max_length=1000)
    id_slot: int = -1

    def check(self) -> None:
        """Raise `ApiError` for fields that are not supported, or not together."""
        if (self.best_of or 1) > (self.n or 1):
            raise ApiError(400, "best_of above n is not done here", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 is for echo: true", param="max_tokens")
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not streamed: leave stream out")


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
    """Continue a text."""
    body.check()
    state = await acquire(request, body.model)
    model = state.named(body.model)
    prompts = inputs(body.prompt, MAX_PROMPTS, "prompt")
    wanted = [await _wanted(state, body, prompt) for prompt in prompts]
    head = {
        "id": f"cmpl-{secrets.token_hex(16)}",
        "object": "text_completion",
        "created": seconds(),
        "model": model,
        "system_fingerprint": state.engine.about["plan_id"],
    }
    if body.stream:
        writer = _Writer(state, body, wanted, head)
        return await answers.streamed(state, request, wanted[0], writer, then=wanted[1:])
    ends, choices = [], list[dict[str, Any]]()
    for each in wanted:
        answer = await answers.gather(state, request, each)
        for choice in answer.choices:
            choices.append(_choice(state, body, each, answer, choice) | {"index": len(choices)})
        ends.append(answer.end)
    return answers.answer_json(
        {**head, "choices": choices, "usage": usage(_sum(body, ends)), "hetero": ends[0].about}
    )


def _sum(body: CompletionRequest, ends: Sequence[Done]) -> Done:
    """Return the last end, with the tokens of all."""
    total = {key: sum(end.usage[key] for end in ends) for key in ends[0].usage}
    if body.max_tokens == 0:
        total["completion_tokens"] = 0
    return replace(ends[-1], usage=total)


async def _wanted(state: State, body: CompletionRequest, prompt: str | list[int]) -> AnswerOptions:
    tokens = prompt
    if isinstance(tokens, str):
        await state.check_length([tokens], "prompt")
        tokens = await state.encoded(tokens) if tokens else []
    answers.check_room(state, tokens)
    options = (
        body.options(state.sampling)
        | body.without_ends(state.model.eos_ids)
        | {
            "max_tokens": max(
                most_tokens(
                    16 if body.max_tokens is None else body.max_tokens, default=state.max_seq_len
                ),
                1,
            )
        }
    )
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        options["echo"] = bool(body.echo)
    grammar = await state.texts(body.wanted_grammar) if body.guided else ""
    return AnswerOptions(
        tokens=list(tokens),
        options=options,
        choices=body.n or 1,
        salt=body.cache_salt,
        slot=state.check_slot(body.id_slot),
        grammar=await checked_grammar(state, grammar),
    )


def _choice(
    state: State,
    body: CompletionRequest,
    wanted: AnswerOptions,
    answer: Answer,
    choice: AnswerChoice,
) -> dict[str, Any]:
    scored_only = body.max_tokens == 0
    text = "" if scored_only else choice.text
    scores: list[tuple[int, Any]] = [] if scored_only else list(choice.logprobs)
    if body.echo:
        text = _echoed(state, wanted) + text
        first = [(wanted.tokens[0], None)]
        scores = [*first, *((x[0], x[1:]) for x in answer.end.prompt_logprobs), *scores]
    return {
        "text": text,
        "logprobs": None if body.logprobs is None else _logprobs(state, scores, body.logprobs),
        "finish_reason": "length" if scored_only else choice.finish,
    }


def _echoed(state: State, wanted: AnswerOptions) -> str:
    return state.model.tokenizer.decode(wanted.tokens)


def _logprobs(state: State, scores: Sequence[tuple[int, Any]], most: int) -> dict[str, Any]:
    """Return four lists, as in the older API. The first token of a text has no probability."""
    tokens, values = list[str](), list[float | None]()
    tops, offsets, at = list[dict[str, float] | None](), list[int](), 0
    for token, score in scores:
        text = state.token_text(token)
        tokens.append(text)
        offsets.append(at)
        at += 0 if token in state.token_bytes.special else len(text)  # which no text has
        if score is None:
            values.append(None)
            tops.append(None)
            continue
        logprob, top = score
        values.append(max(logprob, -9999.0))
        named = {text: max(logprob, -9999.0)} if most else {}
        for other, value in top:
            named.setdefault(state.token_text(other), max(value, -9999.0))
        tops.append(named)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if most else None,
        "text_offset": offsets,
    }


class _Writer(ChunkWriter):
    content = "text"

    def __init__(
        self,
        state: State,
        body: CompletionRequest,
        wanted: Sequence[AnswerOptions],
        head: dict[str, Any],
    ) -> None:
        self._state, self._body, self._wanted = state, body, wanted
        self._scored_only = body.max_tokens == 0
        self._ends = list[Done]()  # of the prompts before
        super().__init__(head, sum(each.choices for each in wanted), body.stream_options)

    def begin(self) -> list[bytes]:
        """Return the prompt for each choice, if it is to be echoed."""
        if not self._body.echo:
            return []
        texts = [x for each in self._wanted for x in [_echoed(self._state, each)] * each.choices]
        return [self._text(i, text) for i, text in enumerate(texts)]

    async def end(self, end: Done) -> list[bytes]:
        """Return the last choice's end with the tokens of all prompts; nothing before that."""
        self._ends.append(end)
        done = len(self._ends) == len(self._wanted)
        return await super().end(_sum(self._body, self._ends)) if done else []

    def _delta(self, event: TokenEvent) -> list[bytes]:
        return [] if self._scored_only else super()._delta(event)

    def _deltas(self, run: Run) -> list[bytes]:
        return [] if self._scored_only else super()._deltas(run)

    def _text(self, index: int, text: str, event: TokenEvent | None = None) -> bytes:
        scores = None
        if event is not None and event.logprob is not None:
            tokens = [(event.token, event.logprob)]
            scores = _logprobs(self._state, tokens, self._body.logprobs or 0)
        return self._chunk(index, text, scores)

    def _last(self, index: int, about: dict[str, Any] | None = None) -> bytes:
        finish = "length" if self._scored_only else self._choices[index].finish
        return self._chunk(index, "", finish=finish, about=about)

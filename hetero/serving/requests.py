"""The common fields of requests: sampling, grammars, stop texts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from hetero.serving.errors import ApiError
from hetero.serving.grammars import (
    choice_grammar,
    gbnf_grammar,
    json_grammar,
    regex_grammar,
)
from hetero.serving.state import State

Token = Annotated[int, Field(ge=0, lt=2**31)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
MAX_CHOICES = 16
MAX_LOGPROBS = 20


def _not_none(limit: int) -> int:
    if limit == 0:
        raise ValueError("give at least 1 token, or -1 for no limit")
    return limit


TokenLimit = Annotated[int, Field(ge=-1), AfterValidator(_not_none)]


def _not_done(value: Any, field: ValidationInfo) -> Any:
    if value:
        raise ApiError(
            400,
            f"`{field.field_name}` is not done here: leave it out",
            param=field.field_name,
            code="unsupported_parameter",
        )
    return value


NotDone = Annotated[Any, AfterValidator(_not_done)]  # a field without which the answer is another


class Request(BaseModel):
    """A request. Unknown fields are ignored, as by other servers."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Sampling(Request):
    """Sampling options. `top_k`, `min_p`, `repetition_penalty`: as in vLLM and llama-server."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)

    def options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `LLM.stream`, with `defaults` of what is not given."""
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        options = {**defaults, **given}
        if "top_p" in options:
            options["top_p"] = max(options["top_p"], 1e-6)  # 0: the likeliest
        options["top_k"] = max(options.get("top_k", 0), 0)
        if 0 < options.get("temperature", 1) < 1e-6:  # greedy, and its inverse stays finite
            options["temperature"] = 0.0
        if self.seed is not None:
            options["seed"] = self.seed % 2**64
        return options


class Penalties(Sampling):
    """Penalties that the completions of OpenAI's API also have."""

    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = False

    def options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `Sampling`, and the penalties."""
        options = super().options(defaults)
        for name in ("frequency_penalty", "presence_penalty"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            if not all(token.isascii() and token.isdigit() for token in self.logit_bias):
                raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias")
            options["logit_bias"] = self.logit_bias
        options["stop"] = stop_texts(self.stop)
        return options

    def without_ends(self, eos_ids: Sequence[int]) -> dict[str, Any]:
        """Return the `logit_bias` of an answer that no token ends, with `ignore_eos`."""
        if not self.ignore_eos:
            return {}
        return {"logit_bias": {**(self.logit_bias or {}), **{str(x): -1e4 for x in eos_ids}}}


class JsonSchema(Request):
    """The `json_schema` of a format."""

    name: str = "answer"
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Request):
    """`response_format` of chat completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    json_schema_: dict[str, Any] | None = Field(None, alias="schema")  # as llama-server has it


class Guided(Request):
    """A grammar in the spelling of OpenAI, vLLM (`guided_…`) or llama-server.

    llama-server has `grammar` and `json_schema`. Only one may be given.
    """

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def guided(self) -> bool:
        """Return whether there is any."""
        return bool(Guided.model_fields.keys() & self.model_fields_set)

    def wanted_grammar(self) -> str:
        """Return llguidance's grammar; empty: none. Raises `UserError`, `ApiError`."""
        grammars = [grammar for grammar in self._grammars() if grammar]
        if len(grammars) > 1:
            raise ApiError(400, "an answer can obey one grammar or schema: give one of them")
        return grammars[0] if grammars else ""

    def answer_schema(self) -> Any:
        """Return the schema of `response_format` (True: any object); None if there is none."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        inner = form.json_schema.json_schema if form.json_schema else form.json_schema_
        return True if inner is None else inner

    def _grammars(self) -> list[str]:
        schemas = [x for x in (self.guided_json, self.json_schema) if x is not None]
        grammars = [json_grammar(schema) for schema in schemas]
        form = self.response_format
        if form is not None and form.type != "text":
            inner = form.json_schema.json_schema if form.json_schema else form.json_schema_
            if form.type == "json_schema" and inner is None:
                raise ApiError(
                    400, "a json_schema needs its `schema`", param="response_format.json_schema"
                )
            grammars.append(json_grammar(True if inner is None else inner))
        if self.guided_regex is not None:
            grammars.append(regex_grammar(self.guided_regex))
        if self.guided_choice is not None:
            grammars.append(choice_grammar(self.guided_choice))
        grammars += [gbnf_grammar(x) for x in (self.guided_grammar, self.grammar) if x]
        return grammars


async def checked_grammar(state: State, grammar: str) -> str:
    """Return the grammar, if an answer can follow it. Raises `ApiError`."""
    if grammar:
        await state.texts(state.token_bytes.check, grammar)
    return grammar


Inputs = str | list[str] | list[Token] | list[list[Token]]


def inputs(given: Inputs, most: int, param: str) -> list[str | list[int]]:
    """Return each of one or several texts or lists of token ids. Raises `ApiError`."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not 1 <= len(given) <= most:
        raise ApiError(400, f"{param} is 1 to {most} texts", param=param)
    return list(given)  # type: ignore[arg-type]


def most_tokens(*given: int | None, default: int) -> int:
    """Return the first limit that is given. -1 is none, as in llama-server: the `default`."""
    limit = next((x for x in given if x is not None), -1)
    return default if limit == -1 else limit


def stop_texts(stop: str | list[str] | None) -> list[str]:
    """Return stop texts as a list. Raises `ApiError`."""
    texts = [stop] if isinstance(stop, str) else stop or []
    if len(texts) > 16 or any(not 1 <= len(text) <= 1000 for text in texts):
        raise ApiError(400, "stop is up to 16 texts of 1 to 1000 characters each", param="stop")
    return texts


def seconds() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())

"""Chat templates: Jinja2 in a sandbox, rendered as `transformers` renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hetero.errors import ModelError
from hetero.models.fields import read_json_object, read_text

Message = Mapping[str, Any]

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The named templates of a model. `special_tokens` are variables of every template."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        where: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self.where = where
        self._now = now

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Text of a conversation.

        `template` names one of several templates (default: `tool_use` if tools are given and there
        is one, else `default`); `variables` are passed on (`enable_thinking`, …). Raises
        `ModelError` with the template's own words when it refuses the messages.
        """
        source = self._select(template, has_tools=bool(tools))
        values: dict[str, Any] = {
            **self.special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None if documents is None else [dict(x) for x in documents],
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda form: self._now().strftime(form),
            **variables,
        }
        try:
            return _compile(source).render(values)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{self.where}: is not a valid template ({error}); use --raw, or correct it"
            ) from error
        except _RENDER_ERRORS as error:
            raise ModelError(
                f"{self.where}: refuses this conversation ({error}); change the messages or "
                "use --raw"
            ) from error

    def _select(self, name: str | None, *, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ModelError(
                f"{self.where}: there is no template {name!r}; choose one of: "
                f"{', '.join(sorted(self.templates))}"
            )
        return self.templates[name]


def load_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a model directory by name; empty if it has none.

    Files of their own come before the field in tokenizer_config.json.
    """
    found = _declared(tokenizer_config.get("chat_template"))
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        found |= _declared(read_json_object(legacy).get("chat_template"))
    single = directory / "chat_template.jinja"
    if single.is_file():
        found["default"] = read_text(single)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    return found


def _declared(value: Any) -> dict[str, str]:
    """A template, or a list of {"name": …, "template": …}."""
    if isinstance(value, str):
        return {"default": value}
    items = value if isinstance(value, list) else []
    return {
        str(item["name"]): str(item["template"])
        for item in items
        if isinstance(item, dict) and "name" in item and "template" in item
    }


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the model said; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, leaves <, > and & alone."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

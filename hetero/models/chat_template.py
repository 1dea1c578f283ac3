"""Chat templates: Jinja2, rendered as `transformers` renders them, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hetero.errors import ModelError
from hetero.models.fields import read_json_object, read_text
from hetero.models.template_sandbox import (
    TemplateLimitError,
    TemplateRefusalError,
    TemplateSyntaxError,
    render,
)

Message = Mapping[str, Any]


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
        """Return the text of a conversation.

        `template` names one of several templates (default: `tool_use` if tools are given and there
        is one, else `default`); `variables` are passed on (`enable_thinking`, …). Raises
        `ModelError` with the template's own words when it refuses the messages, and for a template
        that needs too much time or memory (`hetero.models.template_sandbox`).
        """
        source = self._select(template, has_tools=bool(tools))
        values: dict[str, Any] = {
            **self.special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None if documents is None else [dict(x) for x in documents],
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return self._rendered(source, values)

    def _rendered(self, source: str, values: Mapping[str, Any]) -> str:
        try:
            return render(source, values, self._now())
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{self.where}: is not a valid template ({error}); use --raw, or correct it"
            ) from error
        except TemplateLimitError as error:
            raise ModelError(
                f"{self.where}: needs too much time or memory ({error}); use --raw, or correct it"
            ) from error
        except (TemplateRefusalError, TypeError, ValueError) as error:
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
    """Return the templates of a model directory by name; empty if it has none.

    Separate files take precedence over the field in tokenizer_config.json.
    """
    templates = _declared(tokenizer_config.get("chat_template"))
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        templates |= _declared(read_json_object(legacy).get("chat_template"))
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = read_text(single)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    return templates


def _declared(value: Any) -> dict[str, str]:
    """Return a template, or a list of {"name": …, "template": …}."""
    if isinstance(value, str):
        return {"default": value}
    items = value if isinstance(value, list) else []
    return {
        str(item["name"]): str(item["template"])
        for item in items
        if isinstance(item, dict) and "name" in item and "template" in item
    }

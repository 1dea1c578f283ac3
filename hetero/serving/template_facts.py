"""Abilities of a model's chat template, read from its text or tried out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hetero.errors import ModelError
from hetero.models.tokenizer import HfTokenizer, Tokenizer

_Chat: TypeAlias = Sequence[Mapping[str, Any]]
_NINE: Final = re.compile(r"length\s*[!=]=\s*9\b")  # how Mistral's templates check ids


@dataclass(frozen=True)
class TemplateFacts:
    """Abilities of a model's chat template.

    `short_ids`: it wants ids of calls that have nine letters or digits.
    """

    tools: bool = False
    calls: bool = False
    system: bool = True
    short_ids: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TemplateFacts:
        """Return those of a tokenizer's template."""
        if not isinstance(tokenizer, HfTokenizer) or tokenizer.chat_template is None:
            return cls()
        source = " ".join(tokenizer.chat_template.templates.values())
        user = {"role": "user", "content": "x"}
        return cls(
            tools="tools" in source,
            calls="tool_calls" in source,
            system=not _refuses(tokenizer, [{"role": "system", "content": "x"}, user], [user]),
            short_ids=_NINE.search(source) is not None,
        )


def _refuses(
    tokenizer: Tokenizer, chat: Sequence[Mapping[str, Any]], simpler: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a template refuses a conversation, but not a simpler one."""
    for messages, refusal in ((simpler, False), (chat, True)):
        try:
            tokenizer.render_chat(messages)
        except ModelError:
            return refusal
    return False

"""The texts of responses and conversations: items in OpenAI's form, messages, tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hetero.runtime.kv.constants import SINKS
from hetero.serving.errors import ApiError
from hetero.serving.state import State
from hetero.serving.template_chat import (
    Message,
    answer_message,
    plain_call,
    plain_text,
    rendered,
    result_message,
)
from hetero.serving.tools import ToolUse

Item = dict[str, Any]
_ELSEWHERE: Final = re.compile(  # tools that do not run here, and what only OpenAI can read
    "(web_search|file_search|code_interpreter|image_generation|computer|local_shell|shell"
    "|apply_patch)_call(_output)?|tool_search_(call|output)|mcp_[a-z_]+|compaction"
)


def read_items(
    given: str | Sequence[dict[str, Any]], param: str = "input", *, answered: bool = False
) -> list[Item]:
    """Return the items of a request, with ids and nothing but text.

    With `answered` an answer follows, which continues a last message of the assistant.
    `item_reference` is left for who can look it up; items of tools that ran elsewhere are passed
    over. Raises `ApiError`.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    last = len(given) - 1 if answered else -1
    return [
        _item(item, f"{param}.{i}", begun=i == last)
        for i, item in enumerate(given)
        if not _ELSEWHERE.fullmatch(str(item.get("type")))
    ]


def _item(item: dict[str, Any], where: str, *, begun: bool) -> Item:
    kind = item.get("type") or "message"
    match kind:
        case "message":
            return _message(item, where, begun=begun)
        case "item_reference" if isinstance(item.get("id"), str):
            return {"type": kind, "id": item["id"]}
        case "reasoning":
            return reasoning_item(plain_reasoning(item, where))
        case "function_call":
            fields = {name: item.get(name) for name in ("call_id", "name", "arguments")}
            if isinstance(item.get("namespace"), str):
                fields["namespace"] = item["namespace"]
            prefix = "fc"
        case "custom_tool_call":
            fields = {name: item.get(name) for name in ("call_id", "name", "input")}
            prefix = "ctc"
        case "function_call_output" | "custom_tool_call_output":
            output = plain_text(item.get("output"), f"{where}.output")
            fields = {"call_id": item.get("call_id"), "output": output}
            prefix = "fco" if kind == "function_call_output" else "ctco"
        case _:
            raise ApiError(
                400,
                "an item is a message, function_call, custom_tool_call, the output of one, "
                "reasoning or item_reference here",
                param=where,
            )
    if not all(isinstance(value, str) for value in fields.values()):
        raise ApiError(400, f"a {kind} has the texts {', '.join(fields)}", param=where)
    if kind == "function_call":  # so that what is stored can be rendered
        plain_call({"function": fields}, f"{where}.arguments")
    name = f"{prefix}_{secrets.token_hex(16)}"
    return {"id": name, "type": kind, "status": "completed", **fields}


def _message(item: dict[str, Any], where: str, *, begun: bool) -> Item:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise ApiError(400, "a message's role is system, developer, user or assistant", param=where)
    begun = begun and role == "assistant"
    text = plain_text(item.get("content"), f"{where}.content", begun=begun)
    part: Item = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "status": "completed",
        "role": role,
        "content": [part],
    }


def plain_reasoning(item: dict[str, Any], where: str) -> str:
    """Return the thoughts of a `reasoning` item; empty where they are encrypted or left out.

    Raises `ApiError`.
    """
    content = item.get("content") or ()
    parts = [part for part in content if isinstance(part, dict)]
    texts = [part.get("text") for part in parts if part.get("type") == "reasoning_text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "content of reasoning is reasoning_text", param=f"{where}.content")
    return "\n".join(map(str, texts))


def reasoning_item(text: str, *, summarised: bool = False) -> Item:
    """Return an item of thoughts, which are their own summary."""
    return {
        "id": f"rs_{secrets.token_hex(16)}",
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text}] if summarised else [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
    }


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Return the messages that a chat template takes.

    What an answer consists of (thoughts, text, calls) is one message, as in the other APIs.
    """
    messages, thoughts = list[Message](), ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thoughts = "\n".join(part["text"] for part in item["content"])
            continue
        if kind.endswith("_call_output"):
            messages.append(result_message(item["output"], item["call_id"]))
        elif kind == "function_call" and item["status"] == "incomplete":  # was cut off
            messages.append(answer_message(f"{item['name']}({item['arguments']}", (), thoughts))
        elif kind.endswith("_call"):
            call = _call(item)
            if messages and messages[-1]["role"] == "assistant" and not thoughts:
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append(answer_message("", [call], thoughts))
        else:
            text = "\n".join(part["text"] for part in item["content"])
            role = "system" if item["role"] == "developer" else item["role"]
            if role == "assistant":
                messages.append(answer_message(text, thoughts=thoughts))
            else:
                messages.append({"role": role, "content": text})
        thoughts = ""
    return messages


def _call(item: Item) -> dict[str, Any]:
    """Return the call of an item in the form of chat completions, with parsed arguments.

    That of a custom tool has its text as the argument `input`.
    """
    custom = item["type"] == "custom_tool_call"
    arguments = {"input": item["input"]} if custom else item["arguments"]
    function = {"name": item["name"], "arguments": arguments}
    return plain_call({"id": item["call_id"], "function": function}, "input")


@dataclass(frozen=True)
class WholeText:
    """A text to answer, and what its context may forget where it is `full`.

    That is all after the first `keep` of its first `old` tokens.
    """

    tokens: list[int]
    full: bool = False
    keep: int = 0
    old: int = 0

    @property
    def least(self) -> list[int]:
        """Return what is left when all is forgotten that may be."""
        return [*self.tokens[: self.keep], *self.tokens[max(self.old, self.keep) :]]

    def options(self) -> dict[str, Any]:
        """Return the options of `AppContext.stream_text` for it."""
        about = {"context_shift": True, "keep": self.keep, "old": self.old}
        return about if self.full else {}


def tokens_of(
    state: State,
    instructions: str,
    items: Sequence[Item],
    before: Sequence[int],
    use: ToolUse,
    variables: Mapping[str, Any],
    *,
    drops: bool,
    answer: int,
) -> WholeText:
    """Return the text of a conversation that is to be answered.

    A last message of the assistant is continued, as in the other APIs. `before` is the text up to
    the last answer in the model's own tokens: a text that is sent again often has others. With
    `drops` the context forgets the oldest of those tokens where there is no room, or, without
    `before` or where the model cannot, the oldest turns are left out. Raises `UserError`.
    """
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*system, *messages_of(items)]
    whole = rendered(state, messages, use, variables, continues=True)
    slides = drops and state.shifts
    continued = _with_turn(state, messages, before, use, variables) if before else []
    whole = continued or whole
    full = slides and len(whole) + answer > state.max_seq_len
    keep = _kept(state, system, use, variables) if full else 0
    text = WholeText(whole, full, keep, len(before) if continued else 0)
    if full and continued and len(text.least) < state.max_seq_len:
        return text
    room = state.max_seq_len - max(1, min(answer, state.max_seq_len // 2))
    turns = messages[len(system) :]
    while drops and len(whole) > room:
        later = next((i for i in range(1, len(turns)) if turns[i]["role"] == "user"), 0)
        if not later:
            break
        turns = turns[later:]
        whole = rendered(state, [*system, *turns], use, variables, continues=True)
    return WholeText(whole, slides and len(whole) + answer > state.max_seq_len, keep)


def _kept(
    state: State, system: Sequence[Message], use: ToolUse, variables: Mapping[str, Any]
) -> int:
    """Return how many tokens stay in a full context: the instructions, if they are short."""
    if not system:
        return SINKS
    one, other = (
        rendered(state, [*system, {"role": "user", "content": x}], use, variables)
        for x in ("0", "z")
    )
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return max(SINKS, same) if same <= state.max_seq_len // 4 else SINKS


def _with_turn(
    state: State,
    messages: Sequence[Message],
    before: Sequence[int],
    use: ToolUse,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return `before` with the template's text after its last answer, or alone to continue that.

    It is empty if that cannot be found: two conversations that differ only in that answer are equal
    from there on.
    """
    at = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if at < 0 or messages[at].get("tool_calls"):
        return []
    if at == len(messages) - 1:
        return [*before]
    whole = rendered(state, messages, use, variables)
    one, other = (
        rendered(
            state,
            [*messages[:at], {**messages[at], "content": x}, *messages[at + 1 :]],
            use,
            variables,
        )
        for x in ("0", "z")
    )
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    count = next((i for i, (a, b) in pairs if a != b), 0)
    if not count or one[-count:] != whole[-count:]:
        return []
    return [*before, *one[-count:]]

"""The texts of responses and conversations: items in OpenAI's form, messages, tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from hetero.serving.errors import ApiError
from hetero.serving.state import State
from hetero.serving.tools import ToolUse, plain_text, rendered

Item = dict[str, Any]


def read_items(given: str | Sequence[dict[str, Any]], param: str = "input") -> list[Item]:
    """Return the items of a request, with ids and nothing but text. Raises `ApiError`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"{param}.{i}") for i, item in enumerate(given)]


def _item(item: dict[str, Any], where: str) -> Item:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise ApiError(
                400, "a message's role is system, developer, user or assistant", param=where
            )
        text = plain_text(item.get("content"), f"{where}.content")
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
    if kind == "function_call":
        fields, prefix = ["call_id", "name", "arguments"], "fc"
    elif kind == "function_call_output":
        fields, prefix = ["call_id", "output"], "fco"
    else:
        raise ApiError(
            400, "an item is a message, function_call or function_call_output here", param=where
        )
    if not all(isinstance(item.get(name), str) for name in fields):
        raise ApiError(400, f"a {kind} has the texts {', '.join(fields)}", param=where)
    return {
        "id": f"{prefix}_{secrets.token_hex(16)}",
        "type": kind,
        "status": "completed",
        **{name: item[name] for name in fields},
    }


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages in the form of chat completions."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": "".join(x["text"] for x in item["content"])})
        elif item["type"] == "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            messages.append(
                {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            )
    return messages


def tokens_of(
    state: State,
    instructions: str,
    items: Sequence[Item],
    before: Sequence[int],
    use: ToolUse,
    *,
    drops: bool,
    answer: int,
) -> list[int]:
    """Return the tokens of a conversation that is to be answered.

    `before` is the text up to the last answer in the model's own tokens: a text that is sent again
    often has others. With `drops` the oldest turns are left out where there is no room. Raises
    `UserError`.
    """
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*system, *messages_of(items)]
    whole = rendered(state, messages, use)
    if before and (going_on := _with_turn(state, messages, before, use)):
        whole = going_on
    room = state.max_seq_len - max(1, min(answer, state.max_seq_len // 2))
    turns = messages[len(system) :]
    while drops and len(whole) > room:
        later = next((i for i in range(1, len(turns)) if turns[i]["role"] == "user"), 0)
        if not later:
            break
        turns = turns[later:]
        whole = rendered(state, [*system, *turns], use)
    return whole


def _with_turn(
    state: State, messages: Sequence[dict[str, Any]], before: Sequence[int], use: ToolUse
) -> list[int]:
    """Return `before` with the template's text after its last answer.

    It is empty if that cannot be found: two conversations that differ only in that answer are equal
    from there on.
    """
    at = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if at < 0 or messages[at].get("tool_calls"):
        return []
    whole = rendered(state, messages, use)
    one, other = (
        rendered(state, [*messages[:at], {**messages[at], "content": x}, *messages[at + 1 :]], use)
        for x in ("0", "z")
    )
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    count = next((i for i, (a, b) in pairs if a != b), 0)
    if not count or one[-count:] != whole[-count:]:
        return []
    return [*before, *one[-count:]]

"""The events of a streamed answer in each protocol: what was sent, and what a turn should be.

Deltas of one kind that follow each other are one, and ids are left out: both lists have the same
tuples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.serving.agents.story import Turn

Event = tuple[Any, ...]


def records(text: str) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event."""
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            yield lines.get("event", ""), json.loads(lines["data"])


def merged(events: list[Event]) -> list[Event]:
    """Deltas between two other events, joined if they differ in their last text only."""
    found: list[Event] = []
    deltas: dict[Event, str] = {}
    for event in [*events, ()]:
        if event and event[0] == "delta":
            deltas[event[:-1]] = deltas.get(event[:-1], "") + event[-1]
            continue
        found += [(*key, text) for key, text in deltas.items()]
        deltas.clear()
        found.append(event)
    return found[:-1]


def usages(text: str) -> tuple[int, int, int]:
    """The tokens of the prompt, those that were in the cache, those of the answer."""
    *_, data = [data for _, data in records(text) if "usage" in data or "response" in data]
    usage = data.get("usage") or data["response"]["usage"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    name, answer = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    cached = usage[f"{name}_tokens_details"]["cached_tokens"]
    return usage[f"{name}_tokens"], cached, usage[f"{answer}_tokens"]


# --- Anthropic's messages ----------------------------------------------------------------------


def messages_sent(text: str) -> list[Event]:
    found: list[Event] = []
    for name, data in records(text):
        assert data["type"] == name
        match name:
            case "content_block_start":
                block = data["content_block"]
                found.append(("start", data["index"], block["type"], block.get("name")))
            case "content_block_delta":
                ((_, value),) = ((k, v) for k, v in data["delta"].items() if k != "type")
                value = "" if data["delta"]["type"] == "signature_delta" else value
                found.append(("delta", data["index"], data["delta"]["type"], value))
            case "content_block_stop":
                found.append(("stop", data["index"]))
            case "message_delta":
                found.append((name, data["delta"]["stop_reason"]))
            case _:
                found.append((name,))
    return merged(found)


def messages_of(turn: Turn) -> list[Event]:
    blocks: list[tuple[str, str, str | None, str]] = [
        ("thinking", "thinking_delta", None, turn.thought)
    ]
    if turn.text:
        blocks.append(("text", "text_delta", None, turn.text))
    blocks += [("tool_use", "input_json_delta", name, arguments(x)) for name, x in turn.calls]
    found: list[Event] = [("message_start",), ("ping",)]
    for index, (kind, delta, name, text) in enumerate(blocks):
        found += [("start", index, kind, name), ("delta", index, delta, text)]
        if kind == "thinking":
            found.append(("delta", index, "signature_delta", ""))
        found.append(("stop", index))
    reason = "tool_use" if turn.calls else "end_turn"
    return [*found, ("message_delta", reason), ("message_stop",)]


# --- OpenAI's responses ------------------------------------------------------------------------


def responses_sent(text: str) -> list[Event]:
    found: list[Event] = []
    for number, (name, data) in enumerate(records(text)):
        assert data["type"] == name
        assert data["sequence_number"] == number
        kind = name.removeprefix("response.")
        if kind.endswith(".delta"):
            found.append(("delta", kind, data["output_index"], data["delta"]))
        elif kind.startswith("output_item"):
            item = data["item"]
            found.append((kind, data["output_index"], item["type"], item["status"]))
        elif kind in ("created", "in_progress", "completed"):
            found.append((kind, [item["type"] for item in data["response"]["output"]]))
        else:
            given = data.get("part", data)
            found.append((kind, data["output_index"], given.get("text", given.get("arguments"))))
    return merged(found)


def responses_of(turn: Turn) -> list[Event]:
    items = ["reasoning", *["message"] * bool(turn.text), *["function_call"] * len(turn.calls)]
    found: list[Event] = [("created", []), ("in_progress", [])]
    calls = iter(turn.calls)
    for index, kind in enumerate(items):
        found.append(("output_item.added", index, kind, "in_progress"))
        match kind:
            case "reasoning":
                found += _thought(index, turn.thought)
            case "message":
                found += [
                    ("content_part.added", index, ""),
                    ("delta", "output_text.delta", index, turn.text),
                    ("output_text.done", index, turn.text),
                    ("content_part.done", index, turn.text),
                ]
            case _:
                given = arguments(next(calls)[1])
                name = "function_call_arguments"
                found += [
                    ("delta", f"{name}.delta", index, given),
                    (f"{name}.done", index, given),
                ]
        found.append(("output_item.done", index, kind, "completed"))
    return [*found, ("completed", items)]


def _thought(index: int, text: str) -> list[Event]:
    return [
        ("content_part.added", index, ""),
        ("reasoning_summary_part.added", index, ""),
        ("delta", "reasoning_text.delta", index, text),
        ("delta", "reasoning_summary_text.delta", index, text),
        ("reasoning_text.done", index, text),
        ("content_part.done", index, text),
        ("reasoning_summary_text.done", index, text),
        ("reasoning_summary_part.done", index, text),
    ]


# --- chat completions --------------------------------------------------------------------------


def chat_sent(text: str) -> list[Event]:
    assert text.endswith("data: [DONE]\n\n")
    found: list[Event] = []
    for _, data in records(text):
        if not data["choices"]:
            found.append(("usage",))
            continue
        (choice,) = data["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        if finish is not None:
            assert not delta
            found.append(("finish", finish))
        elif "role" in delta:
            found.append(("role", delta))
        elif "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            if "id" in call:
                found.append(("call", call["index"], call["function"]["name"]))
            found.append(("delta", "call", call["index"], call["function"]["arguments"]))
        else:
            ((key, value),) = delta.items()
            found.append(("delta", key, value))
    return merged(found)


def chat_of(turn: Turn) -> list[Event]:
    found: list[Event] = [
        ("role", {"role": "assistant", "content": ""}),
        ("delta", "reasoning_content", turn.thought),
    ]
    if turn.text:
        found.append(("delta", "content", turn.text))
    for index, (name, given) in enumerate(turn.calls):
        found += [("call", index, name), ("delta", "call", index, arguments(given))]
    return [*found, ("finish", "tool_calls" if turn.calls else "stop"), ("usage",)]


def arguments(given: dict[str, Any]) -> str:
    """As the model writes them."""
    return json.dumps(given, ensure_ascii=False)

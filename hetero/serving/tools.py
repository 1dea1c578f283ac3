"""Tools: how they are described to a model, and how its calls are parsed."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hetero.errors import ModelError
from hetero.serving.errors import ApiError
from hetero.serving.grammars import json_grammar
from hetero.serving.state import State

Message = dict[str, Any]
_CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_REMEDY: Final = ("--raw", "/v1/completions")  # of the command line, and over HTTP
_INSTRUCTIONS: Final = (
    "You may call these functions:\n{tools}\nTo call one, answer with "
    '<tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call> and nothing else.'
)


@dataclass(frozen=True)
class ToolCall:
    """One call of a function; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, as OpenAI's `function` objects.

    `forced`: an answer is a call, of `name` alone if that is given. `silent`: no call is made.
    """

    functions: tuple[dict[str, Any], ...] = ()
    forced: bool = False
    silent: bool = False
    name: str = ""

    def grammar(self) -> str:
        """Return the grammar of an answer that must be a call."""
        if not self.forced:
            return ""
        wanted = [f for f in self.functions if self.name in ("", f["name"])]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": f["name"]},
                    "arguments": f.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for f in wanted
        ]
        return json_grammar(calls[0] if len(calls) == 1 else {"anyOf": calls})

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return an answer's text and its calls. An incomplete call stays text."""
        if not self.functions or self.silent:
            return text, []
        names = {f["name"] for f in self.functions}
        if self.forced:
            call = _read_call(text, names)
            return ("", [call]) if call else (text, [])
        matches = [(part, _read_call(part[1], names)) for part in _CALL.finditer(text)]
        calls = [call for _, call in matches if call]
        if not calls and (call := _read_call(text.strip(), names)):
            return "", [call]
        for part, call in matches:
            if call:
                text = text.replace(part[0], "")
        return text.strip() if calls else text, calls


def _read_call(text: str, names: set[str]) -> ToolCall | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("name") not in names:
        return None
    arguments = record.get("arguments", record.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", record["name"], json.dumps(arguments))


def tool_use(tools: Sequence[dict[str, Any]] | None, choice: Any) -> ToolUse:
    """Parse `tools` and `tool_choice` as chat completions have them. Raises `ApiError`."""
    functions: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not isinstance(function, dict) or not named:
            raise ApiError(
                400, "a tool is a function with a name; no other kind runs here", param=f"tools.{i}"
            )
        if not isinstance(function.get("parameters", {}) or {}, dict):
            raise ApiError(400, "a tool's parameters are a JSON schema", param=f"tools.{i}")
        functions.append(function)
    if isinstance(choice, dict):
        inner = choice.get("function")
        name = str((inner if isinstance(inner, dict) else choice).get("name"))
        if name not in [f["name"] for f in functions]:
            raise ApiError(400, "tool_choice names no tool of `tools`", param="tool_choice")
        return ToolUse(tuple(functions), forced=True, name=name)
    if choice not in (None, "auto", "none", "required"):
        raise ApiError(
            400, "tool_choice is auto, none, required or a function", param="tool_choice"
        )
    if choice == "required" and not functions:
        raise ApiError(400, "tool_choice `required` needs `tools`", param="tool_choice")
    return ToolUse(tuple(functions), forced=choice == "required", silent=choice == "none")


def rendered(state: State, messages: Sequence[Message], use: ToolUse) -> list[int]:
    """Return the token ids of a conversation.

    Where the model's template does not support tools they are described in text. Raises
    `UserError`.
    """
    model, (knows, calls) = state.model, state.template_kinds
    chat = [message if calls else _in_words(message) for message in messages]
    options: dict[str, Any] = {}
    if use.functions and not use.silent:
        tools = [{"type": "function", "function": f} for f in use.functions]
        if knows:
            options["tools"] = tools
        else:
            instructions = _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, use.functions)))
            chat = [{"role": "system", "content": instructions}, *chat]
    try:
        return model.tokenizer.encode_chat(chat, **options)
    except ModelError as error:
        raise ModelError(str(error).replace(*_REMEDY)) from error


def _in_words(message: Message) -> Message:
    """Return a message with tool calls, or a tool's result, as text."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message.get("content") or ""]
    for call in calls:
        record = json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        )
        parts.append(f"<tool_call>{record}</tool_call>")
    return {"role": message["role"], "content": "\n".join(x for x in parts if x)}


def plain_messages(messages: Sequence[dict[str, Any]], param: str = "messages") -> list[Message]:
    """Return messages as text only, for a template. Raises `ApiError` for pictures and sound."""
    text_messages: list[Message] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(
                400,
                "a message's role is system, developer, user, assistant or tool",
                param=f"{param}.{i}.role",
            )
        plain: Message = {"role": "system" if role == "developer" else role}
        plain["content"] = plain_text(message.get("content"), f"{param}.{i}.content")
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [_plain_call(call, f"{param}.{i}.tool_calls") for call in calls]
        elif message.get("content") is None:
            raise ApiError(400, "a message needs its content", param=f"{param}.{i}.content")
        if role == "tool":
            plain["tool_call_id"] = str(message.get("tool_call_id", ""))
        text_messages.append(plain)
    return text_messages


def plain_text(content: Any, param: str) -> str:
    """Return the text of a message's content: a text, or parts that are texts.

    Raises `ApiError`.
    """
    if content is None or isinstance(content, str):
        return content or ""
    kinds = ("text", "input_text", "output_text")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ApiError(400, "content is text here; pictures, sound and files are not read", param=param)


def _plain_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool call is of a function with a name", param=param)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ApiError(400, "a tool call's arguments are JSON", param=param) from None
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }

"""Conversations as chat templates take them, and their token ids.

Each API's history becomes the same messages: `role`, `content` (a text), `tool_calls` with parsed
`arguments`, `tool_call_id` of a result, and `reasoning_content` of an answer with thoughts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hetero.errors import ModelError
from hetero.models.tokenizer import Tokenizer
from hetero.serving.errors import ApiError
from hetero.serving.json_text import parse_json
from hetero.serving.state import State
from hetero.serving.tools import ToolUse

Message = dict[str, Any]
_REMEDY: Final = ("--raw", "/v1/completions")  # of the command line, and over HTTP
_INSTRUCTIONS: Final = (
    "You may call these functions:\n{tools}\nTo call one, answer with "
    '<tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call> and nothing else.'
)
_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # gpt-oss has 3
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")


def rendered(
    state: State,
    messages: Sequence[Message],
    use: ToolUse,
    variables: Mapping[str, Any] | None = None,
    *,
    continues: bool = False,
) -> list[int]:
    """Return the token ids of a conversation that is to be answered.

    Where the model's template has no tools, system messages or calls they are described in text.
    `variables` are passed to the template; with `continues` the last message is not ended, so that
    the answer goes on with it. Raises `UserError`.
    """
    facts = state.template_facts
    messages = _with_ordered_results(messages)
    chat = list(messages) if facts.calls else _in_words(messages)
    options: dict[str, Any] = dict(variables or {})
    if use.functions and not use.silent:
        if facts.tools:
            options["tools"] = [{"type": "function", "function": f} for f in use.functions]
        else:
            listed = "\n".join(map(json.dumps, use.functions))
            chat = _instructed(chat, _INSTRUCTIONS.format(tools=listed))
    if not facts.system:
        chat = _without_system(chat)
    if facts.short_ids:
        chat = [_with_short_ids(message) for message in chat]
    try:
        if continues and chat[-1]["role"] == "assistant" and not chat[-1].get("tool_calls"):
            return _continued(state.model.tokenizer, chat, options)
        tokens = state.model.tokenizer.encode_chat(chat, **options)
    except ModelError as error:
        text = str(error).replace(*_REMEDY)
        template = getattr(state.model.tokenizer, "chat_template", None)
        if template is not None:  # a client has no business with the server's paths
            text = text.replace(template.where, "the chat template")
        raise ModelError(text) from error
    if options.get("enable_thinking") is False:
        tokens += _thought_closed(state, tokens)
    return tokens


def _thought_closed(state: State, tokens: Sequence[int]) -> list[int]:
    """Return the end of a thought that the template begins although thinking is off."""
    tokenizer = state.model.tokenizer
    end = state.answer_form.begun_in(tokens, tokenizer)
    return tokenizer.encode(f"{end}\n\n", add_special_tokens=False) if end else []


def thinking_variables(effort: str | None, *, enabled: bool | None = None) -> dict[str, Any]:
    """Return the variables of a template that say how much to think: Qwen's and gpt-oss's."""
    if effort is not None:
        enabled = effort != "none"
    variables: dict[str, Any] = {} if enabled is None else {"enable_thinking": enabled}
    if effort is not None:
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return variables


def checked_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs`. Raises `ApiError` for names that are no variables."""
    wrong = sorted({"messages", "tools", "documents", "template"} & (given or {}).keys())
    if wrong:
        raise ApiError(
            400, f"`{wrong[0]}` is no variable of a template", param="chat_template_kwargs"
        )
    return dict(given or {})


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Return the messages' texts."""
    return [message["content"] for message in messages]


def _continued(tokenizer: Tokenizer, chat: list[Message], options: dict[str, Any]) -> list[int]:
    """Return the ids up to the end of the last message's text.

    A random marker ends that text, since the text itself may occur in what the template writes.
    """
    begun, marker = chat[-1]["content"].rstrip(), secrets.token_hex(16)
    if not begun.strip():
        return tokenizer.encode_chat(chat[:-1], **options)
    options = {**options, "add_generation_prompt": False}
    text = tokenizer.render_chat([*chat[:-1], {**chat[-1], "content": begun + marker}], **options)
    text, match, _ = text.rpartition(marker)
    shown, wanted = ("".join(x.split()) for x in (text, begun))  # templates may strip it
    if not match or not shown.endswith(wanted):
        raise ApiError(400, "the model's template does not show the message to continue")
    return tokenizer.encode(text, add_special_tokens=False)


def _instructed(chat: list[Message], text: str) -> list[Message]:
    """Return a conversation with instructions, in its system message if it has one."""
    if chat and chat[0]["role"] == "system":
        text = f"{chat[0]['content']}\n\n{text}"
        chat = chat[1:]
    return [{"role": "system", "content": text}, *chat]


def _without_system(chat: list[Message]) -> list[Message]:
    """Return a conversation whose system messages are in the user message that follows."""
    messages, texts = list[Message](), list[str]()
    for message in chat:
        if message["role"] == "system":
            texts.append(message["content"])
        elif message["role"] == "user" and texts:
            messages.append({**message, "content": "\n\n".join([*texts, message["content"]])})
            texts = []
        else:
            messages.append(message)
    if texts:
        messages.append({"role": "user", "content": "\n\n".join(texts)})
    return messages


def _with_ordered_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which results follow each other as their calls do.

    Clients send them as they come, with ids, which many templates do not show.
    """
    ordered, places, begin = list[Message](), dict[str, int](), 0
    for message in messages:
        ordered.append(message)
        if message["role"] != "tool":
            calls = message.get("tool_calls", ())
            places, begin = {call["id"]: i for i, call in enumerate(calls)}, len(ordered)
        elif all(result["tool_call_id"] in places for result in ordered[begin:]):
            ordered[begin:] = sorted(ordered[begin:], key=lambda x: places[x["tool_call_id"]])
    return ordered


def _with_short_ids(message: Message) -> Message:
    calls = [{**call, "id": _short(call["id"])} for call in message.get("tool_calls", ())]
    own: Message = {"tool_calls": calls} if calls else {}
    if "tool_call_id" in message:
        own["tool_call_id"] = _short(message["tool_call_id"])
    return {**message, **own}


def _short(name: str) -> str:
    if len(name) == 9 and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _in_words(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls, and the tools' results, are text.

    Results and the user's text next to them are one message, since such templates want roles to
    alternate.
    """
    chat: list[Message] = []
    after_result = False
    for message in messages:
        plain, result = _worded(message), message["role"] == "tool"
        if (result or after_result) and chat and chat[-1]["role"] == plain["role"] == "user":
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}\n{plain['content']}"}
        else:
            chat.append(plain)
        after_result = result
    return chat


def _worded(message: Message) -> Message:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message.get("content") or ""]
    for call in calls:
        function = call["function"]
        record = json.dumps({"name": function["name"], "arguments": function["arguments"]})
        parts.append(f"<tool_call>{record}</tool_call>")
    return {"role": message["role"], "content": "\n".join(x for x in parts if x)}


def plain_messages(messages: Sequence[dict[str, Any]], param: str = "messages") -> list[Message]:
    """Return messages of chat completions as text only. Raises `ApiError` for other media."""
    plain: list[Message] = []
    for i, message in enumerate(messages):
        role, where = message.get("role"), f"{param}.{i}"
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(
                400,
                "a message's role is system, developer, user, assistant or tool",
                param=f"{where}.role",
            )
        begun = role == "assistant" and i == len(messages) - 1
        text = plain_text(message.get("content"), f"{where}.content", begun=begun)
        if role == "assistant":
            given = message.get("tool_calls") or ()
            calls = [plain_call(call, f"{where}.tool_calls") for call in given]
            plain.append(answer_message(text, calls, _thoughts_of(message)))
        elif message.get("content") is None:
            raise ApiError(400, "a message needs its content", param=f"{where}.content")
        elif role == "tool":
            plain.append(result_message(text, str(message.get("tool_call_id", ""))))
        else:
            plain.append({"role": "system" if role == "developer" else role, "content": text})
    return plain


def _thoughts_of(message: Mapping[str, Any]) -> str:
    """Return an answer's thoughts, in DeepSeek's spelling or OpenRouter's."""
    given = message.get("reasoning_content") or message.get("reasoning")
    return given if isinstance(given, str) else ""


def answer_message(text: str, calls: Sequence[dict[str, Any]] = (), thoughts: str = "") -> Message:
    """Return an assistant's message."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if thoughts:
        message["reasoning_content"] = thoughts
    return message


def result_message(text: str, call_id: str) -> Message:
    """Return the message of a tool's result."""
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def plain_text(content: Any, param: str, *, begun: bool = False) -> str:
    """Return the text of a message's content: a text, or parts that are texts, a line each.

    Those of an answer that was `begun`, to be continued, follow each other as they are. Raises
    `ApiError`.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [_part_text(part) for part in content]
        if None not in texts:
            return ("" if begun else "\n").join(text for text in texts if text is not None)
    raise ApiError(400, "content is text here; pictures, sound and files are not read", param=param)


def _part_text(part: Any) -> str | None:
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        return text if isinstance(text, str) else None
    return None


def plain_call(call: Any, param: str) -> dict[str, Any]:
    """Return a call in the form of chat completions with parsed arguments. Raises `ApiError`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool call is of a function with a name", param=param)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError:
            raise ApiError(400, "a tool call's arguments are JSON", param=param) from None
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }

# ruff: noqa: RUF001  (the bars of DeepSeek's markers are wide)
"""Forms of calls of functions, by family of models, and their readers."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hetero.serving.json_text import parse_json

Call: TypeAlias = tuple[str, str]  # name, arguments as a JSON text
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]  # parameters of each function
_BETWEEN: Final = re.compile(r"[\s;,]*")
_FENCE: Final = re.compile(r"\s*```(?:json|tool_code|tool_call)?\s*(.*?)\s*(?:```\s*)?$", re.DOTALL)


@dataclass(frozen=True)
class CallForm:
    """A form of calls: text between two markers. `end` is empty where the answer ends it."""

    begin: str
    end: str
    read: Callable[[str, Schemas], list[Call]]


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Return calls that are JSON: an object, a list, or several with `;` or a line between.

    Raises `ValueError` for anything else.
    """
    text = _FENCE.sub(r"\1", text).strip()
    decoder, at, records = json.JSONDecoder(), 0, list[Any]()
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        record = parse_json(text[at:end])
        records += record if isinstance(record, list) else [record]
        match = _BETWEEN.match(text, end)
        at = end if match is None else match.end()
    return [_json_call(record, schemas) for record in records]


def _json_call(record: Any, schemas: Schemas) -> Call:
    if isinstance(record, dict) and isinstance(record.get("function"), dict):
        record = record["function"]
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise ValueError("a call has a name")
    key = next((x for x in ("arguments", "parameters") if x in record), "")
    arguments = record.get(key) if key else {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    return _call(record["name"], {} if arguments is None else arguments, schemas)


def _call(name: str, arguments: Any, schemas: Schemas) -> Call:
    """Return a call. Raises `ValueError` for a function that is not offered."""
    if name not in schemas or not isinstance(arguments, dict):
        raise ValueError("a call is of a function that is offered, with an object")
    return name, json.dumps(arguments)


def read_named_json(text: str, schemas: Schemas) -> list[Call]:
    """Return calls as Mistral's models write them: JSON, or `name[ARGS]{…}`, or `name{…}`."""
    if text.lstrip()[:1] in ("{", "["):
        return read_json(text, schemas)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        head, brace, body = part.partition("{")
        name = head.partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()
        calls.append(_call(name, parse_json(brace + body), schemas))
    return calls


_FUNCTION: Final = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER: Final = re.compile(
    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)
_ARGUMENT: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def read_tagged(text: str, schemas: Schemas) -> list[Call]:
    """Return calls inside `<tool_call>`.

    They are JSON (Hermes, Qwen), `<function=…>` (Qwen3-Coder, Qwen3.5) or `<arg_key>` (GLM). Raises
    `ValueError`.
    """
    if functions := _FUNCTION.findall(text):
        return [
            _xml_call(name.strip(), _PARAMETER.findall(body), schemas) for name, body in functions
        ]
    if "<arg_key>" in text or re.fullmatch(r"\s*[\w.-]+\s*", text):
        name = text.partition("<arg_key>")[0].strip()
        return [_xml_call(name, _ARGUMENT.findall(text), schemas)]
    return read_json(text, schemas)


def _read_function(text: str, schemas: Schemas) -> list[Call]:
    """Return a call whose `<function=` was the marker."""
    return read_tagged(f"<function={text}", schemas)


def _xml_call(name: str, given: Sequence[tuple[str, str]], schemas: Schemas) -> Call:
    """Return a call whose arguments are texts: what the schema says is no text is JSON."""
    properties = schemas.get(name, {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, text in given:
        value: Any = text.removeprefix("\n").removesuffix("\n")
        schema = properties.get(key.strip())
        if not _is_text(schema):
            try:
                value = parse_json(value)
            except ValueError:
                value = {"True": True, "False": False, "None": None}.get(value.strip(), value)
        arguments[key.strip()] = value
    return _call(name, arguments, schemas)


def _is_text(schema: Any) -> bool:
    """Return whether a schema has texts; what it does not say may be one."""
    kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
    return "string" in kind


def read_python(text: str, schemas: Schemas) -> list[Call]:
    """Return calls in Python's form, `[go(to="Rome"), stop()]` (LFM2, Llama 3.2, Gemma 3).

    Raises `ValueError`.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("is no expression") from error
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("is no call with named arguments")
        arguments = {str(x.arg): _literal(x.value) for x in node.keywords}
        calls.append(_call(ast.unparse(node.func), arguments, schemas))
    return calls


_NAMES: Final = {"true": True, "false": False, "null": None, "none": None}


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON has, in Python's spelling or JSON's."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return [_literal(x) for x in elts]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _literal(key) for key in keys]
            return {str(k): _literal(v) for k, v in zip(names, values, strict=True)}
    raise ValueError("is no literal")


_DEEPSEEK: Final = re.compile(
    r"(?:function<｜tool▁sep｜>(?P<old>[^\n<]+)\s*```json\s*(?P<body>.*?)\s*```"
    r"|(?P<new>[^\n<]+)<｜tool▁sep｜>(?P<json>.*?))\s*(?:<｜tool▁call▁end｜>|$)",
    re.DOTALL,
)


def read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """Return the calls of DeepSeek's models (R1, V3 and V3.1). Raises `ValueError`."""
    calls = []
    for part in text.split("<｜tool▁call▁begin｜>")[1:]:
        match = _DEEPSEEK.match(part.strip())
        if match is None:
            raise ValueError("is no call")
        name, body = match["old"] or match["new"], match["body"] or match["json"] or "{}"
        calls.append(_call(name.strip(), parse_json(body), schemas))
    return calls


_QUOTE: Final = '<|"|>'
_GEMMA_CALL: Final = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_TOKEN: Final = re.compile(r'<\|"\|>(.*?)<\|"\|>|([{,]\s*)([\w.$-]+)\s*(?=:)', re.DOTALL)


def read_gemma(text: str, schemas: Schemas) -> list[Call]:
    """Return the call of Gemma 4, `call:go{to:<|"|>Rome<|"|>}`. Raises `ValueError`."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("is no call")

    def quoted(token: re.Match[str]) -> str:
        if token[3] is not None:
            return f"{token[2]}{json.dumps(token[3])}"
        return json.dumps(token[1])

    return [_call(match[1], parse_json(_GEMMA_TOKEN.sub(quoted, match[2])), schemas)]


HERMES: Final = CallForm("<tool_call>", "</tool_call>", read_tagged)
# By a text in the template: what the family's calls are between.
FORMS: Final = {
    "<function=": CallForm("<function=", "</function>", _read_function),
    "[TOOL_CALLS]": CallForm("[TOOL_CALLS]", "", read_named_json),
    "<|python_tag|>": CallForm("<|python_tag|>", "", read_json),
    "<|tool_call_start|>": CallForm("<|tool_call_start|>", "<|tool_call_end|>", read_python),
    "<|tool_call|>": CallForm("<|tool_call|>", "<|/tool_call|>", read_json),
    "<|action_start|>": CallForm("<|action_start|><|plugin|>", "<|action_end|>", read_json),
    "<｜tool▁calls▁begin｜>": CallForm(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", read_deepseek
    ),
    "<|tool_call>": CallForm("<|tool_call>", "<tool_call|>", read_gemma),
}
# Special tokens of these forms: they are text for the reader.
MARKERS: Final = (
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "<|tool_call|>", "<|/tool_call|>", "<|action_start|>", "<|plugin|>",
    "<|action_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>", _QUOTE, "<tool_call>",
    "</tool_call>",
)  # fmt: skip


def read_whole(text: str, schemas: Schemas) -> list[Call]:
    """Return the calls of an answer that is nothing else. Raises `ValueError`."""
    for read in (read_json, read_python):
        try:
            calls = read(_FENCE.sub(r"\1", text), schemas)
        except ValueError:
            continue
        if calls:
            return calls
    raise ValueError("is no call")

# ruff: noqa: RUF001  (the bars of DeepSeek's markers are wide)
"""Forms of calls of functions, by family of models, and their readers."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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


def _unfenced(text: str) -> str:
    """Return what is between Markdown's fences, where a text is in them; values may have some."""
    fenced = _FENCE.match(text)
    return text if fenced is None else fenced[1]


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Return calls that are JSON: an object, a list, or several with `;` or a line between.

    Raises `ValueError` for anything else.
    """
    text = _unfenced(text).strip()
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


_MISTRAL: Final = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*"
)


def read_named_json(text: str, schemas: Schemas) -> list[Call]:
    """Return calls as Mistral's models write them: JSON, or `name[ARGS]{…}`, or `name{…}`."""
    if text.lstrip()[:1] in ("{", "["):
        return read_json(text, schemas)
    return _scanned(text, _MISTRAL, _BLANK, schemas)


_BLANK: Final = re.compile(r"\s*")


def _scanned(
    text: str, head: re.Pattern[str], tail: re.Pattern[str], schemas: Schemas
) -> list[Call]:
    """Return calls that are a `head`, which has the name, JSON and a `tail`.

    Raises `ValueError`.
    """
    calls, at = list[Call](), 0
    while at < len(text):
        begin = head.match(text, at)
        if begin is None:
            raise ValueError("is no call")
        end = _end_of_json(text, begin.end())
        calls.append(_call(begin[1], parse_json(text[begin.end() : end]), schemas))
        match = tail.match(text, end)
        at = end if match is None else match.end()
    return calls


def _end_of_json(text: str, begin: int) -> int:
    """Return the end of a JSON value. Raises `ValueError`."""
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


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
    root = schemas.get(name, {})
    properties = root.get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, text in given:
        value: Any = text.removeprefix("\n").removesuffix("\n")
        schema = properties.get(key.strip())
        if value == "null" and kinds(schema, root) == {"string", "null"}:
            value = None
        elif not takes_text(schema, root):
            try:
                value = parse_json(value)
            except ValueError:
                value = {"True": True, "False": False, "None": None}.get(value.strip(), value)
        arguments[key.strip()] = value
    return _call(name, arguments, schemas)


_KINDS: Final = frozenset(("string", "number", "boolean", "null", "array", "object"))
_DEEPEST: Final = 20  # references and alternatives in a schema


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema that references within `root` lead to."""
    for _ in range(_DEEPEST):
        at = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(at, str) or not at.startswith("#/"):
            break
        schema = root
        for key in at[2:].split("/"):
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def kinds(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the kinds of JSON values that a schema allows; all where it does not say.

    `root` has what it refers to.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return _KINDS
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list):
        return frozenset(map(_kind, options))
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset("number" if name == "integer" else str(name) for name in names)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = (kinds(inner, root, depth + 1) for inner in schema[key])
            return frozenset[str]().union(*each)
    return _KINDS


def _kind(value: Any) -> str:
    for kind, types in (("boolean", bool), ("number", int | float), ("string", str)):
        if isinstance(value, types):
            return kind
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "null"


def takes_text(schema: Any, root: Any) -> bool:
    """Return whether a text between tags is a value as it is, not JSON."""
    allowed = kinds(schema, root)
    return allowed in (_KINDS, frozenset(("string",)), frozenset(("string", "null")))


def read_python(text: str, schemas: Schemas) -> list[Call]:
    """Return calls in Python's form, `[go(to="Rome"), stop()]` (LFM2, Llama 3.2, Gemma 3).

    Values are JSON or Python's. Raises `ValueError`.
    """
    with suppress(ValueError):
        return _json_arguments(text.strip(), schemas)
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


_PYTHON_NAME: Final = re.compile(r"\s*,?\s*([\w.-]+)\(")
_PYTHON_KEY: Final = re.compile(r"\s*,?\s*(?:(\w+)\s*=\s*|\*\*\s*)")
_PYTHON_END: Final = re.compile(r"\s*\)\s*")


def _json_arguments(text: str, schemas: Schemas) -> list[Call]:
    """Return calls whose values are JSON, whose texts differ from Python's in their escapes.

    Raises `ValueError`.
    """
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    calls, at = list[Call](), 0
    while at < len(text):
        name = _PYTHON_NAME.match(text, at)
        if name is None:
            raise ValueError("is no call")
        at, arguments = name.end(), dict[str, Any]()
        while (end := _PYTHON_END.match(text, at)) is None:
            key = _PYTHON_KEY.match(text, at)
            if key is None:
                raise ValueError("is no call with named arguments")
            at = _end_of_json(text, key.end())
            value = parse_json(text[key.end() : at])
            if key[1] is None and not isinstance(value, dict):
                raise ValueError("is no object")
            arguments |= value if key[1] is None else {key[1]: value}
        calls.append(_call(name[1], arguments, schemas))
        at = end.end()
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
    r"\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?([\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*"
    r"(?:```json)?\s*"
)
_DEEPSEEK_END: Final = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*")


def read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """Return the calls of DeepSeek's models (R1, V3 and V3.1). Raises `ValueError`."""
    return _scanned(text, _DEEPSEEK, _DEEPSEEK_END, schemas)


QUOTE: Final = '<|"|>'
_GEMMA_CALL: Final = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_TOKEN: Final = re.compile(r'<\|"\|>(.*?)<\|"\|>|([{,]\s*)([\w.$-]+)\s*(?=:)', re.DOTALL)


def read_gemma(text: str, schemas: Schemas) -> list[Call]:
    """Return the call of Gemma 4, `call:go{to:<|"|>Rome<|"|>}`. Raises `ValueError`."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("is no call")

    with suppress(ValueError):
        return [_call(match[1], parse_json(match[2]), schemas)]

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
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>", QUOTE, "<tool_call>",
    "</tool_call>",
)  # fmt: skip


def read_whole(text: str, schemas: Schemas) -> list[Call]:
    """Return the calls of an answer that is nothing else. Raises `ValueError`."""
    for read in (read_json, read_python):
        try:
            calls = read(_unfenced(text), schemas)
        except ValueError:
            continue
        if calls:
            return calls
    raise ValueError("is no call")

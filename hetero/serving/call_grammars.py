# ruff: noqa: RUF001  (the bars of DeepSeek's markers are wide)
"""Grammars of answers with calls, in the form that the model's family writes them.

A call begins with the family's marker and has the arguments of its function's schema. Texts that
markers would end are kept free of them, so that the parser reads what the grammar allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from hetero.models.tokenizer import HfTokenizer, Tokenizer
from hetero.serving.answer_parser import AnswerForm
from hetero.serving.call_forms import FORMS, HERMES, QUOTE, CallForm, kinds, resolved, takes_text
from hetero.serving.grammars import TokenBytes, inline_json, lark_grammar
from hetero.serving.tools import ToolUse

MOST_CALLS: Final = 16  # of an answer that must call; small models would go on
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
_OPEN: Final = ("patternProperties", "anyOf", "oneOf", "allOf", "not", "if", "$ref",
                "dependentSchemas", "minProperties", "maxProperties", "propertyNames")  # fmt: skip
_NO_CALL: Final = r"([^ \n\t{\[`](?s:.*))?"  # a text that is not read as a call without markers
_HARMONY: Final = tuple(
    f"<|{x}|>" for x in ("channel", "message", "start", "end", "call", "return", "constrain")
)
Schema: TypeAlias = Mapping[str, Any]


class _OtherFormError(Exception):
    """The family's form cannot express a schema: it is written as JSON."""


class GrammarRules:
    """The rules of a grammar. `special` are tokens that are no text for llguidance, by text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._lines: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def mark(self, text: str) -> str:
        """Return the expression of a text, in which tokens of `special` are those."""
        matches = [(at, -len(x), x) for x in self._special if (at := text.find(x)) >= 0]
        if not matches:
            return json.dumps(text, ensure_ascii=False) if text else ""
        at, _, token = min(matches)
        before, after = text[:at], text[at + len(token) :]
        inner = f"{self.mark(before)} <[{self._special[token]}]> {self.mark(after)}"
        return inner.strip()

    def without(self, texts: Sequence[str], own: str = "") -> str:
        """Return a terminal of texts that have none of `texts`, and match `own` if given."""
        anything = f"/{own or '(?s:.*)'}/"
        if not texts:
            return self.terminal(anything)
        either = "|".join(map(_escaped, texts))
        return self.terminal(f"{anything} & ~/(?s:.*)({either})(?s:.*)/")

    def until(self, terminal: str, marker: str) -> str:
        """Return the rule of a text of a terminal, and the marker that ends it."""
        if any(x in marker for x in self._special):
            return self.add(f"{terminal} {self.mark(marker)}")
        return self.add(f"{terminal} {self.mark(marker)}", "[lazy]")

    def members(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Return the expression of items in order, each of which is required or may be left out."""
        separator, first, rest = self.mark(between), '""', '""'
        for item, required in reversed(items):
            added = f"{separator} {item} {rest}"
            alone = f"{item} {rest}"
            first = self.add(alone if required else f"{alone} | {first}")
            rest = self.add(added if required else f"{added} | {rest}")
        return first

    def text(self, start: str) -> str:
        """Return the grammar, in Lark's form."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines])


def _escaped(text: str) -> str:
    return "".join(f"\\{x}" if x in r"\.^$|?*+()[]{}/" else x for x in text)


Write: TypeAlias = Callable[[GrammarRules, str, Schema], str]


@dataclass(frozen=True)
class CallWriting:
    """The writing of calls by a family: `begin`, `opens`, calls by `write` with `between`, `end`.

    `form` reads it; None: nothing marks it, the answer is JSON. `single`: one call at a time.
    """

    form: CallForm | None
    begin: str
    write: Write
    opens: str = ""
    between: str = ""
    end: str = ""
    single: bool = False


def _json_call(key: str = "arguments", after: str = "") -> Write:
    def write(rules: GrammarRules, name: str, schema: Schema) -> str:
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        return f"{rules.mark(head)} {inline_json(schema)} {rules.mark('}' + after)}"

    return write


def _named_call(before: str, middle: str, after: str = "") -> Write:
    """Return a writer of JSON behind a function's name."""

    def write(rules: GrammarRules, name: str, schema: Schema) -> str:
        head = rules.mark(f"{before}{name}{middle}")
        return f"{head} {inline_json(schema)} {rules.mark(after)}"

    return write


def _mistral_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    number = f"{rules.mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/"
    return f"{rules.mark(name)} {number} {rules.mark('[ARGS]')} {inline_json(schema)}"


def _properties(schema: Schema) -> list[tuple[str, dict[str, Any], bool]]:
    """Return an object's properties: name, schema, required.

    Raises `_OtherFormError` if there may be others.
    """
    own = schema.get("properties")
    more = schema.get("additionalProperties", False)
    if not isinstance(own, dict) or more is not False or any(x in schema for x in _OPEN):
        raise _OtherFormError
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    if any(name not in own for name in required):
        raise _OtherFormError
    inner = {name: resolved(value, schema) for name, value in own.items()}
    return [
        (name, {**shared, **value} if isinstance(value, dict) else {}, name in required)
        for name, value in inner.items()
    ]


def _text_value(rules: GrammarRules, schema: Schema, kept_out: Sequence[str], end: str) -> str:
    """Return the rule of a text that is written as it is, and its end.

    Raises `_OtherFormError`.
    """
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options is not None:
        texts = ["null" if x is None else x for x in options]
        if any(end in x or any(y in x for y in kept_out) for x in texts):
            raise _OtherFormError
        return rules.add(" | ".join(rules.mark(x + end) for x in texts))
    if any(x in schema for x in ("pattern", "format", "anyOf", "oneOf", "allOf", "$ref")):
        if kinds(schema, schema) >= {"null"} and not {"pattern", "format"} & schema.keys():
            inner = [x for x in schema.get("anyOf", ()) if kinds(x, schema) == {"string"}]
            if len(inner) == 1:
                text = _text_value(rules, inner[0], kept_out, end)
                return rules.add(f"{text} | {rules.mark('null' + end)}")
        raise _OtherFormError
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    own = f"(?s:.{{{least},{most}}})" if least or most != "" else ""
    return rules.until(rules.without([*kept_out, end], own), end)


def _xml_call(before: str, key: tuple[str, str, str], after: str, kept_out: Sequence[str]) -> Write:
    """Return a writer of arguments between tags; `key` is around each name and behind the value."""
    begin, middle, end = key

    def write(rules: GrammarRules, name: str, schema: Schema) -> str:
        items = []
        for own, inner, required in _properties(schema):
            if not _is_word(own):
                raise _OtherFormError
            head = rules.mark(f"{begin}{own}{middle}")
            if takes_text(inner, inner):
                value = _text_value(rules, inner, kept_out, end)
            else:
                value = f"{inline_json(inner)} {rules.mark(end)}"
            items.append((rules.add(f"{head} {value}"), required))
        head = rules.mark(before.replace("NAME", name))
        return f"{head} {rules.members(items, '')} {rules.mark(after)}"

    return write


def _is_word(text: str) -> bool:
    return text.replace("-", "_").replace(".", "_").replace("$", "_").isidentifier()


def _python_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    """Write `go(to="Rome")`, whose values are JSON."""
    try:
        own_properties = _properties(schema)
        if not all(own.isidentifier() for own, _, _ in own_properties):
            raise _OtherFormError
    except _OtherFormError:
        return f"{rules.mark(name + '(**')} {inline_json(schema)} {rules.mark(')')}"
    items = [
        (rules.add(f"{rules.mark(own + '=')} {inline_json(inner)}"), required)
        for own, inner, required in own_properties
    ]
    return f"{rules.mark(name + '(')} {rules.members(items, ', ')} {rules.mark(')')}"


def _gemma_call(rules: GrammarRules, name: str, schema: Schema) -> str:
    head, end = rules.mark(f"call:{name}"), rules.mark("<tool_call|>")
    try:
        return f"{head} {_gemma_object(rules, schema)} {end}"
    except _OtherFormError:
        return f"{head} {inline_json(schema)} {end}"


def _gemma_object(rules: GrammarRules, schema: Schema) -> str:
    items = []
    for own, inner, required in _properties(schema):
        if not _is_word(own):
            raise _OtherFormError
        value = _gemma_value(rules, inner)
        items.append((rules.add(f"{rules.mark(own + ':')} {value}"), required))
    return rules.add(f'"{{" {rules.members(items, ",")} "}}"')


def _gemma_value(rules: GrammarRules, schema: Schema) -> str:
    """Return the expression of a value. Raises `_OtherFormError` for what the form cannot say."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    schema = {**shared, **resolved(schema, schema)}
    allowed = kinds(schema, schema)
    if not allowed & {"string", "array", "object"}:
        return inline_json(schema)
    several = schema.get("anyOf", ())
    if "enum" in schema and len(allowed) > 1:
        several = [{"const": value} for value in schema["enum"]]
    if several:
        return rules.add(" | ".join(_gemma_value(rules, {**shared, **x}) for x in several))
    if allowed == {"string"}:
        return f"{rules.mark(QUOTE)} {_text_value(rules, schema, ['<tool_call|>'], QUOTE)}"
    if allowed == {"object"}:
        return _gemma_object(rules, schema)
    return _gemma_list(rules, schema, shared)


def _gemma_list(rules: GrammarRules, schema: Schema, shared: Schema) -> str:
    inner = schema.get("items")
    unusual = "prefixItems" in schema or schema.get("uniqueItems")
    if kinds(schema, schema) != {"array"} or not isinstance(inner, dict) or unusual:
        raise _OtherFormError
    value = _gemma_value(rules, {**shared, **inner})
    least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
    if most == 0:
        return '"[" "]"'
    bounds = f"{max(least - 1, 0)},{'' if most is None else int(most) - 1}"
    items = f'({value} ("," {value}){{{bounds}}})'
    return rules.add(f'"[" {items}{"" if least else "?"} "]"')


_CODER: Final = _xml_call(
    "\n<function=NAME>\n",
    ("<parameter=", ">\n", "\n</parameter>\n"),
    "</function>\n</tool_call>",
    ("<parameter", "</parameter", "<function", "</function", "<tool_call", "</tool_call"),
)
_GLM: Final = _xml_call(
    "NAME\n",
    ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    "</tool_call>",
    ("<arg_", "</arg_", "<tool_call", "</tool_call", "\n"),
)
_HERMES: Final = CallWriting(
    HERMES, HERMES.begin, _json_call(after="\n</tool_call>"), "\n", "\n<tool_call>\n"
)
_BARE: Final = CallWriting(None, "", _json_call(), single=True)


def _tagged(write: Write) -> CallWriting:
    """Return the writing of tags in `<tool_call>`, and of JSON where tags cannot say it."""

    def call(rules: GrammarRules, name: str, schema: Schema) -> str:
        try:
            return write(rules, name, schema)
        except _OtherFormError:
            return f'"\\n" {_HERMES.write(rules, name, schema)}'

    return CallWriting(HERMES, HERMES.begin, call, "", "\n<tool_call>")


def writing_of(source: str) -> CallWriting:
    """Return how the family of a chat template writes calls."""
    makers = (_tagged_of, _marked_of, _listed_of)
    writing = next((made for make in makers if (made := make(source)) is not None), None)
    if writing is not None:
        return writing
    if "<|python_tag|>" in source:
        return CallWriting(None, "", _json_call("parameters"), single=True)
    in_words = "tools" not in source  # `template_chat` then describes them
    return _HERMES if in_words or "<tool_call>" in source else _BARE


def _tagged_of(source: str) -> CallWriting | None:
    if "<function=" in source:
        return _tagged(_CODER)
    return _tagged(_GLM) if "<arg_key>" in source else None


def _form(
    mark: str, write: Write, opens: str = "", between: str = "", end: str = ""
) -> CallWriting:
    form = FORMS[mark]
    return CallWriting(form, form.begin, write, opens, between, end, single=not between)


def _marked_of(source: str) -> CallWriting | None:
    """Return a writing in which each call has its own marker."""
    if "[TOOL_CALLS]" in source and "[ARGS]" in source:
        write = _mistral_call if "[CALL_ID]" in source else _named_call("", "[ARGS]")
        return _form("[TOOL_CALLS]", write, "", "[TOOL_CALLS]")
    if "<｜tool▁calls▁begin｜>" in source:
        begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
        write = _named_call(begin, "<｜tool▁sep｜>", end)
        if "```json" in source:
            write = _named_call(f"{begin}function<｜tool▁sep｜>", "\n```json\n", f"\n```{end}")
        return _form("<｜tool▁calls▁begin｜>", write, "", "\n", "<｜tool▁calls▁end｜>")
    if "<|tool_call>" in source:
        return _form("<|tool_call>", _gemma_call, "", "<|tool_call>")
    return None


def _listed_of(source: str) -> CallWriting | None:
    """Return a writing in which the calls are a list."""
    if "[TOOL_CALLS]" in source:
        opens = " [" if "[TOOL_CALLS] [" in source else "["
        return _form("[TOOL_CALLS]", _json_call(), opens, ", ", "]")
    if "<|tool_call_start|>" in source:
        return _form("<|tool_call_start|>", _python_call, "[", ", ", "]<|tool_call_end|>")
    if "<|action_start|>" in source:
        return _form("<|action_start|>", _json_call("parameters"), "\n", "", "<|action_end|>")
    if "<|tool_call|>" in source:
        end = "]<|/tool_call|>" if "<|/tool_call|>" in source else "]"
        return _form("<|tool_call|>", _json_call(), "[", ", ", end)
    return None


@dataclass(frozen=True)
class CallGrammar:
    """A grammar, and the form in which the parser reads what it allows.

    `bare`: a call is JSON and nothing else.
    """

    text: str
    form: AnswerForm
    bare: bool


@dataclass(frozen=True)
class CallWriter:
    """Makes the grammars of answers of one model."""

    form: AnswerForm
    writing: CallWriting
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: AnswerForm, tokens: TokenBytes) -> CallWriter:
        """Return that of a tokenizer's chat template."""
        if not isinstance(tokenizer, HfTokenizer) or tokenizer.chat_template is None:
            return cls(form, _HERMES, {})
        source = " ".join(tokenizer.chat_template.templates.values())
        known = tokens.tokenizer
        added = tokenizer.added_tokens
        special = {text: id_ for text, id_ in added.items() if known.is_special_token(id_)}
        return cls(form, writing_of(source), special)

    def grammar(self, use: ToolUse, closes: str, answer: Any = None) -> CallGrammar:
        """Return the grammar of an answer.

        `closes` ends a thought that the prompt began; `answer` is the schema of an answer that is
        no call (None: any text). Raises `UserError`.
        """
        writing, rules = self.writing, GrammarRules(self.special)
        names = [f for f in use.functions if f["name"] in use.names]
        if self.form.channels:
            start = self._channels(rules, names, use, answer)
            return CallGrammar(lark_grammar(rules.text(start)), self.form, bare=False)
        each = [writing.write(rules, f["name"], f.get("parameters") or _NO_PARAMETERS)
                for f in names]  # fmt: skip
        call = rules.add(" | ".join(each))
        most = 1 if writing.single or not use.parallel or use.named else MOST_CALLS
        more = f"({rules.mark(writing.between)} {call}){{0,{most - 1}}}" if most > 1 else ""
        calls = f"{rules.mark(writing.opens)} {call} {more} {rules.mark(writing.end)}"
        alone = f"{rules.mark(writing.begin)} {calls}"
        body = alone if use.forced else self._free(rules, alone, calls, answer)
        form = replace(self.form, calls=(writing.form,) if writing.form else ())
        start = f"{self._thought(rules, closes)} ({body})"
        return CallGrammar(lark_grammar(rules.text(start)), form, bare=writing.form is None)

    def _thought(self, rules: GrammarRules, closes: str) -> str:
        """Return the expression of the thought before an answer."""

        def rest(end: str) -> str:
            return f"{rules.until(rules.without([end]), end)} /\\n{{0,3}}/"

        if closes:
            return rest(closes)
        return " ".join(
            f"({rules.mark(begin)} {rest(end)})?" for begin, end in self.form.thoughts[:1]
        )

    def _free(self, rules: GrammarRules, alone: str, calls: str, answer: Any) -> str:
        """Return the expression of an answer that may call."""
        writing = self.writing
        if answer is not None:  # calls without markers could not be told from it
            own = inline_json(answer)
            return own if writing.form is None else f"{alone} | {own}"
        kept_out = [begin for begin, _ in self.form.thoughts]
        if writing.form is None:
            return f"{alone} | {rules.without(kept_out, _NO_CALL)}"
        text = rules.without([*kept_out, writing.begin])
        return f"{rules.until(text, writing.begin)} {calls} | {text}"

    def _channels(
        self, rules: GrammarRules, names: Sequence[Mapping[str, Any]], use: ToolUse, answer: Any
    ) -> str:
        """Return gpt-oss's form: a call is a message to a function, which ends the answer."""
        text = rules.without(_HARMONY)
        begin = rules.mark("<|channel|>")
        body = []
        for function in names:
            head = f"commentary to=functions.{function['name']} <|constrain|>json<|message|>"
            schema = inline_json(function.get("parameters") or _NO_PARAMETERS)
            body.append(rules.add(f"{rules.mark(head)} {schema}"))
        if not use.forced:
            said = text if answer is None else inline_json(answer)
            body.append(rules.add(f"{rules.mark('final<|message|>')} {said}"))
        thought = f"{rules.mark('analysis<|message|>')} {text}"
        between = rules.mark("<|end|><|start|>assistant<|channel|>")
        return f"{begin} ({thought} {between})? ({' | '.join(body)})"

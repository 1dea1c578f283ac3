# ruff: noqa: RUF001  (the bars of DeepSeek's markers are wide)
"""Grammars of calls: whatever they allow is read back as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from hetero.models.tokenizer import HfTokenizer
from hetero.serving.answer_parser import AnswerForm, AnswerParser, AnswerPart, whole_parts
from hetero.serving.call_grammars import MOST_CALLS, CallWriter
from hetero.serving.errors import ApiError
from hetero.serving.grammars import GrammarConstraint, TokenBytes
from hetero.serving.tools import ToolUse, tool_use

jsonschema_rs = pytest.importorskip("jsonschema_rs")
END = "<|im_end|>"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<think>", "</think>",
)  # fmt: skip
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>")
QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Of each family: what its template says, the markers that are tokens of its vocabulary.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "told in words": ("", ()),
    "hermes": ("tools <tool_call>", ()),
    "qwen3": ("tools <tool_call> <think> </think>", QWEN),
    "qwen3-coder": ("tools <tool_call> <function=", QWEN[:2]),
    "qwen3.5": ("tools <tool_call> <function= <think> </think>", QWEN),
    "glm": ("tools <tool_call> <arg_key> <think> </think>",
            (*QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "glm in text": ("tools <tool_call> <arg_key>", ()),
    "llama3": ("tools <|python_tag|>", ("<|python_tag|>",)),
    "unknown": ("tools", ()),
    "mistral v3": ("tools [TOOL_CALLS] [", ("[TOOL_CALLS]",)),
    "mistral v7": ("tools [TOOL_CALLS][ [THINK] [/THINK]",
                   ("[TOOL_CALLS]", "[THINK]", "[/THINK]")),
    "mistral v11": ("tools [TOOL_CALLS] [CALL_ID] [ARGS]", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    "mistral v13": ("tools [TOOL_CALLS] [ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    "lfm2": ("tools <|tool_call_start|>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "phi4": ("tools <|tool_call|> <|/tool_call|>", ("<|tool_call|>", "<|/tool_call|>")),
    "granite3": ("tools <|tool_call|>", ("<|tool_call|>",)),
    "internlm": ("tools <|action_start|>", ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    "deepseek r1": ("tools <｜tool▁calls▁begin｜> ```json <think> </think>", DEEPSEEK),
    "deepseek v3.1": ("tools <｜tool▁calls▁begin｜> <think> </think>", DEEPSEEK),
    "gemma4": ("tools <|tool_call> <|channel>thought <channel|>",
               ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")),
    "gpt-oss": ("tools <|channel|> <|message|>", HARMONY),
}  # fmt: skip
SINGLE = ("llama3", "unknown", "internlm", "gpt-oss")
SHORT = {"type": "string", "maxLength": 5}
LISTS = {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2}
GO: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": SHORT,
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "class": {"enum": ["first", "second", "a<b"]},
        "via": {"anyOf": [SHORT, {"type": "null"}]},
        "x": LISTS,
        "at": {
            "type": "object",
            "properties": {"lat": {"type": "boolean"}, "name": SHORT},
            "required": ["lat"],
        },
        "how": {"$ref": "#/$defs/how"},
    },
    "required": ["to", "x"],
    "$defs": {"how": {"enum": ["fly", 3, None]}},
}
PATTERN = {"type": "object", "properties": {"to": {"type": "string", "pattern": "^[A-Z]{3}$"}}}
EITHER = {
    "anyOf": [
        {"type": "object", "properties": {"a": SHORT}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "integer", "minimum": 0, "maximum": 9}}},
    ]
}
SCHEMAS = {"go": GO, "code": PATTERN, "either.of-two": EITHER, "stop": None}


class Family:
    """The tokenizer of bytes and of a family's markers, with its parser and grammars."""

    def __init__(self, name: str) -> None:
        template, markers = FAMILIES[name]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = {word: i for i, word in enumerate([*alphabet, "aa"])}
        backend = tokenizers.Tokenizer(models.BPE(words, [("a", "a")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(END, special=True)])
        # Qwen's and GLM's are no special tokens.
        backend.add_tokens([AddedToken(x, special="tool_call>" not in x) for x in markers])
        template, ends = f"{{# {template} #}}", [backend.token_to_id(END)]
        self.tokenizer = HfTokenizer(backend, {}, {"default": template}, ends=ends)
        self.size = self.tokenizer.vocab_size
        model: Any = SimpleNamespace(
            config=SimpleNamespace(vocab_size=self.size),
            eos_ids=self.tokenizer.eos_ids,
            tokenizer=self.tokenizer,
        )
        self.tokens = TokenBytes(model)
        self.form = AnswerForm.of(self.tokenizer)
        self.writer = CallWriter.of(self.tokenizer, self.form, self.tokens)
        self.end = self.tokenizer.eos_ids[0]
        self.ids = {self.tokenizer.encode(x)[0] for x in markers}
        plain = self.tokenizer.encode("ab z<>/{}[]\"\\'\n,:=()019tnuok_")
        self.usual = np.zeros(self.size, np.bool_)
        self.usual[plain] = True

    def walk(self, use: ToolUse, draw: random.Random, closes: str = "", answer: Any = None) -> Any:
        """A text that the grammar allows, and its parts."""
        made = self.writer.grammar(use, closes, answer)
        self.tokens.check(made.text)
        constraint = GrammarConstraint(self.tokens, made.text, self.size)
        ids = list[int]()
        while len(ids) < 3000:
            allowed = constraint.allowed()
            if allowed[self.end] and draw.random() < 0.5:
                break
            marks = [x for x in self.ids if allowed[x]]
            usual = np.flatnonzero(allowed & self.usual)
            every = np.flatnonzero(allowed)
            every = every[every != self.end]
            if not len(every):
                break
            some = marks if marks and draw.random() < 0.35 else usual if len(usual) else every
            token = int(draw.choice(list(some)))
            ids.append(token)
            constraint.accept(token)
        else:
            raise AssertionError("the walk does not come to an end")
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        parser = AnswerParser(made.form, {**use.schemas}, closes=closes, bare=made.bare)
        for letter in text:
            parser.feed(letter)
        parser.feed("", last=True)
        return text, whole_parts(parser.parts)


@cache
def family(name: str) -> Family:
    return Family(name)


def use_of(choice: Any = "required", **options: Any) -> ToolUse:
    functions = [
        {"name": name, **({} if schema is None else {"parameters": schema}), **options}
        for name, schema in SCHEMAS.items()
    ]
    return tool_use([{"type": "function", "function": x} for x in functions], choice)


def check_calls(parts: list[AnswerPart], text: str) -> int:
    """Check the calls against their schemas, and return how many there are."""
    calls = [part for part in parts if part.kind == "call"]
    for call in calls:
        schema = SCHEMAS[call.name] or {"type": "object", "additionalProperties": False}
        assert jsonschema_rs.is_valid(schema, json.loads(call.text)), (text, call)
    return len(calls)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_answer_is_calls_and_nothing_else(name: str) -> None:
    seed = random.randrange(2**32)
    draw, counts, thought = random.Random(seed), set[int](), False
    for _ in range(12):
        text, parts = family(name).walk(use_of(), draw)
        assert {part.kind for part in parts} <= {"call", "thought"}, (seed, text)
        counts.add(check_calls(parts, text))
        thought = thought or parts[0].kind == "thought"
    assert min(counts) >= 1
    assert max(counts) <= (1 if name in SINGLE else MOST_CALLS)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_strict_calls_fit_their_schemas_where_the_model_chooses(name: str) -> None:
    draw, kinds_ = random.Random(name), set[str]()  # one in which there are both
    for _ in range(12):
        text, parts = family(name).walk(use_of("auto", strict=True), draw)
        check_calls(parts, text)
        kinds_ |= {part.kind for part in parts}
        if "call" in {part.kind for part in parts}:
            assert parts[-1].kind == "call", text
    assert "text" in kinds_


@pytest.mark.few(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_with_a_schema_is_that_or_a_call(name: str) -> None:
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    draw, kinds_ = random.Random(name), set[str]()  # one in which there are both
    for _ in range(30):
        text, parts = family(name).walk(use_of("auto"), draw, answer=answer)
        check_calls(parts, text)
        texts = [part.text for part in parts if part.kind == "text"]
        kinds_ |= {part.kind for part in parts}
        assert len(texts) <= 1
        for each in texts:
            assert json.loads(each) in ({"ok": True}, {"ok": False}), text
    bare = family(name).writer.writing.form is None and name != "gpt-oss"
    assert kinds_ >= ({"text"} if bare else {"text", "call"})


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["qwen3", "deepseek r1", "gemma4", "hermes"])
def test_one_call_where_there_may_be_one(name: str) -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    draw = random.Random()
    for use in (use_of(named), replace(use_of(), parallel=False)):
        for _ in range(4):
            text, parts = family(name).walk(use, draw)
            assert check_calls(parts, text) == 1
    assert {part.name for part in family(name).walk(use_of(named), draw)[1]} <= {"stop", ""}


def test_a_thought_that_the_prompt_began_is_ended_first() -> None:
    for _ in range(5):
        text, parts = family("qwen3").walk(use_of(), random.Random(), closes="</think>")
        assert text.count("</think>") == 1
        assert check_calls(parts, text) >= 1


def test_texts_between_tags_have_no_quotes() -> None:
    written = (
        '<tool_call>\n<function=go>\n<parameter=to>\nA "b"\n</parameter>\n<parameter=class>\n'
        'first\n</parameter>\n<parameter=x>\n["a", "b"]\n</parameter>\n<parameter=at>\n'
        '{"lat": true, "name": "c"}\n</parameter>\n<parameter=how>\n3\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    gemma = (
        '<|tool_call>call:go{to:<|"|>A "b"<|"|>,class:<|"|>first<|"|>,x:[<|"|>a<|"|>,<|"|>b<|"|>],'
        'at:{lat:true,name:<|"|>c<|"|>},how:3}<tool_call|>'
    )
    arguments = {
        "to": 'A "b"',
        "class": "first",
        "x": ["a", "b"],
        "at": {"lat": True, "name": "c"},
        "how": 3,
    }
    for name, text in (("qwen3-coder", written), ("gemma4", gemma)):
        found = family(name)
        made = found.writer.grammar(use_of(), "")
        constraint = GrammarConstraint(found.tokens, made.text, found.size)
        for token in found.tokenizer.encode(text):
            assert constraint.allowed()[token]
            constraint.accept(token)
        assert constraint.allowed()[found.end]
        parser = AnswerParser(made.form, use_of().schemas, bare=made.bare)
        parser.feed(text, last=True)
        assert [json.loads(part.text) for part in parser.parts] == [arguments]


def test_a_choice_that_is_no_function_is_named() -> None:
    with pytest.raises(ApiError, match="type 'web_search' names no function"):
        use_of({"type": "web_search"})

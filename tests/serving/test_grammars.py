"""Answers under grammars: valid whatever the model would rather say."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero import LLM, UserError
from hetero.serving.grammars import (
    LARGEST_INTEGER,
    GrammarConstraint,
    TokenBytes,
    choice_grammar,
    gbnf_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)

SCHEMAS = int(os.environ.get("HETERO_SCHEMAS", "40"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu") as found:
        yield found


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> TokenBytes:
    return TokenBytes(llm.model)


def answer(llm: LLM, tokens: TokenBytes, grammar: str, **options: Any) -> Any:
    tokens.check(grammar)
    constraint = GrammarConstraint(tokens, grammar, llm.model.config.vocab_size)
    return llm.chat(
        [{"role": "user", "content": "Tell me"}], constraint=constraint, max_tokens=400, **options
    )


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short, so that an answer comes to its end."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf"] if depth else []
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 8)}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 90)}
        case "enum":
            return {"enum": draw.sample(["red", 1, None, True, "blue", 2.5], 3)}
        case "const":
            return {"const": draw.choice(["x", 7, False])}
        case "object":
            names = draw.sample(["a", "b", "name", "a b", "ü"], draw.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": names[: draw.randint(0, len(names))],
                "additionalProperties": False,
            }
        case "array":
            most = draw.randint(0, 3)
            items = random_schema(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": min(1, most), "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The schemas of `random_schema`, and no others, by hand."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    for name, wanted in (("enum", schema.get("enum")), ("const", [schema.get("const")])):
        if name in schema:
            return any(type(value) is type(each) and value == each for each in wanted)
    match schema["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            count = isinstance(value, list) and schema["minItems"] <= len(value)
            return (
                count
                and len(value) <= schema["maxItems"]
                and all(fits(each, schema["items"]) for each in value)
            )
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(schema["properties"])
        and all(fits(value[name], schema["properties"][name]) for name in value)
    )


@pytest.mark.full
def test_answers_are_valid_over_random_schemas(llm: LLM, tokens: TokenBytes) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for i in range(SCHEMAS):
        schema = random_schema(draw)
        result = answer(llm, tokens, json_grammar(schema), temperature=1.0, seed=seed + i)
        assert result.finish_reason == "stop", (seed, schema, result.text)
        assert fits(json.loads(result.text), schema), (seed, schema, result.text)


def test_other_grammars(llm: LLM, tokens: TokenBytes) -> None:
    options = {"temperature": 1.0, "seed": 5}
    assert re.fullmatch("[a-f]{3,5}", answer(llm, tokens, regex_grammar("[a-f]{3,5}")).text)
    assert answer(llm, tokens, choice_grammar(["red", 'a "b"']), **options).text in ("red", 'a "b"')
    gbnf = 'root ::= ("yes" | "no") " " [0-9]'
    assert re.fullmatch("(yes|no) [0-9]", answer(llm, tokens, gbnf_grammar(gbnf), **options).text)
    assert json.loads(answer(llm, tokens, json_grammar({"type": "boolean"})).text) in (True, False)


@pytest.mark.parametrize(
    "grammar", [lark_grammar("start: nothing"), regex_grammar("("), "", "{", "x" * 300_000]
)
def test_what_is_no_grammar_is_one_sentence(tokens: TokenBytes, grammar: str) -> None:
    with pytest.raises(UserError) as raised:
        tokens.check(grammar)
    assert not re.search(r"\n|<state>|Tokens:|⟦", str(raised.value)), "a parser's own notes"


def test_a_mask_is_what_the_matcher_takes(llm: LLM, tokens: TokenBytes) -> None:
    """Against its slow twin: every token tried on a matcher of its own."""
    grammar = regex_grammar("(cat|car)s?")
    size = llm.model.config.vocab_size
    mask = GrammarConstraint(tokens, grammar, size).allowed()
    assert mask.shape == (size,)
    found = {tokens.of(int(token)) for token in np.flatnonzero(mask)}
    whole = {b"cat", b"car", b"cats", b"cars"}
    wanted = {
        data
        for token in range(size)
        if token not in tokens.special
        and (data := tokens.of(token))
        and any(each.startswith(data) for each in whole)
    }
    assert found == wanted


OWN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "value", "open_"),
    [
        (OWN, {"a": 1}, False),
        ({"type": "array", "items": OWN}, [{"a": 1}], False),
        ({"anyOf": [OWN, {"type": "null"}]}, {"a": 1}, False),
        ({"$ref": "#/$defs/own", "$defs": {"own": OWN}}, {"a": 1}, False),
        (OWN | {"additionalProperties": True}, {"a": 1}, True),
        ({"type": "object"}, {"a": 1}, True),
        ({"allOf": [OWN, {"properties": {"b": {"type": "integer"}}}]}, {"a": 1, "b": 1}, True),
        (
            {"properties": {"allOf": {"type": "integer"}}, "required": ["allOf"]},
            {"allOf": 1},
            False,
        ),
        (OWN | {"description": 'not "allOf"', "default": {"allOf": 1}}, {"a": 1}, False),
    ],
)
def test_an_object_has_the_properties_of_its_schema_alone(
    tokens: TokenBytes, schema: dict[str, Any], value: Any, open_: bool
) -> None:
    def accepts(given: Any) -> bool:
        matcher = GrammarConstraint(tokens, json_grammar(schema), 10**6)._matcher
        ids = tokens.tokenizer.tokenize_str(json.dumps(given, separators=(",", ":")))
        return bool(matcher.validate_tokens(ids) == len(ids))

    def with_more(given: Any) -> Any:
        return [with_more(x) for x in given] if isinstance(given, list) else {**given, "more": 1}

    assert accepts(value)
    assert accepts(with_more(value)) == open_


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"type": "integer"}, 2**53 - 1, True),
        ({"type": "integer"}, -(2**53) + 1, True),
        ({"type": "integer"}, 10**17, False),
        ({"type": ["integer", "null"]}, 10**17, False),
        ({"type": "integer", "minimum": 0}, 10**17, False),
        ({"type": "integer", "maximum": 10**18}, 10**17, True),
        ({"type": "number"}, 10**17, True),
        ({"type": ["integer", "number"]}, 10**17, True),
        ({"type": "integer", "title": "A number"}, 10**17, False),
        ({"type": "integer", "exclusiveMaximum": 9}, 9, False),
        ({"type": "integer", "exclusiveMaximum": 9}, 8, True),
        ({"type": "integer", "enum": [10**17]}, 10**17, True),
        ({"type": "integer", "anyOf": [{"const": 10**17}, {"minimum": 0}]}, 10**17, True),
    ],
)
def test_an_integer_ends(
    tokens: TokenBytes, schema: dict[str, Any], value: int, *, fits: bool
) -> None:
    for whole, given in (
        (schema, value),
        ({"type": "object", "properties": {"a": schema}, "required": ["a"]}, {"a": value}),
        ({"type": "array", "items": schema}, [value]),
        ({"type": "array", "items": {"$id": "http://a/b", "anyOf": [schema]}}, [value]),
    ):
        matcher = GrammarConstraint(tokens, json_grammar(whole), 10**6)._matcher
        ids = tokens.tokenizer.tokenize_str(json.dumps(given, separators=(",", ":")))
        assert bool(matcher.validate_tokens(ids) == len(ids)) == fits


def test_many_integers_are_one_definition() -> None:
    """A range in a schema takes milliseconds to compile, so that many share one definition."""
    names = [f"name {i}" for i in range(9)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    assert json_grammar(schema).count(str(LARGEST_INTEGER)) == 2

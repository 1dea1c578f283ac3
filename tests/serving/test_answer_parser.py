# ruff: noqa: E501, RUF001  (a row is an answer; the bars of DeepSeek's markers are wide)
"""Answers of each family, as their models write them, and what they are read as."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.serving.answer_parser import AnswerForm, AnswerParser, AnswerPart, Piece, whole_parts
from hetero.serving.call_forms import FORMS, HERMES
from hetero.serving.thought_budget import ThoughtBudget, ThoughtLimit

SCHEMAS: dict[str, Any] = {
    "go": {
        "properties": {
            "to": {"type": "string"},
            "days": {"type": "integer"},
            "via": {},
            "x": {"type": "array"},
        }
    },
    "stop": {},
}
THINK = (("<think>", "</think>"),)
GEMMA = (("<|channel>thought\n", "<channel|>"),)
ROME = ("go", {"to": "Rome"})
STOP = ("stop", {})


def form_of(mark: str = "", thoughts: Any = ()) -> AnswerForm:
    calls = (HERMES, FORMS[mark]) if mark else (HERMES,)
    return AnswerForm(thoughts=thoughts, calls=calls)


HERMES_JSON = '<tool_call>\n{"name": "go", "arguments": {"to": "Rome"}}\n</tool_call>'
BARE = '{"name": "go", "arguments": {"to": "Rome"}}'
LLAMA = '{"name": "go", "parameters": {"to": "Rome"}}'
CODER = "<tool_call>\n<function=go>\n<parameter=to>\nRome\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>go\n<arg_key>to</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
PYTHON = '<|tool_call_start|>[go(to="Rome")]<|tool_call_end|>'
OLD_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n"
    '{"to": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁sep｜>{"to": "Rome"}<｜tool▁call▁end｜>'
    "\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
MISTRAL, LLAMA3, LFM2, PHI4, INTERN, DEEP, GEMMA4 = (
    "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call|>", "<|action_start|>",
    "<｜tool▁calls▁begin｜>", "<|tool_call>",
)  # fmt: skip
# Of each: the template's mark, the markers of thoughts, the answer, and text, thoughts, calls.
TABLE: list[tuple[str, Any, str, str, str, list[tuple[str, Any]]]] = [
    # Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3, Hunyuan
    ("", (), HERMES_JSON, "", "", [ROME]),
    ("", (), f"Well. {HERMES_JSON}", "Well.", "", [ROME]),
    ("", (), f"Well.\n\n{HERMES_JSON}\n", "Well.", "", [ROME]),
    ("", (), HERMES_JSON * 2, "", "", [ROME, ROME]),
    ("", (), f"{HERMES_JSON}\n{HERMES_JSON.replace('go', 'stop')}", "", "", [ROME, ("stop", {"to": "Rome"})]),
    ("", (), f"{HERMES_JSON}\nDone.", "Done.", "", [ROME]),
    ("", (), HERMES_JSON.removesuffix("\n</tool_call>"), "", "", [ROME]),
    ("", (), HERMES_JSON.replace("Rome", "</tool_call>"), "", "", [("go", {"to": "</tool_call>"})]),
    ("", (), HERMES_JSON.replace("Rome", 'a \\"b\\" }'), "", "", [("go", {"to": 'a "b" }'})]),
    ("", (), '<tool_call>{"name": "stop"}</tool_call>', "", "", [STOP]),
    ("", (), '<tool_call>{"name": "stop", "arguments": null}</tool_call>', "", "", [STOP]),
    ("", (), '<tool_call>{"name": "go", "arguments": "{\\"to\\": \\"Rome\\"}"}</tool_call>', "", "", [ROME]),
    ("", (), '<tool_call>{"arguments": {"to": "Rome"}, "name": "go"}</tool_call>', "", "", [ROME]),
    ("", (), '<tool_call>[{"name": "go", "arguments": {"to": "Rome"}}, {"name": "stop"}]</tool_call>', "", "", [ROME, STOP]),
    ("", (), '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "", []),
    ("", (), "<tool_call>{</tool_call>", "<tool_call>{</tool_call>", "", []),
    ("", (), '<tool_call>{"name": "go", "arguments": {"to": NaN}}</tool_call>', '<tool_call>{"name": "go", "arguments": {"to": NaN}}</tool_call>', "", []),
    ("", (), '<tool_call>{"name": "go", "arguments": {"to": "Ro', '<tool_call>{"name": "go", "arguments": {"to": "Ro', "", []),
    ("", (), '<tool_call>{"name": "go", "arguments": []}</tool_call>', '<tool_call>{"name": "go", "arguments": []}</tool_call>', "", []),
    ("", (), "Tags like <tool are text", "Tags like <tool are text", "", []),
    # JSON alone: Llama 3, small models, forced calls
    ("", (), BARE, "", "", [ROME]),
    ("", (), f"\n{BARE}\n", "", "", [ROME]),
    ("", (), LLAMA, "", "", [ROME]),
    ("", (), f"[{BARE}]", "", "", [ROME]),
    ("", (), f"{LLAMA}; {LLAMA}", "", "", [ROME, ROME]),
    ("", (), f"{LLAMA}\n{LLAMA}", "", "", [ROME, ROME]),
    ("", (), '{"type": "function", "name": "go", "parameters": {"to": "Rome"}}', "", "", [ROME]),
    ("", (), '{"type": "function", "function": {"name": "go", "arguments": {"to": "Rome"}}}', "", "", [ROME]),
    ("", (), f"```json\n{BARE}\n```", "", "", [ROME]),
    ("", (), f"```\n{BARE}\n```", "", "", [ROME]),
    ("", (), '{"name": "go", "arguments": {}}', "", "", [("go", {})]),
    ("", (), '{"name": "Rome", "size": 3}', '{"name": "Rome", "size": 3}', "", []),
    ("", (), '{"city": "Rome"}', '{"city": "Rome"}', "", []),
    ("", (), "[1, 2]", "[1, 2]", "", []),
    ("", (), "```python\ngo()\n```", "```python\ngo()\n```", "", []),
    ("", (), f"{BARE} I hope.", f"{BARE} I hope.", "", []),
    ("", (), f"I say {BARE}", f"I say {BARE}", "", []),
    # Python's form
    ("", (), '[go(to="Rome")]', "", "", [ROME]),
    ("", (), '[go(to="Rome"), stop()]', "", "", [ROME, STOP]),
    ("", (), '```tool_code\ngo(to="Rome")\n```', "", "", [ROME]),
    ("", (), "[fly()]", "[fly()]", "", []),
    # Thoughts
    ("", THINK, "<think>\nHm.\n</think>\n\nRome.", "Rome.", "Hm.", []),
    ("", THINK, "<think>\n\n</think>\n\nRome.", "Rome.", "", []),
    ("", THINK, f"<think>\nHm.\n</think>\n\n{HERMES_JSON}", "", "Hm.", [ROME]),
    ("", THINK, f"<think>\nHm.\n</think>\n\n{BARE}", "", "Hm.", [ROME]),
    ("", THINK, f"<think>{HERMES_JSON}</think>Rome.", "Rome.", HERMES_JSON, []),
    ("", THINK, "<think>\nHm. I was cut", "", "Hm. I was cut", []),
    ("", THINK, "<think>a < b</think>x", "x", "a < b", []),
    ("", (), "<think>Hm.</think>Rome.", "<think>Hm.</think>Rome.", "", []),
    ("", (("[THINK]", "[/THINK]"),), "[THINK]Hm.[/THINK]Rome.", "Rome.", "Hm.", []),
    ("", GEMMA, "<|channel>thought\nHm.\n<channel|>Rome.", "Rome.", "Hm.", []),
    # Qwen3-Coder, Qwen3.5
    ("<function=", THINK, CODER, "", "", [ROME]),
    ("<function=", THINK, f"Well.\n{CODER}", "Well.", "", [ROME]),
    ("<function=", THINK, f"<think>\nHm.\n</think>\n\n{CODER}", "", "Hm.", [ROME]),
    ("<function=", (), CODER.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), "", "", [ROME]),
    ("<function=", (), CODER.replace("\nRome\n", "\nRome\n\nhere\n"), "", "", [("go", {"to": "Rome\n\nhere"})]),
    ("<function=", (), CODER.replace("=to>\nRome", "=days>\n3"), "", "", [("go", {"days": 3})]),
    ("<function=", (), CODER.replace("\nRome\n", "\n3\n"), "", "", [("go", {"to": "3"})]),
    ("<function=", (), CODER.replace("=to>\nRome", '=x>\n["a", 1]'), "", "", [("go", {"x": ["a", 1]})]),
    ("<function=", (), "<tool_call>\n<function=stop>\n</function>\n</tool_call>", "", "", [STOP]),
    ("<function=", (), CODER.replace("function=go", "function=fly"), CODER.replace("function=go", "function=fly"), "", []),
    # GLM 4.5 and later
    ("", THINK, GLM, "", "", [ROME]),
    ("", THINK, f"<think>Hm.</think>\n{GLM}\n{GLM}", "", "Hm.", [ROME, ROME]),
    ("", (), GLM.replace("to<", "days<").replace("Rome", "3"), "", "", [("go", {"days": 3})]),
    ("", (), "<tool_call>stop</tool_call>", "", "", [STOP]),
    # Mistral
    (MISTRAL, (), f"[TOOL_CALLS][{BARE}]", "", "", [ROME]),
    (MISTRAL, (), f"[TOOL_CALLS] [{BARE}, {BARE}]", "", "", [ROME, ROME]),
    (MISTRAL, (), f"Well.[TOOL_CALLS] [{BARE}]", "Well.", "", [ROME]),
    (MISTRAL, (), '[TOOL_CALLS]go[ARGS]{"to": "Rome"}', "", "", [ROME]),
    (MISTRAL, (), '[TOOL_CALLS]go[CALL_ID]123456789[ARGS]{"to": "Rome"}', "", "", [ROME]),
    (MISTRAL, (), '[TOOL_CALLS]go[ARGS]{"to": "Rome"}[TOOL_CALLS]stop[ARGS]{}', "", "", [ROME, STOP]),
    (MISTRAL, (), "[TOOL_CALLS]go[ARGS]{", "[TOOL_CALLS]go[ARGS]{", "", []),
    # Llama 3.1 to 3.3
    (LLAMA3, (), f"<|python_tag|>{LLAMA}", "", "", [ROME]),
    (LLAMA3, (), f"<|python_tag|>{LLAMA}; {LLAMA}", "", "", [ROME, ROME]),
    (LLAMA3, (), LLAMA, "", "", [ROME]),
    (LLAMA3, (), "<|python_tag|>print(1)", "<|python_tag|>print(1)", "", []),
    # LFM2
    (LFM2, (), PYTHON, "", "", [ROME]),
    (LFM2, (), f"{PYTHON}Going.", "Going.", "", [ROME]),
    (LFM2, (), PYTHON.replace('to="Rome"', "days=-3, via=None, x=[1, true]"), "", "", [("go", {"days": -3, "via": None, "x": [1, True]})]),
    (LFM2, (), PYTHON.replace('"Rome"', "{'a': 1.5}"), "", "", [("go", {"to": {"a": 1.5}})]),
    (LFM2, (), PYTHON.replace('to="Rome"', "open('x')"), PYTHON.replace('to="Rome"', "open('x')"), "", []),
    (LFM2, (), f"<|tool_call_start|>[{BARE}]<|tool_call_end|>", f"<|tool_call_start|>[{BARE}]<|tool_call_end|>", "", []),
    # Phi-4-mini, Granite 3
    (PHI4, (), f"<|tool_call|>[{BARE}]<|/tool_call|>", "", "", [ROME]),
    (PHI4, (), f"<|tool_call|>[{BARE}]", "", "", [ROME]),
    (PHI4, (), f"<|tool_call|>{BARE}", "", "", [ROME]),
    # InternLM 2
    (INTERN, (), f"Well.<|action_start|><|plugin|>\n{LLAMA}<|action_end|>", "Well.", "", [ROME]),
    # DeepSeek
    (DEEP, THINK, f"<think>Hm.</think>{OLD_DEEPSEEK}", "", "Hm.", [ROME]),
    (DEEP, (), DEEPSEEK, "", "", [ROME, STOP]),
    (DEEP, (), DEEPSEEK.removesuffix("<｜tool▁calls▁end｜>"), "", "", [ROME, STOP]),
    # Gemma 4
    (GEMMA4, GEMMA, '<|tool_call>call:go{to:<|"|>Rome<|"|>}<tool_call|>', "", "", [ROME]),
    (GEMMA4, GEMMA, '<|tool_call>call:go{days:3,x:[<|"|>a, b:<|"|>,{k:true}]}<tool_call|>', "", "", [("go", {"days": 3, "x": ["a, b:", {"k": True}]})]),
    (GEMMA4, GEMMA, "<|channel>thought\nHm.<channel|><|tool_call>call:stop{}<tool_call|>", "", "Hm.", [STOP]),
    (GEMMA4, GEMMA, "<|tool_call>go<tool_call|>", "<|tool_call>go<tool_call|>", "", []),
]  # fmt: skip
FINAL = "<|channel|>final<|message|>Rome."
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
COMMENTARY = (
    '<|channel|>commentary to=functions.go <|constrain|>json<|message|>{"to": "Rome"}<|call|>'
)
CHANNELS = [
    (FINAL, "Rome.", "", []),
    (ANALYSIS + FINAL, "Rome.", "Hm.", []),
    (f"{ANALYSIS}{FINAL}<|return|>", "Rome.", "Hm.", []),
    (ANALYSIS + COMMENTARY, "", "Hm.", [ROME]),
    (ANALYSIS + COMMENTARY.removesuffix("<|call|>"), "", "Hm.", [ROME]),
    (f"<|channel|>commentary<|message|>Going.<|end|><|start|>assistant{COMMENTARY}", "Going.", "", [ROME]),
    ("<|channel|>commentary to=go<|message|>{}", "", "", [("go", {})]),
    ("<|start|>assistant<|channel|>final<|message|>Rome.", "Rome.", "", []),
    (COMMENTARY.replace('"}', ""), COMMENTARY.replace('"}', "").removesuffix("<|call|>"), "", []),
    ("Rome.", "Rome.", "", []),
]  # fmt: skip


def read(parser: AnswerParser, texts: list[str]) -> list[AnswerPart]:
    """The parts of an answer in pieces; the pieces are checked to be the parts."""
    pieces: list[Piece] = [piece for text in texts for piece in parser.feed(text)]
    pieces += parser.feed("", last=True)
    assert [piece.part for piece in pieces if piece.begins] == parser.parts
    for part in parser.parts:
        assert part.text == "".join(piece.text for piece in pieces if piece.part is part)
    return whole_parts(parser.parts)


def shown(parts: list[AnswerPart]) -> tuple[str, str, list[tuple[str, Any]]]:
    text, thoughts = (
        "".join(part.text for part in parts if part.kind == kind) for kind in ("text", "thought")
    )
    calls = [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]
    return text, thoughts, calls


def split(text: str, seed: int) -> list[str]:
    """A text in pieces of one to eight characters, as tokens are."""
    draw, texts = random.Random(seed), list[str]()
    while text:
        count = draw.randint(1, 8)
        texts.append(text[:count])
        text = text[count:]
    return texts


@pytest.mark.few(10_000)
@pytest.mark.parametrize(("mark", "thoughts", "answer", "text", "thought", "calls"), TABLE)
def test_an_answer_is_read_however_it_comes(
    mark: str, thoughts: Any, answer: str, text: str, thought: str, calls: list[Any]
) -> None:
    form = form_of(mark, thoughts)
    for texts in ([answer], list(answer), *(split(answer, seed) for seed in range(8))):
        assert shown(read(AnswerParser(form, SCHEMAS), texts)) == (text, thought, calls)


@pytest.mark.few(10_000)
@pytest.mark.parametrize(("answer", "text", "thought", "calls"), CHANNELS)
def test_channels_are_read_however_they_come(
    answer: str, text: str, thought: str, calls: list[Any]
) -> None:
    form = AnswerForm(channels=True)
    for texts in ([answer], list(answer), *(split(answer, seed) for seed in range(8))):
        assert shown(read(AnswerParser(form, SCHEMAS), texts)) == (text, thought, calls)


@given(st.text('ab \n<>{}[]"`', max_size=20), st.integers(0, 9), st.booleans())
def test_other_text_flows_unchanged(text: str, seed: int, tools: bool) -> None:
    parser = AnswerParser(form_of(MISTRAL, THINK), SCHEMAS if tools else {})
    parts = read(parser, split(text, seed))
    assert "".join(part.text for part in parts) == text.lstrip()
    assert {part.kind for part in parts} <= {"text"}


@given(
    st.lists(st.sampled_from(["go", "stop"]), max_size=3),
    st.text("ab\n", max_size=5).map(str.strip),
    st.text("ab\n", max_size=5).map(str.strip),
    st.integers(0, 9),
)
def test_an_answer_that_is_written_is_read_back(
    names: list[str], thoughts: str, text: str, seed: int
) -> None:
    arguments = {"to": text + '"}', "x": [seed, {"a": None}]}
    calls = [json.dumps({"name": name, "arguments": arguments}) for name in names]
    answer = f"<think>\n{thoughts}\n</think>\n\n{text}"
    answer += "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
    parts = read(AnswerParser(form_of("", THINK), SCHEMAS), split(answer, seed))
    assert shown(parts) == (text, thoughts, [(name, arguments) for name in names])


def test_a_thought_that_the_prompt_began() -> None:
    form = form_of("", THINK)
    assert form.opened_by("<|im_start|>assistant\n<think>\n") == "</think>"
    assert form.opened_by("<think>\n\n</think>\n\n") == ""
    parser = AnswerParser(form, SCHEMAS, closes="</think>")
    assert parser.thinking
    parts = read(parser, split(f"Hm.\n</think>\n\n{HERMES_JSON}", 1))
    assert shown(parts) == ("", "Hm.", [ROME])
    assert not parser.thinking


def test_text_and_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(form_of(), SCHEMAS)
    assert [x.text for x in parser.feed("Well, I")] == ["Well, I"]
    assert parser.feed(' <tool_call>{"name": "go", "argu') == []
    begun, first = parser.feed('ments": {"to')
    assert (begun.begins, begun.part.name, begun.part.id[:5]) == (True, "go", "call_")
    assert first.text == '{"to'
    assert "".join(x.text for x in parser.feed('": "Ro')).endswith('": "Ro')
    assert [x.text for x in parser.feed('me"}}</tool_call>')] == ['me"}']
    assert parser.parts[-1].whole


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), max_size=30),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_thought_has_so_many_tokens_at_most(chosen: list[int], most: int, begun: bool) -> None:
    """1 begins a thought, 2 ends it; 9 and 2 are forced."""
    limit = ThoughtLimit(tokens=most, begin=[1], end=[2], forced=[9, 2], begun=begun)
    budget, thought = ThoughtBudget(limit, 10), 0 if begun else -1
    for token in chosen:
        mask = budget.allowed()
        if mask is not None:
            assert thought == most
            (forced,) = np.flatnonzero(mask)
            assert forced == 9
            budget.accept(9)
            mask = budget.allowed()
            assert mask is not None
            assert list(np.flatnonzero(mask)) == [2]
            budget.accept(2)
            thought = -1
            continue
        assert thought < most or thought == -1
        budget.accept(token)
        before = thought + 1 if thought >= 0 else -1
        thought = {1: 0 if before < 0 else before, 2: -1}.get(token, before)

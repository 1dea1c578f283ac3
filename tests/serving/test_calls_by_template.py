# ruff: noqa: RUF001  (the bars of DeepSeek's markers are wide)
"""Calls as each family's chat template writes them in a history are read back as they were."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.serving.answer_parser import AnswerParser, whole_parts
from tests.serving.test_call_grammars import SINGLE, family, use_of
from tests.support.selection import examples

# The part of a template that writes the calls of an assistant's message.
JSON_CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
PARAMETERS = '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
WITH_ID = JSON_CALL[:-1] + ', "id": "{{ c.id }}"}'
LISTED = "{% for c in calls %}CALL{{ ', ' if not loop.last }}{% endfor %}"
EACH = "{% for c in calls %}CALL{% endfor %}"
LINES = "{% for c in calls %}CALL{{ '\n' if not loop.last }}{% endfor %}"
TAGGED = LINES.replace("CALL", f"<tool_call>\n{JSON_CALL}\n</tool_call>")
XML = LINES.replace(
    "CALL",
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
)
GLM = LINES.replace(
    "CALL",
    "<tool_call>{{ c.name }}\n{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
)
DEEPSEEK = "<｜tool▁calls▁begin｜>" + EACH + "<｜tool▁calls▁end｜>"
GEMMA = """
{%- macro value(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>
{%- elif v is mapping -%}{ {%- for k, x in v | items %}{{ k }}:{{ value(x) }}
{{- ',' if not loop.last }}{% endfor -%} }
{%- elif v is sequence -%}[{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else -%}{{ v | tojson }}{%- endif -%}
{%- endmacro -%}
{% for c in calls %}<|tool_call>call:{{ c.name }}{{ value(c.arguments) }}<tool_call|>{% endfor %}"""
TEMPLATES = {
    "hermes": TAGGED,
    "qwen3": TAGGED,
    "qwen3-coder": XML,
    "qwen3.5": XML,
    "glm": GLM,
    "llama3": EACH.replace("CALL", PARAMETERS),
    "mistral v3": f"[TOOL_CALLS] [{LISTED.replace('CALL', WITH_ID)}]",
    "mistral v7": f"[TOOL_CALLS][{LISTED.replace('CALL', WITH_ID)}]",
    "mistral v11": EACH.replace(
        "CALL", "[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.arguments | tojson }}"
    ),
    "mistral v13": EACH.replace("CALL", "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    "lfm2": "<|tool_call_start|>["
    + LISTED.replace(
        "CALL",
        "{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v | repr }}"
        "{{ ', ' if not loop.last }}{% endfor %})",
    )
    + "]<|tool_call_end|>",
    "phi4": f"<|tool_call|>[{LISTED.replace('CALL', JSON_CALL)}]<|/tool_call|>",
    "granite3": f"<|tool_call|>[{LISTED.replace('CALL', JSON_CALL)}]",
    "internlm": EACH.replace("CALL", f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>"),
    "deepseek r1": DEEPSEEK.replace(
        "CALL",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
        "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>",
    ),
    "deepseek v3.1": DEEPSEEK.replace(
        "CALL",
        "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
        "<｜tool▁call▁end｜>",
    ),
    "gemma4": GEMMA,
    "gpt-oss": EACH.replace(
        "CALL",
        "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
        "{{ c.arguments | tojson }}<|call|>",
    ),
}
# Texts stand between these markers as they are, so a marker in a text is one, and spaces may go.
UNQUOTED = ("qwen3-coder", "qwen3.5", "glm")
# Any characters in quotes; of families that quote with a marker or not at all, plainer ones.
QUOTED = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["```", "```json\n{}\n```", "[it's", '{"a": 1}', "</s>"]
)
PLAIN = st.text(st.characters(categories=["L", "N", "P"], exclude_characters="<>|"), max_size=12)


def arguments(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments of the function `go` of `SCHEMAS`."""
    return st.fixed_dictionaries(
        {"to": texts, "x": st.lists(texts, min_size=1, max_size=2)},
        optional={
            "days": st.integers(1, 99),
            "via": texts | st.none(),
            "at": st.fixed_dictionaries({"lat": st.booleans()}, optional={"name": texts}),
        },
    )


def environment() -> jinja2.Environment:
    """Return an environment like that of `transformers`: JSON keeps characters as they are."""
    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    made.filters["repr"] = repr
    return made


@pytest.mark.few(5)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_a_call_in_a_template_is_read_back(name: str, data: st.DataObject) -> None:
    texts = PLAIN if name in (*UNQUOTED, "gemma4") else QUOTED
    count = 1 if name in SINGLE else data.draw(st.integers(1, 3))
    calls = [
        {"name": "go", "id": f"call{i:05}", "arguments": data.draw(arguments(texts))}
        for i in range(count)
    ]
    text = environment().from_string(TEMPLATES[name]).render(calls=calls)
    use = use_of("auto")
    made = family(name).writer.grammar(use, "")
    parser = AnswerParser(family(name).form, use.schemas, closes="", bare=made.bare)
    cut = data.draw(st.integers(0, len(text)))
    parser.feed(text[:cut])
    parser.feed(text[cut:], last=True)
    calls_read = [part for part in whole_parts(parser.parts) if part.kind == "call"]
    assert [(part.name, json.loads(part.text)) for part in calls_read] == [
        (call["name"], call["arguments"]) for call in calls
    ], text

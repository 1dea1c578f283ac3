"""Chat templates render as in `transformers`."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ModelError
from hetero.models import template_sandbox
from hetero.models.chat_template import ChatTemplate, load_templates
from hetero.models.tokenizer import HfTokenizer
from tests.models.model_helpers import byte_fallback_tokenizer, byte_level_tokenizer

LLAMA3 = """{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{#- system message #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- bos_token }}{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {% endif %}
    {% if message.role == 'assistant' %}
{% generation %}{{ '<|im_start|>assistant\\n' + message.content + '<|im_end|>' }}{% endgeneration %}

    {% continue %}
    {% endif %}
    {{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>{% endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
CONVERSATION = [
    {"role": "user", "content": "  Häh? <b>1 & 2</b> "},
    {"role": "assistant", "content": "No\nidea 😀"},
    {"role": "user", "content": "Why?"},
]
TOOLS = [{"type": "function", "function": {"name": "añadir", "description": "<x> & 'y'"}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def reference(template: str, messages: list[dict[str, str]], **options: Any) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), **SPECIAL
    )
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    return text


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"tools": TOOLS}])
@pytest.mark.parametrize(
    ("template", "system"),  # Mistral's takes no system message
    [(LLAMA3, False), (LLAMA3, True), (CHATML, False), (CHATML, True), (MISTRAL, False)],
)
def test_templates_render_as_in_transformers(
    template: str, options: dict[str, Any], generation: bool, system: bool
) -> None:
    first = [{"role": "system", "content": " Be brief. "}] if system else []
    messages = [*first, *CONVERSATION]
    ours = ChatTemplate({"default": template}, SPECIAL)
    assert ours.render(messages, add_generation_prompt=generation, **options) == reference(
        template, messages, add_generation_prompt=generation, **options
    )


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate({"default": LLAMA3}, SPECIAL, now=lambda: datetime(2031, 2, 3))
    assert "Today Date: 03 Feb 2031\n" in template.render(CONVERSATION)


def test_a_refusal_carries_the_templates_own_words() -> None:
    template = ChatTemplate({"default": MISTRAL}, SPECIAL, where="m: chat template")
    with pytest.raises(ModelError) as caught:
        template.render(CONVERSATION[1:])
    assert str(caught.value) == (
        "m: chat template: refuses this conversation (Conversation roles must alternate "
        "user/assistant/user/assistant/...); change the messages or use --raw"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "is not a valid template"),
        ("{{ messages[99].role.upper() }}", "refuses this conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses this conversation"),
        ("{{ messages.append(1) }}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "refuses this conversation"),
    ],
)
def test_broken_and_hostile_templates_are_errors(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=f"^chat template: {words}"):
        ChatTemplate({"default": source}, {}).render(CONVERSATION)


def test_a_template_that_is_ended_leaves_the_next_alone() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    now = datetime(2031, 2, 3)
    assert template_sandbox.render("{{ a }}", {"a": 1}, now) == "1"
    with pytest.raises(template_sandbox.TemplateLimitError, match=r"not end within 0\.1 seconds"):
        template_sandbox.render(endless, {}, now, limit_s=0.1)
    assert template_sandbox.render("{{ a }}", {"a": 2}, now) == "2"
    with pytest.raises(template_sandbox.TemplateLimitError, match="too large"):
        template_sandbox.render("{{ [a] * 10**8 }}", {"a": "x" * 99}, now)
    assert template_sandbox.render("{{ a }}", {"a": 3}, now) == "3"


@pytest.mark.skipif(os.name != "posix", reason="sessions of POSIX")
def test_ctrl_c_of_a_terminal_does_not_reach_the_process_that_renders() -> None:
    template_sandbox.render("{{ a }}", {"a": 1}, datetime(2031, 2, 3))
    (worker,) = template_sandbox._current
    assert os.getsid(worker._process.pid) == worker._process.pid != os.getsid(0)


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(ModelError, match="refuses this conversation"):
        ChatTemplate({"default": "a"}, {}).render(CONVERSATION, thing=object())


def test_tools_choose_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(CONVERSATION) == "plain"
    assert template.render(CONVERSATION, tools=TOOLS) == "tools"
    assert template.render(CONVERSATION, template="tool_use") == "tools"
    with pytest.raises(ModelError, match="there is no template 'rag'; choose one of: default, "):
        template.render(CONVERSATION, template="rag")


def test_templates_come_from_the_configuration_and_files(tmp_path: Path) -> None:
    config = {
        "chat_template": [{"name": "default", "template": "a"}, {"name": "r", "template": "b"}]
    }
    assert load_templates(tmp_path, {}) == {}
    assert load_templates(tmp_path, {"chat_template": "x"}) == {"default": "x"}
    assert load_templates(tmp_path, config) == {"default": "a", "r": "b"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert load_templates(tmp_path, config) == {"default": "old", "r": "b"}
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert load_templates(tmp_path, config) == {"default": "new", "r": "b", "tool_use": "t"}


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        HfTokenizer(byte_level_tokenizer()).render_chat(CONVERSATION)
    assert str(caught.value) == (
        "this model has no chat template; use --raw (the prompt as it is), or a model with "
        "chat_template in tokenizer_config.json (GGUF: tokenizer.chat_template)"
    )


def test_a_conversation_is_encoded_with_the_templates_special_tokens_only() -> None:
    tokenizer = HfTokenizer(byte_fallback_tokenizer(), SPECIAL, {"default": MISTRAL})
    ids = tokenizer.encode_chat(CONVERSATION)
    assert ids.count(1) == 1
    assert ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s>")


FAKES = {
    "macOS": "def setrlimit(*_): raise ValueError('current limit exceeds maximum limit')",
    "another system": "def setrlimit(*_): raise OSError(22, 'Invalid argument')",
    "no such limit": "del RLIMIT_AS\ndef setrlimit(*_): pass",
}


@pytest.mark.parametrize("system", FAKES)
def test_templates_render_where_memory_cannot_be_limited(
    tmp_path: Path, monkeypatch: Any, system: str
) -> None:
    (tmp_path / "resource.py").write_text(f"RLIMIT_AS, RLIMIT_CORE = 9, 4\n{FAKES[system]}\n")
    monkeypatch.syspath_prepend(tmp_path)  # the worker has this process's path
    worker = template_sandbox._Worker()
    try:
        request = {"source": "{{ a }}", "values": {"a": 1}, "now": "2031-02-03T00:00:00"}
        assert worker.ask(request, 30.0) == {"text": "1"}
    finally:
        worker.end()

"""Tokenizers and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bad_inputs.case import CHAT, BadInput, Change, json_set, replaced
from tests.support import tiny_files

FILE, SETTINGS = "model/tokenizer.json", "model/tokenizer_config.json"


def model(**values: Any) -> Change:
    """Fields of the tokenizer's model."""

    def change(work: Path) -> None:
        raw = json.loads((work / FILE).read_text(encoding="utf-8"))
        raw["model"] |= values
        (work / FILE).write_text(json.dumps(raw), encoding="utf-8")

    return change


def added(content: str) -> Change:
    """One more added token."""

    def change(work: Path) -> None:
        raw = json.loads((work / FILE).read_text(encoding="utf-8"))
        raw["added_tokens"].append(raw["added_tokens"][0] | {"id": 400, "content": content})
        (work / FILE).write_text(json.dumps(raw), encoding="utf-8")

    return change


def shifted(by: int) -> Change:
    """A vocabulary whose ids lie beyond the model's."""
    return model(vocab={word: i + by for i, word in enumerate(tiny_files.WORDS)})


def template(source: Any) -> Change:
    return json_set(SETTINGS, {"chat_template": source})


TOKENIZERS: tuple[tuple[str, Change, str], ...] = (
    ("not there", replaced(FILE, None), "has no tokenizer.json; download it"),
    ("empty", replaced(FILE, ""), "is not a tokenizer"),
    ("cut", replaced(FILE, '{"version": "1.0", "model"'), "is not a tokenizer"),
    ("no JSON", replaced(FILE, b"\xff\xfe"), "is not a tokenizer"),
    ("an empty object", replaced(FILE, "{}"), "is not a tokenizer"),
    ("a list", replaced(FILE, "[]"), "is not a tokenizer"),
    ("nested deep", replaced(FILE, "[" * 100_000), "is not a tokenizer"),
    ("no model", json_set(FILE, {"model": None}), "is not a tokenizer"),
    ("an unknown model", json_set(FILE, {"model": {"type": "Magic"}}), "is not a tokenizer"),
    ("merges of unknown tokens", model(merges=["q9 z7"]), "is not a tokenizer"),
    ("a vocabulary of texts", model(vocab={"a": "b"}), "is not a tokenizer"),
    ("a negative id", model(vocab={"a": -1}), "is not a tokenizer"),
    ("an id beyond 32 bits", model(vocab={"a": 2**40}), "is not a tokenizer"),
    ("a broken pattern", json_set(FILE, {"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}}),
     "is not a tokenizer"),
    ("26 rules that double", json_set(FILE, {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 26}}),
     "may make 512 characters of one (normalizer), at most 256 are taken"),
    ("30 decoding rules that double", json_set(FILE, {"decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30}}),
     "may make 512 characters of one (decoder), at most 256 are taken"),
    ("a text 5000 times", json_set(FILE, {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 5000}}),
     "may make 5000 characters of one (post_processor)"),
    ("an added token of 50 MB", added("x" * 50_000_000), "adds tokens of 500000"),
    ("a token of 100 kB", model(vocab={"x" * 100_000: 3}), "has a token of 100000 characters"),
    ("a prefix that the library does not survive", model(continuing_subword_prefix="##"),
     "is not a tokenizer"),
    ("of a larger vocabulary", shifted(1000), "does not belong to"),
    ("its unknown token is unknown", model(vocab={"a": 3}, merges=[], unk_token="<none>"),
     "the tokenizer fails on this text"),
    ("settings a list", replaced(SETTINGS, "[]"), "must hold a JSON object, got list"),
    ("settings cut", replaced(SETTINGS, '{"bos'), "is not valid JSON"),
    ("special tokens a number", replaced("model/special_tokens_map.json", "5"), "got int"),
)  # fmt: skip
TEMPLATES: tuple[tuple[str, Any, str], ...] = (
    ("no template", None, "this model has no chat template; use --raw"),
    ("a number", 5, "this model has no chat template"),
    ("a list of numbers", [5], "this model has no chat template"),
    ("only another name", [{"name": "x", "template": "a"}], "there is no template 'default'"),
    ("not closed", "{% for m in messages %}", "is not a valid template"),
    ("an unknown tag", "{% frobnicate %}", "is not a valid template"),
    ("an unknown filter", "{{ messages | frobnicate }}", "is not a valid template"),
    ("nested deep", "{{ " + "(" * 5000, "needs too much time or memory (it nests too deeply)"),
    ("its own words", "{{ raise_exception('no such role') }}", "(no such role); change"),
    ("a division by zero", "{{ 1 / 0 }}", "refuses this conversation"),
    ("an index", "{{ messages[7].content.strip() }}", "refuses this conversation"),
    ("an attribute of Python", "{{ cycler.__init__.__globals__ }}", "is unsafe"),
    ("a method of Python", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses this"),
    ("a file", "{% include '/etc/passwd' %}", "refuses this conversation"),
    ("an import", "{% import 'os' as os %}{{ os.system('true') }}", "refuses this conversation"),
    ("a change of the messages", "{{ messages.append(1) }}", "refuses this conversation"),
    ("a range of 10^9", "{% for i in range(10**9) %}{% endfor %}", "needs too much time or memory"),
    ("a text of 10^10", "{{ 'a' * 10**10 }}", "needs too much time or memory"),
    ("a width of 10^9", "{{ '%999999999d' % 1 }}", "needs too much time or memory"),
    ("a field of 10^9", "{{ '{:>999999999}'.format(1) }}", "needs too much time or memory"),
    ("a list of 10^10", "{{ ([0] * 10**10) | length }}", "needs too much time or memory"),
    ("doubling", "{% set x = 'a' %}" + "{% set x = x ~ x %}" * 60, "needs too much time or memory"),
    ("a long answer", "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "too much time"),
    ("a macro that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
     "needs too much time or memory (it nests too deeply)"),
)  # fmt: skip
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)

CASES = [
    *(BadInput(f"tokenizer: {n}", s, change=c) for n, c, s in TOKENIZERS),
    *(BadInput(f"template: {n}", s, CHAT, template(x)) for n, x, s in TEMPLATES),
    BadInput("template: loops without end", "does not end within", CHAT, template(ENDLESS)),
    BadInput("template: its own file is no text", "is not UTF-8 text", CHAT,
             replaced("model/chat_template.jinja", b"\xff\xfe")),
]  # fmt: skip

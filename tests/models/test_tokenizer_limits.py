"""What a tokenizer may make of a text is bounded from its file, and the bound holds."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from hetero.errors import ModelError
from hetero.models.tokenizer_limits import Growth, check_tokenizer, check_tokens
from tests.support import tiny_files
from tests.support.selection import examples

SPACES = normalizers.Replace(" ", "▁")
LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), SPACES])
# Pipelines of the families that are supported, and of some others.
FAMILIES: dict[str, tuple[Any, Any, Growth]] = {
    "gpt2": (None, pre_tokenizers.ByteLevel(), Growth(1, 0)),
    "qwen": (normalizers.NFC(), pre_tokenizers.ByteLevel(), Growth(1, 0)),
    "llama": (LLAMA, None, Growth(1, 1, own=True)),
    "gemma": (SPACES, pre_tokenizers.Split(" ", "merged_with_previous"), Growth(1, 0, own=True)),
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), Growth(1, 0)),
}
CONTENT = st.text("aﷺ é▁ İ", max_size=3)
STEPS = st.one_of(
    st.builds(normalizers.Replace, st.text("aﷺ é", min_size=1, max_size=3), CONTENT),
    st.builds(
        lambda pattern, content: normalizers.Replace(tokenizers.Regex(pattern), content),
        st.sampled_from(["a*", "", "(?=a)", " {2,}", ".", "é+"]),
        CONTENT,
    ),
    st.builds(normalizers.Prepend, CONTENT),
    st.sampled_from(
        [normalizers.NFKC(), normalizers.NFD(), normalizers.NFKD(), normalizers.Lowercase(),
         normalizers.BertNormalizer(), normalizers.ByteLevel(), normalizers.Nmt(),
         normalizers.StripAccents(), normalizers.Strip()]
    ),
)  # fmt: skip


def raw_of(normalizer: Any = None, pre_tokenizer: Any = None, **others: Any) -> dict[str, Any]:
    """The tiny tokenizer with other steps."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    for name, value in others.items():
        setattr(backend, name, value)
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_families_make_no_text_longer(family: str) -> None:
    normalizer, pre_tokenizer, expected = FAMILIES[family]
    assert check_tokenizer(raw_of(normalizer, pre_tokenizer), "t") == expected


@pytest.mark.full
@settings(max_examples=examples(300), deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=5),
    text=st.text("aﷺé İ多 ﬁ", max_size=30),
    byte_level=st.booleans(),
)
def test_no_text_becomes_longer_than_the_bound(
    steps: list[Any], text: str, byte_level: bool
) -> None:
    pre = pre_tokenizers.ByteLevel() if byte_level else pre_tokenizers.Whitespace()
    raw = raw_of(normalizers.Sequence(steps), pre)
    try:
        growth = check_tokenizer(raw, "t")
    except ModelError:
        return  # refused before it could
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    try:
        normal = backend.normalizer.normalize_str(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # empty matches are too much for it
            raise
        return
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
    # What Unicode makes of the user's own characters is theirs.
    assert len(normal) <= growth.of(18 * len(text) + 1)
    assert sum(map(len, pieces)) <= growth.of(72 * len(text) + 4)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 26)},
         r"may make 512 characters of one \(normalizer\), at most 256"),
        ({"normalizer": normalizers.Replace(tokenizers.Regex(""), "a" * 300)}, "of one"),
        ({"normalizer": normalizers.Prepend("a" * 70_000)}, "may add 70000 characters"),
        ({"normalizer": normalizers.Sequence([normalizers.ByteLevel()] * 20)}, "of one"),
        ({"normalizer": normalizers.Sequence([normalizers.Replace("a", "ﷺ"), normalizers.NFKC(),
                                              normalizers.Replace("ل", "ﷺ"), normalizers.NFKC()])},
         "may make 324 characters of one"),
        ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 20)},
         "of one (pre_tokenizer)"),
        ({"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 26)}, r"of one (decoder)"),
        ({"post_processor": processors.TemplateProcessing(
            single=" ".join(["$A"] * 300), pair="$A $B:1", special_tokens=[])},
         "of one (post_processor)"),
        ({"post_processor": processors.Sequence([processors.TemplateProcessing(
            single="$A $A", pair="$A $B:1", special_tokens=[])] * 20)}, "of one (post_processor)"),
    ],
)  # fmt: skip
def test_rules_that_multiply_are_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as found:
        check_tokenizer(raw_of(**others), "t.json")
    assert message.replace("\\", "") in str(found.value)
    assert str(found.value).startswith("t.json: the tokenizer may ")


def test_ids_around_a_text_are_counted_as_often_as_they_stand() -> None:
    raw = raw_of()
    special = {"id": "s", "ids": [0] * 1000, "tokens": ["a"] * 1000}
    piece = {"SpecialToken": {"id": "s", "type_id": 0}}
    raw["post_processor"] = {
        "type": "TemplateProcessing", "single": [piece] * 100, "pair": [],
        "special_tokens": {"s": special},
    }  # fmt: skip
    with pytest.raises(ModelError, match=r"may add 100000 characters \(post_processor\)"):
        check_tokenizer(raw, "t")


def test_a_precompiled_map_is_as_long_as_its_longest_text() -> None:
    trie = b"\0" * 8
    data = len(trie).to_bytes(4, "little") + trie + b"short\0" + "é".encode() * 300 + b"\0"
    raw = raw_of()
    raw["normalizer"] = {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(data).decode(),
    }
    with pytest.raises(ModelError, match="may make 300 characters of one"):
        check_tokenizer(raw, "t")


def test_tokens_are_bounded_alone_and_together() -> None:
    with pytest.raises(ModelError, match="adds tokens of 4200000 bytes together"):
        check_tokens(["é" * 1_050_000] * 2, [], "t")
    with pytest.raises(ModelError, match="has a token of 70000 characters"):
        check_tokens([], ["a", "b" * 70_000], "t")
    raw = json.loads(tiny_files.tokenizer().to_str())
    check_tokenizer(raw, "t")
    raw["model"]["vocab"]["b" * 70_000] = 999
    with pytest.raises(ModelError, match="has a token of 70000 characters"):
        check_tokenizer(raw, "t")
    raw["model"] = {"type": "Unigram", "vocab": [["b" * 70_000, 0.0]]}
    with pytest.raises(ModelError, match="has a token of 70000 characters"):
        check_tokenizer(raw, "t")
    raw["model"] = {"continuing_subword_prefix": "#" * 100}
    with pytest.raises(ModelError, match="a continuing_subword_prefix of 100 characters"):
        check_tokenizer(raw, "t")


@pytest.mark.parametrize(
    "raw", [None, [], {}, {"normalizer": 3}, {"normalizer": {"type": "Sequence"}},
            {"model": {"vocab": [3]}, "added_tokens": [None, {}]},
            {"post_processor": {"type": "TemplateProcessing", "single": [3, {}]}},
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}],
)  # fmt: skip
def test_what_is_malformed_is_left_to_the_library(raw: Any) -> None:
    assert check_tokenizer(raw, "t").factor == 1

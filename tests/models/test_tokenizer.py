"""Encoding, decoding, and decoding while a model writes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ModelError
from hetero.models.tokenizer import _LONG, REPLACEMENT, ByteTokenizer, HfTokenizer, Tokenizer
from tests.models.model_helpers import byte_fallback_tokenizer, byte_level_tokenizer
from tests.support.selection import examples

RELAXED = settings(deadline=None, max_examples=examples(150))
FAMILIES = {
    "byte-level": HfTokenizer(byte_level_tokenizer()),
    "byte-fallback": HfTokenizer(byte_fallback_tokenizer(), {"bos_token": "<s>"}),
    "bytes": ByteTokenizer(300),
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=30) | st.text(
    st.sampled_from("the é\n\t 😀\N{REPLACEMENT CHARACTER}多👩\u200d"), max_size=30
)


def pieces(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    """What a reader sees, token by token, and the rest."""
    stream = tokenizer.decoder(context or [])
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@RELAXED
@given(text=TEXT)
def test_pieces_joined_are_the_decoded_text(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["byte-level", "bytes"])
@RELAXED
@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_ids_stream_as_they_decode(family: str, ids: list[int]) -> None:
    tokenizer = FAMILIES[family]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@RELAXED
@given(ids=st.lists(st.integers(0, 280), max_size=30))
def test_byte_fallback_streams_any_ids_of_whole_characters_as_they_decode(ids: list[int]) -> None:
    tokenizer = FAMILIES["byte-fallback"]
    text, full = "".join(pieces(tokenizer, ids)), tokenizer.decode(ids)
    if REPLACEMENT not in full:
        assert text == full
    else:  # there a whole run of bytes is U+FFFD if one is wrong; the stream shows the good ones
        remaining = iter(text)
        assert all(char in remaining for char in full.replace(REPLACEMENT, ""))
        assert REPLACEMENT in text


@pytest.mark.parametrize("family", FAMILIES)
@RELAXED
@given(text=TEXT.filter(lambda text: REPLACEMENT not in text))
def test_a_piece_never_ends_inside_a_character(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]
    assert not any(REPLACEMENT in x for x in pieces(tokenizer, tokenizer.encode(text)))


@pytest.mark.parametrize("family", FAMILIES)
@RELAXED
@given(prompt=TEXT, rest=TEXT)
def test_with_a_context_the_text_goes_on(family: str, prompt: str, rest: str) -> None:
    tokenizer = FAMILIES[family]
    before = tokenizer.encode(prompt)
    after = tokenizer.encode(rest, add_special_tokens=False)
    whole = tokenizer.decode([*before, *after])
    assert tokenizer.decode(before) + "".join(pieces(tokenizer, after, before)) == whole


@pytest.mark.parametrize("family", FAMILIES)
@RELAXED
@given(text=TEXT)
def test_text_survives_the_round_trip(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]
    if family == "byte-fallback" and "▁" in text:
        return  # this family writes ▁ for a space
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_of_four_byte_tokens_comes_at_once() -> None:
    tokenizer = FAMILIES["byte-fallback"]
    assert pieces(tokenizer, tokenizer.encode("e 😀e", add_special_tokens=False)) == [
        *("", "e", " ", "", "", "", "😀", "e", "")
    ]


def test_an_unfinished_character_comes_at_the_end_as_u_fffd() -> None:
    tokenizer = FAMILIES["byte-fallback"]
    ids = tokenizer.encode("e😀", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, ids)[-1] == tokenizer.decode(ids)[1:] == REPLACEMENT * 3


def test_a_newline_is_not_held_back() -> None:
    tokenizer = FAMILIES["byte-fallback"]
    assert pieces(tokenizer, tokenizer.encode("e\ne", add_special_tokens=False))[2] == "\n"


def test_special_tokens_are_silent_unless_asked_for() -> None:
    tokenizer = FAMILIES["byte-fallback"]
    ids = [1, *tokenizer.encode("the", add_special_tokens=False), 2]
    loud = tokenizer.decoder(skip_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == "the"
    assert "".join([loud.push(x) for x in ids]) + loud.finish() == tokenizer.decode(
        ids, skip_special_tokens=False
    )


def test_a_special_token_in_the_middle_keeps_the_space_after_it() -> None:
    tokenizer = FAMILIES["byte-fallback"]
    the = tokenizer.encode("the", add_special_tokens=False)
    assert pieces(tokenizer, [*the, 1, *the]) == ["the", "", " the", ""]


def test_garbage_does_not_grow_the_window() -> None:
    tokenizer = HfTokenizer(byte_level_tokenizer())
    token = next(x for x in range(tokenizer.vocab_size) if tokenizer.decode([x]) == REPLACEMENT)
    stream = tokenizer.decoder()
    count = sum(len(stream.push(token)) for _ in range(500)) + len(stream.finish())
    assert count == 500
    assert len(stream._window) < 200  # type: ignore[attr-defined]


def test_ids_outside_a_random_models_bytes_are_named() -> None:
    tokenizer = ByteTokenizer(300)
    assert pieces(tokenizer, [104, 0xC3, 299, 105]) == ["h", "", f"{REPLACEMENT}<299>", "i", ""]
    assert tokenizer.decode([104, 0xC3, 299, 105]) == f"h{REPLACEMENT}<299>i"


@pytest.mark.parametrize(
    ("settings_", "text", "first"),
    [
        ({"bos_token": "<|begin|>"}, "hi", False),
        ({"bos_token": "<|begin|>", "add_bos_token": True}, "hi", True),
        ({"bos_token": {"content": "<|begin|>"}, "add_bos_token": True}, "<|begin|>hi", True),
        ({"bos_token": "<|begin|>", "add_bos_token": False}, "hi", False),
    ],
)
def test_bos_is_added_once_where_the_configuration_asks(
    settings_: dict[str, object], text: str, first: bool
) -> None:
    tokenizer = HfTokenizer(byte_level_tokenizer(), settings_)
    ids = tokenizer.encode(text)
    assert (ids[0] == tokenizer.bos_id) == first
    assert ids.count(tokenizer.bos_id or 0) == int(first)
    assert tokenizer.bos_id not in tokenizer.encode("hi", add_special_tokens=False)


def test_padding_and_truncation_of_the_file_are_off() -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert FAMILIES["byte-level"].encode("Once upon") == HfTokenizer(backend).encode("Once upon")


def test_a_directory_is_read_with_its_special_tokens(tmp_path: Path) -> None:
    byte_fallback_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    tokenizer = HfTokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 290)
    assert tokenizer.encode("the") == [1, 288]


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        HfTokenizer.from_directory(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: has no tokenizer.json; download it, or save it with transformers' "
        "AutoTokenizer.save_pretrained"
    )


def test_a_broken_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: is not a tokenizer \(.*\); download"):
        HfTokenizer.from_directory(tmp_path)


def test_the_real_tokenizer_streams(stories: Path) -> None:
    tokenizer = HfTokenizer.from_directory(stories)
    text = "Once upon a time, Lily said: “café 😀”\n\nThe end."
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id == 1
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("\udcc3\udca9t\udcc3\udca9", "été"),
        ("a\udcffb", "a\ufffdb"),
        ("a\ud800", "a\ufffd\ufffd\ufffd"),
    ],
)
def test_undecoded_bytes_are_read_as_utf8(family: str, text: str, read_as: str) -> None:
    assert FAMILIES[family].encode(text) == FAMILIES[family].encode(read_as)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=examples(20))
@given(text=TEXT.filter(str.strip))
def test_a_long_text_has_the_same_ids_as_a_short_one(family: str, text: str) -> None:
    tokenizer, long = FAMILIES[family], text * (2 * _LONG // len(text))
    with mock.patch("hetero.models.tokenizer._LONG", len(long) + 1):
        expected = [tokenizer.encode(long, add_special_tokens=x) for x in (True, False)]
        shown = [tokenizer.decode(expected[0], skip_special_tokens=x) for x in (True, False)]
    found = [tokenizer.encode(long, add_special_tokens=x) for x in (True, False)]
    assert found == expected
    assert [tokenizer.decode(found[0], skip_special_tokens=x) for x in (True, False)] == shown


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    text, tokens = "Once upon a time there was a naïve fox. " * 10_000, list[int]()
    thread = threading.Thread(target=lambda: tokens.extend(FAMILIES["byte-level"].encode(text)))
    naps = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        naps += 1
    assert len(tokens) > 100_000
    assert naps > 20  # two or three where the lock is kept until the end

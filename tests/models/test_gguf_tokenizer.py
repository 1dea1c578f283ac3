"""Tokenizers of GGUF files where their metadata is incomplete or odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufFile, read_tokenizer
from hetero.models.tokenizer import HfTokenizer
from tests.models.gguf_files import write_tiny

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["'s", "\u0120{", "12", "123", "45", "12345"]
MERGES = ["' s", "\u0120 {", "1 2", "12 3", "4 5", "123 45"]


def byte_level(path: Path, pre: str | None, **changes: Any) -> HfTokenizer:
    tokens = [*BYTES, *WORDS]
    changes = {"tokenizer__ggml__token_type": [1] * len(tokens), **changes}
    write_tiny(
        path, tokens=tokens, tokenizer__ggml__model="gpt2", tokenizer__ggml__merges=MERGES,
        tokenizer__ggml__pre=pre, **changes,
    )  # fmt: skip
    return read_tokenizer(GgufFile(path))


def words(tokenizer: HfTokenizer, text: str) -> list[str]:
    """The tokens of a text, as texts."""
    return [tokenizer.decode([id_]) for id_ in tokenizer.encode(text)]


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_text_without_a_named_pattern_is_split_by_llama_cpps_default(
    pre: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp splits punctuation first, then words, then digits in groups of three."""
    tokenizer = byte_level(tmp_path / "m.gguf", pre)
    assert words(tokenizer, "a's {") == ["a", "'", "s", " ", "{"]
    assert words(tokenizer, "12345") == ["123", "45"]
    assert words(tokenizer, "$1 ^2") == ["$", "1", " ", "^", "2"]
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1
    assert "tokenizer.ggml.pre does not say how this model splits text" in notice
    read_tokenizer(GgufFile(tmp_path / "m.gguf"))
    assert capsys.readouterr().err == ""  # said once


def test_a_named_pattern_needs_no_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level(tmp_path / "m.gguf", "gpt-2")
    assert words(tokenizer, "a's {") == ["a", "'s", " {"]
    assert words(tokenizer, "12345") == ["12345"]
    assert capsys.readouterr().err == ""


def test_a_vocabulary_that_is_no_list_of_texts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny(path, tokenizer__ggml__tokens=[[1, 2]] * 268)
    with pytest.raises(ModelError, match=r"carries no vocabulary \(tokenizer.ggml.tokens\)"):
        _ = open_model(path).tokenizer


def test_a_model_of_an_unknown_pattern_is_refused(tmp_path: Path) -> None:
    byte_level(tmp_path / "m.gguf", "gpt-2")
    with pytest.raises(ModelError, match="splits text in the way 'tekken', supported are"):
        _ = byte_level(tmp_path / "n.gguf", "tekken")
    assert open_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("falcon3", "llama-bpe"), ("pixtral", "llama-bpe"), ("lfm2", "llama-bpe"),
        ("megrez", "qwen2"), ("stablelm2", "qwen2"), ("exaone4", "gpt-2"), ("olmo", "gpt-2"),
        ("starcoder", "smollm"), ("refact", "smollm"), ("command-r", "smollm"),
    ],
)  # fmt: skip
def test_names_of_one_pattern(name: str, same: str, tmp_path: Path) -> None:
    """Those that llama.cpp's loader treats alike, whether it splits or merges or adds BOS."""
    changes = {"tokenizer__ggml__bos_token_id": 3}
    one = byte_level(tmp_path / "a.gguf", name, **changes)
    other = byte_level(tmp_path / "b.gguf", same, **changes)
    for text in ("a's {", "12345 6", "I'M\r\n  so\n\nx", "  2²٣ $x"):
        assert one.encode(text) == other.encode(text)

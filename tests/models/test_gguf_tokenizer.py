"""Tokenizers of GGUF files where their metadata is incomplete or odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufFile, read_tokenizer
from hetero.models.gguf.splitting import SPLITTINGS
from hetero.models.tokenizer import HfTokenizer
from tests.models.gguf_files import PIECES, write_tiny

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
    with pytest.raises(ModelError, match="splits text in the way 'superbpe', supported are"):
        _ = byte_level(tmp_path / "n.gguf", "superbpe")
    assert open_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("falcon3", "llama-bpe"), ("pixtral", "llama-bpe"), ("lfm2", "llama-bpe"),
        ("megrez", "qwen2"), ("stablelm2", "qwen2"), ("exaone4", "gpt-2"), ("olmo", "gpt-2"),
        ("starcoder", "smollm"), ("refact", "smollm"), ("command-r", "smollm"),
        ("glm5", "glm4"), ("llama4", "gpt-4o"), ("deepseek-v3", "hunyuan-dense"),
        ("chatglm-bpe", "dbrx"), ("mellum2", "refact"),
    ],
)  # fmt: skip
def test_names_of_one_pattern(name: str, same: str, tmp_path: Path) -> None:
    """Those that llama.cpp's loader treats alike, whether it splits or merges or adds BOS."""
    changes = {"tokenizer__ggml__bos_token_id": 3}
    one = byte_level(tmp_path / "a.gguf", name, **changes)
    other = byte_level(tmp_path / "b.gguf", same, **changes)
    for text in ("a's {", "12345 6", "I'M\r\n  so\n\nx", "  2²٣ $x"):
        assert one.encode(text) == other.encode(text)


SCRIPTS = """I'LL say: don't, we'Ve, it\u2019s HTTPServer's iPhone DŽungla ǅ 2²٣ 12345.67 a1b22c333
  \t two  spaces\n\n\nand\r\ntabs\t\t// C:/path/\n#include<x>\n ...\n??!\n   \u00a0end
Привет, МИР! Ελληνικά ΣΟΦΌΣ. עִבְרִית שָׁלוֹם العَرَبِيَّة ١٢٣٤ हिन्दी क्षत्रिय ไทยภาษาที่
বাংলা
தமிழ் 한국어 조선글
日本語ひらがなカタカナ漢字。中文\uff0c测试\uff01 e\u0301 \u1e9b\u0323 ﬁ Ⅷ ½ 👩‍👩‍👧 🇩🇪 ∑∫≈
€5 _under_score_ -> {x: [1]}
Georgian ქართული ᲥᲐᲠᲗᲣᲚᲘ ʰmodifier ǰ Tiếng Việt Ünïcödé İstanbul ŒUVRE ærø ß"""


@pytest.mark.parametrize(
    "pre",
    ["llama-bpe", "dbrx", "lfm2", "qwen2", "megrez", "qwen35", "tekken", "gpt-4o", "llama4"],
)
def test_text_of_many_scripts_is_split_as_by_transformers(pre: str) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    pattern = tokenizers.Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[pre])
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    check_split(pre, split)


def test_qwen35_is_split_as_by_its_own_tokenizer() -> None:
    module = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    pattern = tokenizers.Regex(module.PRETOKENIZE_REGEX)
    check_split("qwen35", pre_tokenizers.Split(pattern, behavior="isolated"))
    assert SPLITTINGS["qwen35"].nfc


@pytest.mark.parametrize("pre", ["glm4", "hunyuan", "exaone4", "olmo", "refact", "hunyuan-dense"])
def test_other_names_split_as_llama_cpp_says(pre: str) -> None:
    """With another engine of regular expressions than ours."""
    regex: Any = pytest.importorskip("regex")
    words = [SCRIPTS]
    for pattern in PATTERNS[pre]:
        words = [part for word in words for part in parts(regex, pattern, word)]
    assert split_words(SPLITTINGS[pre].pre_tokenizer()) == words


def parts(regex: Any, pattern: str, text: str) -> list[str]:
    """The matches of a pattern in a text, and what is between them."""
    found, at = [], 0
    for match in regex.finditer(pattern, text):
        found += [text[at : match.start()], match.group()]
        at = match.end()
    return [x for x in [*found, text[at:]] if x]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
QUOTED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "glm4": [rf"{QUOTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{REST}"],
    "hunyuan": [rf"{QUOTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{REST}"],
    "exaone4": [GPT2],
    "olmo": [GPT2],
    "refact": [r"\p{N}", GPT2],
    "hunyuan-dense": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


def check_split(pre: str, split: Any) -> None:
    wanted = [word for word, _ in split.pre_tokenize_str(SCRIPTS)]
    assert split_words(SPLITTINGS[pre].pre_tokenizer()) == wanted


def split_words(pre_tokenizer: Any) -> list[str]:
    spans = [span for _, span in pre_tokenizer.pre_tokenize_str(SCRIPTS)]
    return [SCRIPTS[start:stop] for start, stop in spans]


def test_gemma4_is_bpe_over_characters(tmp_path: Path) -> None:
    """As by Gemma's tokenizer in `transformers`, with the same vocabulary and merges."""
    transformers = pytest.importorskip("transformers")
    letters = [x for x in dict.fromkeys("abcdehlo▁\n日本éП") if x not in PIECES]
    merges = ["l l", "h e", "ll o", "he llo", "▁ hello", "\n \n", "日 本", "▁ ▁"]
    tokens = [*PIECES, *letters, *(x.replace(" ", "") for x in merges)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    path = write_tiny(
        tmp_path / "m.gguf", tokens=tokens, tokenizer__ggml__model="gemma4",
        tokenizer__ggml__merges=merges, tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__scores=None, tokenizer__ggml__unknown_token_id=0,
    )  # fmt: skip
    ours = read_tokenizer(GgufFile(path))
    theirs = transformers.GemmaTokenizer(
        vocab={x: i for i, x in enumerate(tokens)}, merges=[tuple(x.split(" ")) for x in merges]
    )
    for text in ("hello  hello\n\n日本 é", " ab\n", "Пz 👩‍👧 hellohello", SCRIPTS):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == text


def test_a_tokenizer_of_gemma4_needs_merges(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", tokenizer__ggml__model="gemma4")
    with pytest.raises(ModelError, match="carries no merges"):
        read_tokenizer(GgufFile(path))

"""Splitting text before it is merged, by the names that llama.cpp has in `tokenizer.ggml.pre`.

Patterns are those of the models' own `tokenizer.json`, which llama.cpp writes for an engine without
all properties of Unicode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

_WHITE: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3: Final = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_WHITE}"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35: Final = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS: Final = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_WHITE}"
_TEKKEN: Final = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_SYMBOLS}"
)  # fmt: skip
_GPT4O: Final = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}{_SYMBOLS}"
)
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_WHITE}",
)
# llama.cpp's for a file that names none.
_DEFAULT: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """A way to split text.

    patterns     each splits what the ones before it left; none: as GPT-2
    digits       every digit is a word, before anything else
    whole_words  a known word is not merged piece by piece
    bos          a text begins with BOS where the file does not say
    nfc          text is normalised first
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> Any:
        """Return the pre-tokenizer, which ends with bytes as characters."""
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.Split(Regex(x), behavior="isolated") for x in self.patterns]
        plain = bool(self.patterns)
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not plain))
        return pre_tokenizers.Sequence(steps)


_NAMES: Final = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Splitting(
        patterns=(_LLAMA3,), whole_words=True, bos=True
    ),
    "glm4 glm5": Splitting(patterns=(_LLAMA3,), whole_words=True),
    "smaug-bpe dbrx chatglm-bpe": Splitting(patterns=(_LLAMA3,)),
    "qwen2": Splitting(patterns=(_QWEN2,), nfc=True),
    "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open": Splitting(patterns=(_QWEN2,)),
    "qwen35": Splitting(patterns=(_QWEN35,), nfc=True),
    "tekken": Splitting(patterns=(_TEKKEN,), whole_words=True, bos=True),
    "gpt-4o llama4 kanana2": Splitting(patterns=(_GPT4O,)),
    "hunyuan-dense deepseek-v3": Splitting(patterns=_DEEPSEEK3),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 olmo mpt jais trillion": Splitting(),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Splitting(digits=True),
    "default": Splitting(patterns=_DEFAULT),
}
SPLITTINGS: Final[Mapping[str, Splitting]] = {
    name: splitting for names, splitting in _NAMES.items() for name in names.split()
}

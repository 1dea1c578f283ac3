"""Limits on what a tokenizer may make of a text, checked before the library is given it.

The library runs in this process and ends it where memory is short. `tokenizer.json` may hold rules
that double a text again and again, and tokens of any length; both are bounded here, from the file
alone. A text of c characters becomes at most `factor` · c + `extra` characters, and as many tokens.

What a file brings of its own (`Replace`, `Prepend`, a precompiled map, a template) counts by its
length. What Unicode brings (`NFKC` makes up to 18 characters of one, `ByteLevel` up to 4) counts
only where the file can feed it: after something of its own, or a second time.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class TokenizerLimits:
    """Limits of a tokenizer's file. No tokenizer in use comes near them.

    file_bytes   size of the file
    factor       characters that its rules may make of one,
    extra        and add to any text
    characters   of a text that its rules have made longer
    token        characters of one token
    affix        characters that are put before or after every character of a word
    added_bytes  of all added tokens; the library takes 70 times as much
    """

    file_bytes: int = 128 << 20
    factor: int = 256
    extra: int = 1 << 16
    characters: int = 1 << 26
    token: int = 1 << 16
    affix: int = 64
    added_bytes: int = 4 << 20


LIMITS: Final = TokenizerLimits()

# Characters that one may become, of what Unicode defines; of a kind that is not here, 4.
_NATURAL: Final = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 3,
    "ByteLevel": 4, "Metaspace": 2, "Strip": 1, "StripAccents": 1, "Nmt": 1, "Split": 1,
    "Digits": 1, "Punctuation": 1, "Whitespace": 1, "WhitespaceSplit": 1, "BertPreTokenizer": 1,
    "UnicodeScripts": 1, "CharDelimiterSplit": 1, "FixedLength": 1,
}  # fmt: skip
_LISTS: Final = ("normalizers", "pretokenizers", "processors", "decoders")
Json = Mapping[str, Any]


@dataclass
class Growth:
    """The growth of a text to at most `factor` · characters + `extra`; `own`: by its rules."""

    factor: int = 1
    extra: int = 0
    own: bool = False

    def times(self, factor: int, extra: int = 0) -> None:
        """Return the growth with one more step."""
        self.factor *= factor
        self.extra = self.extra * factor + extra

    def of(self, characters: int) -> int:
        """Return the largest size of a text of that many characters."""
        return self.factor * characters + self.extra


def check_tokenizer(raw: object, where: str) -> Growth:
    """Return how much longer a text may become by a parsed tokenizer.json.

    Raises `ModelError` where that is more than any tokenizer needs. The library refuses what is
    malformed.
    """
    if not isinstance(raw, Mapping):
        return Growth()
    check_tokens(_contents(raw), _vocabulary(raw), where)
    model = raw.get("model")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(name) if isinstance(model, Mapping) else None
        if isinstance(affix, str) and len(affix) > LIMITS.affix:
            raise _error(where, f"has a {name} of {len(affix)} characters", str(LIMITS.affix))
    growth = Growth()
    seen: set[str] = set()
    for key in ("normalizer", "pre_tokenizer"):
        for part in _parts(raw.get(key)):
            _grow(growth, part, seen)
            _check(growth, key, where)
    for part in _parts(raw.get("post_processor")):
        if part.get("type") == "TemplateProcessing":
            _template(growth, part)
            _check(growth, "post_processor", where)
    decoder = Growth()
    for part in _parts(raw.get("decoder")):
        if part.get("type") == "Replace":
            _replace(decoder, part)
            _check(decoder, "decoder", where)
    return growth


def check_tokens(added: Iterable[str], vocabulary: Iterable[str], where: str) -> None:
    """Raise `ModelError` for tokens that are too long, alone or together."""
    total = 0
    for token in added:
        total += len(token.encode("utf-8", "surrogatepass"))
    if total > LIMITS.added_bytes:
        raise _error(where, f"adds tokens of {total} bytes together", str(LIMITS.added_bytes))
    longest = max(map(len, vocabulary), default=0)
    if longest > LIMITS.token:
        raise _error(where, f"has a token of {longest} characters", str(LIMITS.token))


def _check(growth: Growth, key: str, where: str) -> None:
    if growth.factor > LIMITS.factor:
        many = f"may make {growth.factor} characters of one ({key})"
        raise _error(where, many, str(LIMITS.factor))
    if growth.extra > LIMITS.extra:
        raise _error(where, f"may add {growth.extra} characters ({key})", str(LIMITS.extra))


def _error(where: str, what: str, most: str) -> ModelError:
    return ModelError(f"{where}: the tokenizer {what}, at most {most} are taken; use another model")


def _contents(raw: Json) -> Iterator[str]:
    tokens = raw.get("added_tokens")
    for token in tokens if isinstance(tokens, list) else ():
        content = token.get("content") if isinstance(token, Mapping) else None
        if isinstance(content, str):
            yield content


def _vocabulary(raw: Json) -> Iterator[str]:
    """Yield tokens of a dictionary, or of Unigram's pairs of token and score."""
    model = raw.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        yield from vocabulary
        return
    for pair in vocabulary if isinstance(vocabulary, list) else ():
        if isinstance(pair, list) and pair and isinstance(pair[0], str):
            yield pair[0]


def _parts(component: object) -> Iterator[Json]:
    """Yield the steps of a component in their order, sequences inside sequences too."""
    waiting = [component]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        inner = [part[name] for name in _LISTS if isinstance(part.get(name), list)]
        if inner:
            waiting.extend(reversed(inner[0]))
        else:
            yield part


def _grow(growth: Growth, part: Json, seen: set[str]) -> None:
    """Let a step act on `growth`; `seen` are the kinds of the steps before it."""
    kind = str(part.get("type"))
    own = _OWN.get(kind)
    if own is not None:
        own(growth, part)
        growth.own = True
    elif growth.own or kind in seen:
        growth.times(_NATURAL.get(kind, 4))
    seen.add(kind)


def _replace(growth: Growth, part: Json) -> None:
    content = _length(part.get("content"))
    pattern = part.get("pattern")
    plain = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(plain, str) and plain:
        growth.times(max(1, -(-content // len(plain))))
    else:  # an expression may match between all characters
        growth.times(1 + content, content)


def _prepend(growth: Growth, part: Json) -> None:
    growth.times(1, _length(part.get("prepend")))


def _precompiled(growth: Growth, part: Json) -> None:
    """Return the growth by a precompiled map, whose texts follow its trie, each ended by a zero."""
    try:
        data = base64.b64decode(str(part.get("precompiled_charsmap")), validate=True)
    except (binascii.Error, ValueError):
        return  # the library refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    growth.times(max(1, *(len(text.decode("utf-8", "replace")) for text in texts)))


def _template(growth: Growth, part: Json) -> None:
    parts = part.get("single")
    special = part.get("special_tokens")
    texts = ids = 0
    for entry in parts if isinstance(parts, list) else ():
        if not isinstance(entry, Mapping):
            continue
        texts += "Sequence" in entry
        named = entry.get("SpecialToken")
        name = named.get("id") if isinstance(named, Mapping) else None
        token = special.get(name) if isinstance(special, Mapping) else None
        known = token.get("ids") if isinstance(token, Mapping) else None
        ids += len(known) if isinstance(known, list) else 1
    growth.times(max(1, texts), ids)


def _length(text: object) -> int:
    return len(text) if isinstance(text, str) else 0


_OWN: Final[Mapping[str, Callable[[Growth, Json], None]]] = {
    "Replace": _replace,
    "Prepend": _prepend,
    "Precompiled": _precompiled,
}

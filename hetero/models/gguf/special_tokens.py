"""The special tokens of a GGUF file's vocabulary, as llama.cpp's loader decides them.

Given ids come first, then the defaults of the kind of tokenizer, then the names of tokens
(`llama_vocab::impl::load` in `llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hetero.models.end_tokens import ENDS, FIM, FIM_ENDS, fim_tokens, named_ends, not_ends

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Ids that a file need not give. llama.cpp also takes 11 as both ends of text of every byte-level
# vocabulary (Falcon's); in those of the supported models token 11 is a comma.
_DEFAULTS: Final = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
_SPELLINGS: Final = {
    "separator": ("seperator_token_id", "separator_token_id"),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
}
_ENDS: Final = ("eos", "eot", "eom", *FIM_ENDS)
# Parts of a message of gpt-oss, which are shown.
_SHOWN: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


def vocabulary(metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens, empty where the file has none.

    A token without a text is named as in llama.cpp.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {str}:
        return []
    return [x or f"[EMPTY_{i}]" for i, x in enumerate(tokens)] if "" in tokens else tokens


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of `bos`, `eos`, `unknown`, …; None where there is none."""
    size = _size(metadata)
    for key in _SPELLINGS.get(name, (f"{name}_token_id",)):
        given = metadata.get(f"tokenizer.ggml.{key}")
        if (
            isinstance(given, int)
            and not isinstance(given, bool)
            and 0 <= given < (size or 1 << 31)
        ):
            return given
    kind = str(metadata.get("tokenizer.ggml.model"))
    default = _DEFAULTS.get(kind, {}).get(name)
    if default is None or default >= size:
        return None
    is_text = kind == "gpt2" and _given_types(metadata)[default] != CONTROL
    return None if is_text else default


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a generation: given ones first, then those known by name."""
    return _ends(metadata)[0]


def token_types(metadata: Mapping[str, Any]) -> list[int]:
    """Return the type of every token: the file's, unless its name implies another."""
    ids = _ids(vocabulary(metadata))
    types = _given_types(metadata)
    for id_ in (named_ends(ids, ()) | fim_tokens(ids, _unnamed(metadata))).values():
        types[id_] = CONTROL
    shown = dict.fromkeys(_SHOWN, USER_DEFINED)
    shown |= {x: NORMAL if x == "</s>" else USER_DEFINED for x in _ends(metadata)[1]}
    for name in shown.keys() & ids.keys():
        types[ids[name]] = shown[name]
    return types


def _ends(metadata: Mapping[str, Any]) -> tuple[tuple[int, ...], set[str]]:
    """Return the ids that end a generation, and the names that then do not."""
    tokens = vocabulary(metadata)
    given = [id_ for name in _ENDS if (id_ := special_id(metadata, name)) is not None]
    if not tokens:
        return tuple(dict.fromkeys(given)), set()
    known = _ids(tokens)
    named = named_ends(known, [x for x in _unnamed(metadata) if x in FIM_ENDS])
    ids = dict.fromkeys([*given, *named.values()])
    plain = not_ends({name for name in ENDS if name in known} | {tokens[id_] for id_ in ids})
    return tuple(id_ for id_ in ids if tokens[id_] not in plain), plain


def _given_types(metadata: Mapping[str, Any]) -> list[int]:
    size, given = _size(metadata), metadata.get("tokenizer.ggml.token_type")
    if isinstance(given, np.ndarray) and len(given) >= size:
        types: list[int] = given[:size].tolist()
        return types
    return [NORMAL] * size


def _unnamed(metadata: Mapping[str, Any]) -> list[str]:
    """Return the kinds of fill-in-the-middle tokens whose ids the file does not give."""
    return [kind for kind in FIM if special_id(metadata, kind) is None]


def _size(metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))

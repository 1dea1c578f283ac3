"""The special tokens of a GGUF file's vocabulary, as llama.cpp's loader decides them.

Given ids come first, then the defaults of the kind of tokenizer, then the names of tokens
(`llama_vocab::impl::load` in `llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hetero.models.end_tokens import FIM_ENDS, fim_tokens, named_ends, not_ends

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Ids that a file need not give. llama.cpp also takes 11 as both ends of text of every byte-level
# vocabulary (Falcon's); in those of the supported models token 11 is a comma.
_DEFAULTS: Final = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
_SPELLINGS: Final = {"separator": ("seperator_token_id", "separator_token_id")}
_ENDS: Final = ("eos", "eot", "eom", *FIM_ENDS)
# Parts of a message of gpt-oss, which are shown.
_SHOWN: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


def vocabulary(metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens, empty where the file has none; a token without a text is
    named as in llama.cpp.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {str}:
        return []
    return [x or f"[EMPTY_{i}]" for i, x in enumerate(tokens)] if "" in tokens else tokens


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of `bos`, `eos`, `unknown`, …; None where there is none."""
    size = len(vocabulary(metadata))
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
    is_text = kind == "gpt2" and token_types(metadata)[default] != CONTROL
    return None if is_text else default


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a generation: given ones first, then those known by name."""
    tokens = vocabulary(metadata)
    given = [id_ for name in _ENDS if (id_ := special_id(metadata, name)) is not None]
    if not tokens:
        return tuple(dict.fromkeys(given))
    ids = dict.fromkeys([*given, *named_ends(_ids(tokens)).values()])
    plain = not_ends({tokens[id_] for id_ in ids})
    return tuple(id_ for id_ in ids if tokens[id_] not in plain)


def token_types(metadata: Mapping[str, Any]) -> list[int]:
    """Return the type of every token, the file's but where its name says that it is another."""
    tokens = vocabulary(metadata)
    given = metadata.get("tokenizer.ggml.token_type")
    types = [NORMAL] * len(tokens)
    if isinstance(given, np.ndarray) and len(given) >= len(tokens):
        types = given[: len(tokens)].tolist()
    ids = _ids(tokens)
    for id_ in (named_ends(ids) | fim_tokens(ids)).values():
        types[id_] = CONTROL
    for name in (x for x in _SHOWN if x in ids):
        types[ids[name]] = USER_DEFINED
    return types


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))

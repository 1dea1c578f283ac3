"""The tokenizer of a GGUF file, as a `tokenizers` pipeline.

`llama` is SentencePiece's BPE with scores (a pair is merged if its token is in the vocabulary, best
score first) and bytes for what is unknown; `gpt2` is BPE over bytes with a list of merges and a
pattern that `tokenizer.ggml.pre` names (`hetero.models.gguf.splitting`); `gemma4` is BPE over
characters, with `▁` for spaces, a list of merges, and bytes for what is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any, Final, cast

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from hetero.errors import ModelError
from hetero.models.gguf.file import NO_UTF8, GgufFile
from hetero.models.gguf.special_tokens import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    end_ids,
    special_id,
    token_types,
    vocabulary,
)
from hetero.models.gguf.splitting import SPLITTINGS, Splitting
from hetero.models.tokenizer import REPLACEMENT, HfTokenizer
from hetero.models.tokenizer_limits import check_tokens
from hetero.terminal.notices import notify_once

_NAMES: Final = ("bos", "eos", "unknown", "padding", "separator")
_HF_NAMES: Final = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
    "separator": "sep_token",
}  # fmt: skip


def read_tokenizer(file: GgufFile) -> HfTokenizer:
    """Build the tokenizer with its chat template. Raises `ModelError`."""
    metadata = file.metadata
    tokens = vocabulary(metadata)
    kind = _text(metadata, "tokenizer.ggml.model")
    if not tokens:
        raise _error(file, "carries no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise _error(file, "has a vocabulary with a token twice")
    if kind == "llama":
        backend = _sentencepiece(file, tokens)
    elif kind == "gpt2":
        backend = _bytes(file, tokens)
    elif kind == "gemma4":
        backend = _characters(file, tokens)
    else:
        given = metadata.get("tokenizer.ggml.model")
        raise _error(
            file, f"has a tokenizer of the kind {given!r}, supported are llama, gpt2 and gemma4"
        )
    _add_special(file, backend, tokens)
    if re.search(NO_UTF8, "\n".join(tokens)):
        mend = decoders.Replace(Regex(NO_UTF8), REPLACEMENT)
        backend.decoder = decoders.Sequence([mend, backend.decoder])
    eos = _token_of(metadata, "eos", tokens)
    if metadata.get("tokenizer.ggml.add_eos_token") is True and eos is not None:
        ids = [(eos, tokens.index(eos))]
        backend.post_processor = processors.TemplateProcessing(["$A", eos], special_tokens=ids)
    special = _special_tokens(metadata, tokens)
    settings: dict[str, Any] = {**special, "add_bos_token": _adds_bos(metadata, kind)}
    return HfTokenizer(
        backend, settings, _templates(metadata), where=str(file.path), ends=end_ids(metadata)
    )


def _sentencepiece(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    scores = _numbers(file, "scores", len(tokens))
    if scores is None:
        raise _error(file, "must give a score to every token (tokenizer.ggml.scores)")
    known = dict(zip(tokens, range(len(tokens)), strict=True))
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    return _spaced(file, tokens, _merges_of_scores(known, scores), prefix=prefix)


def _characters(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix") is True
    return _spaced(file, tokens, _merges(file), prefix=prefix)


def _spaced(
    file: GgufFile, tokens: Sequence[str], merges: Sequence[tuple[str, str]], *, prefix: bool
) -> tokenizers.Tokenizer:
    """Return BPE over characters with `▁` for spaces, and before the text with a `prefix`."""
    unknown = _token_of(file.metadata, "unknown", tokens)
    model = _bpe(file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_scores(known: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every way to make a token of two others; tokens with the best score first."""
    by_length: dict[int, list[str]] = {}
    for token in known:
        by_length.setdefault(len(token), []).append(token)
    merges = []
    for length, group in by_length.items():
        for cut in range(1, min(length, 64)):
            # A hundred thousand tokens have many parts: no step for each of them is Python's.
            ends = map(itemgetter(slice(cut, None)), group)
            for token in compress(group, map(known.__contains__, ends)):
                left, index = token[:cut], known[token]
                if left in known and math.isfinite(scores[index]):
                    merges.append((-scores[index], index, known[left], left, token[cut:]))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _bytes(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    splitting = _splitting(file)
    model = _bpe(file, tokens, _merges(file), ignore_merges=splitting.whole_words)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = splitting.pre_tokenizer()
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe(
    file: GgufFile, tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any
) -> models.BPE:
    try:
        known = dict(zip(tokens, range(len(tokens)), strict=True))
        return models.BPE(known, list(merges), **options)
    except Exception as error:  # the library raises bare Exception
        raise _error(file, f"has merges that do not fit its vocabulary ({error})") from error


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    """Return pairs of tokens, "left right" in the file."""
    lines = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise _error(file, "carries no merges (tokenizer.ggml.merges)")
    pairs = [tuple(line.split(" ")) if isinstance(line, str) else () for line in lines]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if wrong is not None:
        raise _error(file, f"has a merge that is not two tokens, {str(lines[wrong])[:80]!r}")
    return cast("list[tuple[str, str]]", pairs)


def _numbers(file: GgufFile, name: str, count: int) -> list[float] | None:
    """Return an array of `count` numbers, None if it is anything else."""
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, np.ndarray) or values.shape != (count,):
        return None
    numbers: list[float] = values.astype(np.float64).tolist()
    return numbers


def _splitting(file: GgufFile) -> Splitting:
    pre = _text(file.metadata, "tokenizer.ggml.pre") or "default"
    if pre not in SPLITTINGS:
        given = file.metadata.get("tokenizer.ggml.pre")
        raise _error(
            file, f"splits text in the way {given!r}, supported are {', '.join(SPLITTINGS)}"
        )
    if pre == "default":
        notify_once(
            f"{file.path}: tokenizer.ggml.pre does not say how this model splits text, so "
            "llama.cpp's default pattern does, which is wrong for Llama 3, Qwen 2 and others: "
            "convert the model again with a current convert_hf_to_gguf.py"
        )
    return SPLITTINGS[pre]


def _add_special(file: GgufFile, backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> None:
    given = file.metadata.get("tokenizer.ggml.token_type")
    if given is not None and _numbers(file, "token_type", len(tokens)) is None:
        raise _error(file, "must give a type to every token (tokenizer.ggml.token_type)")
    kinds = token_types(file.metadata)
    special = [tokens[i] for i in np.flatnonzero(np.isin(kinds, (UNKNOWN, CONTROL))).tolist()]
    defined = [tokens[i] for i in np.flatnonzero(np.equal(kinds, USER_DEFINED)).tolist()]
    check_tokens([*special, *defined], tokens, f"{file.path}: GGUF file")
    strips = _strips_after(file.metadata)
    backend.add_special_tokens([_added(x, strips) for x in special])
    backend.add_tokens([_added(x, strips) for x in defined])


def _strips_after(metadata: Mapping[str, Any]) -> bool:
    """Return whether special tokens strip the white space after them, as Phi-3's do.

    No metadata says it: llama.cpp goes by the model's name.
    """
    name = str(metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def _added(token: str, strips: bool) -> AddedToken:
    strips = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
    return AddedToken(token, normalized=False, rstrip=strips)


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    named = {_HF_NAMES[x]: _token_of(metadata, x, tokens) for x in _NAMES}
    return {name: token for name, token in named.items() if token is not None}


def _token_of(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> str | None:
    index = special_id(metadata, name)
    return None if index is None else tokens[index]


def _adds_bos(metadata: Mapping[str, Any], kind: object) -> bool:
    """Return llama.cpp's default where the file does not say."""
    given = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(given, bool):
        return given
    splitting = SPLITTINGS.get(_text(metadata, "tokenizer.ggml.pre"))
    return kind == "llama" or (splitting is not None and splitting.bos)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    return {
        name.removeprefix(prefix).removeprefix(".") or "default": text
        for name, text in metadata.items()
        if (name == prefix or name.startswith(f"{prefix}.")) and isinstance(text, str)
    }


def _text(metadata: Mapping[str, Any], name: str) -> str:
    """Return a text entry unchanged, and any other as a text that no tokenizer has."""
    value = metadata.get(name, "")
    return value if isinstance(value, str) else repr(value)


def _error(file: GgufFile, what: str) -> ModelError:
    return ModelError(
        f"{file.path}: GGUF file {what}; use another file, or the model's Hugging Face directory"
    )

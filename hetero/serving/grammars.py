"""Grammars that constrain an answer, by llguidance: JSON schemas, regular expressions, Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import llguidance
import numpy as np
import numpy.typing as npt

from hetero.errors import UserError
from hetero.models import LoadedModel
from hetero.models.tokenizer import HfTokenizer, Tokenizer

LONGEST_GRAMMAR: Final = 256 << 10  # characters


class TokenBytes:
    """The bytes of each token id of a model, for grammars and for showing tokens."""

    def __init__(self, model: LoadedModel) -> None:
        vocabulary, eos = model.config.vocab_size, list(model.eos_ids)
        tokenizer = model.tokenizer
        self.special = tokenizer.special_ids if isinstance(tokenizer, HfTokenizer) else frozenset()
        source: Any = (
            tokenizer.to_json()
            if isinstance(tokenizer, HfTokenizer)
            else _Bytes(tokenizer, vocabulary)
        )
        self.tokenizer = llguidance.LLTokenizer(source, n_vocab=vocabulary, eos_token=eos or [0])
        self._ends = bool(eos)

    def of(self, token: int) -> bytes:
        """Return the bytes of one id."""
        return self.tokenizer.decode_bytes([token])

    def check(self, grammar: str) -> None:
        """Raise `UserError` for a grammar that llguidance does not accept."""
        if not self._ends:
            raise UserError("this model has no token that ends a text, which a grammar needs")
        if len(grammar) > LONGEST_GRAMMAR:
            raise UserError(
                f"a grammar or schema has at most {LONGEST_GRAMMAR} characters, got {len(grammar)}"
            )
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self.tokenizer
        )
        if failed:
            raise UserError(
                f"the grammar or schema cannot be used: {messages[0] if messages else ''}"
            )


def json_grammar(schema: Any) -> str:
    """Return the grammar of the JSON values that a schema allows (True: any object).

    Raises `UserError`.
    """
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise UserError(f"a JSON schema must be an object, got {str(schema)[:80]!r}")
    try:
        return str(
            llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_flexible": False}
            )
        )
    except ValueError as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from error


def lark_grammar(text: str) -> str:
    """Return the grammar of a Lark grammar."""
    return str(llguidance.LLMatcher.grammar_from_lark(text))


def gbnf_grammar(text: str) -> str:
    """Return the grammar of a GBNF (llama.cpp's form) or Lark grammar."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return lark_grammar(any_to_lark(text))
    except Exception as error:  # the converter raises what its parser does
        raise UserError(f"the grammar cannot be read: {error}") from error


def regex_grammar(text: str) -> str:
    """Return the grammar of a regular expression."""
    return str(llguidance.LLMatcher.grammar_from_regex(text))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of several texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(x, ensure_ascii=False) for x in choices))


class GrammarConstraint:
    """The state of one answer in a grammar (`hetero.generation.sampling.Constraint`)."""

    def __init__(self, tokens: TokenBytes, grammar: str, vocabulary: int) -> None:
        self._matcher = llguidance.LLMatcher(tokens.tokenizer, grammar)
        self._vocabulary = vocabulary
        self._check()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the tokens [vocab] that may come next."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(mask, bitorder="little")[: self._vocabulary].astype(bool)

    def accept(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"the grammar or schema cannot be used: {self._matcher.get_error()}")


class _Bytes(llguidance.TokenizerWrapper):
    """A vocabulary of ids that are bytes (random models)."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.eos_token_id, self.bos_token_id = 0, None
        self.tokens = [bytes([i]) if i < 256 else f"<{i}>".encode() for i in range(vocabulary)]
        self.special_token_ids: list[int] = []
        self.is_tokenizer_wrapper = True
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return list(text.encode()) if isinstance(text, str) else list(text)

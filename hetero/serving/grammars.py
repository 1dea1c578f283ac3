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
LARGEST_INTEGER: Final = 2**53 - 1  # up to which readers of JSON agree (RFC 8259)
# Keys that add other schemas to an object, or say what else it has.
_SHARING: Final = {"patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "not", "if",
                   "$ref", "$dynamicRef", "dependentSchemas"}  # fmt: skip
_LOWS: Final = ("minimum", "exclusiveMinimum")
_HIGHS: Final = ("maximum", "exclusiveMaximum")
_SPECIAL: Final = {*_SHARING, "enum", "const", "multipleOf"}  # of an integer
# One definition: llguidance compiles the range of each `minimum` and `maximum` separately.
_NAME: Final = "integer-of-16-digits"
_INTEGER: Final = {"$ref": f"#/$defs/{_NAME}"}
_INTEGERS: Final = {"type": "integer", "minimum": -LARGEST_INTEGER, "maximum": LARGEST_INTEGER}
# Keys whose values are a schema, schemas by name, and lists of schemas.
_ONE_SCHEMA: Final = {"items", "additionalProperties", "unevaluatedProperties", "propertyNames",
                      "contains", "not", "if", "then", "else"}  # fmt: skip
_SCHEMAS_BY_NAME: Final = {"properties", "patternProperties", "$defs", "definitions",
                           "dependentSchemas"}  # fmt: skip
_SCHEMA_LISTS: Final = {"anyOf", "oneOf", "prefixItems"}


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
            raise UserError(_unusable(messages[0] if messages else ""))


def _unusable(reason: str) -> str:
    """Return the message of a grammar's error, without llguidance's dump of its state."""
    return f"the grammar or schema cannot be used: {reason.partition('<state>')[0].strip()}"


def json_grammar(schema: Any) -> str:
    """Return the grammar of the JSON values that a schema allows (True: any object).

    Objects have their `properties` alone, and integers up to 16 digits, unless the schema says
    otherwise (`_closed`). Raises `UserError`.
    """
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise UserError(f"a JSON schema must be an object, got {str(schema)[:80]!r}")
    try:
        text = json.dumps(_narrowed(schema))
        return str(
            llguidance.LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_flexible": False}
            )
        )
    except RecursionError:
        raise UserError("the JSON schema cannot be used: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from error


def inline_json(schema: Any) -> str:
    """Return the expression of a schema's values in a Lark grammar, spaced as Python's `json` does.

    So do templates, and models write what they have read. True: any object. Raises `UserError`.
    """
    schema = {"type": "object"} if schema is True else dict(schema)
    json_grammar(schema)  # raises for what cannot be used
    schema = _narrowed(schema)
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': spaces})}"


def _has_all_of(schema: Any) -> bool:
    """Return whether `allOf` is a keyword in a schema: any object may be one of those it adds up.

    Names of properties, texts and enumerated values do not count.
    """
    if not isinstance(schema, dict):
        return False
    inner = [value for key, value in schema.items() if key in _ONE_SCHEMA]
    for key in _SCHEMAS_BY_NAME & schema.keys():
        inner += schema[key].values() if isinstance(schema[key], dict) else ()
    for key in _SCHEMA_LISTS & schema.keys():
        inner += schema[key] if isinstance(schema[key], list) else ()
    return "allOf" in schema or any(map(_has_all_of, inner))


def _narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without what small models make up unless it says that it has that."""
    return schema if _has_all_of(schema) else _with_integers(_closed(schema))


def _with_integers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the definition that `_bounded` refers to."""
    definitions = schema.get("$defs")
    own = definitions if isinstance(definitions, dict) else {}
    return {**schema, "$defs": {**own, _NAME: _INTEGERS}}


def _closed(schema: Any) -> Any:
    """Return a schema whose objects with `properties` have no others, and whose integers end.

    llama.cpp reads schemas so: small models otherwise make up properties and digits without end.
    A value that other schemas describe too stays open, since the others may allow more.
    """
    if not isinstance(schema, dict):
        return schema
    own, inner = "properties" in schema, _bounded(schema)
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            inner[key] = {name: _closed(each) for name, each in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems") and not own and isinstance(value, list):
            inner[key] = [_closed(each) for each in value]
        elif key in ("items", "additionalProperties"):
            inner[key] = _closed(value)
    if own and not _SHARING & schema.keys():
        inner.setdefault("additionalProperties", False)
    return _with_integers(inner) if "$id" in schema else inner  # what references begin from


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose integers have both bounds."""
    kinds = schema.get("type")
    kinds = set(kinds) if isinstance(kinds, list) else {kinds}
    if not {"integer"} <= kinds <= {"integer", "null"} or _SPECIAL & schema.keys():
        return dict(schema)
    bounds = {name: schema[name] for name in (*_LOWS, *_HIGHS) if name in schema}
    if not bounds:
        return {"anyOf": [_INTEGER, {"type": "null"}]} if "null" in kinds else dict(_INTEGER)
    if not all(isinstance(x, int | float) and abs(x) < LARGEST_INTEGER for x in bounds.values()):
        return dict(schema)
    low = {} if any(x in bounds for x in _LOWS) else {"minimum": -LARGEST_INTEGER}
    high = {} if any(x in bounds for x in _HIGHS) else {"maximum": LARGEST_INTEGER}
    return {**schema, **low, **high}


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
            raise UserError(_unusable(self._matcher.get_error()))


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

"""Reading a JSON object field by field; errors name the field, the rule and the value."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hetero.backends.host import files
from hetero.errors import ModelError

MAX_SIZE = 2**31 - 1  # sizes are int32 on devices


def read_text(path: Path, max_bytes: int = files.LONGEST_DOCUMENT_BYTES) -> str:
    """Return a text file in UTF-8. Raises `ModelError`."""
    try:
        return files.read_text(path, max_bytes)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror or error}); give another file, or check its "
            "permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text ({error}); download the file again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `ModelError` if there is none."""
    try:
        raw = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # also a number of more than 4300 digits
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: is not valid JSON ({error}); download the file again") from error
    if not isinstance(raw, dict):
        raise ModelError(
            f"{path}: must hold a JSON object, got {type(raw).__name__}; download the file again"
        )
    return raw


class Fields:
    """Typed access to a JSON object; `where` is the file's name in messages.

    A field that is absent or null takes the default; without a default that is an error.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def error(self, name: str, rule: str, remedy: str) -> ModelError:
        """Return the error `where: name rule, got value; remedy`."""
        got = f", got {self.raw[name]!r}" if name in self.raw else ", but it is missing"
        return ModelError(f"{self.where}: {name} {rule}{got}; {remedy}")

    def positive_int(self, name: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return an integer from 1 to `limit`."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "must be a positive integer", "correct the file")
        if value > limit:
            raise self.error(name, f"must be at most {limit}", "correct the file")
        return value

    def count(self, name: str, default: int, limit: int = MAX_SIZE) -> int:
        """Return an integer from 0 to `limit`."""
        value = self.raw.get(name)
        if value == 0 and not isinstance(value, bool):
            return 0
        if isinstance(value, int) and value > limit >= 0:
            raise self.error(name, f"must be at most {limit}", "correct the file")
        return self.positive_int(name, default, max(limit, 1))

    def positive_float(self, name: str, default: float | None = None) -> float:
        """Return a finite number > 0."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not is_number(value) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "must be a positive number", "correct the file")
        return float(value)

    def optional_float(self, name: str) -> float | None:
        """Return a finite number > 0, or None if absent."""
        return None if self.raw.get(name) is None else self.positive_float(name)

    def positive_floats(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers > 0."""
        values = self.raw.get(name)
        numbers = values if isinstance(values, list | tuple) else [None]
        if not all(is_number(x) and 0 < x <= sys.float_info.max for x in numbers):
            raise self.error(name, "must be a list of positive numbers", "correct the file")
        return tuple(map(float, numbers))

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", "correct the file")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "must be a string", "correct the file")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """Return a JSON object; empty if absent."""
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, "must be a JSON object", "correct the file")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Return token ids given as an integer, a list of integers, or null."""
        value = self.raw.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(x, int) or isinstance(x, bool) for x in values):
            raise self.error(name, "must be a token id or a list of token ids", "correct the file")
        return tuple(values)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return an int or float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)

"""JSON from outside: texts that UTF-8 can hold, and only what JSON has."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

# Each escape in turn, so that the second backslash of a pair begins none. The first group is half
# of a UTF-16 pair alone: JavaScript's `slice` leaves it of an emoji, and no UTF-8 text has it.
_ESCAPES: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

_HALVES: Final = re.compile("[\ud800-\udfff]")


def whole_characters(data: bytes) -> bytes:
    """Return a JSON text in which half of a character is U+FFFD. Its length stays the same."""
    if b"\\ud" not in data and b"\\uD" not in data:
        return data
    return _ESCAPES.sub(lambda match: rb"\ufffd" if match[1] else match[0], data)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError`, also for NaN and deep nesting."""
    try:
        data = whole_characters(_HALVES.sub("\ufffd", text).encode())
        return json.loads(data, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

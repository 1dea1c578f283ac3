"""Checks of what callers of the public API pass: wrong types become one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hetero.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
Message: TypeAlias = Mapping[str, Any]


def check_prompt(prompt: object) -> str | list[int]:
    """Return a text, or token ids. Raises `UserError`."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray):
        return check_ids(prompt)
    raise UserError(f"a prompt must be a text or a list of token ids, got {_kind(prompt)}")


def check_ids(tokens: object) -> list[int]:
    """Return token ids. Raises `UserError`."""
    if not isinstance(tokens, Sequence | np.ndarray) or isinstance(tokens, str | bytes):
        raise UserError(f"token ids must be a list of whole numbers, got {_kind(tokens)}")
    return [_id(value) for value in tokens]


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number of at least `minimum`. Raises `UserError`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, got {_kind(value)}")
    if value < minimum:
        raise UserError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Return one of some words. Raises `UserError`."""
    if value not in known:
        words = f"{', '.join(known[:-1])} or {known[-1]}"
        raise UserError(f"{name} is {words}, got {value!r}")


def check_stop(stop: object) -> tuple[str, ...]:
    """Return stop texts; a single string is one. Raises `UserError`."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or any(not isinstance(x, str) for x in stops):
        raise UserError(f"stop must be a text or a list of texts, got {_kind(stop)}")
    if any(not x for x in stops):
        raise UserError("a stop text must not be empty")
    return tuple(stops)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a conversation: objects with a known role and a text. Raises `UserError`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UserError(
            "a conversation must be a list of messages such as "
            f"{{'role': 'user', 'content': 'Hello'}}, got {_kind(messages)}"
        )
    if not messages:
        raise UserError("the conversation is empty: give at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(
            f"message {index} must be an object with role and content, got {_kind(message)}"
        )
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"message {index}: role must be one of {', '.join(ROLES)}, got {role!r}")
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise UserError(
            f"message {index}: content must be a text, got {_kind(message.get('content'))}"
        )
    return dict(message)


def _id(value: object) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UserError(f"a prompt's token ids must be whole numbers, got {_kind(value)}")
    return int(value)


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6,
          "gb": 10**9, "k": 2**10, "m": 2**20, "g": 2**30}  # fmt: skip


def parse_size(value: str | int) -> int:
    """Return the bytes of `4GiB`, `500MB` or a number. Raises `UserError`."""
    # By hand: pydantic's ByteSize takes bits as well, and its errors name neither value nor remedy.
    value = str(value)
    digits = value.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = value.strip()[len(digits) :].strip().lower()
    try:
        nbytes = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise UserError(f"{value!r} is not a size: write it like 4GiB or 500MB") from None
    if not 1 <= nbytes < 2**63:
        raise UserError(f"{value!r} is not a size of at least a byte: write it like 4GiB or 500MB")
    return int(nbytes)

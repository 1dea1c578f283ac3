"""Mutations of a JSON document that keep it a JSON document: values, names and whole subtrees."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64,
    10**40, -(2**63), 0.5, -0.5, 1e-300, 1e308, float("inf"), float("nan"), "", "a", "0", "\x00",
    "\ud800", "é" * 300, [], {}, [[]], [0], [""], [None] * 9, {"": 0}, {"type": None}, [1, 2, 3],
)  # fmt: skip
MAX_EDITS = 3


def edited(data: bytes, chance: random.Random, words: Sequence[str] = ()) -> bytes | None:
    """`data` with a few edits, None if it is no JSON."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    holder = [document]
    for _ in range(chance.randint(1, MAX_EDITS)):
        places = list(_places(holder))
        if places:
            _edit(*chance.choice(places), places, chance, words)
    try:
        return json.dumps(holder[0]).encode("utf-8", errors="surrogatepass")
    except (ValueError, RecursionError):
        return None


def _places(holder: Any) -> Any:
    """Every (container, key) of a document, the document itself first."""
    waiting = [holder]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                waiting.append(container[key])


def _edit(
    container: Any, key: Any, places: Sequence[Any], chance: random.Random, words: Sequence[str]
) -> None:
    if key not in container if isinstance(container, dict) else key >= len(container):
        return  # an earlier edit took it away
    other, other_key = chance.choice(places)
    match chance.randrange(7):
        case 0 if len(container) > 1 or isinstance(container, dict):
            del container[key]
        case 1 | 2:
            container[key] = copy.deepcopy(chance.choice(ODD_VALUES))
        case 3 if words:
            container[key] = chance.choice(words)
        case 4 if isinstance(container, dict):
            container[chance.choice([*words, "x"])] = container.pop(key)
        case 5 if isinstance(container[key], list):
            container[key] = container[key] + copy.deepcopy(container[key])
        case _:
            value = container[key]
            if isinstance(value, int | float) and not isinstance(value, bool):
                container[key] = value + chance.choice((-1, 1, 0.5, value, 2**31))
            else:
                found = other.get(other_key) if isinstance(other, dict) else None
                container[key] = copy.deepcopy(found)

"""Sentences for people: each on one line, and nothing in it that commands a terminal."""

from __future__ import annotations

import re
from typing import Final

LONGEST_SENTENCE: Final = 1000
# C0 without tab and newline, DEL and C1: cursor, colours, titles, the clipboard.
CONTROLS: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f"
# And what turns the direction of writing, with which a name may look like another.
_DECEIVING: Final = re.compile(f"[{CONTROLS}\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text with control and direction characters escaped.

    An escape is written as `\\x1b`.
    """
    return _DECEIVING.sub(escaped, text)


def one_sentence(message: str) -> str:
    """Return a message on one line of at most about 1000 characters, control characters escaped."""
    line = printable(re.sub(r"\s*\n\s*", " ", message))
    if len(line) <= LONGEST_SENTENCE:
        return line
    return f"{line[: LONGEST_SENTENCE - 300]} … {line[-300:]}"


def escaped(match: re.Match[str]) -> str:
    """Return a character as its escape."""
    return match.group().encode("unicode_escape").decode("ascii")

"""What files and models say, made safe to show: nothing of theirs commands a terminal."""

from __future__ import annotations

import re
import sys
from typing import Final

# C0 without tab and newline, DEL and C1: cursor, colours, titles, the clipboard.
_CONTROLS: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_CONTROL: Final = re.compile(f"[{_CONTROLS}]")
# And what turns the direction of writing, with which a name may look like another.
_DECEIVING: Final = re.compile(f"[{_CONTROLS}\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text with control characters, and those that turn its direction, as escapes such as \\x1b."""
    return _DECEIVING.sub(_escaped, text)


def answer_text(text: str) -> str:
    """A part of an answer as it is shown: as it is, unless stdout is a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return _CONTROL.sub(_escaped, text.replace("\r", ""))


def json_line(text: str) -> str:
    """A JSON document with the control characters that JSON leaves alone escaped, too."""
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found.group()):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")

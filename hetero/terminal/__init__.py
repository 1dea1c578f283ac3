"""Texts of files and models, made safe to show: nothing of theirs commands a terminal.

`hetero.terminal.notices` has what is worth a line on standard error.
"""

from __future__ import annotations

import re
import sys
from typing import Final

from hetero.backends.sentences import CONTROLS, escaped, printable

_CONTROL: Final = re.compile(f"[{CONTROLS}]")


def answer_text(text: str) -> str:
    """Return a part of an answer as it is shown: unchanged, unless stdout is a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return _CONTROL.sub(escaped, text.replace("\r", ""))


def json_line(text: str) -> str:
    """Return a JSON document with the control characters that JSON leaves alone escaped, too."""
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found.group()):04x}", text)


__all__ = ["answer_text", "json_line", "printable"]

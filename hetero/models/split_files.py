"""Names of the files that one GGUF model is split into: `NAME-00001-of-00003.gguf`, …

As llama.cpp's `llama_split_path` and `llama-gguf-split` name them.
"""

from __future__ import annotations

import re
from typing import Final

_SPLIT: Final = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ext>\.gguf)", re.I
)


def split_names(name: str) -> list[str]:
    """Return the names of all files of a model, of which `name` is one, in order; [name] for a
    model in one file.
    """
    match = _SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    stem, count, ext = match["stem"], match["count"], match["ext"]
    return [f"{stem}-{number:05d}-of-{count}{ext}" for number in range(1, int(count) + 1)]


def model_name(name: str) -> str:
    """Return the name of a model's file without what says which of several it is."""
    match = _SPLIT.fullmatch(name)
    return name if match is None else match["stem"] + match["ext"]

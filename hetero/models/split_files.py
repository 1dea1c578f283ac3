"""Names of the files that one GGUF model is split into.

They are those of llama.cpp's `llama_split_path` and `llama-gguf-split`: `NAME-00001-of-00003.gguf`,
…
"""

from __future__ import annotations

import re
from typing import Final

_SPLIT: Final = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ext>\.gguf)", re.I
)


def split_names(name: str) -> list[str]:
    """Return the names of all files of the model that `name` is one of, in order.

    For a model in one file that is [name].
    """
    match = _SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    stem, count, ext = match["stem"], match["count"], match["ext"]
    return [f"{stem}-{number:05d}-of-{count}{ext}" for number in range(1, int(count) + 1)]


def model_name(name: str) -> str:
    """Return the name of a model's file without the number of the split."""
    match = _SPLIT.fullmatch(name)
    return name if match is None else match["stem"] + match["ext"]

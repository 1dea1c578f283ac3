"""EXAONE 4: OLMo 2's blocks with norms of each head.

Models with windows have rotary embeddings in the layers with a window alone.
"""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    DEFAULT_WINDOW,
    Architecture,
    Decoder,
    every,
    kinds_of,
    layer_kinds,
    one_window,
    windows_of,
)
from hetero.models.architectures.olmo import PERIOD, POST_NORMS
from hetero.models.fields import Fields
from hetero.models.sliding import FULL

_PATTERN = "sliding_window_pattern"


def _read(source: Fields, layers: int) -> dict[str, Any]:
    (window, *_) = one_window(source, layers, DEFAULT_WINDOW)
    kinds = [FULL] * layers
    if window:
        kinds = layer_kinds(source, layers) or every(_period(source), layers)
    windows = windows_of(kinds, window)
    return {
        "in_norms": False,
        "out_norms": True,
        "qk_norm": True,
        "windows": windows,
        "rotates": tuple(not window or size > 0 for size in windows),
    }


def _period(source: Fields) -> int:
    """Return the layers of a period, the last of which has full attention; `LLLG` are four."""
    value = source.raw.get(_PATTERN)
    if not isinstance(value, str):
        return source.positive_int(_PATTERN, PERIOD)
    if not value or value != "L" * (len(value) - 1) + "G":
        raise source.error(_PATTERN, "must be a number, or L … L G", "correct the file")
    return len(value)


def _write(config: Decoder) -> dict[str, Any]:
    hybrid = not all(config.rotates)
    return {
        "sliding_window": max(config.windows) or (DEFAULT_WINDOW if hybrid else None),
        "layer_types": kinds_of(config.windows),
    }


EXAONE4 = Architecture(
    name="exaone4",
    class_name="Exaone4ForCausalLM",
    kv_heads=32,
    ids=(0, 2),
    eps=1e-5,
    read=_read,
    write=_write,
    used=(_PATTERN,),
    names=POST_NORMS,
)

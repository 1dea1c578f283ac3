"""SmolLM3: Llama without a rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    Architecture,
    Decoder,
    layer_kinds,
    one_window,
    windows_of,
)
from hetero.models.architectures.llama import LLAMA
from hetero.models.fields import Fields
from hetero.models.sliding import FULL, SLIDING

INTERVAL = 4


def _read(source: Fields, layers: int) -> dict[str, Any]:
    rotates = _rotates(source, layers)
    (window, *_) = one_window(source, layers, 0)
    window = window if source.boolean("use_sliding_window", False) else 0
    given = layer_kinds(source, layers)
    if given is not None and SLIDING in given and not window:
        raise source.error(
            "layer_types",
            f"must be {FULL} without use_sliding_window and sliding_window",
            "correct the file",
        )
    kinds = given or [FULL if x else SLIDING for x in rotates]
    return {
        **LLAMA.read(source, layers),
        "rotates": rotates,
        "windows": windows_of(kinds, window),
    }


def _rotates(source: Fields, layers: int) -> tuple[bool, ...]:
    """Return by layer whether it has a rotary embedding; `no_rope_layers` has 1 where it has."""
    flags = source.raw.get("no_rope_layers")
    if flags is None:
        interval = source.positive_int("no_rope_layer_interval", INTERVAL)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(flags, list) or len(flags) < layers or any(x not in (0, 1) for x in flags):
        raise source.error(
            "no_rope_layers", f"must list 0 or 1 for each of {layers} layers", "correct the file"
        )
    return tuple(bool(x) for x in flags[:layers])


def _write(config: Decoder) -> dict[str, Any]:
    window = max(config.windows)
    return {
        **LLAMA.write(config),
        "no_rope_layers": [int(x) for x in config.rotates],
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "layer_types": [SLIDING if x else FULL for x in config.windows],
    }


SMOLLM3 = Architecture(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    max_position=32768,
    kv_heads=4,
    ids=(128000, 128001),
    tied=True,
    theta=2e6,
    read=_read,
    write=_write,
    used=("no_rope_layers", "no_rope_layer_interval", "layer_types"),
)

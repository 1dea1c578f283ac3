"""The sizes of layers that differ, and the layers whose keys and values others attend to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from hetero.errors import ModelError
from hetero.models.fields import Fields
from hetero.models.sliding import FULL

GLOBAL_HEAD_DIM: Final = 512
KEYS_ARE_VALUES: Final = "attention_k_eq_v"
WIDE: Final = "use_double_wide_mlp"


class LayerSizes(NamedTuple):
    """The sizes of a layer that may differ from other layers'."""

    kv_heads: int
    head_dim: int
    intermediate_size: int


class Sized(Protocol):
    """The parts of `hetero.models.config.ModelConfig` that are written."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layer_sizes(self) -> tuple[LayerSizes, ...]: ...
    @property
    def kv_source(self) -> tuple[int, ...]: ...
    @property
    def keys_are_values(self) -> bool: ...


def read_layers(source: Fields, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `ModelConfig` in which layers of these kinds differ.

    Raises `ModelError`.
    """
    shared = source.count("num_kv_shared_layers", 0, len(kinds) - 1)
    return {
        "layer_sizes": read_layer_sizes(source, kinds, shared),
        "kv_source": kv_sources(source, kinds, shared),
        "keys_are_values": source.boolean(KEYS_ARE_VALUES, False),
    }


def read_layer_sizes(source: Fields, kinds: Sequence[str], shared: int) -> tuple[LayerSizes, ...]:
    """Return the sizes of each layer, of which the last `shared` have queries only.

    Some have others by `per_layer_config`, or, with full attention, by `global_head_dim` and
    `num_global_key_value_heads`; with `use_double_wide_mlp` the shared ones have twice the
    feed-forward. Raises `ModelError`.
    """
    own = LayerSizes(
        source.positive_int("num_key_value_heads", 4),
        source.positive_int("head_dim", 256),
        source.positive_int("intermediate_size", 9216),
    )
    sizes = _of_kinds(source, kinds, own)
    if source.raw.get("per_layer_config") is not None:
        sizes = _by_layer(source, len(kinds), own)
    queries = source.positive_int("num_attention_heads")
    for layer, x in enumerate(sizes):
        if queries % x.kv_heads or x.head_dim % 2:
            raise ModelError(
                f"{source.where}: layer {layer} must have key/value heads that divide "
                f"num_attention_heads ({queries}), of an even size, got {x.kv_heads} of "
                f"{x.head_dim}; correct the file"
            )
    wide = shared if source.boolean(WIDE, False) else 0
    return tuple(
        x._replace(intermediate_size=2 * x.intermediate_size) if i >= len(sizes) - wide else x
        for i, x in enumerate(sizes)
    )


def _of_kinds(source: Fields, kinds: Sequence[str], own: LayerSizes) -> list[LayerSizes]:
    full = own._replace(head_dim=source.positive_int("global_head_dim", GLOBAL_HEAD_DIM))
    if source.boolean(KEYS_ARE_VALUES, False):
        heads = source.positive_int("num_global_key_value_heads", own.kv_heads)
        full = full._replace(kv_heads=heads)
    return [full if kind == FULL else own for kind in kinds]


def _by_layer(source: Fields, layers: int, own: LayerSizes) -> list[LayerSizes]:
    sizes = [own] * layers
    given = source.object("per_layer_config")
    for number in given:
        where = f"{source.where}: per_layer_config"
        if not number.isdecimal() or not number.isascii() or int(number[:9]) >= layers:
            raise ModelError(
                f"{where} must have layer numbers below {layers}, got {number[:64]!r}; correct the "
                "file"
            )
        fields = Fields(Fields(given, where).object(number), f"{where}: {number}")
        unknown = sorted(set(fields.raw) - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise fields.error(unknown[0], "is not supported for a layer", "choose another model")
        sizes[int(number)] = own._replace(
            kv_heads=fields.positive_int("num_key_value_heads", own.kv_heads),
            head_dim=fields.positive_int("head_dim", own.head_dim),
        )
    return sizes


def write_layers(config: Sized) -> dict[str, Any]:
    """Return the fields that `read_layers` reads."""
    base = {"head_dim": config.head_dim, "num_key_value_heads": config.kv_heads}
    own = [{"head_dim": x.head_dim, "num_key_value_heads": x.kv_heads} for x in config.layer_sizes]
    wide = [x.intermediate_size != config.intermediate_size for x in config.layer_sizes]
    return {
        KEYS_ARE_VALUES: config.keys_are_values,
        "num_kv_shared_layers": sum(source != i for i, source in enumerate(config.kv_source)),
        "per_layer_config": {str(i): x for i, x in enumerate(own) if x != base},
        WIDE: any(wide),
    }


def kv_sources(source: Fields, kinds: Sequence[str], shared: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer attends to.

    For the last `shared` layers that is the last one before them of their kind. Raises
    `ModelError` where there is none.
    """
    first = len(kinds) - shared
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    missing = next((kind for kind in kinds[first:] if kind not in last), None)
    if missing is not None:
        raise source.error(
            "num_kv_shared_layers",
            f"must leave a layer with {missing} among the first {first}",
            "correct the file",
        )
    return (*range(first), *(last[kind] for kind in kinds[first:]))

"""The differences between architectures; the defaults are Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.models.delta_net import DeltaNet
from hetero.models.expert_config import ExpertConfig
from hetero.models.fields import Fields, is_number
from hetero.models.layer_sizes import Sized
from hetero.models.sliding import FULL, SLIDING
from hetero.models.stacked_experts import Stacked

DEFAULT_WINDOW = 4096


class Decoder(Sized, Protocol):
    """The parts of `hetero.models.config.ModelConfig` that architectures read."""

    @property
    def heads(self) -> int: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def residual_scale(self) -> float: ...
    @property
    def logit_scale(self) -> float: ...
    @property
    def embed_scale(self) -> float: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope_scaled(self) -> bool: ...
    @property
    def rotates(self) -> tuple[bool, ...]: ...
    @property
    def mixers(self) -> tuple[str, ...]: ...
    @property
    def conv_taps(self) -> int: ...
    @property
    def conv_bias(self) -> bool: ...
    @property
    def delta(self) -> DeltaNet | None: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def attention_scale(self) -> float | None: ...
    @property
    def attention_softcap(self) -> float: ...
    @property
    def logit_softcap(self) -> float: ...
    @property
    def positions(self) -> int: ...
    @property
    def experts(self) -> ExpertConfig | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_inputs(self) -> int: ...


# From the fields of config.json and the number of layers to parameters of `ModelConfig`.
Read: TypeAlias = Callable[[Fields, int], dict[str, Any]]
# From a configuration to the fields of config.json that `Read` looks at.
Write: TypeAlias = Callable[[Any], dict[str, Any]]
# Source rows of each row of a weight, where a tensor holds them in another order.
RowOrder: TypeAlias = Callable[[Decoder], npt.NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """The names of a checkpoint's tensors.

    `matmuls` are the modules whose rows, one after the other, are the rows of our fused weight;
    `vectors` the modules of a block's norms; `parameters` tensors that are not a module's weight or
    bias; `experts` the modules of the experts' matrices, with `{}` for an expert's number;
    `model_modules` those outside of the blocks; `shared` modules outside of them whose rows, or
    whose one vector, all blocks share. `.weight` and `.bias` are appended to modules.
    `block` is the prefix of a block. `stacked` are the experts' matrices in tensors of all experts,
    which a checkpoint may have instead.
    """

    block: str = "model.layers.{}."
    matmuls: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
    )
    vectors: Mapping[str, str] = field(
        default_factory=lambda: {
            "input_norm": "input_layernorm",
            "post_norm": "post_attention_layernorm",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
        }
    )
    experts: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, Stacked] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    model_modules: Mapping[str, str] = field(
        default_factory=lambda: {
            "embed": "model.embed_tokens",
            "lm_head": "lm_head",
            "final_norm": "model.norm",
            "mtp_embed": "mtp.fc",
            "mtp_hidden": "mtp.fc",
            "mtp_embed_norm": "mtp.pre_fc_norm_embedding",
            "mtp_hidden_norm": "mtp.pre_fc_norm_hidden",
        }
    )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models, by what differs from the decoder that all share.

    name, class_name  `model_type` and `architectures` of config.json
    keys              fields of config.json that have another name here (ours: theirs)
    max_position, intermediate_size, kv_heads, head_dim, ids, tied, activation, eps
                      what `transformers` takes where config.json leaves the field out;
                      kv_heads None: as many as heads; head_dim None: hidden_size / heads;
                      ids: (bos, eos)
    grouped           query heads may share key/value heads; else config.json is not asked
    read, write       fields that only this family has; `read` may also return `rotary_factor`,
                      `rotates` (by layer) and `adjust_rope`, a function of the rotary embedding
    row_order         the rows of a checkpoint's tensor, by its module, if in another order
    column_order      its columns
    used              fields that are refused elsewhere (`hetero.models.config_keys`)
    defaults          fields that the text part of a larger model may leave out
    quantised         methods of `quantization_config` whose tensors are read
    norm_offset       added to every norm's weight when it is read
    norm_bias         whether a LayerNorm has a bias
    ropes             `rope_parameters` where config.json has none
    theta             base period of the rotary embedding where config.json gives none
    local_theta       that of layers with a sliding window, whose embedding is never scaled by
                      `rope_scaling`; None: all layers have one embedding
    mtp               checkpoints may have a head that predicts one token more
    """

    name: str
    class_name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    max_position: int = 2048
    intermediate_size: int | None = None
    kv_heads: int | None = None
    grouped: bool = True
    head_dim: int | None = None
    ids: tuple[int, int] | None = None
    tied: bool = False
    activation: str = "silu"
    eps: float = 1e-6
    names: TensorNames = field(default_factory=TensorNames)
    read: Read = lambda _source, _layers: {}
    write: Write = lambda _config: {}
    row_order: Mapping[str, RowOrder] = field(default_factory=dict)
    column_order: Mapping[str, RowOrder] = field(default_factory=dict)
    norm_offset: float = 0.0
    used: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    quantised: tuple[str, ...] = ()
    norm_bias: bool = True
    ropes: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    local_theta: float | None = None
    mtp: bool = False

    def key(self, name: str) -> str:
        """Return the field's name in config.json."""
        return self.keys.get(name, name)


def layer_kinds(
    source: Fields,
    layers: int,
    kinds: tuple[str, ...] = (FULL, SLIDING),
    *,
    name: str = "layer_types",
    remedy: str = "correct the file",
) -> list[str] | None:
    """Return `layer_types`, one of `kinds` for each layer; None if absent. Raises `ModelError`."""
    types = source.raw.get(name)
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in kinds for kind in types)
    if not known or len(types) != layers:
        raise source.error(
            name, f"must list {' or '.join(kinds)} for each of the {layers} layers", remedy
        )
    return list(types)


def windows_of(kinds: Sequence[str], window: int) -> tuple[int, ...]:
    """Return the windows of layers of these kinds."""
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def every(count: int, layers: int) -> list[str]:
    """Return sliding attention in all layers but every `count`-th, which has full attention."""
    return [FULL if (i + 1) % count == 0 else SLIDING for i in range(layers)]


def kinds_of(windows: Sequence[int]) -> list[str]:
    """Return the `layer_types` of windows."""
    return [SLIDING if window else FULL for window in windows]


def one_window(source: Fields, layers: int, default: int) -> tuple[int, ...]:
    """Return `sliding_window` for every layer; null is none."""
    given = source.raw.get("sliding_window") is not None
    absent = default if "sliding_window" not in source.raw else 0
    return (source.positive_int("sliding_window") if given else absent,) * layers


def switched_window(source: Fields, layers: int) -> tuple[int, ...]:
    """Return Qwen's windows: only with `use_sliding_window`, from layer `max_window_layers` on."""
    (window, *_) = one_window(source, layers, DEFAULT_WINDOW)
    if not source.boolean("use_sliding_window", False):
        return (0,) * layers
    kinds = layer_kinds(source, layers)
    if kinds is not None:
        return windows_of(kinds, window)
    first = source.raw.get("max_window_layers", 28)
    if not is_number(first) or first < 0:
        raise source.error("max_window_layers", "must be a layer number", "correct the file")
    return tuple(window if i >= first else 0 for i in range(layers))


def write_switched_window(windows: Sequence[int]) -> dict[str, Any]:
    """Return the fields that `switched_window` reads."""
    window = max(windows)
    return {
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "layer_types": kinds_of(windows),
    }


def halves_of_pairs(heads: int, head_dim: int, rotated: int) -> npt.NDArray[np.int64]:
    """Return the order of rows that are rotated pair by pair, such that they rotate half by half.

    Of each head's first `rotated` rows, row 2 i + j (pair i) becomes row j · rotated / 2 + i.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, head_dim)
    pairs = rows[:, :rotated].reshape(heads, rotated // 2, 2).swapaxes(1, 2)
    return np.concatenate([pairs.reshape(heads, -1), rows[:, rotated:]], axis=1).reshape(-1)


def _rotated(config: Decoder) -> int:
    return config.rotary_dim or config.head_dim


ROTATED_IN_PAIRS: Mapping[str, RowOrder] = {
    "self_attn.q_proj": lambda x: halves_of_pairs(x.heads, x.head_dim, _rotated(x)),
    "self_attn.k_proj": lambda x: halves_of_pairs(x.kv_heads, x.head_dim, _rotated(x)),
}
"""`row_order` of families with interleaved rotary embeddings."""


def scale(source: Fields, name: str, default: float = 1.0) -> float:
    """Return a factor of the model, such that neither it nor 1 / factor² leaves float32."""
    factor = source.positive_float(name, default)
    if not 1e-9 <= factor <= 1e9:
        raise source.error(name, "must be from 1e-9 to 1e9", "correct the file")
    return factor

"""Checks shared by all backends: the weights of an operation, and whether a device is alive.

(`hetero.backends.protocol.check_tensors` checks the tensors of a binding.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.errors import DeviceError, DeviceLostError
from hetero.backends.formats import StorageFormat
from hetero.backends.host import forks
from hetero.backends.ops import Op, describe, weight_names
from hetero.backends.protocol import Acceptance, Capabilities, WeightValue
from hetero.backends.weights import PackedWeight

# Weights that are a `PackedWeight`; an RMSNorm's `weight` is a vector.
PACKED_NAMES: Final = ("weight", "hot_weight", "experts_gate", "experts_up", "experts_down")


def check_weights(op: Op, weights: Mapping[str, WeightValue]) -> None:
    """Validate names, shapes and formats of `Device.prepare`'s weights. Raises `ValueError`."""
    names = weight_names(op)
    if set(names) != set(weights):
        raise ValueError(f"{describe(op)} takes the weights {names}, got {tuple(weights)}")
    for name in names:
        if (
            isinstance(op, ops.MatMul | ops.Embed | ops.Outliers | ops.Experts)
            and name in PACKED_NAMES
        ):
            _check_packed(op, name, weights[name])
        elif name == "hot":
            _check_hot(op, weights[name])
        else:
            _check_vector(op, name, weights[name])


def packed(weights: Mapping[str, WeightValue], name: str = "weight") -> PackedWeight:
    """Return a packed weight of an operation that passed `check_weights`."""
    weight = weights[name]
    assert isinstance(weight, PackedWeight)
    return weight


def vector(weights: Mapping[str, WeightValue], name: str) -> npt.NDArray[np.float32]:
    """Return a one-dimensional float32 weight of an operation that passed `check_weights`."""
    value: Any = weights[name]
    assert not isinstance(value, PackedWeight)
    assert value.dtype == np.float32
    values: npt.NDArray[np.float32] = value
    return values


def expert_weights(
    op: ops.Experts, name: str, weights: Mapping[str, WeightValue]
) -> list[dict[str, WeightValue]]:
    """Return the weights of each own expert's matmul with one of the matrices, as views."""
    n, whole = op.matmuls[name].n, packed(weights, name)
    of_experts: list[dict[str, WeightValue]] = []
    for start in (e * n for e in op.own):
        own: dict[str, WeightValue] = {"weight": whole.rows(start, start + n)}
        if op.bias:
            own["bias"] = vector(weights, f"{name}_bias")[start : start + n]
        of_experts.append(own)
    return of_experts


def slab(weights: Mapping[str, WeightValue]) -> tuple[npt.NDArray[np.int32], PackedWeight]:
    """Return the hot features of an `Outliers` and their weights [n, hot].

    The record has passed `check_weights`.
    """
    hot: Any = weights["hot"]
    columns = weights["hot_weight"]
    assert isinstance(columns, PackedWeight)
    features: npt.NDArray[np.int32] = hot
    return features, columns


def check_token_count(
    capabilities: Capabilities, op: Op, m: int, *, own: int | None = None
) -> None:
    """Raise `ValueError` for a token count that a device with static shapes has no graph for.

    `own` is the kernel's `graph`. Operations with a state take any: padding would change it; so do
    experts, each of which has its own tokens.
    """
    if ops.has_state(op) or isinstance(op, ops.Experts):
        return
    if capabilities.static_shapes and m not in (own, *capabilities.graph_sizes):
        raise ValueError(
            f"{describe(op)}: no graph for {m} tokens, prepared are {capabilities.graph_sizes}"
        )


def accept_format(capabilities: Capabilities, op: Op) -> Acceptance:
    """Return whether the weight format of a MatMul, an Embed or Experts is among the device's.

    Experts' inputs have no static scales.
    """
    if isinstance(op, ops.Experts) and op.weight_format.activations.static:
        remedy = "choose weights without static scales of activations, such as w8a16"
        return Acceptance(False, f"{op.weight_format} has no kernels of routed experts", remedy)
    if isinstance(op, ops.MatMul | ops.Embed | ops.Experts):
        formats = capabilities.weight_formats
        if op.weight_format not in formats:
            return Acceptance(False, f"weight format {op.weight_format} is not one of {formats}")
    return Acceptance(True)


def first_position(
    backend: str, call: str, position: npt.NDArray[np.int32], m: int, limit: int
) -> int:
    """Return the position of a call's first token, for devices whose host side reads it.

    Raises `DeviceError` when m tokens from there pass `limit` (a cache's capacity, a table's end).
    """
    first = int(position[0])
    if not 0 <= first <= limit - m:
        raise DeviceError(
            backend,
            call,
            "POSITION_OUT_OF_RANGE",
            f"{m} tokens at position {first} do not fit {limit}; open the model with a larger "
            "context",
        )
    return first


class Health:
    """State of a device: whether it takes calls. Lost once, lost for good, with the first reason.

    `threads`: its driver has threads of its own, so that it is lost in a forked child.
    """

    def __init__(self, backend: str, *, threads: bool = False) -> None:
        self._backend = backend
        self._reason = ""
        self._remedy = "open the device again"
        if threads:
            forks.in_child(self._forked)

    @property
    def alive(self) -> bool:
        """Return whether it is neither closed nor failed."""
        return not self._reason

    @property
    def state(self) -> str:
        """Return `open`, or why not."""
        return f"lost ({self._reason})" if self._reason else "open"

    def lose(self, reason: str) -> None:
        """Refuse every later call; the first reason stays."""
        self._reason = self._reason or reason

    def check(self, operation: str) -> None:
        """Raise `DeviceLostError` when the device is closed or has failed."""
        if self._reason:
            raise DeviceLostError(self._backend, operation, self._reason, self._remedy)

    def _forked(self) -> None:
        self.lose(forks.REASON)
        self._remedy = forks.REMEDY


def _check_packed(
    op: ops.MatMul | ops.Embed | ops.Outliers | ops.Experts, name: str, weight: WeightValue
) -> None:
    if not isinstance(weight, PackedWeight):
        raise ValueError(f"{describe(op)} takes a PackedWeight, got {type(weight).__name__}")
    match op:
        case ops.MatMul():
            n, k, storage = op.n, op.k, op.weight_format.storage
        case ops.Embed():
            n, k, storage = op.vocab, op.d, op.weight_format.storage
        case ops.Experts():
            n, k = op.experts * op.matmuls[name].n, op.matmuls[name].k
            storage = op.weight_format.storage
        case ops.Outliers() if name == "weight":
            n, k, storage = op.n, op.k, StorageFormat.Q8R
        case ops.Outliers():
            n, k, storage = op.n, op.hot, StorageFormat.F16
    if (weight.n, weight.k, weight.storage) != (n, k, storage):
        raise ValueError(
            f"{describe(op)} takes {storage} weights of {n}×{k}, "
            f"got {weight.storage} of {weight.n}×{weight.k}"
        )
    if isinstance(op, ops.Embed | ops.Experts) and len(weight.parts) > 1:
        raise ValueError(f"{describe(op)} takes weights of one part, got {len(weight.parts)}")


def _check_vector(op: Op, name: str, value: Any) -> None:  # noqa: PLR0912
    match op:
        case ops.MatMul() | ops.Outliers():
            length = 1 if name == "x_scale" else op.n
        case ops.Rope():
            length = op.norm_width(name)
        case ops.Attention():
            length = op.heads
        case ops.AttentionHeads():
            length = op.attention.heads
        case ops.RMSNorm() | ops.LayerNorm() | ops.GatedAdd():
            length = op.d
        case ops.Add():
            length = 1
        case ops.AddPositions():
            length = op.rows * op.d
        case ops.DecodeChunks():
            length = op.kv_heads * op.head_dim
        case ops.Router():
            length = op.experts * (op.d if name == "router" else 1)
        case ops.Experts():
            length = op.experts * op.matmuls[name.removesuffix("_bias")].n
        case ops.GatedDelta():
            length = op.v_dim if name == "norm" else op.v_heads
        case ops.ShortConv():
            length = op.taps * op.d if name == "taps" else op.d
        case _:
            raise ValueError(f"{describe(op)} has no weight {name}")
    if not isinstance(value, np.ndarray) or value.shape != (length,) or value.dtype != np.float32:
        got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value)
        raise ValueError(f"{describe(op)} takes {name} as float32 ({length},), got {got}")
    if name == "x_scale" and not (np.isfinite(value[0]) and value[0] > 0):
        raise ValueError(f"{describe(op)} takes a finite x_scale > 0, got {value[0]}")


def _check_hot(op: Op, value: Any) -> None:
    assert isinstance(op, ops.Outliers)
    right = isinstance(value, np.ndarray) and (value.shape, value.dtype) == ((op.hot,), np.int32)
    if not right or np.any(np.diff(value) <= 0) or value[0] < 0 or value[-1] >= op.k:
        raise ValueError(f"{describe(op)} takes hot as int32 ({op.hot},), rising, below {op.k}")

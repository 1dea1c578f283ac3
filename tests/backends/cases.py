"""Making the tensors and weights of an operation, running it on a device, checking its result.

The expected numbers come from `hetero.backends.reference.compute` on copies of the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetero.backends import ops
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.kv_codes import random_channels, random_chunks
from hetero.backends.kv_rows import cache_rows, random_rows
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.ops import (
    ADDED_PORTS,
    OUTPUT_PORTS,
    STATE_PORTS,
    Op,
    describe,
    weight_names,
)
from hetero.backends.protocol import (
    FIXED_PORTS,
    BoundCall,
    Device,
    Kernel,
    WeightValue,
    port_dtype,
    port_shape,
)
from hetero.backends.reference.compute import program
from hetero.backends.weights import PART_STORAGES, pack, stacked
from tests.support.helpers import assert_close
from tests.support.selection import exhaustive

CACHES = ("k_cache", "v_cache")

PROCESSOR_TOLERANCE = 3e-6
PROCESSOR_ATTENTION_TOLERANCE = 1e-5
TOLERANCE = 2e-5
# Backends that compute everything in fp16, whose rounding is up to 2⁻¹¹ = 4.9e-4 of each value: a
# result of one rounding, and of several in a row.
HALF_PRECISION = frozenset({"qnn"})
HALF_TOLERANCE = 5e-4
HALF_TOLERANCE_CHAIN = 1.5e-3
HALF_TOLERANCE_ATTENTION = 4e-3
# QNN's results of 8-bit codes are codes themselves. A step is 2 · x_scale of the power of two above
# the row's norm, so with `make_weights` at most 2 · 0.04 · 2 √k, and results are of size √k: a
# uniform error of a step is 0.29 · 0.16. Where results do not fit, codes of x count double: 0.08,
# uniform as well, next to it.
CODES_TOLERANCE = 0.29 * (0.16 + 0.08)


def tolerance(op: Op, device: Device) -> float:
    """Largest relative difference from the reference."""
    if device.info.backend in HALF_PRECISION:
        return _half_tolerance(op)
    if is_processor(device):
        return _processor_tolerance(op)
    if isinstance(op, ops.Experts):
        return 2 * _matmul_tolerance(op.weight_format)
    return _matmul_tolerance(op.weight_format) if isinstance(op, ops.MatMul) else TOLERANCE


def _matmul_tolerance(weight_format: WeightFormat) -> float:
    """On GPUs, those with fp16 arithmetic among them."""
    if weight_format.half_is_enough:
        return 1e-3
    return 2e-5 if weight_format.activations.are_floats else 1e-2


def _processor_matmul_tolerance(weight_format: WeightFormat) -> float:
    """Three to ten times what was measured on Zen 4 over three seeds of the suite (PoCL with and
    without VNNI, ONNX Runtime): activations in one plane of 8 bits, in two, float32 sums.
    """
    if not weight_format.activations.are_floats:
        return 3e-5
    if weight_format.storage.quantised:
        return 1e-4
    return 1e-5 if weight_format.half_is_enough else 5e-6


def is_processor(device: Device) -> bool:
    """Whether a CPU computes, in float32 or in integers."""
    if getattr(device, "half", 0):
        return False
    own = device.info.backend in ("ort-cpu", "reference", "simulated")
    return own or "cpu" in device.info.details


def _processor_tolerance(op: Op) -> float:
    match op:
        case ops.MatMul():
            return _processor_matmul_tolerance(op.weight_format)
        case ops.Experts():  # two matmuls in a row; a code of the second may be the next one
            rounds = not op.weight_format.activations.are_floats
            return 1e-3 if rounds else 3 * _processor_matmul_tolerance(op.weight_format)
        case ops.Embed():
            return 2e-7  # nothing is added up
        case ops.Attention() | ops.SumScores():
            return PROCESSOR_ATTENTION_TOLERANCE
        case _:
            return PROCESSOR_TOLERANCE


def _half_tolerance(op: Op) -> float:
    match op:
        case ops.MatMul() if op.weight_format.activations.static:
            return CODES_TOLERANCE
        case ops.MatMul() if op.softcap:
            return HALF_TOLERANCE_CHAIN
        case ops.Add(scaled=True):
            return HALF_TOLERANCE_CHAIN
        case ops.MatMul() | ops.Embed() | ops.Add() | ops.AddPositions():
            return HALF_TOLERANCE
        case ops.ShortConv() | ops.GatedDelta():  # products and sums of several in a row
            return 2 * HALF_TOLERANCE_CHAIN
        case ops.Attention():
            # A score of size s is off by s·2⁻¹², which multiplies its weight; s is about scale·D.
            # A cap rounds it twice more.
            roundings = 3 if op.softcap else 1
            off = roundings * op.softmax_scale * op.head_dim * 2**-12
            return max(HALF_TOLERANCE_ATTENTION, off)
        case _:
            return HALF_TOLERANCE_CHAIN


def floor(op: Op, device: Device) -> float:
    """Least size that a result counts as: what cancels out keeps the rounding of its terms."""
    if device.info.backend not in HALF_PRECISION:
        if not isinstance(op, ops.MatMul):
            return 0.0
        half = bool(getattr(device, "half", 0)) and op.weight_format.half_is_enough
        kind = op.weight_format
        planes = is_processor(device) and kind.storage.quantised and kind.activations.are_floats
        return op.k**0.5 if half or planes else 0.0
    match op:
        case ops.MatMul():
            return op.k**0.5
        case ops.Add() | ops.AddPositions() | ops.SigmoidGate() | ops.GatedInput():
            return 1.0  # a sigmoid, too, is rounded as a part of 1
        case ops.ShortConv():
            return op.taps**0.5
        case _:
            return 0.0


def require(device: Device, op: Op) -> None:
    """Skip the test if the device declares that it does not take the operation.

    On emulated fp16 the storages of files compile for up to a minute: the gate runs them with a
    bias only.
    """
    emulated = getattr(device, "half", 0) == 2 and not exhaustive()
    if emulated and isinstance(op, ops.MatMul) and op.weight_format.of_file and not op.bias:
        pytest.skip("compiles for a minute: with a bias only")
    accepted = device.accepts(op)
    if not accepted:
        pytest.skip(f"{device.info.backend}: {accepted.reason}")


def make_weights(op: Op, rng: np.random.Generator) -> dict[str, WeightValue]:  # noqa: PLR0912
    """Random weights of an operation."""
    weights: dict[str, WeightValue] = {}
    for name in weight_names(op):
        match op:
            case ops.Router():
                size = op.experts * (op.d if name == "router" else 1)
                weights[name] = rng.standard_normal(size, dtype=np.float32) / op.d**0.5
            case ops.Experts():
                weights[name] = expert_weight(op, name, rng)
            case ops.MatMul() | ops.Embed() if name == "weight":
                n, k = (op.n, op.k) if isinstance(op, ops.MatMul) else (op.vocab, op.d)
                values = rng.standard_normal((n, k), dtype=np.float32)
                weights[name] = pack(values, op.weight_format.storage)
                if isinstance(op, ops.Embed) and op.weight_format.of_file:
                    kind = PART_STORAGES[(n + k) % len(PART_STORAGES)]
                    weights[name] = stacked([pack(values, kind)])
            case ops.Outliers():
                weights[name] = outlier_weight(op, name, rng)
            case ops.MatMul() if name == "x_scale":
                weights[name] = np.full(1, rng.uniform(0.02, 0.04), dtype=np.float32)
            case ops.MatMul():
                weights[name] = rng.standard_normal(op.n, dtype=np.float32)
            case ops.DecodeChunks():
                weights[name] = random_channels(op, rng)
            case ops.AddPositions():
                weights[name] = rng.standard_normal(op.rows * op.d, dtype=np.float32)
            case ops.ShortConv():
                count = op.taps * op.d if name == "taps" else op.d
                weights[name] = rng.standard_normal(count, dtype=np.float32)
            case ops.GatedDelta() if name != "norm":
                values = rng.uniform(0.01, 4.0, op.v_heads).astype(np.float32)
                weights[name] = -values if name == "decay" else values - 2
            case ops.GatedDelta():
                weights[name] = 1 + 0.3 * rng.standard_normal(op.v_dim, dtype=np.float32)
            case ops.Add():
                weights[name] = rng.standard_normal(1, dtype=np.float32)
            case ops.Attention() | ops.AttentionHeads():  # smaller and larger than any score
                heads = op.attention.heads if isinstance(op, ops.AttentionHeads) else op.heads
                weights[name] = 3 * rng.standard_normal(heads, dtype=np.float32)
            case ops.Rope():
                width = op.norm_width(name)
                weights[name] = 1 + 0.3 * rng.standard_normal(width, dtype=np.float32)
            case _:
                weights[name] = 1 + 0.3 * rng.standard_normal(op.d, dtype=np.float32)
    return weights


def expert_weight(op: ops.Experts, name: str, rng: np.random.Generator) -> WeightValue:
    """A matrix of all experts, or its biases."""
    matmul = op.matmuls[name.removesuffix("_bias")]
    n, storage = op.experts * matmul.n, op.weight_format.storage
    if name.endswith("_bias"):
        return rng.standard_normal(n, dtype=np.float32)
    values = rng.standard_normal((n, matmul.k), dtype=np.float32) / np.float32(matmul.k**0.5)
    if not op.weight_format.of_file:
        return pack(values, storage)
    return stacked([pack(values, PART_STORAGES[(n + len(name)) % len(PART_STORAGES)])])


def random_routes(op: ops.Experts, m: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Different experts for each token, and weights that add up to 1."""
    chosen = rng.random((m, op.experts)).argsort(axis=1)[:, : op.chosen]
    shares = rng.random((m, op.chosen))
    shares /= shares.sum(axis=1, keepdims=True)
    return np.concatenate([chosen, shares], axis=1).astype(np.float32)


def outlier_weight(op: ops.Outliers, name: str, rng: np.random.Generator) -> WeightValue:
    """A weight of an `Outliers`; a tenth of standard normal activations is in excess."""
    match name:
        case "hot":
            return np.sort(rng.choice(op.k, op.hot, replace=False)).astype(np.int32)
        case "hot_weight":
            return pack(rng.standard_normal((op.n, op.hot), np.float32), StorageFormat.F16)
        case "weight":
            return pack(rng.standard_normal((op.n, op.k), np.float32), StorageFormat.Q8R)
        case _:
            return np.full(1, 1.6 / 127, np.float32)


def make_tensors(
    op: Op,
    m: int,
    rng: np.random.Generator,
    *,
    position: int = 0,
    spare_rows: int = 0,
    device: Device | None = None,
) -> dict[str, Tensor]:
    """Random inputs for m tokens; outputs, spare rows and unwritten cache positions are NaN.

    Every tensor is at an offset in a buffer of its own, as in a pool.
    """
    tensors = {}
    for port in op.ports:
        tensor = _new(op, port, m + spare_rows, device)
        tensors[port] = tensor
        array = tensor.array
        if port == "position":
            array[:] = position
        elif port == "tokens":
            assert isinstance(op, ops.Embed)
            array[:] = rng.integers(0, op.vocab, len(array))
        elif port in CACHES:
            appended = isinstance(op, ops.SumScores) or getattr(op, "reads", False)
            known = position + (m if appended else 0)
            random_rows(cache_rows(op, array), known, rng, keys=port == "k_cache")
        elif port in ADDED_PORTS:
            array[:] = rng.random(array.shape)
        elif port in STATE_PORTS:
            array[:] = rng.standard_normal(array.shape) if position else np.nan
        elif port not in ("codes", "table"):
            array[:] = np.nan
            if port not in OUTPUT_PORTS:
                array[:m] = rng.standard_normal(array[:m].shape)
    if isinstance(op, ops.Experts):
        tensors["routes"].array[:m] = random_routes(op, m, rng)
    if isinstance(op, ops.DecodeChunks):
        tensors["codes"].array[:], tensors["table"].array[:m] = random_chunks(op, m, rng)
    return tensors


def _new(op: Op, port: str, m: int, device: Device | None) -> Tensor:
    shape, dtype = port_shape(op, port, m), port_dtype(op, port)
    offset = 64
    nbytes = offset + int(np.prod(shape)) * dtype.itemsize
    buffer = HostBuffer(nbytes) if device is None else device.allocate(nbytes)
    if device is not None:
        device.map(buffer)
    return Tensor(buffer, shape, dtype, offset)


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Copies of all tensors."""
    return {port: tensor.array.copy() for port, tensor in tensors.items()}


def expected(
    op: Op, weights: Mapping[str, WeightValue], before: Mapping[str, npt.NDArray[Any]], m: int
) -> dict[str, npt.NDArray[Any]]:
    """What the tensors must hold after a call of m tokens that found them as `before`."""
    after = {port: array.copy() for port, array in before.items()}
    run, _ = program(op, weights)
    run({port: a if port in FIXED_PORTS else a[:m] for port, a in after.items()})
    return after


def execute(device: Device, call: BoundCall) -> None:
    """Run a call to its end in the device's own way."""
    if device.capabilities.asynchronous:
        call.submit().wait(30.0)
    else:
        call.run()


def check_call(
    device: Device,
    kernel: Kernel,
    weights: Mapping[str, WeightValue],
    tensors: Mapping[str, Tensor],
    m: int,
) -> BoundCall:
    """Bind, run, and compare every tensor with the reference; returns the bound call."""
    call = kernel.bind(tensors, m)
    check_run(device, kernel.op, call, weights, tensors)
    return call


def check_run(
    device: Device,
    op: Op,
    call: BoundCall,
    weights: Mapping[str, WeightValue],
    tensors: Mapping[str, Tensor],
) -> None:
    """Run a bound call: outputs are right, everything else is untouched."""
    m = call.m
    before = snapshot(tensors)
    wanted = expected(op, weights, before, m)
    execute(device, call)
    for port, tensor in tensors.items():
        what = f"{describe(op)} m={m}: {port}"
        if isinstance(op, ops.Router) and port in OUTPUT_PORTS:
            chosen = slice(0, op.chosen)  # numbers, which are exact
            np.testing.assert_array_equal(tensor.array[:m, chosen], wanted[port][:m, chosen], what)
        if port in OUTPUT_PORTS:
            actual, limit = tensor.array[:m], tolerance(op, device)
            assert_close(actual, wanted[port][:m], limit, what, floor=floor(op, device))
            np.testing.assert_array_equal(tensor.array[m:], before[port][m:], f"{what} rows ≥ m")
        elif port in (*ADDED_PORTS, *STATE_PORTS):
            assert_close(tensor.array, wanted[port], tolerance(op, device), what)
        else:
            np.testing.assert_array_equal(tensor.array, wanted[port], what)


# An emulated device takes about 8 µs for an exponential; what it is given of other operations.
EMULATED_VALUES = 20_000


def _affordable(device: Device, op: Op, ms: tuple[int, ...]) -> tuple[int, ...]:
    """Token counts without those that an emulator takes seconds for; matmuls keep all. Of emulated
    fp16, whose kernels compile for seconds, the gate takes the least and the largest.
    """
    if getattr(device, "half", 0) == 2 and not exhaustive():
        ms = tuple(dict.fromkeys((ms[0], ms[-1])))
    if "emulated" not in device.info.details or isinstance(op, ops.MatMul):
        return ms
    width = int(np.prod(port_shape(op, op.ports[0], 1)))
    return tuple(m for m in ms if m * width <= EMULATED_VALUES) or ms[:1]


def check_op(device: Device, op: Op, ms: tuple[int, ...], *, seed: int = 0) -> None:
    """One kernel, several token counts, each on fresh tensors with two spare rows."""
    require(device, op)
    rng = np.random.default_rng(seed)
    weights = make_weights(op, rng)
    kernel = device.prepare(op, weights)
    for m in _affordable(device, op, ms):
        tensors = make_tensors(op, m, rng, spare_rows=2, device=device)
        check_call(device, kernel, weights, tensors, m)

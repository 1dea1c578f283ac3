"""The cases of a self-test: every family of kernels once, on random data, against numpy.

A family is one kernel source with one set of features: matmuls of each weight format for one token,
a few and many; attention by rows and by tiles; norms, rotations, activations, sums, look-ups, and
the flag and signal that synchronisation uses. Shapes are small and most odd, so that tails run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import CacheFormat, StorageFormat, WeightFormat
from hetero.backends.kv_codes import random_channels, random_chunks
from hetero.backends.kv_rows import cache_rows, random_rows
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.gpu_capabilities import WEIGHT_FORMATS
from hetero.backends.ops import (
    ADDED_PORTS,
    OUTPUT_PORTS,
    STATE_PORTS,
    Op,
    describe,
    weight_names,
)
from hetero.backends.protocol import CACHE_PORTS, FIXED_PORTS, WeightValue, port_dtype, port_shape
from hetero.backends.reference.compute import program
from hetero.backends.weights import pack

SEED: Final = 20260101
POSITION: Final = 21  # tokens before the call's first, for what depends on positions
DEADLINE_S = 30.0


class WrongResultError(Exception):
    """A kernel computed something else than its twin; says which and by how much."""


@dataclass(frozen=True)
class Case:
    """An operation at some token counts.

    `tolerance` is the largest difference from the twin, as a part of the twin's largest value: a
    kernel that is right differs by a hundredth of it.
    """

    op: Op
    tokens: tuple[int, ...]
    tolerance: float = 1e-4


def cases() -> Iterator[Case]:
    """Return every family; fast compiling ones come first, so that a fault shows soon."""
    # Programs that name a shape take the demo model's, which then loads what is compiled here.
    attention = ops.Attention(heads=8, kv_heads=4, head_dim=32, capacity=1024, kv=CacheFormat.F16)
    yield Case(ops.Add(d=101), (9,))
    yield Case(ops.RMSNorm(d=256, eps=1e-5), (1, 9))
    yield Case(ops.RMSNorm(d=256, eps=1e-5, add=True), (9,))
    yield Case(ops.LayerNorm(d=101, eps=1e-5), (9,))
    yield Case(ops.Outliers(n=101, k=76, hot=5), (1, 9))
    yield Case(ops.Outliers(n=101, k=76, hot=5, excess=True), (9,))
    yield Case(ops.GatedAct(f=101), (9,))
    yield Case(ops.ShortConv(d=101, taps=3, gated=True), (1, 40))
    delta = ops.GatedDelta(k_heads=2, v_heads=4, k_dim=128, v_dim=128, eps=1e-6)
    yield Case(delta, (1, 40))
    yield Case(ops.ShortConv(d=101, taps=4, activation="silu"), (2, 40))
    yield Case(ops.Act(f=101, activation="gelu_tanh"), (9,))
    yield Case(ops.AddPositions(d=101, rows=64), (9,))
    yield Case(ops.Embed(vocab=40, d=256, weight_format=WeightFormat.W4A16), (7,))
    yield Case(ops.Rope(heads=8, kv_heads=4, head_dim=32, theta=1e4, max_position=64), (1, 9))
    yield Case(attention, (1, 40))
    yield Case(replace(attention, capacity=100, window=9), (1, 40))  # by the same program
    yield Case(replace(attention, kv=CacheFormat.Q8), (1, 40))
    yield Case(ops.SumScores(attention=attention, every=2), (1, 40))
    chunks = ops.DecodeChunks(kv_heads=4, head_dim=32, capacity=1024, room=1 << 16)
    yield Case(replace(chunks, kv=attention.kv), (6,))
    coded = replace(chunks, by_token=True, keys_by_token=True, kv=CacheFormat.Q8)
    yield Case(coded, (6,))
    for name in (x for x in WEIGHT_FORMATS if not x.of_file):  # whose kernels depend on the file
        integers = name.activations.static  # of the same codes as the twin's
        tokens = (1, 4, 40) if name.storage is StorageFormat.Q4 or integers else (1, 40)
        op = ops.MatMul(n=83, k=160, weight_format=name)
        yield Case(op, tokens) if integers else Case(op, tokens, name.tolerance)


def try_cases(device: OpenCLDevice, part: int = 0, of: int = 1) -> Iterator[tuple[int, int]]:
    """Run every `of`-th case from `part` on; yield (done, of how many) after each.

    The last part also tries the flag and the signal. Raises `WrongResultError` or `DeviceError`.
    """
    listed = list(cases())[part::of]
    random = np.random.default_rng(SEED)
    for number, case in enumerate(listed, 1):
        _try(device, case, random)
        yield number, len(listed)
    if part == of - 1 and device.flag() is not None:
        device.stream_signal()
    device.finish()


def _try(device: OpenCLDevice, case: Case, random: np.random.Generator) -> None:
    weights = random_weights(case.op, random)
    kernel = device.prepare(case.op, weights)
    for m in case.tokens:
        tensors = random_tensors(device, case.op, m, random)
        before = {port: tensor.array.copy() for port, tensor in tensors.items()}
        wanted = _expected(case.op, weights, before, m)
        kernel.bind(tensors, m).submit().wait(DEADLINE_S)
        for port, tensor in tensors.items():
            rounded = port in OUTPUT_PORTS | ADDED_PORTS | {*STATE_PORTS}
            off = _difference(tensor.array, wanted[port], exact=not rounded)
            limit = case.tolerance if rounded else 1e-6
            if not off <= limit:
                raise WrongResultError(
                    f"{describe(case.op)} of {m} tokens is off by {off:.2g} of its largest {port}"
                )


def random_weights(op: Op, random: np.random.Generator) -> dict[str, WeightValue]:
    """Return the weights of an operation."""
    weights_of: dict[str, WeightValue] = {}
    for name in weight_names(op):
        match op:
            case ops.MatMul() | ops.Embed() if name == "weight":
                n, k = (op.n, op.k) if isinstance(op, ops.MatMul) else (op.vocab, op.d)
                values = random.standard_normal((n, k), dtype=np.float32)
                weights_of[name] = pack(values, op.weight_format.storage)
            case ops.Outliers():
                weights_of[name] = outlier_weight(op, name, random)
            case ops.MatMul() if name == "x_scale":
                weights_of[name] = np.full(1, random.uniform(0.02, 0.04), dtype=np.float32)
            case ops.MatMul():
                weights_of[name] = random.standard_normal(op.n, dtype=np.float32)
            case ops.AddPositions():
                weights_of[name] = random.standard_normal(op.rows * op.d, dtype=np.float32)
            case ops.Rope():
                weights_of[name] = random.standard_normal(op.head_dim, dtype=np.float32)
            case ops.ShortConv():
                count = op.taps * op.d if name == "taps" else op.d
                weights_of[name] = random.standard_normal(count, dtype=np.float32)
            case ops.GatedDelta():
                count = op.v_dim if name == "norm" else op.v_heads
                weights_of[name] = random.uniform(-2.0, -0.1, count).astype(np.float32)
            case ops.DecodeChunks():
                weights_of[name] = random_channels(op, random)
            case ops.RMSNorm() | ops.LayerNorm():
                weights_of[name] = random.standard_normal(op.d, dtype=np.float32)
    return weights_of


def outlier_weight(op: ops.Outliers, name: str, random: np.random.Generator) -> WeightValue:
    """Return a weight of an `Outliers`; a tenth of standard normal activations is in excess."""
    match name:
        case "hot":
            return np.sort(random.choice(op.k, op.hot, replace=False)).astype(np.int32)
        case "hot_weight":
            return pack(random.standard_normal((op.n, op.hot), np.float32), StorageFormat.F16)
        case "weight":
            return pack(random.standard_normal((op.n, op.k), np.float32), StorageFormat.Q8R)
        case _:
            return np.full(1, 1.6 / 127, np.float32)


def random_tensors(
    device: OpenCLDevice, op: Op, m: int, random: np.random.Generator
) -> dict[str, Tensor]:
    """Return inputs in the device's memory; outputs and cache rows not written yet are NaN."""
    tensors = {}
    for port in op.ports:
        tensor = new_tensor(port_shape(op, port, m), port_dtype(op, port), device.allocate)
        array = tensor.array
        if port == "position":
            array[:] = POSITION
        elif port == "tokens":
            assert isinstance(op, ops.Embed)
            array[:] = random.integers(0, op.vocab, array.shape)
        elif port in CACHE_PORTS:
            known = POSITION + (m if isinstance(op, ops.SumScores) else 0)
            random_rows(cache_rows(op, array), known, random, keys=port == "k_cache")
        elif port in OUTPUT_PORTS:
            array[:] = np.nan
        else:
            array[:] = random.standard_normal(array.shape)
        tensors[port] = tensor
    if isinstance(op, ops.DecodeChunks):
        tensors["codes"].array[:], tensors["table"].array[:] = random_chunks(op, m, random)
    return tensors


def _expected(
    op: Op, weights: Mapping[str, WeightValue], before: Mapping[str, npt.NDArray[Any]], m: int
) -> dict[str, npt.NDArray[Any]]:
    """Return every tensor after the call, by `hetero.backends.reference`."""
    after = {port: array.copy() for port, array in before.items()}
    run, _ = program(op, weights)
    run({port: a if port in FIXED_PORTS else a[:m] for port, a in after.items()})
    return after


def _difference(got: npt.NDArray[Any], wanted: npt.NDArray[Any], *, exact: bool) -> float:
    """Return largest difference as a part of the largest wanted value.

    Infinite where one is NaN alone.
    """
    same = np.isnan(got) & np.isnan(wanted) if got.dtype.kind == "f" else np.zeros(1, bool)
    scale = np.nanmax(np.abs(wanted), initial=0.0)
    off = np.where(same, 0.0, np.abs(got.astype(np.float64) - wanted))
    worst = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
    if worst == 0.0:
        return 0.0
    return worst if exact or scale == 0.0 else worst / float(scale)

"""Null devices on one virtual clock, with times that are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hetero.backends import null
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import ManualClock
from hetero.backends.null import NullDevice
from hetero.backends.ops import MatMul, Op
from hetero.backends.protocol import DeviceKind
from hetero.profiler.features import weight_bytes
from hetero.profiler.measure import MeasureSettings
from hetero.profiler.non_matmul_ops import BLOCKS
from hetero.profiler.options import Options
from hetero.profiler.records import (
    CapabilityRecord,
    DeviceProfile,
    DeviceRecord,
    Knots,
    MatMulRow,
)

W4 = WeightFormat.W4A16
GRAPHS = (1, 2, 4, 8, 32, 64, 128, 256)
PAIRS = ((512, 512), (1024, 512), (512, 1024), (2048, 2048), (4096, 1024), (1024, 4096))
TOKENS = (1, 4, 8, 32, 128, 256)
Cost = Callable[[Op, int], float]


def gpu_cost(op: Op, m: int) -> float:
    """10 µs, then 20 GB/s of weights up to 4 tokens and 100 GFLOP/s of the tokens above them."""
    if not isinstance(op, MatMul):
        return 5e-6
    memory = float(weight_bytes(W4, op.n, op.k)) / 20e9
    return 10e-6 + memory + max(m - 4, 0) * 2.0 * op.n * op.k / 100e9


def npu_cost(op: Op, m: int) -> float:
    """5 µs, 10 GB/s, 200 GFLOP/s in stages of 32 tokens and 64 rows; tall weights take 1.5×."""
    if not isinstance(op, MatMul):
        return 8e-6
    rows, tokens = -(-op.n // 64) * 64, m if m <= 8 else -(-m // 32) * 32
    seconds = float(weight_bytes(W4, rows, op.k)) / 10e9 + tokens * 2.0 * rows * op.k / 200e9
    return 5e-6 + seconds * (1.5 if op.k >= 2 * op.n else 1.0)


def devices(
    clock: ManualClock, *, gpu: Cost = gpu_cost, npu: Cost = npu_cost
) -> dict[DeviceKind, NullDevice]:
    """An asynchronous GPU and an NPU with static shapes."""
    return {
        "gpu": null.open(kind="gpu", asynchronous=True, cost=gpu, clock=clock),
        "npu": null.open(kind="npu", graph_sizes=GRAPHS, cost=npu, clock=clock, row_alignment=32),
    }


def options(**changes: object) -> Options:
    """A small grid, and a single block's operations with it, which take longest; every task
    converges at once on a virtual clock.
    """
    base = Options(
        pairs=PAIRS, tokens=TOKENS, power=False, settings=MeasureSettings(task_s=60.0),
        budget_s=600.0, blocks=BLOCKS[-1:],
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def record(kind: DeviceKind, **capabilities: object) -> DeviceRecord:
    """A device record without a device."""
    declared = CapabilityRecord.model_validate(
        {"weight_formats": list(WeightFormat)} | capabilities
    )
    return DeviceRecord(
        backend="null", name=kind, driver="none", fingerprint=kind, capabilities=declared
    )


def row(device: DeviceKind, m: int, n: int, k: int, seconds: float, **more: object) -> MatMulRow:
    """A measured row."""
    return MatMulRow.model_validate(
        {"device": device, "weight_format": W4, "m": m, "n": n, "k": k, "seconds": seconds,
         "ci": 0.01, "samples": 9} | more
    )  # fmt: skip


def rows_of(device: DeviceKind, cost: Cost) -> list[MatMulRow]:
    """The whole small grid, as `cost` says."""
    return [
        row(device, m, n, k, cost(MatMul(n=n, k=k, weight_format=W4), m))
        for n, k in PAIRS
        for m in TOKENS
    ]


def knots(*points: tuple[int, float]) -> Knots:
    """Knots that depend on n·k alone."""
    return Knots(
        tokens=tuple(m for m, _ in points),
        coefficients=tuple((0.0, 0.0, 0.0, value) for _, value in points),
    )


def sizes(*values: int) -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
    """One-element float arrays, as the predictors take them."""
    return tuple(np.asarray([float(value)]) for value in values)


def only_formats(profile: DeviceProfile, *formats: WeightFormat) -> DeviceProfile:
    """A profile that measured no other weight formats."""
    return profile.model_copy(
        update={
            name: tuple(x for x in getattr(profile, name) if x.weight_format in formats)
            for name in ("matmuls", "predictors", "every_core")
        }
    )


def without_ops(profile: DeviceProfile, *ops: str) -> DeviceProfile:
    """A profile of before these operators were timed, in any format."""
    return profile.model_copy(
        update={
            name: tuple(x for x in getattr(profile, name) if x.op.split("+")[0] not in ops)
            for name in ("others", "other_predictors")
        }
    )

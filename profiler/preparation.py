"""The time to prepare graphs and kernels, by size, cold and with warm caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock
from hetero.backends.memory import new_tensor
from hetero.backends.ops import MatMul
from hetero.backends.protocol import Device, DeviceKind, WeightValue
from hetero.profiler.features import weight_bytes
from hetero.profiler.fit import fit_nonnegative
from hetero.profiler.records import PreparationPredictor, PreparationRow
from hetero.profiler.workload import WeightPool


def measure_preparation(
    devices: Mapping[DeviceKind, Device],
    pool: WeightPool,
    clock: Clock,
    pairs: Sequence[tuple[int, int]],
    weight_formats: Iterable[WeightFormat],
    *,
    sizes: int = 12,
    weights_each: int = 3,
    checkpoint: Callable[[], None] = lambda: None,
) -> list[PreparationRow]:
    """Prepare `sizes` of the pairs from the smallest to the largest.

    What the first run of a new kernel takes with its preparation and the end of it, less what the
    next run takes.

    Each is prepared for `weights_each` weights, then again for the last of them. A graph of static
    shapes holds its weight, so that all are new and their median is the cold time (one alone may be
    twice as long, by where its memory comes from); kernels that compute any weight are new once.
    The smallest is prepared once before: the first of all costs more, and comes once. `checkpoint`
    is called before each pair.
    """
    ordered = sorted(set(pairs), key=lambda pair: pair[0] * pair[1])
    at = np.unique(np.linspace(0, len(ordered) - 1, sizes).round().astype(int))
    rows = []
    for kind, device in devices.items():
        for weight_format in weight_formats:
            if weight_format not in device.capabilities.weight_formats:
                continue
            first = MatMul(n=ordered[0][0], k=ordered[0][1], weight_format=weight_format)
            _once(device, first, pool.weights(first), clock)
            for n, k in (ordered[i] for i in at):
                checkpoint()
                op = MatMul(n=n, k=k, weight_format=weight_format)
                weights = [pool.weights(op) for _ in range(weights_each)]
                cold = [_once(device, op, weight, clock) for weight in weights]
                new = cold if device.capabilities.static_shapes else cold[:1]
                cached_s = _once(device, op, weights[-1], clock)
                rows.append(
                    PreparationRow(
                        device=kind,
                        weight_format=weight_format,
                        n=n,
                        k=k,
                        cold_s=median(new),
                        cached_s=cached_s,
                    )
                )
    return rows


def fit_preparation(rows: Iterable[PreparationRow]) -> tuple[PreparationPredictor, ...]:
    """Return fixed time and time per byte of the weight, for each device and format."""
    groups: dict[tuple[DeviceKind, WeightFormat], list[PreparationRow]] = {}
    for row in rows:
        groups.setdefault((row.device, row.weight_format), []).append(row)
    return tuple(_fit(kind, f, rows) for (kind, f), rows in sorted(groups.items()))


def _once(device: Device, op: MatMul, weights: Mapping[str, WeightValue], clock: Clock) -> float:
    sizes = device.capabilities.graph_sizes
    m = min(sizes) if sizes else 1
    x, y = new_tensor((m, op.k)), new_tensor((m, op.n))
    begin_s = clock.now()
    call = device.prepare(op, weights).bind({"x": x, "y": y}, m)
    call.run()  # some backends finish here what they put off
    first_s = clock.now() - begin_s
    begin_s = clock.now()
    call.run()
    next_s = clock.now() - begin_s
    begin_s = clock.now()
    del call  # and with it the kernel
    freed_s = clock.now() - begin_s
    return max(first_s - next_s + freed_s, 0.0)


def _fit(
    kind: DeviceKind, weight_format: WeightFormat, rows: Sequence[PreparationRow]
) -> PreparationPredictor:
    sizes = [float(weight_bytes(weight_format, row.n, row.k)) for row in rows]
    columns = np.stack((np.ones(len(rows)), np.asarray(sizes)), axis=1)
    # Relative errors need times above 0.
    cold = fit_nonnegative(columns, np.asarray([max(row.cold_s, 1e-7) for row in rows]))
    cached = fit_nonnegative(columns, np.asarray([max(row.cached_s, 1e-7) for row in rows]))
    return PreparationPredictor(
        device=kind,
        weight_format=weight_format,
        fixed_s=float(cold[0]),
        s_per_byte=float(cold[1]),
        cached_fixed_s=float(cached[0]),
        cached_s_per_byte=float(cached[1]),
    )

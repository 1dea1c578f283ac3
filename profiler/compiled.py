"""Compiler mode: a profile of a chip that is not at hand, from its compiler's schedules.

Qualcomm's compiler runs on a PC and writes for each graph what the NPU will do with it
(`hetero.backends.qnn.optrace`). A small physical model turns that into seconds:

    seconds = launches · launch_s + max(DRAM bytes / dram, vector-unit bytes / hvx)

`dram` is the bandwidth that one processor reaches (measured by the paper, not fitted); `launch_s`
and `hvx` are fitted to published timings of the Snapdragon 8 Gen 3 (`bench/lab/chip_fit.py`). The
vector units unpack 4-bit weights and arrange activations: their traffic explains the timings better
than the matrix unit's or the memory's (docs/explanation/qnn.md has the errors, which are large).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.host.clock import Clock, SystemClock
from hetero.backends.host.folders import cache_folder
from hetero.backends.ops import MatMul
from hetero.backends.qnn.npu_capabilities import (
    DEFAULT_GRAPH_SIZES,
    STANDARD_GRAPH_SIZES,
    capabilities_of,
)
from hetero.backends.snapdragon import find_chip
from hetero.backends.weights import PackedWeight, data_shape, scales_shape
from hetero.profiler.environment import hetero_version
from hetero.profiler.errors import ProfileError
from hetero.profiler.fit import fit
from hetero.profiler.options import DEFAULT_BUDGET_S, Event
from hetero.profiler.preparation import fit_preparation
from hetero.profiler.profile_files import shipped_path
from hetero.profiler.records import (
    CapabilityRecord,
    Coverage,
    DeviceProfile,
    DeviceRecord,
    MatMulRow,
    PreparationRow,
)

if TYPE_CHECKING:
    from hetero.backends.qnn.optrace import Schedule, ScheduleStore

# Everything that is not the NPU's matmuls comes from this profile.
BASE_PROFILE = "snapdragon-8-gen-3"
WEIGHTS = WeightFormat.W4A16  # the only format with published timings
LOADING_S = 0.02
TOKENS = STANDARD_GRAPH_SIZES
SHAPES = ((2048, 2048), (3072, 2048), (2048, 8192), (16384, 2048), (4096, 4096), (6144, 4096))


class CallWork(NamedTuple):
    """Work of a call: graphs it launches, bytes from DRAM and through HVX."""

    launches: float
    dram_bytes: float
    hvx_bytes: float


@dataclass(frozen=True)
class ChipModel:
    """Constants of the formula in the module's docstring."""

    launch_s: float
    dram_bytes_per_s: float
    hvx_bytes_per_s: float

    def seconds(self, work: CallWork) -> float:
        """Return the predicted time of a call."""
        memory = work.dram_bytes / self.dram_bytes_per_s
        return work.launches * self.launch_s + max(memory, work.hvx_bytes / self.hvx_bytes_per_s)


# `bench/paper.py schedules` fits these to the six timings and prints the errors.
SNAPDRAGON_8_GEN_3 = ChipModel(launch_s=0.0, dram_bytes_per_s=43.3e9, hvx_bytes_per_s=65.2e9)


class Scheduler:
    """Schedules of matmuls on one chip, from the cache or the compiler."""

    def __init__(self, soc: str, directory: Path | None = None) -> None:
        from hetero.backends.qnn.library import load
        from hetero.backends.qnn.optrace import ScheduleStore
        from hetero.backends.qnn.session import Target

        try:
            chip = find_chip(soc)
        except ValueError as error:
            raise ProfileError(str(error)) from None
        folder = directory or cache_folder() / "qnn-schedules"
        self.store: ScheduleStore = ScheduleStore(Target(load(), chip), folder)

    def schedule(self, n: int, k: int, rows: int) -> Schedule:
        """Return what one graph of `rows` tokens does."""
        from hetero.backends.qnn import catalog

        op = MatMul(n=n, k=k, weight_format=WEIGHTS)
        return self.store.find(*catalog.graph(op, rows, {"weight": _random_weight(n, k)}, "random"))

    def preparation_s(self, n: int, k: int, tokens: Sequence[int]) -> float:
        """Return seconds to compile the graphs of all these token counts."""
        counts = {rows for m in tokens for rows in _launches(n, k, m)}
        return sum(self.schedule(n, k, rows).prepare_s for rows in counts)

    def work(self, n: int, k: int, m: int) -> CallWork:
        """Return what a call of m tokens does in all its launches."""
        schedules = [self.schedule(n, k, rows) for rows in _launches(n, k, m)]
        return CallWork(
            len(schedules),
            sum(schedule.dram_bytes for schedule in schedules),
            sum(schedule.hvx.vtcm_bytes for schedule in schedules),
        )

    def close(self) -> None:
        """End the compiling process."""
        self.store.close()


def _launches(n: int, k: int, m: int) -> list[int]:
    from hetero.backends.qnn import catalog

    return catalog.chunks(MatMul(n=n, k=k, weight_format=WEIGHTS), m)


def _random_weight(n: int, k: int) -> PackedWeight:
    """Return the values that cannot be stored shorter.

    The compiler folds scales that are all alike.
    """
    random = np.random.default_rng(0)
    codes = random.integers(0, 2**32, data_shape(StorageFormat.Q4, n, k), dtype=np.uint32)
    scales = (0.01 * (1 + random.random(scales_shape(StorageFormat.Q4, n, k)))).astype(np.float16)
    return PackedWeight(StorageFormat.Q4, n, k, codes, scales)


def compiler_profile(
    soc: str,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] | None = None,
    *,
    budget_s: float = DEFAULT_BUDGET_S,
    directory: Path | None = None,
    clock: Clock | None = None,
    progress: Callable[[Event], None] | None = None,
) -> DeviceProfile:
    """Return the profile of a chip by its compiler.

    NPU matmuls are `compiler-predicted`, the rest is simulated. Small weights come first; those
    that would take longer than the budget has left are predicted from the others.

    Raises `ProfileError`, `DeviceError`.
    """
    tokens, clock = tokens or TOKENS, clock or SystemClock()
    scheduler = Scheduler(soc, directory)
    rows: list[MatMulRow] = []
    preparation: list[PreparationRow] = []
    start_s = now_s = clock.now()
    wanted = [(n, k, m) for n, k in sorted(set(shapes), key=math.prod) for m in tokens]
    slowest = 0.0  # seconds to compile a graph, for each of its weights
    try:
        for done, (n, k, m) in enumerate(wanted):
            left_s = budget_s - (now_s - start_s)
            if rows and slowest * n * k > left_s:
                break
            if progress is not None:
                progress(Event(f"compiling {n}×{k}", done, len(wanted), max(left_s, 0.0)))
            rows.append(_row(scheduler, n, k, m))
            before_s, now_s = now_s, clock.now()
            slowest = max(slowest, (now_s - before_s) / (n * k))
            if m == tokens[-1]:
                preparation.append(_preparation(scheduler, n, k, tokens))
    finally:
        scheduler.close()
    coverage = Coverage(
        budget_s=budget_s,
        spent_s=now_s - start_s,
        grid_tasks=len(wanted),
        measured_tasks=len(rows),
        finished=len(rows) == len(wanted),
    )
    return _assemble(soc, rows, preparation, coverage)


def _row(scheduler: Scheduler, n: int, k: int, m: int) -> MatMulRow:
    seconds = SNAPDRAGON_8_GEN_3.seconds(scheduler.work(n, k, m))
    return MatMulRow(device="npu", weight_format=WEIGHTS, m=m, n=n, k=k, seconds=seconds)


def _preparation(scheduler: Scheduler, n: int, k: int, tokens: Sequence[int]) -> PreparationRow:
    """Return the times of compiling all graphs of a weight here, and of loading them.

    Loading is at its measured bound.
    """
    seconds = scheduler.preparation_s(n, k, tokens)
    return PreparationRow(
        device="npu", weight_format=WEIGHTS, n=n, k=k, cold_s=seconds, cached_s=LOADING_S
    )


def _assemble(
    soc: str,
    rows: Sequence[MatMulRow],
    preparation: Sequence[PreparationRow],
    coverage: Coverage,
) -> DeviceProfile:
    from hetero.backends.qnn.opening import open as open_qnn

    base = DeviceProfile.load(shipped_path(BASE_PROFILE))
    able = capabilities_of(find_chip(soc), DEFAULT_GRAPH_SIZES, shared_weights=True)  # of a bundle
    with open_qnn(soc=soc, cache=None, ahead=True) as npu:
        launches = {"launch_tokens": npu.capabilities.launch_tokens}
        declared = CapabilityRecord.of(able).model_copy(update=launches)
        record = DeviceRecord.of(npu).model_copy(
            update={"numbers": "compiler-predicted", "capabilities": declared}
        )
    predictors = [p for p in base.predictors if p.device == "gpu"]
    timed = tuple(sorted({row.m for row in rows}))  # more graphs than are opened
    graphs = record.capabilities.model_copy(update={"graph_sizes": timed})
    fitted = fit(record.model_copy(update={"capabilities": graphs}), rows)
    return base.model_copy(
        update={
            "name": soc,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "hetero_version": hetero_version(),
            "coverage": coverage,
            "devices": base.devices | {"npu": record},
            "predictors": (*predictors, fitted),
            "matmuls": tuple(rows),
            "preparation": tuple(preparation),
            "preparation_predictors": fit_preparation(preparation),
            "notes": (
                f"NPU matmuls are compiler-predicted for {soc}: the schedule is the chip's, the "
                "speeds are those of the Snapdragon 8 Gen 3, with errors of about 40 %",
                f"everything else is simulated, from the profile {BASE_PROFILE}",
            ),
        }
    )

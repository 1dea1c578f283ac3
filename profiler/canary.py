"""The numeric canary: finds kernels that compute wrongly before they are timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from hetero.backends.errors import DeviceError
from hetero.backends.memory import Tensor
from hetero.backends.ops import Experts, Op
from hetero.backends.protocol import DeviceKind
from hetero.backends.weights import PackedWeight
from hetero.profiler.grid import Task, shape_class
from hetero.profiler.predict import Floats, op_name
from hetero.profiler.records import Quarantine
from hetero.profiler.workload import TaskRunner

OTHER_TOLERANCE: Final = 1e-4
CHECKED_ROWS: Final = 48  # at each end and in the middle of the weight
CHECKED_TOKENS: Final = 16  # at each end of the sequence


def check_matmul(task: Task, runner: TaskRunner) -> Quarantine | None:
    """Run every copy of a task's kernel once; the entry to make if it is wrong, or fails."""
    try:
        errors = [_error(runner, copy) for copy in range(len(runner.calls))]
    except DeviceError as error:
        return _entry(task, None, str(error))
    worst = max(errors, key=lambda error: error if np.isfinite(error) else np.inf)
    if worst <= task.weight_format.tolerance:
        return None
    return _entry(task, worst if np.isfinite(worst) else None, "")


def failed_matmul(task: Task, reason: str) -> Quarantine:
    """Return the entry of a kernel that could not be prepared or launched."""
    return _entry(task, None, reason)


def check_other(
    kind: DeviceKind, op: Op, actual: Mapping[str, Tensor], wanted: Mapping[str, Floats]
) -> Quarantine | None:
    """Compare an operation's outputs with the reference's."""
    errors = [relative_error(actual[port].array, value) for port, value in wanted.items()]
    worst = max(errors, key=lambda error: error if np.isfinite(error) else np.inf)
    # Experts are three matmuls, two in a row.
    tolerance = 3 * op.weight_format.tolerance if isinstance(op, Experts) else OTHER_TOLERANCE
    if worst <= tolerance:
        return None
    finite = worst if np.isfinite(worst) else None
    return Quarantine(
        device=kind,
        op=op_name(op),
        error=finite,
        tolerance=tolerance,
        detail=_detail(op_name(op), finite, tolerance),
    )


def relative_error(actual: Floats, wanted: Floats) -> float:
    """Return ‖actual - wanted‖ / ‖wanted‖ in float64; NaN where anything is not finite."""
    difference = np.linalg.norm(np.asarray(actual, dtype=np.float64) - wanted)
    return float(difference / max(float(np.linalg.norm(wanted)), 1e-30))


def checked(size: int, ends: int) -> list[slice]:
    """Return the parts of a dimension that are compared.

    Both ends and the middle, on multiples of 16.
    """
    if size <= 3 * ends:
        return [slice(0, size)]
    middle = size // 2 // 16 * 16
    last = (size - ends) // 16 * 16
    return [slice(0, ends), slice(middle, middle + ends), slice(last, size)]


def _error(runner: TaskRunner, copy: int) -> float:
    y = runner.y.array
    y[...] = np.nan  # what the kernel does not write stays wrong
    runner.launch([copy])
    weight = runner.weights[copy]
    tokens = checked(y.shape[0], CHECKED_TOKENS)
    x = np.concatenate([runner.x.array[part] for part in tokens]).astype(np.float64)
    errors = []
    for part in checked(weight.n, CHECKED_ROWS):
        rows = _rows(weight, part).astype(np.float64)
        got = np.concatenate([y[at, part] for at in tokens])
        errors.append(relative_error(got, x @ rows.T))
    return max(errors, key=lambda error: error if np.isfinite(error) else np.inf)


def _rows(weight: PackedWeight, part: slice) -> npt.NDArray[np.float32]:
    return weight.rows(part.start, part.stop).dequantize()


def _entry(task: Task, error: float | None, failure: str) -> Quarantine:
    name = f"MatMul {task.weight_format.value} ({task.order}) of {task.m}×{task.n}×{task.k}"
    tolerance = task.weight_format.tolerance
    return Quarantine(
        device=task.device,
        op="MatMul",
        weight_format=task.weight_format,
        order=task.order,
        shape_class=shape_class(task.m, task.n, task.k),
        error=error,
        tolerance=tolerance,
        detail=failure or _detail(name, error, tolerance),
    )


def _detail(name: str, error: float | None, tolerance: float) -> str:
    problem = "gives values that are not finite" if error is None else f"is off by {error:.2g}"
    return f"{name} {problem} of its size (tolerance {tolerance:.2g})"

"""Finds values that are not finite, and the call that wrote the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hetero.backends.errors import DeviceError
from hetero.backends.protocol import Completion, Device, DeviceKind, Operand, parts_of
from hetero.runtime.handover import fetch
from hetero.runtime.program import PREQUEUE, RUN, SUBMIT, Launch
from hetero.runtime.step import Step


def all_finite(values: npt.NDArray[np.float32]) -> bool:
    """Return whether all values are finite."""
    return bool(np.isfinite(values).all())


def norms_finite(rows: npt.NDArray[np.float32]) -> bool:
    """Return `all_finite` of a norm's output [m, d] by checking two columns.

    A value in a row that is not finite makes the mean square of the row so, and then every value of
    the row is zero or not a number.
    """
    first = rows[:, :2]
    suspect = ~np.isfinite(first).all(axis=1) | (first == 0).all(axis=1)
    return not suspect.any() or all_finite(rows[suspect])


def first_not_finite(step: Step, devices: Mapping[DeviceKind, Device]) -> Launch | None:
    """Return the first launch of a step whose result has a value that is not finite, or None.

    The step is run again, call by call. Tokens and position must be those of its last run. A step
    with wait values cannot be run so.
    """
    for action in step.program:
        if action.code not in (SUBMIT, PREQUEUE, RUN):
            continue
        launch = step.launches[action.launch]
        completion: Completion | None = cast("Any", action.target)()
        if completion is not None:
            completion.wait()
            fetch(devices[launch.kind], (x for y in launch.outputs for x in parts_of(y)))
        count = launch.tokens[1] - launch.tokens[0]
        if not all(_rows_finite(operand, count) for operand in launch.outputs):
            return launch
    return None


def not_finite(launch: Launch | None, devices: Mapping[DeviceKind, Device]) -> DeviceError:
    """Return the error that names the launch, where one is known."""
    why = "values are not finite: weights are damaged, or too large for this arithmetic"
    if launch is None:
        return DeviceError("engine", "computing the logits", "NOT_FINITE", why)
    return DeviceError(
        devices[launch.kind].info.backend,
        f"computing {launch.node} ({launch.call.name}) on the {launch.kind}",
        "NOT_FINITE",
        f"{why}; try other --weights, or --device {'npu' if launch.kind == 'gpu' else 'gpu'}",
    )


def _rows_finite(operand: Operand, count: int) -> bool:
    return all(all_finite(part.array[:count]) for part in parts_of(operand))

"""Try whether the Hexagon computes at all when a device is opened.

The provider lists an NPU wherever its device node is, and refuses every graph where the Hexagon
does not start. A sum is therefore run first. Why QNN did not start is in ONNX Runtime's log alone,
which `compiler.GraphCompiler` reads.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import numpy as np

from hetero.backends.errors import DeviceError, DeviceUnavailableError
from hetero.backends.onnx_common.binding import NATIVE_ERRORS
from hetero.backends.ops import Add
from hetero.backends.qnn import graphs
from hetero.backends.qnn.compiler import GraphCompiler
from hetero.backends.qnn.library import BACKEND
from hetero.backends.qnn.session import NOT_ON_NPU, Target, device_error, new_session

FEATURES = 32
WHAT = "starting the Hexagon"


@functools.cache
def check_starts(target: Target) -> None:
    """Raise `DeviceUnavailableError` with QNN's own code unless a sum runs; once for a process."""
    model = graphs.single(Add(d=FEATURES), 1, {})
    try:
        _run_sum(target, model)
    except DeviceError as refused:
        error = _logged(target, model) if refused.code.startswith(NOT_ON_NPU) else None
        error = error or refused
        raise DeviceUnavailableError(BACKEND, WHAT, error.code, error.remedy) from refused


def _run_sum(target: Target, model: bytes) -> None:
    session = new_session(target, model, WHAT)
    ones = np.ones((1, FEATURES), np.float32)
    try:
        (y,) = session.run(None, {"x": ones, "residual": ones})
    except NATIVE_ERRORS as error:
        raise device_error(error, WHAT) from error
    if not np.allclose(y, 2, rtol=1e-3):  # off by 1e-7, though its fp16 value is exact
        raise DeviceError(BACKEND, WHAT, f"WRONG_RESULT: 1 + 1 gave {y.flat[0]:g}", "reboot")


def _logged(target: Target, model: bytes) -> DeviceError | None:
    """Return the error of compiling in a child, whose log says more; None if it has none."""
    compiler = GraphCompiler(target)
    try:
        with contextlib.closing(compiler), tempfile.TemporaryDirectory() as folder:
            compiler.compile(model, Path(folder) / "sum.onnx", WHAT)
    except DeviceError as error:
        return error
    except OSError:  # no room for a temporary file
        return None
    return None

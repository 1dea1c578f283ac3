"""ONNX Runtime sessions, their errors, and calls whose addresses are fixed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import onnxruntime as ort

from hetero.backends.checks import Health
from hetero.backends.errors import DeviceError
from hetero.backends.onnx_common.binding import NATIVE_ERRORS, Launch
from hetero.backends.onnx_common.builder import PLACEHOLDER_FILE
from hetero.backends.protocol import BoundCall

BACKEND = "ort-cpu"
FATAL_ONLY = 4  # errors are raised; printed as well they would come twice
# On Arm, KleidiAI's int8 kernels round activations for each row, not for each block of 32.
DISABLE_KLEIDIAI = "mlas.disable_kleidiai"
Array: TypeAlias = npt.NDArray[Any]


def new_session(model: bytes, weights: Mapping[str, Array] | None = None) -> ort.InferenceSession:
    """Return a session on the calling thread.

    `weights` are used in place, or packed, never copied.

    Memory: no arena, which would keep the largest intermediate result of every session for good.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = FATAL_ONLY
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(DISABLE_KLEIDIAI, "1")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(PLACEHOLDER_FILE.parent)
    )
    # The options only point at these values; they must live until the session is made.
    values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in (weights or {}).items()}
    for name, value in values.items():
        options.add_initializer(name, value)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def device_error(error: Exception, operation: str) -> DeviceError:
    """Return ONNX Runtime's message with its code's name first."""
    text = " ".join(str(error).split())
    match = re.search(r"\[ONNXRuntimeError\] : \d+ : (\w+) : (.*)", text)
    code, message = match.groups() if match else (type(error).__name__, text)
    return DeviceError(
        BACKEND,
        operation,
        f"{code}: {message[:300]}",
        "close other programs if memory is short; else report it with this line",
    )


class OrtCall(BoundCall):
    """Runs its launches one after the other. `before` computes what depends on the position."""

    def __init__(
        self,
        name: str,
        m: int,
        health: Health,
        launches: Sequence[Launch],
        *,
        keep: object,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.m = name, m
        self._health = health
        self.launches = list(launches)
        self._runs = [launch.bound for launch in launches]
        self._before = before
        self._keep = keep  # whatever owns the bound memory

    def run(self) -> None:
        """Execute on the calling thread, the interpreter lock released."""
        self._health.check(self.name)
        if self._before is not None:
            self._before()
        try:
            for run, args in self._runs:
                run(*args)  # with run options, Python's wrapper takes 50 µs longer
        except NATIVE_ERRORS as error:
            raise device_error(error, self.name) from error

    def release(self) -> None:
        """Drop the sessions; only a closed device does this."""
        self.launches.clear()
        self._runs.clear()

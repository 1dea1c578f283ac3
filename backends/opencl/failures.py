"""OpenCL status codes to `DeviceError`: the code's name, the operation, the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyopencl as cl

from hetero.backends.errors import DeviceError

BACKEND = "opencl"

REMEDIES = {
    "CL_MEM_OBJECT_ALLOCATION_FAILURE": "free device memory or use a smaller model or context",
    "CL_OUT_OF_RESOURCES": "free device memory, or shorten the prompt or the context",
    "CL_OUT_OF_HOST_MEMORY": "free host memory or use a smaller model or context",
    "CL_INVALID_BUFFER_SIZE": "the device's largest buffer is smaller than this tensor",
    "CL_DEVICE_NOT_AVAILABLE": "check the OpenCL driver with `hetero doctor`",
    "CL_BUILD_PROGRAM_FAILURE": "report this kernel and the device's name as a bug",
    "CL_COMPILER_NOT_AVAILABLE": "install the full OpenCL driver, its compiler included",
    "CL_INVALID_WORK_GROUP_SIZE": "report this kernel and the device's name as a bug",
}

FATAL = frozenset({"CL_OUT_OF_RESOURCES", "CL_DEVICE_NOT_AVAILABLE"})


def code_name(code: int) -> str:
    """Name of a status code, such as `CL_OUT_OF_RESOURCES`."""
    try:
        name: str = cl.status_code.to_string(code)  # type: ignore[operator]
    except ValueError:
        return f"OpenCL status {code}"
    return f"CL_{name}"


def device_error(operation: str, code: int, detail: str = "") -> DeviceError:
    """Return the error for a status code."""
    name = code_name(code)
    shown = f"{name}: {detail}" if detail else name
    return DeviceError(BACKEND, operation, shown, REMEDIES.get(name, ""))


@contextmanager
def decoded(operation: str) -> Iterator[None]:
    """Turn pyopencl's exceptions inside the block into `DeviceError`."""
    try:
        yield
    except cl.Error as error:
        raise device_error(operation, error.code, _first_lines(error)) from error


def _first_lines(error: cl.Error, lines: int = 12) -> str:
    """Return the first lines of a build log.

    Empty for other errors, whose text only repeats the code.
    """
    _, build, log = str(error).partition("Build on")
    text = [line for line in log.splitlines()[1:] if line and not line.startswith("(options:")]
    return "\n".join(["", *text[:lines]]) if build else ""

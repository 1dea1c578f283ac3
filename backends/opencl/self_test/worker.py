"""The child process: loads one driver, tries its kernels, compiles programs, or dies of it.

Run by `hetero.backends.host.child`, so that it ends with its parent. The first line of standard
input is a `WorkerJob`, each further one a question; answers go to standard output, which native
code cannot reach, since file descriptor 1 is made the log that 2 is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyopencl as cl

from hetero.backends.errors import DeviceError, WaitTimeoutError
from hetero.backends.host.files import has_room
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.drivers import driver_of_library, driver_of_platform
from hetero.backends.opencl.drivers.icd import DriverCandidate
from hetero.backends.opencl.drivers.levels import LEVELS
from hetero.backends.opencl.drivers.loader import Loaded, Wanted, load
from hetero.backends.opencl.gpu_capabilities import WEIGHT_FORMATS
from hetero.backends.opencl.program_source import ProgramSource
from hetero.backends.opencl.selected import Selected
from hetero.backends.opencl.self_test.cases import WrongResultError, try_cases
from hetero.backends.opencl.self_test.kernel_store import KernelStore
from hetero.backends.opencl.self_test.program_compiler import Local, Variant
from hetero.backends.opencl.self_test.supervisor import IDLE_S, WorkerJob
from hetero.backends.opencl.table import TABLE

BUFFER_BYTES = 1 << 16


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    answers = _own_output()
    questions = _lines()
    session = WorkerSession(WorkerJob(**json.loads(next(questions))))
    _say(answers, session.hello())
    for question in questions:
        asked = json.loads(question)
        if asked["do"] == "self-test":
            for answer in session.run_cases(asked["device"], asked["part"], asked["of"]):
                _say(answers, answer)
        else:
            _say(answers, session.build(asked))


class WorkerSession:
    """The loaded driver and what was opened of it."""

    def __init__(self, job: WorkerJob) -> None:
        self.level = LEVELS[job.level]
        self.candidate = DriverCandidate(job.library, driver_of_library(job.library), job.origin)
        self.folder = Path(job.folder)
        self.store = KernelStore(*map(Path, job.stores))
        self._loaded: Loaded | None = None
        self._opened: dict[int, tuple[OpenCLDevice, Local]] = {}
        self._programs: dict[str, cl.Program] = {}

    def hello(self) -> dict[str, Any]:
        """Return the driver's devices, or why there are none."""
        try:
            wanted = [Wanted(self.candidate, self.level, self.store)]
            self._loaded = load(wanted, workers=1, folder=self.folder)
        except DeviceError as error:
            return {"error": [error.operation, error.code, error.remedy]}
        except OSError as error:  # a full disk says nothing of the driver
            return {"error": ["loading the driver", str(error), ""], "lasting": False}
        return {"devices": [_row(device) for device in self._devices()]}

    def run_cases(self, index: int, part: int, of: int) -> Iterator[dict[str, Any]]:
        """Yield progress, then the outcome of one part of the cases with a word on it."""
        try:
            device, _ = self._open(index)
            for done, count in try_cases(device, part, of):
                yield {"done": done, "all": count}
            yield {"passed": ""}
        except WrongResultError as wrong:
            yield {"wrong": str(wrong)}
        except WaitTimeoutError as error:
            yield {"hung": f"{error.operation}: {error.code}"}
        except DeviceError as error:  # a compiler does not say that the disk is full
            room = has_room(self.folder)
            why = "" if room else " (its folder has no room)"
            yield {"failed": f"{error.operation}: {error.code}{why}", "lasting": room}
        except OSError as error:
            yield {"failed": str(error), "lasting": False}

    def build(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Build a program and, with a variant, launch it with no work."""
        try:
            device, compiler = self._open(asked["device"])
            given = asked["source"]
            source = ProgramSource(given["name"], given["text"], tuple(given["options"]))
            if source.digest not in self._programs:
                native = device.native
                self._programs[source.digest] = compiler.program(device.context, native, source)
            if asked["variant"] is not None:
                launch = asked["variant"]
                variant = Variant(
                    launch["kernel"], tuple(launch["global_size"]), tuple(launch["local_size"]),
                    launch["kinds"],
                )  # fmt: skip
                with compiler.variant(source, variant):
                    _launch_nothing(device, self._programs[source.digest], variant)
            return {"built": True}
        except DeviceError as error:
            return {"error": [error.operation, error.code, error.remedy]}
        except (cl.Error, OSError) as error:
            return {"error": ["building a kernel", str(error)[:300], ""]}

    def _devices(self) -> list[cl.Device]:
        assert self._loaded is not None
        return self._loaded.devices(self.candidate)

    def _open(self, index: int) -> tuple[OpenCLDevice, Local]:
        if index not in self._opened:
            native = self._devices()[index]
            driver = driver_of_platform(native.platform.name)
            driver.prepare(native, self.level)
            compiler = Local(self.store, self.folder / "pocl" if driver.caches_kernels else None)
            selected = Selected(native, driver, self.level, compiler)
            self._opened[index] = OpenCLDevice(TABLE, WEIGHT_FORMATS, selected), compiler
        return self._opened[index]


def _launch_nothing(device: OpenCLDevice, program: cl.Program, variant: Variant) -> None:
    """Launch with no work: argument 0 of every kernel is a count of work (`calls`)."""
    kernel = cl.Kernel(program, variant.kernel)
    buffer = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, BUFFER_BYTES)
    values: dict[str, Any] = {"b": buffer, "i": np.int32(0), "u": np.uint32(0), "f": np.float32(0)}
    for at, kind in enumerate(variant.kinds):
        kernel.set_arg(at, values[kind])
    cl.enqueue_nd_range_kernel(device.queue, kernel, variant.global_size, variant.local_size)
    device.queue.finish()


def _row(device: cl.Device) -> dict[str, str]:
    kinds = ((cl.device_type.GPU, "gpu"), (cl.device_type.CPU, "cpu"))
    return {
        "platform": device.platform.name.strip(),
        "platform_version": device.platform.version.strip(),
        "name": device.name.strip(),
        "version": device.version.strip(),
        "driver_version": device.driver_version.strip(),
        "kind": next((name for bit, name in kinds if device.type & bit), "other"),
    }


def _own_output() -> IO[bytes]:
    """Return the pipe to the parent; whatever else writes to standard output writes to the log."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _lines() -> Iterator[str]:
    """Yield the lines of standard input until it ends.

    This process ends when it is silent for `IDLE_S`: by a thread, since Windows can wait for
    sockets alone.
    """
    timer: threading.Timer | None = None
    while line := sys.stdin.readline():
        if timer is not None:
            timer.cancel()
        yield line
        timer = threading.Timer(IDLE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()


def _say(pipe: IO[bytes], message: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()


if __name__ == "__main__":
    main()

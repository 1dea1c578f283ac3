"""Finding an OpenCL device, and PoCL's environment: one worker thread on one chosen core."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pyopencl as cl

from hetero.backends.affinity import allowed_cores
from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.opencl.failures import BACKEND, code_name
from hetero.backends.opencl.pocl_repair import applies, known_cpu_name, repair
from hetero.backends.processor import cpu_flags

NO_DRIVER = "pip install 'pyopencl[pocl]' (Linux x86-64) or install the GPU's OpenCL driver"
TASKS = Path("/proc/self/task")
TRIVIAL = "__kernel void trivial(__global int *x) { x[0] = 1; }"


@dataclass(frozen=True)
class Found:
    """A device that builds programs. `compiler_cpu` is PoCL's `-target-cpu` if it was repaired."""

    device: cl.Device
    is_pocl: bool
    compiler_cpu: str = ""
    worker_cpu: int | None = None


_workers: list[int] = []  # threads of PoCL in this process; they live as long as it
_repaired: dict[int, str] = {}  # device struct -> CPU name


def default_cache_dir() -> Path:
    """Where derived files of this backend lie."""
    return Path(platformdirs.user_cache_dir("hetero", appauthor=False)) / "opencl"


def find_device(*, wanted: str | None, cpu: int | None, cache_dir: Path) -> Found:
    """Set PoCL's environment, pick a device, repair and pin PoCL, and prove that it builds."""
    prepare_environment(cache_dir)
    before = _tasks()
    devices = _devices()
    started = sorted(_tasks() - before)
    device = _choose(devices, wanted)
    is_pocl = device.platform.name == "Portable Computing Language"
    if not is_pocl:
        return Found(device, is_pocl=False)
    _check_one_worker(device)
    name = _repair(device)
    _build_trivial(device)
    if len(started) == device.max_compute_units:
        _workers[:] = started
    return Found(device, is_pocl=True, compiler_cpu=name, worker_cpu=_pin(cpu))


def prepare_environment(cache_dir: Path) -> None:
    """PoCL reads these once, when its device is first asked for; the user's own values win.

    POCL_AFFINITY is left alone: it pins worker i to core i, which a container may not allow.
    """
    os.environ.setdefault("POCL_MAX_PTHREAD_COUNT", "1")
    if "POCL_CACHE_DIR" not in os.environ:
        # The kernels' hash may not name the CPU they were compiled for, so the folder does.
        name = known_cpu_name(cpu_flags())
        os.environ["POCL_CACHE_DIR"] = str(writable_dir(cache_dir / "pocl" / name))


def writable_dir(path: Path) -> Path:
    """`path`, made if missing; a folder for this process and a warning where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="hetero-opencl-"))
        atexit.register(shutil.rmtree, other, ignore_errors=True)
        warnings.warn(
            f"kernel cache {path} is not writable ({error.strerror}), using {other}", stacklevel=2
        )
        return other


def _devices() -> list[cl.Device]:
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise DeviceUnavailableError(
            BACKEND, "looking for OpenCL platforms", code_name(error.code), _driver_remedy()
        ) from error
    found = []
    for platform in platforms:
        try:
            found += platform.get_devices()
        except cl.Error:  # a platform without devices answers with an error
            continue
    if not found:
        raise DeviceUnavailableError(
            BACKEND, "looking for OpenCL devices", "CL_DEVICE_NOT_FOUND", _driver_remedy()
        )
    return found


def _choose(devices: list[cl.Device], wanted: str | None) -> cl.Device:
    """The wanted device, else the first GPU, else the first device."""
    names = [f"{device.platform.name} / {device.name}" for device in devices]
    if wanted is not None:
        for device, name in zip(devices, names, strict=True):
            if wanted.lower() in name.lower():
                return device
        raise DeviceUnavailableError(
            BACKEND, f"looking for {wanted!r}", "not found", f"there is: {'; '.join(names)}"
        )
    gpus = [device for device in devices if device.type & cl.device_type.GPU]
    return (gpus or devices)[0]


def _check_one_worker(device: cl.Device) -> None:
    """PoCL's thread count is fixed when its device is first asked for in the process."""
    expected = os.environ["POCL_MAX_PTHREAD_COUNT"]
    if str(device.max_compute_units) != expected.strip():
        raise DeviceUnavailableError(
            BACKEND,
            "limiting PoCL to its worker threads",
            f"OpenCL was already initialised with {device.max_compute_units} threads, "
            f"{expected} wanted",
            "open the device before any other OpenCL call of the process, or set "
            f"POCL_MAX_PTHREAD_COUNT={expected} in its environment",
        )


def _repair(device: cl.Device) -> str:
    if not applies(device.platform.version, device.version):
        return ""
    if device.int_ptr not in _repaired:
        name = known_cpu_name(cpu_flags())
        if repair(device.int_ptr, name):
            _repaired[device.int_ptr] = name
    return _repaired.get(device.int_ptr, "")


def _build_trivial(device: cl.Device) -> None:
    try:
        context = cl.Context([device])
        program = cl.Program(context, TRIVIAL).build()
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4)
        program.trivial(cl.CommandQueue(context), (1,), (1,), buffer).wait()
    except cl.Error as error:
        raise DeviceUnavailableError(
            BACKEND,
            f"building a kernel with {device.platform.version.strip()} ({device.version})",
            f"{code_name(error.code)}: {str(error)[:300]}",
            _cache_remedy()
            or "PoCL's compiler does not know this CPU; install a newer PoCL or another driver",
        ) from error


def _driver_remedy() -> str:
    """PoCL shows no device at all where it cannot make its cache."""
    return _cache_remedy() or NO_DRIVER


def _cache_remedy() -> str:
    """What to do about a cache that the user chose and PoCL cannot write; empty if it can."""
    folder = Path(os.environ.get("POCL_CACHE_DIR", ""))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError:
        return f"POCL_CACHE_DIR={folder} cannot be written: unset it or name a writable directory"


def _tasks() -> set[int]:
    return {int(task.name) for task in TASKS.iterdir()} if TASKS.exists() else set()


def _pin(cpu: int | None) -> int | None:
    """Move PoCL's worker to one core.

    None where the worker is not known, because OpenCL was in use before, or not the only one.
    """
    if len(_workers) != 1 or sys.platform != "linux":
        return None
    allowed = allowed_cores()
    core = allowed[0] if cpu is None else cpu
    try:
        os.sched_setaffinity(_workers[0], {core})
    except OSError as error:
        raise DeviceUnavailableError(
            BACKEND,
            f"moving PoCL's worker to core {core}",
            str(error.strerror),
            f"cores allowed to this process: {allowed}",
        ) from error
    return core

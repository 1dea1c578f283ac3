"""Finding an OpenCL device, and PoCL's workers: one thread on one chosen core, or one for each."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pyopencl as cl

from hetero.backends.affinity import allowed_cores
from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.opencl.failures import BACKEND, code_name
from hetero.backends.opencl.pocl_repair import applies, known_cpu_name, repair
from hetero.backends.processor import cpu_flags
from hetero.backends.registry import EVERY_CORE

NO_DRIVER = "pip install 'pyopencl[pocl]' (Linux x86-64) or install the GPU's OpenCL driver"
TASKS = Path("/proc/self/task")
WORKERS = "POCL_MAX_PTHREAD_COUNT"
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


def find_device(
    *, wanted: str | None, cpu: int | None, every_core: bool = False, cache_dir: Path
) -> Found:
    """Set PoCL's environment, pick a device, repair and pin PoCL, and prove that it builds."""
    count = wanted_workers(every_core=every_core)
    before = _tasks()
    with pocl_environment(cache_dir, count):
        devices = _devices()
    started = sorted(_tasks() - before)
    if every_core:
        devices = [device for device in devices if device.type & cl.device_type.CPU]
        if not devices:
            raise DeviceUnavailableError(
                EVERY_CORE, "looking for a processor", "CL_DEVICE_NOT_FOUND", NO_DRIVER
            )
    device = _choose(devices, wanted)
    is_pocl = device.platform.name == "Portable Computing Language"
    if not is_pocl:
        return Found(device, is_pocl=False)
    if len(started) == device.max_compute_units:
        _workers[:] = started
    _check_workers(device, count)
    name = _repair(device)
    _build_trivial(device)
    worker_cpu = None
    if every_core:
        _move_workers(allowed_cores())
    elif _workers and count == 1:
        worker_cpu = allowed_cores()[0] if cpu is None else cpu
        _move_workers([worker_cpu])
    return Found(device, is_pocl=True, compiler_cpu=name, worker_cpu=worker_cpu)


@contextmanager
def pocl_environment(cache_dir: Path, workers: int) -> Iterator[None]:
    """What PoCL reads, once in a process, when its device is first asked for; the user's own values
    win. The number of workers is taken back, for processes that are started from here.

    POCL_AFFINITY is left alone: it pins worker i to core i, which a container may not allow.
    """
    if "POCL_CACHE_DIR" not in os.environ:
        # The kernels' hash may not name the CPU they were compiled for, so the folder does.
        name = known_cpu_name(cpu_flags())
        os.environ["POCL_CACHE_DIR"] = str(writable_dir(cache_dir / "pocl" / name))
    if WORKERS in os.environ:
        yield
        return
    os.environ[WORKERS] = str(workers)
    try:
        yield
    finally:
        del os.environ[WORKERS]


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


def wanted_workers(*, every_core: bool) -> int:
    """Threads that PoCL is to have, or as many as the user says in the environment."""
    said = os.environ.get(WORKERS, "").strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return len(allowed_cores()) if every_core else 1


def started_workers() -> int | None:
    """PoCL's threads in this process, whose number is fixed; None before its device is opened."""
    return len(_workers) or None


def _check_workers(device: cl.Device, count: int) -> None:
    """PoCL's thread count is fixed when its device is first asked for in the process.

    More threads than one core needs do no harm if they are known: they are held to that core.
    """
    units = device.max_compute_units
    if units == count:
        return
    if count == 1 and len(_workers) == units:
        warnings.warn(
            f"OpenCL runs with {units} threads in this process, which now share one core: decoding "
            f"is up to a fifth slower than in a process that does not open {EVERY_CORE} first",
            stacklevel=2,
        )
        return
    raise DeviceUnavailableError(
        BACKEND,
        f"giving PoCL {count} worker threads",
        f"OpenCL was already initialised with {units} in this process",
        "open the device before any other OpenCL call of the process, or set "
        f"{WORKERS}={count} in its environment",
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


def _move_workers(cores: list[int]) -> None:
    """Hold PoCL's workers to these cores, if they are known: nobody used OpenCL before."""
    if sys.platform != "linux":
        return
    try:
        for worker in _workers:
            os.sched_setaffinity(worker, cores)
    except OSError as error:
        raise DeviceUnavailableError(
            BACKEND,
            f"moving PoCL's worker to core {', '.join(map(str, cores))}",
            str(error.strerror),
            f"cores allowed to this process: {allowed_cores()}",
        ) from error

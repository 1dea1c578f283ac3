"""Chooses a self-tested OpenCL driver, device and level, and loads it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyopencl as cl

from hetero.backends.errors import DeviceOptionError, DeviceUnavailableError
from hetero.backends.host.affinity import allowed_cores
from hetero.backends.host.folders import cache_folder
from hetero.backends.host.processor import is_arm64
from hetero.backends.opencl.drivers import DRIVERS, icd, loader, threads
from hetero.backends.opencl.drivers.icd import DriverCandidate, candidates
from hetero.backends.opencl.drivers.levels import LEVEL_VARIABLE, Level, chosen_level
from hetero.backends.opencl.drivers.loader import Loaded, Wanted, load, wanted_workers
from hetero.backends.opencl.drivers.pocl import CACHE, WORKERS
from hetero.backends.opencl.failures import BACKEND
from hetero.backends.opencl.reports import DriverReport
from hetero.backends.opencl.selected import Selected
from hetero.backends.opencl.self_test.program_compiler import Remote
from hetero.backends.opencl.self_test.results import DeviceResult
from hetero.backends.opencl.self_test.runner import SelfTests, passed_level
from hetero.backends.opencl.self_test.supervisor import Supervisor
from hetero.backends.registry import EVERY_CORE

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice

NO_DRIVER: Final = "pip install 'pyopencl[pocl]' (Linux x86-64) or install the GPU's OpenCL driver"
NO_DRIVER_ARM: Final = (
    "install the GPU's OpenCL driver, or PoCL for the processor's cores (Debian, Ubuntu: "
    "apt install pocl-opencl-icd)"
)


def no_driver() -> str:
    """Return what to install where no driver is: pip's PoCL is for x86-64 alone."""
    return NO_DRIVER_ARM if is_arm64() and sys.platform.startswith("linux") else NO_DRIVER


@dataclass(frozen=True)
class TestedDevice:
    """A device that passed its self-test: its driver's candidate, its place there, its level.

    `note` names drivers that come before it and that this process cannot load any more.
    """

    candidate: DriverCandidate
    index: int
    device: DeviceResult
    level: Level
    note: str = ""


def cache_root(cache_dir: Path | None = None) -> Path:
    """Return where results and kernels lie.

    The folder that is asked for, else POCL_CACHE_DIR, else the user's cache. Raises
    `DeviceOptionError` for a POCL_CACHE_DIR that cannot be written.
    """
    if cache_dir is not None:
        return cache_dir
    named = os.environ.get(CACHE)
    if not named:
        return cache_folder() / "opencl"
    try:
        Path(named).mkdir(parents=True, exist_ok=True)
        writable = os.access(named, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise DeviceOptionError(
            BACKEND, "keeping compiled kernels", f"{CACHE}={named} cannot be written",
            "unset it or name a writable folder",
        )  # fmt: skip
    return Path(named) / "hetero"


def find_device(
    *,
    wanted: str | None,
    cpu: int | None,
    every_core: bool = False,
    cache_dir: Path | None = None,
) -> Selected:
    """Pick a self-tested device, load its driver and pin its threads to their cores.

    `wanted` is a driver's name (`pocl`, `intel`) or a part of a platform's or device's name. Raises
    `DeviceOptionError` for what was named and is not there, `DeviceUnavailableError` where nothing
    computes right here.
    """
    self_tests = SelfTests(cache_root(cache_dir))
    forced, here = chosen_level(), loader.loaded()
    chosen = _choose(self_tests, wanted, forced, every_core, here)
    count = wanted_workers(every_core=every_core)
    loaded = here or load(
        _worth_loading(self_tests, chosen), workers=count, folder=self_tests.run.path
    )
    driver = chosen.candidate.driver
    native = _native(loaded, chosen)
    shared = _check_workers(native, loaded, count) if driver.computes_on_cpu else ""
    driver.prepare(native, chosen.level)
    self_tests.run.use(self_tests.path(chosen.candidate))
    return Selected(
        native, driver, chosen.level,
        _compiler(self_tests, chosen, loaded),
        cores=_cores(driver.computes_on_cpu, cpu, every_core),
        threads=loaded.asked if driver.computes_on_cpu else int(native.max_compute_units),
        note="; ".join(filter(None, (chosen.note, shared))),
    )  # fmt: skip


def choose_driver(wanted: str | None) -> str | None:
    """Name of the driver that `find_device` would take, None where nothing computes right here."""
    self_tests = SelfTests(cache_root())
    try:
        chosen = _choose(self_tests, wanted, chosen_level(), False, loader.loaded())
    except DeviceUnavailableError:
        return None
    return chosen.candidate.driver.name


def place_workers(selected: Selected, device: OpenCLDevice, before: set[int]) -> None:
    """Pin a CPU driver's threads to their cores, as far as they are known.

    `before` are the threads that this process had before the device was made. All open devices of a
    driver share its threads: they run on the cores of each, and `Device.note` says so.
    """
    state, driver = loader.loaded(), selected.driver.name
    device.note = selected.note
    if state is None or not selected.cores:
        return
    workers = state.workers.setdefault(driver, [])
    if selected.driver.starts_threads_late:
        device.start_threads()
        workers += sorted(threads.native_tasks() - before)
    threads.hold(workers, list(selected.cores))
    state.users[device] = driver, selected.cores
    device.at_close = partial(_leave_workers, state, driver, weakref.ref(device))
    if set(shared := state.hold_workers(driver)) > set(selected.cores):
        shown = ", ".join(map(str, shared))
        device.note = f"OpenCL's threads run on cores {shown}, for another model that is open"
        warnings.warn(device.note, stacklevel=3)


def _leave_workers(state: Loaded, driver: str, device: weakref.ref[OpenCLDevice]) -> None:
    """Let the devices that stay have the threads."""
    state.users.pop(device(), None)
    with contextlib.suppress(DeviceUnavailableError):  # cores that were taken away meanwhile
        state.hold_workers(driver)


def started_workers() -> int | None:
    """Return the threads that OpenCL has in this process, whose number is fixed.

    None before it is loaded.
    """
    state = loader.loaded()
    return None if state is None else state.asked


def survey(cache_dir: Path | None = None) -> Iterator[DriverReport]:
    """Yield every installed driver's result, testing it now where there is none or no device."""
    self_tests = SelfTests(cache_root(cache_dir))
    forced = chosen_level()
    for candidate in candidates():
        own = candidate.driver.levels()
        levels = own if forced is None or forced not in own else (forced,)
        result = self_tests.examine(candidate, None if levels is own else forced, retry=True)
        driver, origin, path = candidate.driver.name, candidate.origin, self_tests.path(candidate)
        if result.problem:
            library = Path(candidate.library).name or "the system's loader"
            yield DriverReport(driver, origin, library, None, result.problem, path)
        for device in result.devices:
            level = passed_level(device, levels)
            said = "; ".join(attempt.sentence for attempt in device.attempts)
            name = None if level is None else level.name
            yield DriverReport(driver, origin, device.title, name, said, path)


def _choose(
    self_tests: SelfTests,
    wanted: str | None,
    forced: Level | None,
    every_core: bool,
    here: Loaded | None,
) -> TestedDevice:
    """Return the first device in order of preference. Raises as `find_device`."""
    reasons: list[str] = []
    names: list[str] = []
    missed: list[str] = []
    for candidate, kinds in _order(wanted):
        if forced is not None and forced not in candidate.driver.levels():
            reasons.append(f"{candidate.driver.name} has no level {forced.name}")
            continue
        if here is not None and candidate.library not in {w.candidate.library for w in here.wanted}:
            reasons.append(f"OpenCL runs in this process without {candidate.origin}")
            known = self_tests.known(candidate)
            if known is None or any(
                passed_level(device, candidate.driver.levels()) for device in known.devices
            ):
                missed.append(reasons[-1])
            continue
        result = self_tests.examine(candidate, forced)
        names += [d.title for d in result.devices]
        if result.problem:
            reasons.append(f"{candidate.origin}: {result.problem}")
        levels = (forced,) if forced is not None else candidate.driver.levels()
        for i, device in enumerate(result.devices):
            if device.kind not in kinds or (every_core and device.kind != "cpu"):
                continue
            if not _is_wanted(wanted, candidate, device):
                continue
            level = passed_level(device, levels)
            if level is not None:
                return TestedDevice(candidate, i, device, level, "; ".join(dict.fromkeys(missed)))
            reasons += [f"{device.title}: {a.sentence}" for a in device.attempts]
    return _nothing(wanted, forced, every_core, reasons, names)


def _order(wanted: str | None) -> Iterator[tuple[DriverCandidate, tuple[str, ...]]]:
    """Yield drivers with the kinds of device that are taken of each.

    GPUs first, then PoCL, then other drivers of processors.
    """
    listed = candidates()
    named = [d.name for d in DRIVERS]
    if wanted in named:
        listed = [c for c in listed if c.driver.name == wanted]
    vendors = [c for c in listed if not c.driver.computes_on_cpu]
    yield from ((c, ("gpu", "other")) for c in vendors)
    yield from ((c, ("cpu", "gpu", "other")) for c in listed if c.driver.computes_on_cpu)
    yield from ((c, ("cpu",)) for c in vendors)


def _is_wanted(wanted: str | None, candidate: DriverCandidate, device: DeviceResult) -> bool:
    return (
        wanted is None or wanted == candidate.driver.name or wanted.lower() in device.title.lower()
    )


def _nothing(
    wanted: str | None,
    forced: Level | None,
    every_core: bool,
    reasons: Sequence[str],
    names: Sequence[str],
) -> TestedDevice:
    """Raise an error that no driver fits the request."""
    why = "; ".join(dict.fromkeys(reasons))
    if wanted is not None:
        there = "; ".join(dict.fromkeys([*(c.driver.name for c in candidates()), *names]))
        raise DeviceOptionError(
            BACKEND, f"looking for {wanted!r}", why or "not found",
            f"there is: {there or 'no driver'} (`hetero devices`)",
        )  # fmt: skip
    if forced is not None and reasons:
        raise DeviceOptionError(
            BACKEND, f"using {LEVEL_VARIABLE}={forced.name}", why or "no device has this level",
            "unset it",
        )  # fmt: skip
    missing = icd.missing_folder()
    raise DeviceUnavailableError(
        EVERY_CORE if every_core else BACKEND,
        "looking for an OpenCL device",
        why or f"CL_DEVICE_NOT_FOUND{f': {missing} cannot be read' if missing else ''}",
        "unset it, or name a folder with .icd files" if missing else no_driver(),
    )


def _worth_loading(self_tests: SelfTests, chosen: TestedDevice) -> list[Wanted]:
    """Return the chosen driver, and drivers that passed their self-tests already.

    What is not loaded at first cannot be later.
    """
    wanted = [_wanted(self_tests, chosen.candidate, chosen.level)]
    for candidate in candidates():
        result = self_tests.known(candidate)
        if candidate.library == chosen.candidate.library or result is None:
            continue
        levels = candidate.driver.levels()
        passed = [passed_level(device, levels) for device in result.devices]
        if passed and all(passed) and passed[0] is not None:
            wanted.append(_wanted(self_tests, candidate, passed[0]))
    return wanted


def _wanted(self_tests: SelfTests, candidate: DriverCandidate, level: Level) -> Wanted:
    store = self_tests.store(candidate, level)
    store.use()
    return Wanted(candidate, level, store)


def _native(loaded: Loaded, chosen: TestedDevice) -> cl.Device:
    """Return the device of this process that the result is about."""
    known = chosen.device
    for device in loaded.devices(chosen.candidate):
        facts = (device.platform.version, device.name, device.driver_version)
        if tuple(map(str.strip, facts)) == (
            known.platform_version,
            known.name,
            known.driver_version,
        ):
            return device
    raise DeviceUnavailableError(
        BACKEND,
        f"finding {known.title} in this process",
        "OpenCL was already initialised with other drivers in this process",
        "open the device before any other OpenCL call of the process",
    )


def _check_workers(device: cl.Device, loaded: Loaded, count: int) -> str:
    """Check the number of threads, which is fixed when a driver is loaded.

    More threads than one core needs do no harm if they are known: they are pinned to that core.
    Return, and warn, what that costs; empty where it is as asked.
    """
    is_pocl = WORKERS if device.platform.name == "Portable Computing Language" else None
    units = int(device.max_compute_units) if is_pocl else loaded.asked
    if units == count:
        return ""
    if count == 1 and units == loaded.asked:
        note = (
            f"OpenCL runs with {units} threads in this process, which now share one core: decoding "
            f"is up to a fifth slower than in a process that does not open {EVERY_CORE} first"
        )
        warnings.warn(note, stacklevel=2)
        return note
    raise DeviceUnavailableError(
        BACKEND,
        f"giving OpenCL {count} worker threads",
        f"OpenCL was already initialised with {units} in this process",
        "open the device before any other OpenCL call of the process, or set "
        f"{WORKERS}={count} in its environment",
    )


def _cores(on_cpu: bool, cpu: int | None, every_core: bool) -> tuple[int, ...]:
    """Return where a CPU driver's threads belong; empty for a device that has cores of its own."""
    if not on_cpu:
        return ()
    allowed = allowed_cores()
    return tuple(allowed) if every_core else (allowed[0] if cpu is None else cpu,)


def _compiler(self_tests: SelfTests, chosen: TestedDevice, loaded: Loaded) -> Remote:
    candidate, level = chosen.candidate, chosen.level
    supervisor = Supervisor(self_tests.job(candidate, level, loaded.folder), chosen.index)
    folder = loaded.folder / "pocl" if candidate.driver.caches_kernels else None
    return Remote(self_tests.store(candidate, level), folder, supervisor)

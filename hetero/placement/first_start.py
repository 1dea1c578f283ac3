"""The first start on a machine without its own profile: scales the shipped profile's times.

The reference kernels of the profile are timed here, once, for about a second, in a process of its
own: OpenCL must not run in this one before its number of cores is known. The result is stored in
hetero's cache, one small file for each combination of what it depends on. What the devices alone
report is compared when they are opened (`forget_if_other`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import allowed_cores, core_count, pinned, run_on
from hetero.backends.host.child import child_command
from hetero.backends.host.processor import cpu_flags, cpu_name
from hetero.backends.host.time_limits import time_limit
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.errors import UserError, one_sentence
from hetero.placement.device_set import DeviceMode, open_devices
from hetero.placement.timing_lock import timing
from hetero.profiler import profile_files
from hetero.profiler.environment import hetero_version, package_versions
from hetero.profiler.errors import ProfileError
from hetero.profiler.factors import MAX_FACTOR
from hetero.profiler.nearest_profile import nearest_shipped
from hetero.solver.plan import Phase

if TYPE_CHECKING:
    from hetero.profiler.grid import Task
    from hetero.profiler.records import DeviceProfile
    from hetero.profiler.scaling import Factors

SWITCH: Final = "HETERO_SCALE"  # `off`: shipped profiles are taken as they are
TOO_LATE: Final = 3  # exit code of the process that times, after `StartLimits.timing_s`
# Of the environment, what decides which device or kernel is opened.
VARIABLES: Final = (
    "HETERO_OPENCL_LEVEL",
    "HETERO_OPENCL_MEMORY",
    "OCL_ICD_FILENAMES",
    "OCL_ICD_VENDORS",
    "POCL_DEVICES",
    "POCL_MAX_PTHREAD_COUNT",
)


@dataclass(frozen=True, kw_only=True)
class StartLimits:
    """Limits of the first start, in seconds.

    timed_s   the kernels are timed for so long,
    max_s    or for so long where other programs keep the cores busy
    timing_s  after which the process that does it ends, whatever a device does
    start_s   of that process, devices opened and their kernels compiled
    retry_s   after which a machine that could not be measured is tried again
    """

    timed_s: float = 1.2
    max_s: float = 1.8
    timing_s: float = 2.0
    start_s: float = 30.0
    retry_s: float = 600.0


LIMITS: Final = StartLimits()


class _Record(BaseModel):
    """Base of these records, which every start reads: a profile's own would be loaded with them."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="null"
    )


class Machine(_Record):
    """The facts that the factors depend on, known before any device is open.

    `flags` is a hash of the processor's; `cores` are those that this process may use, `core_count`
    of them at once.
    """

    hetero_version: str
    processor: str
    flags: str
    cores: tuple[int, ...]
    core_count: int
    packages: dict[str, str]
    environment: dict[str, str]

    @classmethod
    def here(cls) -> Self:
        """Return this machine."""
        return cls(
            hetero_version=hetero_version(),
            processor=cpu_name(),
            flags=_hash(" ".join(sorted(cpu_flags()))),
            cores=tuple(allowed_cores()),
            core_count=core_count(),
            packages=package_versions(),
            environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        )

    @property
    def path(self) -> Path:
        """Return the path of its factors, next to the machine's own profile."""
        folder = profile_files.cached_profile_path().parent
        return folder / f"first-start-{_hash(self.model_dump_json())}.json"


class Factor(_Record):
    """Seconds of a device's reference kernel here over those of the profile."""

    device: DeviceKind
    phase: Phase
    weight_format: WeightFormat
    value: Annotated[float, Field(ge=1 / MAX_FACTOR, le=MAX_FACTOR)]


class FirstStart(_Record):
    """The measured factors, or why there are none (`reason`), and what they apply to.

    profile   fingerprint of the profile that is scaled
    at_s      when, in seconds since 1970
    devices   fingerprints of the devices
    spent_s   how long the kernels were timed
    check     hash of all the others
    """

    schema_version: Literal[1] = 1
    machine: Machine
    profile: str
    at_s: float
    devices: dict[DeviceKind, str] = Field(default_factory=dict)
    factors: tuple[Factor, ...] = ()
    spent_s: Annotated[float, Field(ge=0)] = 0.0
    reason: str = ""
    check: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.factors) == bool(self.reason):
            raise ValueError("there are factors, or a reason why there are none")
        return self

    @property
    def by_kind(self) -> Factors:
        """Return the factors as `scaled` takes them."""
        return {(f.device, f.phase, f.weight_format): f.value for f in self.factors}

    @property
    def clause(self) -> str:
        """Return the clause that follows the notice that a shipped profile is used."""
        if self.reason:
            return f"its times not scaled to this machine because {self.reason}"
        formats = dict.fromkeys(factor.weight_format for factor in self.factors)
        shown = " and ".join(f"{_shown(self.by_kind, name)} in {name}" for name in formats)
        return (
            f"its times scaled by {shown} (prefill/decode), measured here in {self.spent_s:.1f} s"
        )

    @property
    def is_stale(self) -> bool:
        """Return whether nothing could be measured, and it is time to try again."""
        return bool(self.reason) and abs(time.time() - self.at_s) >= LIMITS.retry_s

    def saved(self, path: Path) -> None:
        """Write it atomically. Raises `ProfileError`."""
        sealed = self.model_copy(update={"check": self._hash()})
        profile_files.write_atomically(path, sealed.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Return the record in a file, None if it is damaged."""
        try:
            if path.stat().st_size > 1 << 16:
                return None
            start = cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None
        if start.check != start._hash():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used
        return start

    def _hash(self) -> str:
        return _hash(self.model_dump_json(exclude={"check"}))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shown(factors: Factors, weight_format: WeightFormat) -> str:
    """Return `gpu 1.80/1.72, npu 0.91/1.00`."""
    kinds: dict[DeviceKind, list[str]] = {}
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for device in dict.fromkeys(kind[0] for kind in factors):
        values = [factors.get((device, phase, weight_format)) for phase in phases]
        kinds[device] = ["-" if value is None else f"{value:.2f}" for value in values]
    return ", ".join(f"{device} {'/'.join(values)}" for device, values in kinds.items())


def scaled_here(profile: DeviceProfile, notice: str) -> tuple[DeviceProfile, str]:
    """Return a shipped profile with its times scaled to this machine, and its extended notice.

    Both are unchanged without a notice, because the profile is this machine's or was requested. No
    failure is an error: the profile is then as it was shipped.
    """
    if not notice:
        return profile, notice
    if os.environ.get(SWITCH, "").strip().lower() == "off":
        return profile, f"{notice}, its times not scaled to this machine because {SWITCH} is off"
    from hetero.profiler.scaling import reference_tasks, scaled

    try:
        start = _find(profile, reference_tasks(profile))
        if start.reason:
            return profile, f"{notice}, {start.clause}"
        here = scaled(profile, start.by_kind)
    except ProfileError as error:
        return profile, f"{notice}, its times not scaled to this machine because {error}"
    return here.model_copy(update={"name": f"{profile.name}, scaled here"}), (
        f"{notice}, {start.clause}"
    )


def profile_facts() -> dict[str, Any] | None:
    """Return facts that identify the default profile, as it is scaled here.

    They are hashes of the files that it comes from, and the machine. None where there is no such
    file, or the times are to be measured (again).
    """
    machine, own = Machine.here(), profile_files.taken_profile_path()
    nearest = (nearest_shipped(npu) for npu in (None, "ort-cpu"))
    shipped = {profile_files.shipped_path(x.name): None for x in nearest if x is not None}
    paths = [own, machine.path, *shipped]
    off = os.environ.get(SWITCH, "").strip().lower() == "off"
    try:
        read = {str(path): path.read_bytes() for path in paths if os.path.exists(path)}
    except OSError:
        return None
    if not off and not os.path.exists(own):
        factors = FirstStart.load(machine.path)
        if factors is None or factors.is_stale:
            return None
    hashes = {path: hashlib.sha256(data).hexdigest() for path, data in read.items()}
    return {"machine": machine.model_dump(), "scaled": not off, "files": hashes}


def _find(profile: DeviceProfile, tasks: Sequence[Task]) -> FirstStart:
    """Return the cached factors, or measure and cache them.

    Raises `ProfileError` without a cache.
    """
    from hetero.profiler.records import phase_of

    machine = Machine.here()
    path, wanted = machine.path, profile.fingerprint
    cached = FirstStart.load(path)
    if cached is not None and (cached.machine, cached.profile) == (machine, wanted):
        whole = {(t.device, phase_of(t.m), t.weight_format) for t in tasks} == set(cached.by_kind)
        if whole or (cached.reason and not cached.is_stale):
            return cached
    _check_folder(path.parent)
    made = _measured(profile, tasks, machine)
    with contextlib.suppress(ProfileError):  # the disk is full now
        made.saved(path)
    return made


def _check_folder(folder: Path) -> None:
    """Raise `ProfileError` where nothing can be stored: every start would measure again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"{}")
    except OSError as error:
        raise ProfileError(f"{folder} cannot be written ({error.strerror})") from error


def _measured(profile: DeviceProfile, tasks: Sequence[Task], machine: Machine) -> FirstStart:
    from hetero.profiler.scaling import factors_of

    common: dict[str, Any] = {
        "machine": machine, "profile": profile.fingerprint, "at_s": time.time(),
    }  # fmt: skip
    try:
        known = profile.devices
        backends: dict[DeviceKind, str] = {x: known[x].backend for x in KINDS if x in known}
        answer = _in_process(tasks, backends, machine.cores)
        factors = factors_of(profile, tasks, answer["seconds"])
        return FirstStart(
            **common,
            devices=answer["devices"],
            spent_s=answer["spent_s"],
            factors=tuple(
                Factor(device=device, phase=phase, weight_format=weight_format, value=value)
                for (device, phase, weight_format), value in factors.items()
            ),
        )
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        return FirstStart(**common, reason=_reason(error))


def _reason(error: Exception) -> str:
    match error:
        case UserError():
            return one_sentence(str(error))
        case subprocess.TimeoutExpired():
            return f"its devices were not open after {time_limit(LIMITS.start_s):g} s"
        case subprocess.CalledProcessError(returncode=code) if code == TOO_LATE:
            return f"its reference kernels were not timed after {time_limit(LIMITS.timing_s):g} s"
        case subprocess.CalledProcessError(returncode=code, stderr=text):
            lines = (text or "").strip().splitlines()
            return one_sentence(lines[-1] if lines else f"timing them ended with {code}")
        case OSError():
            return f"{sys.executable} cannot be started ({error.strerror})"
    return "the process that times its reference kernels gave no answer"


def _in_process(
    tasks: Sequence[Task], backends: dict[DeviceKind, str], cores: Sequence[int]
) -> dict[str, Any]:
    """Return the answer of `main` in a child process."""
    request = {"tasks": list(tasks), "backends": backends, "cores": list(cores)}
    done = subprocess.run(
        child_command("hetero.placement.first_start"),
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        timeout=time_limit(LIMITS.start_s + LIMITS.timing_s),
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "reason" in answer:
        raise UserError(answer["reason"])
    return answer


def forget_if_other(devices: Iterable[Device]) -> None:
    """Drop this machine's factors if they were not measured on the open devices.

    Those are then another driver, or other kernels: the next start measures again.
    """
    path = Machine.here().path
    start = FirstStart.load(path)
    if start is None:
        return
    for device in devices:
        measured = start.devices.get(device.capabilities.kind, "")
        same_backend = measured.startswith(f"{device.info.backend}|")
        if same_backend and measured != device.info.fingerprint:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def time_here(tasks: Sequence[Task], backends: dict[DeviceKind, str]) -> dict[str, Any]:
    """Return seconds of kernels on the devices of these backends, their fingerprints, and the time.

    For a process of its own, which ends if it takes too long. Raises `DeviceError`, `UserError` or
    `ProfileError`.
    """
    from hetero.backends.host.clock import SystemClock
    from hetero.profiler.interference import find_interference
    from hetero.profiler.scaling import prepare_references, time_references
    from hetero.profiler.workload import Workload

    mode: DeviceMode = "hetero" if len(backends) == 2 else next(x for x in KINDS if x in backends)
    opened = open_devices(mode, gpu=backends.get("gpu", "auto"), npu=backends.get("npu", "auto"))
    try:
        if opened.fallback:
            raise UserError(opened.fallback.partition(" because ")[2])
        with pinned(opened.control_core):
            workload = Workload(
                opened.devices, clock=SystemClock(), interference=find_interference()
            )
            runners = prepare_references(workload, tasks)
            start_s = time.perf_counter()
            with timing(), _at_most(time_limit(LIMITS.timing_s)):
                max_s = time_limit(LIMITS.max_s)
                seconds = time_references(workload, runners, LIMITS.timed_s, max_s)
            spent_s = time.perf_counter() - start_s
        devices = {kind: device.info.fingerprint for kind, device in opened.devices.items()}
        return {"seconds": seconds, "devices": devices, "spent_s": spent_s}
    finally:
        opened.close()


@contextlib.contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """End this process if what is inside takes longer: a call of a driver may never return."""
    guard = threading.Timer(limit_s, os._exit, (TOO_LATE,))
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def main() -> None:
    """Time the kernels of the request on stdin; print one line of JSON."""
    from hetero.profiler.grid import Task

    request = json.load(sys.stdin)
    run_on(request["cores"])
    tasks = [Task(d, WeightFormat(f), order, *sizes) for d, f, order, *sizes in request["tasks"]]
    warnings.simplefilter("ignore")
    try:
        answer = time_here(tasks, request["backends"])
    except (DeviceError, UserError) as error:
        answer = {"reason": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

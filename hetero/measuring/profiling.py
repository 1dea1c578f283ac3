"""Taking profiles from Python: opens the devices, pins the threads, calls the profiler."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from filelock import FileLock, Timeout

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.host.folders import cache_folder
from hetero.backends.protocol import KINDS
from hetero.errors import UserError
from hetero.measuring.every_core import ROUNDS, can_use_every_core, measure_every_core
from hetero.measuring.step_cost import measure_step_s
from hetero.models import model_spec
from hetero.placement.choice import NO_CPU
from hetero.placement.device_set import DeviceMode, DeviceSet, open_devices
from hetero.profiler.complete import completed
from hetero.profiler.errors import ProfileError
from hetero.profiler.grid import Shape
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.options import DEFAULT_BUDGET_S, QUICK_BUDGET_S, Event, Options
from hetero.profiler.profile_files import refuse_folder
from hetero.profiler.records import DeviceProfile, EveryCore
from hetero.profiler.session import profile_devices
from hetero.terminal.notices import notify

MIN_MEASURED: Final = 0.75  # of the grid, where no budget is given
SHORTEST_BUDGET_S: Final = 1.0
# What a machine of two cores takes besides the matmuls of the grid (waits, other kernels, both
# devices at once, fitting), and the fewest matmuls that predictions can be checked by.
MIN_BUDGET_S: Final = {True: 30.0, False: 75.0}  # by `quick`
LONGEST_BUDGET_S: Final = 1e6
EMULATED: Final = (
    "the NPU is emulated: its times are the emulator's and say nothing of the chip's speed, which "
    "`hetero profile --soc CHIP` predicts"
)


def profile_device(
    out: str | Path | None = None,
    *,
    quick: bool = False,
    budget_s: float | None = None,
    resume: bool = False,
    device: DeviceMode = "hetero",
    gpu: str = "auto",
    npu: str = "auto",
    cpu: str = NO_CPU,
    model: str | None = None,
    weights: Iterable[str] = ("w4a16",),
    name: str = "host",
    progress: Callable[[Event], None] | None = None,
) -> DeviceProfile:
    """Measure this machine and return its profile; written to `out` as it grows, if given.

    `budget_s` defaults to ten minutes, 50 s if `quick`; one too short for anything is refused,
    before or, on a slow machine, as soon as that shows. `model` measures exactly the shapes of a
    model instead of the default grid, with its weights cached as much as they would be. `cpu` is
    the backend of a third device, whose matmuls are measured besides. Raises `ProfileError` and
    `UserError`.
    """
    if budget_s is not None and not SHORTEST_BUDGET_S <= budget_s <= LONGEST_BUDGET_S:
        raise UserError(
            f"budget_s is from {SHORTEST_BUDGET_S:g} to {LONGEST_BUDGET_S:g} seconds, got "
            f"{budget_s}"
        )
    _check_budget(budget_s, quick)
    if out is not None:
        refuse_folder(out)
    formats = _formats(weights)
    of_model = {} if model is None else model_options(model_spec(model), formats)
    options = Options(
        name=name,
        quick=quick,
        budget_s=budget_s or (QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S),
        weight_formats=formats,
        gpu_core=assign_cores().gpu,
        keep_budget=budget_s is not None,  # the default one may take longer
        least=MIN_MEASURED if budget_s is None else 0.0,
        **of_model,
    )
    with _alone(out):
        return _measure(
            options,
            Backends(device, gpu, npu, None if cpu == NO_CPU else cpu),
            out=out,
            resume=resume,
            progress=progress,
            quick=quick,
        )


def complete_profile(
    path: str | Path, *, gpu: str = "auto", npu: str = "auto"
) -> tuple[DeviceProfile, list[str]]:
    """Measure the kernels that a profile of these devices lacks, and write it with them.

    Returns the profile and the new kernels, perhaps none. Raises `ProfileError` and `UserError`.
    """
    with _alone(path):
        profile = DeviceProfile.load(path)
        kinds = [kind for kind in KINDS if kind in profile.devices]
        device: DeviceMode = "hetero" if len(kinds) > 1 else kinds[0]
        third = profile.devices.get("cpu")
        opened = Backends(device, gpu, npu, None if third is None else third.backend).open()
        options = Options(
            weight_formats=tuple(dict.fromkeys(x.weight_format for x in profile.predictors)),
            gpu_core=assign_cores().gpu,
            control_core=opened.control_core,
        )
        try:
            with pinned(opened.control_core):
                finished = completed(profile, opened.devices, options)
        finally:
            opened.close()
        finished.save(Path(path))
    return finished, list(finished.notes[len(profile.notes) :])


class Backends(NamedTuple):
    """The devices to measure, by the names of their backends."""

    device: DeviceMode
    gpu: str
    npu: str
    cpu: str | None

    def open(self) -> DeviceSet:
        """Open them. Raises `UserError` where a third device was named and is missing."""
        opened = open_devices(self.device, gpu=self.gpu, npu=self.npu, cpu=self.cpu)
        if self.cpu is None or "cpu" in opened.devices:
            return opened
        opened.close()
        why = opened.fallback.partition(" because ")[2] or "a third device is besides both others"
        raise UserError(f"--measure-cpu {self.cpu}: {why}")


def _measure(
    options: Options,
    backends: Backends,
    *,
    out: str | Path | None,
    resume: bool,
    progress: Callable[[Event], None] | None,
    quick: bool,
) -> DeviceProfile:
    formats = options.weight_formats
    opened = backends.open()
    options = replace(options, control_core=opened.control_core)
    if opened.numbers == "emulated":
        notify(EMULATED)
    try:
        step_s = None
        if "gpu" in opened.devices:
            with suppress(DeviceError):  # some kernel of it fails, which the profile will say
                step_s = measure_step_s(backends.gpu, model_bytes=options.cold_bytes)
        every_core = None
        if "gpu" in opened.devices and can_use_every_core(opened.devices["gpu"]):
            every_core = partial(_every_core, formats, 1 if quick else ROUNDS)
        with pinned(opened.control_core):
            return profile_devices(
                opened.devices,
                options,
                out=Path(out) if out is not None else None,
                resume=resume,
                progress=progress,
                step_s=step_s,
                every_core=every_core,
            )
    finally:
        opened.close()


def _every_core(
    formats: Sequence[WeightFormat], rounds: int, checkpoint: Callable[[], None]
) -> list[EveryCore]:
    return measure_every_core(formats, rounds=rounds, checkpoint=checkpoint)


def _check_budget(budget_s: float | None, quick: bool) -> None:
    min_s = MIN_BUDGET_S[quick]
    if budget_s is not None and budget_s < min_s:
        shorter = "" if quick else f"; --quick (quick=True) needs {MIN_BUDGET_S[True]:.0f} s"
        raise UserError(
            f"a budget of {budget_s:g} s is too short to predict anything: give at least "
            f"{min_s:.0f} s{shorter}"
        )


@contextmanager
def _alone(out: str | Path | None) -> Iterator[None]:
    """Lock a file against other profilers. Raises `ProfileError` for the second one."""
    if out is None:
        yield
        return
    lock = FileLock(lock_path(Path(out)), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ProfileError(
            f"another `hetero profile` is writing {out}: wait until it has ended, or give another "
            "--out"
        ) from None
    try:
        yield
    finally:
        lock.release()


def lock_path(out: Path) -> Path:
    """Return the lock of a profile: not next to it, where it would be left over."""
    name = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]
    folder = cache_folder() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir())
    return folder / f"profile-{name}.lock"


def model_shapes(spec: ModelGraph) -> tuple[Shape, ...]:
    """Return the matmuls of a model for the profiler."""
    return tuple(Shape(matmul.name, matmul.n, matmul.k) for matmul in spec.matmuls)


def model_options(spec: ModelGraph, formats: Iterable[WeightFormat]) -> dict[str, Any]:
    """Return the `Options` of a profile for one model: its matmuls, its other kernels, its size."""
    stored = (spec.with_weight_format(f) for f in formats)
    return {
        "shapes": model_shapes(spec),
        "graph": spec,
        "cold_bytes": max((one.matmul_weight_bytes for one in stored), default=0),
    }


def parse_budget(text: str) -> float:
    """Return the seconds of `90s`, `10m`, `1h` or a plain number. Raises `UserError`."""
    # By hand: libraries of durations read far more than these three units, `1 month` among them.
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    factor = units.get(text[-1:].lower())
    number = text[:-1] if factor is not None else text
    try:
        seconds = float(number) * (factor or 1.0)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_BUDGET_S <= seconds <= LONGEST_BUDGET_S:
        raise UserError(f"--budget is a time such as 90s, 10m or 1h, got {text!r}")
    return seconds


def _formats(weights: Iterable[str]) -> tuple[WeightFormat, ...]:
    try:
        return tuple(WeightFormat(weight) for weight in weights)
    except ValueError:
        known = ", ".join(WeightFormat)
        raise UserError(f"weights are of {known}, got {', '.join(weights)}") from None

"""Self-tests: a driver and a level are used in this process only after a child has used them.

For each driver the best level of this machine is tried first; a child that crashes, hangs or
computes something else than the numpy twin costs a sentence, and the next level down is tried. The
result is kept with everything it depends on (`results`), and the kernels that a self-test
compiled are those that the first model loads (`store`).
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from filelock import FileLock, Timeout

from hetero.backends.host.affinity import core_count
from hetero.backends.host.time_limits import time_limit
from hetero.backends.opencl.drivers.icd import DriverCandidate
from hetero.backends.opencl.drivers.levels import LEVELS, Level
from hetero.backends.opencl.reports import CHECKING, PREPARING
from hetero.backends.opencl.self_test.kernel_store import KernelStore, keep_newest
from hetero.backends.opencl.self_test.results import (
    Attempt,
    DeviceResult,
    SelfTestResult,
    circumstances,
    drop_results,
    read_result,
    result_key,
    result_path,
    write_result,
)
from hetero.backends.opencl.self_test.run_folder import run_folder
from hetero.backends.opencl.self_test.supervisor import Worker, WorkerDiedError, WorkerJob, hello

MAX_PARTS: Final = 4
LOCK_S: Final = 300.0  # how long another process's self-test of the same is waited for

Notify: TypeAlias = Callable[[str], None]


def print_notice(sentence: str) -> None:
    """Print a sentence on standard error, like the command line's notices."""
    print(f"hetero: {sentence}", file=sys.stderr, flush=True)


@dataclass
class SelfTests:
    """Results of this machine's drivers, from the cache in `root` or by self-test."""

    root: Path
    notify: Notify = print_notice

    def __post_init__(self) -> None:
        self.run = run_folder(self.root)
        self._suspected = set(self.run.suspects)
        drop_results(self.run.suspects)
        self.run.suspects.clear()

    def known(self, candidate: DriverCandidate) -> SelfTestResult | None:
        """Return the kept result, None where there is none."""
        key = result_key(candidate)
        return self._read(result_path(self.root, key), key)

    def path(self, candidate: DriverCandidate) -> Path:
        """Return where a driver's result is kept."""
        return result_path(self.root, result_key(candidate))

    def examine(
        self, candidate: DriverCandidate, forced: Level | None = None, *, retry: bool = False
    ) -> SelfTestResult:
        """Return the result of a driver.

        It is that of its best level that passes, or of the forced one. With `retry`, one that had
        no device is loaded again.
        """
        key = result_key(candidate)
        path = result_path(self.root, key)
        levels = (forced,) if forced is not None else candidate.driver.levels()
        result = self._read(path, key, retry)
        if result is not None and _is_complete(result, levels):
            return result
        with self._one_at_a_time(path):
            result = self._read(path, key, retry) or SelfTestResult(
                key=key, library=candidate.library, origin=candidate.origin,
                driver=candidate.driver.name, circumstances=circumstances(),
            )  # fmt: skip
            if not _is_complete(result, levels):
                result = self._try_levels(candidate, result, levels)
                self._keep(path, result)
        return result

    def store(self, candidate: DriverCandidate, level: Level) -> KernelStore:
        """Return the compiled kernels of a driver at a level.

        They are in this process's folder where the cache cannot be written.
        """
        name = f"{folder_prefix(candidate)}-{level.name}"
        return KernelStore(self.root / "kernels" / name, self.run.path / "kernels" / name)

    def job(self, candidate: DriverCandidate, level: Level, folder: Path) -> WorkerJob:
        """Return the job of a child."""
        stores = tuple(map(str, self.store(candidate, level).folders))
        return WorkerJob(candidate.library, candidate.origin, level.name, str(folder), stores)

    def _try_levels(
        self, candidate: DriverCandidate, result: SelfTestResult, levels: tuple[Level, ...]
    ) -> SelfTestResult:
        again = self.path(candidate) in self._suspected
        meter = _Meter(self.notify, CHECKING if again else PREPARING)
        for level in levels:
            result = self._try_level(candidate, result, level, levels, meter)
            if result.problem or all(passed_level(d, levels) for d in result.devices):
                break
        meter.end()
        for device in result.devices:
            for attempt in device.attempts:
                if attempt.outcome != "passed":
                    self.notify(f"OpenCL by {device.title}: {attempt.sentence}")
        return result

    def _try_level(
        self,
        candidate: DriverCandidate,
        result: SelfTestResult,
        level: Level,
        levels: tuple[Level, ...],
        meter: _Meter,
    ) -> SelfTestResult:
        """Return the result with an attempt of this level for each device of which none passed."""
        store = self.store(candidate, level)
        used = store.is_used()
        child = _Child(self, candidate, level, 0)
        try:
            rows = child.rows()
        except WorkerDiedError as error:
            problem = f"loading it {error.outcome} ({error.detail})"
            return result.model_copy(update={"problem": problem, "lasting": error.lasting})
        devices = result.devices or tuple(DeviceResult.model_validate(row) for row in rows)
        if not devices:
            child.close()
            return result.model_copy(update={"problem": "CL_DEVICE_NOT_FOUND"})
        others = [_Child(self, candidate, level, part) for part in range(1, _parts(candidate))]
        children = [child, *others]
        tried = []
        for i, device in enumerate(devices):
            if passed_level(device, levels) or device.attempt(level):
                tried.append(device)
                continue
            attempt = _attempt(children, i, meter)
            if attempt.outcome != "passed" and used and attempt.lasting:
                store.clear()  # kernels of an earlier run may be the cause
                attempt = _attempt(children, i, meter)
            attempts = (*device.attempts, attempt)
            tried.append(device.model_copy(update={"attempts": attempts}))
        child.close()
        return result.model_copy(update={"devices": tuple(tried)})

    def _one_at_a_time(self, path: Path) -> AbstractContextManager[object]:
        """Return a lock, so that the second of two first starts takes the first's results."""
        lock = FileLock(path.with_suffix(".lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=time_limit(LOCK_S))
        except (OSError, Timeout):
            return nullcontext()
        return _LockedFile(lock)

    def _read(self, path: Path, key: str, retry: bool = False) -> SelfTestResult | None:
        result = read_result(path, key) or _UNKEPT.get(path)
        return None if result is not None and retry and result.problem else result

    def _keep(self, path: Path, result: SelfTestResult) -> None:
        if not result.lasting:
            return
        try:
            write_result(path, result)
            keep_newest(self.root / "kernels")
        except OSError as error:
            passed = any(a.outcome == "passed" for d in result.devices for a in d.attempts)
            if passed and path not in _UNKEPT:
                self.notify(
                    f"kernels cannot be kept in {self.root} ({error.strerror}), so they are "
                    "prepared at every start: make it writable, or name another in XDG_CACHE_HOME"
                )
            if passed:
                _UNKEPT[path] = result


# By path, of this process: results that could not be written, and those of the same file later.
_UNKEPT: dict[Path, SelfTestResult] = {}


class _LockedFile(AbstractContextManager[object]):
    def __init__(self, lock: FileLock) -> None:
        self._lock = lock

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Child:
    """The child that tries one part of a level's cases, started again after it died."""

    def __init__(
        self, self_tests: SelfTests, candidate: DriverCandidate, level: Level, part: int
    ) -> None:
        self.level = level
        self._self_tests = self_tests
        self._candidate = candidate
        self._part = part
        self._started = 0
        self._worker: Worker | None = None

    def rows(self) -> tuple[dict[str, str], ...]:
        """Return the driver's devices. Raises `WorkerDiedError`.

        Each process has a folder of its own: what killed one is not there for the next.
        """
        self._started += 1
        name = f"self-test-{_short(self._candidate.fingerprint())}-{self.level.name}"
        folder = self._self_tests.run.path / f"{name}-{self._part}-{self._started}"
        self._worker, rows = hello(self._self_tests.job(self._candidate, self.level, folder))
        return tuple(rows)

    def attempt(self, device: int, parts: int, meter: _Meter) -> Attempt:
        """Try this part on a device; a child that only does parts ends with it."""
        start_s = time.perf_counter()
        outcome, detail, lasting = "passed", "", True
        try:
            if self._worker is None:
                self.rows()
            assert self._worker is not None
            self._worker.say({"do": "self-test", "device": device, "part": self._part, "of": parts})
            answer = self._worker.hear()
            while "done" in answer:
                meter.show(self._part, answer["done"], answer["all"])
                answer = self._worker.hear()
            lasting = answer.pop("lasting", True)
            ((outcome, detail),) = answer.items()
        except WorkerDiedError as error:
            self._worker = None
            outcome, detail, lasting = error.outcome, error.detail, error.lasting
        if outcome != "passed" or self._part > 0:
            self.close()
        seconds = round(time.perf_counter() - start_s, 3)
        return Attempt.model_validate(
            {
                "level": self.level.name, "outcome": outcome, "detail": detail,
                "seconds": seconds, "lasting": lasting,
            }
        )  # fmt: skip

    def close(self) -> None:
        """End the child."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _parts(candidate: DriverCandidate) -> int:
    """Return the children that share a self-test's cases: compilers take one core each."""
    return min(MAX_PARTS, core_count()) if candidate.driver.computes_on_cpu else 1


def _attempt(children: Sequence[_Child], device: int, meter: _Meter) -> Attempt:
    """Return all parts of a self-test at once; the first that did not pass speaks for all."""
    with ThreadPoolExecutor(len(children)) as pool:
        ends = list(pool.map(lambda c: c.attempt(device, len(children), meter), children))
    said: Attempt = min(ends, key=lambda end: end.outcome == "passed")
    return said.model_copy(update={"seconds": max(end.seconds for end in ends)})


class _Meter:
    """Progress on standard error: a line, counted on where that is a terminal."""

    def __init__(self, notify: Notify, text: str) -> None:
        self._notify = notify
        self._text = text
        self._counts = notify is print_notice and sys.stderr.isatty()
        self._begun = False
        self._lock = threading.Lock()
        self._done: dict[int, tuple[int, int]] = {}

    def show(self, part: int, number: int, of: int) -> None:
        """Show that so many cases of a part are done."""
        with self._lock:
            self._done[part] = (number, of)
            if self._counts:
                done, all_ = (sum(column) for column in zip(*self._done.values(), strict=True))
                text = f"\rhetero: {self._text} ({done} of {all_})"
                print(text, end="", file=sys.stderr, flush=True)
            elif not self._begun:
                self._notify(self._text)
            self._begun = True

    def end(self) -> None:
        """End the line of progress."""
        if self._counts and self._begun:
            print(file=sys.stderr)


def _is_complete(result: SelfTestResult, levels: tuple[Level, ...]) -> bool:
    """Return whether there is nothing left to try of these levels."""
    if result.problem:
        return True
    return bool(result.devices) and all(
        passed_level(device, levels) is not None or all(device.attempt(level) for level in levels)
        for device in result.devices
    )


def passed_level(device: DeviceResult, levels: tuple[Level, ...]) -> Level | None:
    """Return the best of these levels that passed."""
    for level in levels:
        attempt = device.attempt(level)
        if attempt is not None and attempt.outcome == "passed":
            return LEVELS[attempt.level]
    return None


def folder_prefix(candidate: DriverCandidate) -> str:
    """Return how the names of a driver's folders with kernels begin."""
    return _short(candidate.fingerprint())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

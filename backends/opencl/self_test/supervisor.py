"""The parent's side of a child process that loads drivers, tries kernels and compiles (`worker`).

Messages are lines of JSON in both directions. A child that ends, or says nothing for too long, is
an answer too: `WorkerDiedError` has the signal and the last words of its standard error, which is
where compilers chatter and which no user sees without `--debug`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hetero.backends.errors import KernelBuildError
from hetero.backends.host.child import child_command
from hetero.backends.host.time_limits import VARIABLE, Patience, time_limit
from hetero.backends.opencl.program_source import ProgramSource
from hetero.backends.opencl.self_test.program_compiler import Variant

MODULE: Final = "hetero.backends.opencl.self_test.worker"
# The longest wait for one line, in which one program or kernel is compiled (`Patience`).
SILENCE_S: float = 60.0
ENDING_S: Final = 0.2
WORDS: Final = 300
MAX_LINES: Final = 200
# Ends that say something of the code that ran, unless the last words are of a lack of room.
FAULTS: Final = frozenset(
    -getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE")
    if hasattr(signal, name)
)
DISK_FULL: Final = ("No space left on device", "File too large", "Disk quota exceeded")
MEMORY_FULL: Final = ("out of memory", "bad_alloc", "Cannot allocate memory", "MemoryError")

log = logging.getLogger(__name__)


class WorkerDiedError(Exception):
    """A child that crashed (`outcome` crashed) or did not answer in time (hung).

    `lasting`: it would happen again; a full disk or a kill from outside may not.
    """

    def __init__(self, outcome: str, detail: str, *, lasting: bool) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.lasting = lasting


@dataclass(frozen=True)
class WorkerJob:
    """A child's job: a library to load, its level, the folder and stores to compile into."""

    library: str
    origin: str
    level: str
    folder: str
    stores: tuple[str, ...]


def worker_command() -> Sequence[str]:
    """Return the command of a child."""
    return child_command(MODULE)


class Worker:
    """One child. Used by one thread at a time; ends with `close`, or with this process."""

    def __init__(self, job: WorkerJob) -> None:
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        self._child = subprocess.Popen(
            worker_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._words: deque[str] = deque(maxlen=MAX_LINES)
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_words, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        with contextlib.suppress(WorkerDiedError):  # its end is the answer to the first question
            self.say(asdict(job))

    @property
    def alive(self) -> bool:
        """Return whether it has not ended: the system ends it with the thread that started it."""
        return self._child.poll() is None

    def say(self, message: dict[str, Any]) -> None:
        """Send a message. Raises `WorkerDiedError`."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            raise self._died() from None

    def hear(self) -> dict[str, Any]:
        """Return the next message. Raises `WorkerDiedError`."""
        line = self._next_line(Patience(self._child.pid, time_limit(SILENCE_S)))
        if line is None:
            raise self._died()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._died() from None
        return answer

    def _next_line(self, patience: Patience) -> bytes | None:
        while True:
            try:
                return self._lines.get(timeout=patience.limit_s)
            except queue.Empty:
                if not patience.is_over():
                    continue
                words = self._last_words()
                self.kill()
                said = f"no answer for {patience.limit_s:g} s{words}"
                raise WorkerDiedError("hung", said, lasting=True) from None

    def kill(self) -> None:
        """End the child, whatever it is doing."""
        self._child.kill()
        self.close()

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for reader in self._readers:
            reader.join(ENDING_S)
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        stream = self._child.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def _died(self) -> WorkerDiedError:
        """Return why there is no answer."""
        try:
            code = self._child.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        words = self._last_words()
        self.close()
        full = any(sign in words for sign in (*DISK_FULL, *MEMORY_FULL))
        lasting = code in FAULTS and not full
        return WorkerDiedError("crashed", f"{_ended(code)}{words}", lasting=lasting)

    def _read_words(self) -> None:
        """Read standard error: compilers' chatter for `--debug`, and the last lines for `_died`."""
        stream = self._child.stderr
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                text = line.decode(errors="replace").strip()
                self._words.append(text)
                log.debug("worker: %s", text)

    def _last_words(self) -> str:
        """Return the last thing that it wrote to standard error but warnings, on one line."""
        self._readers[1].join(ENDING_S)
        lines = [line for line in self._words if line and "warning" not in line.lower()]
        return f": {lines[-1][:WORDS]}" if lines else ""


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Supervisor:
    """A child that compiles what the store does not have; started when it is first needed.

    It may die of a program: that is an error of that request, and the next one goes to another
    child. After `IDLE_S` without a question the child ends by itself, which costs nothing here.
    """

    def __init__(self, job: WorkerJob, device: int) -> None:
        self._job = job
        self._device = device
        self._worker: Worker | None = None
        self._pid = os.getpid()
        self._asked_s = 0.0
        self.builds = 0

    def build(self, source: ProgramSource, variant: Variant | None) -> None:
        """See `compiler.Builder`. Raises `KernelBuildError`."""
        self.builds += 1
        question = {
            "do": "build",
            "device": self._device,
            "source": {"name": source.name, "text": source.text, "options": source.options},
            "variant": None if variant is None else asdict(variant),
        }
        try:
            answer = self._ask(question)
        except WorkerDiedError as error:
            self._worker = None
            raise KernelBuildError(
                "opencl",
                f"building {source.name}{'' if variant is None else f' ({variant.kernel})'}",
                f"the driver's compiler {error.outcome} ({error.detail})",
                _remedy(error),
            ) from error
        if "error" in answer:
            raise KernelBuildError("opencl", *answer["error"])

    def close(self) -> None:
        """End the child."""
        if self._worker is not None and self._pid == os.getpid():
            self._worker.close()
        self._worker = None

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        idle = time.monotonic() - self._asked_s > IDLE_S / 2
        if self._worker is None or idle or not self._worker.alive:
            self.close()
            self._worker = Worker(self._job)
            self._worker.hear()  # its devices
        worker = self._worker
        assert worker is not None
        self._asked_s = time.monotonic()
        self._worker = None  # interrupted, it is not used again: its answer comes late
        try:
            worker.say(question)
            answer = worker.hear()
        except WorkerDiedError:
            raise
        except BaseException:
            worker.kill()
            raise
        self._worker, self._asked_s = worker, time.monotonic()
        return answer


IDLE_S: Final = 20.0


def _remedy(error: WorkerDiedError) -> str:
    if any(sign in error.detail for sign in DISK_FULL):
        return "make room on the disk"
    if any(sign in error.detail for sign in MEMORY_FULL):
        return "free memory"
    if error.outcome == "hung":
        return f"use --device npu, or {VARIABLE}=4 if this machine is only slow"
    return "use --device npu, or another level (HETERO_OPENCL_LEVEL)"


def hello(job: WorkerJob) -> tuple[Worker, Sequence[dict[str, Any]]]:
    """Return a child with its driver loaded, and its devices. Raises `WorkerDiedError`."""
    worker = Worker(job)
    answer = worker.hear()
    if "error" in answer:
        worker.close()
        raise WorkerDiedError(
            "failed", ": ".join(answer["error"][:2]), lasting=answer.get("lasting", True)
        )
    return worker, answer["devices"]

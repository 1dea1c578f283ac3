"""A model that answers on the NPU alone while the devices of its plan are prepared."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetero.backends.errors import DeviceError
from hetero.backends.host.affinity import unpinned
from hetero.backends.host.background import Background
from hetero.backends.host.child import child_command
from hetero.backends.host.time_limits import time_limit
from hetero.backends.protocol import DeviceKind
from hetero.errors import FallbackWarning, UserError, one_sentence
from hetero.placement.choice import Choice
from hetero.placement.timing_lock import wait_while_timed
from hetero.runtime.engine import Engine
from hetero.runtime.executor import nothing

PREPARING_S: Final = 900.0  # of the child: self-tests, scaling, kernels, packing
TIMED_S: Final = 5.0  # for which a step waits at most while the machine is timed
END_S: Final = 5.0  # for the thread to see that its child was ended


class PreparationError(Exception):
    """The child process that prepares a plan failed; the message says how."""


FAILURES: Final = (PreparationError, DeviceError, UserError, MemoryError, OSError)


def stay_alone(engine: Engine, device: str, error: BaseException) -> None:
    """Say that a model that was to move stays on a device, and why."""
    why = one_sentence(str(error) or type(error).__name__)
    engine.deployment.fallback = f"going on with {device} alone because {why}"
    warnings.warn(engine.deployment.fallback, FallbackWarning, stacklevel=3)


class LatePlan:
    """Prepares a plan in a child process, and moves the engine to its devices between two steps.

    A thread owns the child (`hetero.generation.warming`), which compiles kernels, scales the
    profile and packs weights into the cache as a start that waits does. The thread then chooses the
    devices from what is cached; it touches neither engine nor devices. `before_step` is the
    engine's: the thread that has the engine's lock waits there while the child times the machine,
    and moves the engine when all is prepared. So a step's thread owns the devices.

    What fails leaves the model on its device, `here`, with one `FallbackWarning`;
    `Deployment.fallback` says why. A move that is interrupted is made again before the next step.
    `close` ends child and thread; a process that ends otherwise takes the child with it.
    """

    def __init__(
        self,
        engine: Engine,
        question: Mapping[str, Any],
        choose: Callable[[], Choice],
        move: Callable[[Choice], None],
        here: DeviceKind = "npu",
    ) -> None:
        self._here = here
        self._engine, self._question, self._choose, self._move = engine, question, choose, move
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._job = Background(self._prepared)
        engine.before_step = self.before_step
        threading.Thread(target=self._job.run, name="hetero-late-plan", daemon=True).start()

    def before_step(self) -> bool:
        """Move the engine if all is prepared; return whether it has moved."""
        if not self._job.wait(0):
            wait_while_timed(TIMED_S)
            return False
        self._engine.before_step = nothing
        try:
            self._move(self._job.result())
        except FAILURES as error:
            stay_alone(self._engine, self._here, error)
            return False
        except BaseException:
            self._engine.before_step = self.before_step
            raise
        return True

    def wait(self, limit_s: float = math.inf) -> bool:
        """Return whether everything is prepared, or has failed, at the latest after `limit_s`."""
        ended = self._job.wait(limit_s)
        if ended and self._engine.before_step == self.before_step:
            try:
                self._job.result()
            except FAILURES as error:
                self._engine.before_step = nothing
                stay_alone(self._engine, self._here, error)
        return ended

    def close(self) -> None:
        """End the child and the thread; idempotent."""
        self._closed = True
        self._engine.before_step = nothing
        self._job.cancel()
        self._end()
        self._job.wait(END_S)

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()

    def _prepared(self) -> Choice:
        """Run the child; return what was chosen. Raises `PreparationError`, and what `choose` does.

        The child has the terminal's Ctrl-C kept away: it ends with this process.
        """
        unpinned()
        try:
            self._process = subprocess.Popen(
                child_command("hetero.generation.warming"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise PreparationError(f"no process could be started ({error.strerror})") from error
        if self._closed:
            self._end()
        limit_s = time_limit(PREPARING_S)
        try:
            _, said = self._process.communicate(json.dumps(self._question), timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._end()
            self._process.communicate()
            raise PreparationError(f"preparing took more than {limit_s:g} s") from None
        if code := self._process.returncode:
            lines = said.strip().splitlines()
            why = lines[-1].removeprefix("hetero: ") if lines else f"it ended with {code}"
            raise PreparationError(f"preparing its plan failed: {why}")
        return self._choose()

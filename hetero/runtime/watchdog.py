"""A thread that reports native calls which do not return, because Python cannot end them.

Waits for a device have a deadline, and its error names the kernel. A call of ONNX Runtime or QNN,
or the driver's own wait (`--sync event`, `finish`, `copy`), keeps the control thread until it
returns, and has no timeout. Where one hangs only its process can be ended.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from hetero.backends.host.clock import Clock
from hetero.backends.host.time_limits import time_limit
from hetero.backends.protocol import DEFAULT_DEADLINE_S
from hetero.runtime.program import SIGNAL, WAIT, WAIT_LAYER, Action
from hetero.runtime.step import Step
from hetero.runtime.waits import WaitPoint

POLL_S: Final = 5.0
AT_WORK: Final = 10.0  # times as long a call may take whose thread computes
log = logging.getLogger("hetero")


class Runner(Protocol):
    """Runs steps: `hetero.runtime.executor.Executor`."""

    running: tuple[Step, list[float], int] | None
    clock: Clock


def hung_call(executor: Runner, now_s: float, limit_s: float = DEFAULT_DEADLINE_S) -> str:
    """Return a sentence on the call that an executor has been in for `limit_s`, if there is one.

    The limit is ten times as long where its thread computes: a slow machine is no driver that
    hangs. HETERO_TIMEOUT_SCALE multiplies it. `now_s` is of its clock.
    """
    running = executor.running
    if running is None:
        return ""
    step, stamps, thread = running
    at, limit_s = len(stamps) - 1, time_limit(limit_s)
    waited_s = now_s - stamps[-1]
    if at >= len(step.program) or waited_s < limit_s or _ends(step.program[at]):
        return ""
    if waited_s < AT_WORK * limit_s and not _sleeps(thread):
        return ""
    launch = step.launches[step.program[at].launch]
    return (
        f"the {launch.kind} has not ended {launch.call.name} ({launch.node}) for {limit_s:g} s: a "
        "call of its driver cannot be interrupted; end this process if it stays so, and run "
        "`hetero doctor`"
    )


def _ends(action: Action) -> bool:
    """Return whether an action has a deadline of its own."""
    site = getattr(action.target, "__self__", None)
    polls = isinstance(site, WaitPoint) and site.owner.method == "fast"
    return action.code in (WAIT_LAYER, SIGNAL) or (action.code == WAIT and polls)


def _sleeps(thread: int) -> bool:
    """Return whether a thread of this process sleeps (Linux; elsewhere unknown)."""
    try:
        stat = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("S", "D")


class Watchdog:
    """A thread that checks the executors of this process.

    `on_hang` is called once for each hung call.
    """

    def __init__(self) -> None:
        self.on_hang: Callable[[str], object] = log.error
        self._executors: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, executor: Runner) -> None:
        """Watch this executor as long as it exists."""
        self._executors.add(executor)
        if self._thread is None or not self._thread.is_alive():  # the first, or in a forked child
            self._thread = threading.Thread(target=self._run, name="hetero-watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        reported: set[str] = set()
        while True:
            time.sleep(POLL_S)
            sentences = {hung_call(x, x.clock.now()) for x in list(self._executors)} - {""}
            for sentence in sentences - reported:
                self.on_hang(sentence)
            reported = sentences


WATCHDOG: Final = Watchdog()

"""Blocks that change something of the process: a signal handler that raises leaves it as it was."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from hetero.backends.host.affinity import pinned
from hetero.backends.host.gc_pause import gc_paused
from hetero.backends.host.timers import PR_GET_TIMERSLACK, _prctl, timer_slack
from hetero.models.tokenizer import quiet_panics
from tests.support.interrupts import handler, interrupted, places

try:
    from hetero.backends.qnn.library import quiet_stdout
except ImportError:  # its package is not installed
    quiet_stdout = contextlib.nullcontext

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux"),
    # A temporary file that was interrupted while it was opened is closed by its finaliser.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def state() -> dict[str, Any]:
    return {
        "outputs": [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)],
        "cores": os.sched_getaffinity(0),
        "collects": gc.isenabled(),
        "slack": _prctl()(PR_GET_TIMERSLACK),
    }


def quiet_stdout() -> AbstractContextManager[None]:
    pytest.importorskip("onnxruntime_qnn")
    from hetero.backends.qnn.library import quiet_stdout

    return quiet_stdout()


@pytest.mark.parametrize(
    "block",
    [
        quiet_stdout,
        quiet_panics,
        gc_paused,
        lambda: timer_slack(1),
        lambda: pinned(min(os.sched_getaffinity(0))),
    ],
    ids=["stdout", "stderr", "collector", "slack", "cores"],
)
def test_a_signal_at_any_instruction(block: Callable[[], AbstractContextManager[Any]]) -> None:
    def run() -> None:
        with block():
            pass

    before = state()
    run()
    with handler():
        for place in places(run):
            interrupted(run, place)
            assert state() == before, place

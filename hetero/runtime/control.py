"""The control thread: the one that runs steps, submits to the GPU and calls the NPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from hetero.backends.host.affinity import move_pin, pinned
from hetero.backends.host.timers import timer_slack

_NESTED: Final = nullcontext()


class ControlThread:
    """The thread inside `on_core`, on the control core (None: on any), with exact sleeps."""

    def __init__(self, core: int | None) -> None:
        self.core = core
        self._inside = 0  # a thread

    def on_core(self) -> AbstractContextManager[None]:
        """Hold the control core for one or many steps.

        Nested holds make no system calls, which take longer than all the Python code of a step of a
        small model.
        """
        return _NESTED if self._inside == threading.get_ident() else self._hold()

    def move_to(self, core: int | None) -> None:
        """Hold another core from now on, also in the calling thread's holds that have begun."""
        self.core = core
        move_pin(core)

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with pinned(self.core), timer_slack(1):
            before, self._inside = self._inside, threading.get_ident()
            try:
                yield
            finally:
                self._inside = before

"""The lock of a model's devices: one thread at a time, for one step at a time."""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable
from typing import Final

from hetero.backends.errors import DeviceLostError
from hetero.backends.host import forks
from hetero.errors import UserError

IN_USE: Final = "another thread was using it when this process was forked"


def lost_error() -> DeviceLostError:
    """Return the error of a forked child that would wait for a thread that only its parent has."""
    return DeviceLostError("engine", "running the model", IN_USE, forks.REMEDY)


class StepLock(RLock):  # type: ignore[misc]  # C's own class may be derived from
    """A lock that is taken for a step, or while a context is allocated; never between steps.

    `with` calls the lock's own `__enter__` and `__exit__`, which are C: an exception that a Python
    signal handler raises comes before or after them, so an interrupted step never keeps the lock.
    `lost` is true in a child that was forked while another thread had the lock.
    """

    _is_owned: Callable[[], bool]
    _at_fork_reinit: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        forks.in_child(self._forked)

    def check(self) -> None:
        """Raise `UserError` in a signal handler (or finaliser) that interrupted this thread's step.

        Another step would overwrite its activations.
        """
        if self._is_owned():
            raise UserError(
                "this thread is in the middle of a step of this model: a signal handler cannot run "
                "another one; raise an exception from it instead, or set a flag"
            )

    def _forked(self) -> None:
        if self.acquire(blocking=False):
            self.release()
        else:
            self.lost = True
            self._at_fork_reinit()

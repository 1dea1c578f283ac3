"""A child process that answers questions in lines of JSON, with a limit on every wait."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

from hetero.backends.host.child import child_command

EXIT_S: Final = 5.0  # for a child to leave by itself, and again after SIGTERM
AGAIN_S: Final = 0.01  # until a finaliser has ended
Message = dict[str, Any]


class ChildDiedError(Exception):
    """The child ended, or did not answer in time; the message says which."""


class JsonChild:
    """The parent's side. A context manager: an error inside ends the child at once.

    The child runs a module of ours that calls `serve`. Its standard error is the parent's; Ctrl-C
    of a terminal reaches the parent alone. It ends with the thread that made it.
    """

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            child_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=os.name == "posix",
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name=module).start()

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def say(self, message: Message) -> None:
        """Send a message. Raises `ChildDiedError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None

    def hear(self, limit_s: float) -> Message:
        """Return the next message. Raises `ChildDiedError`."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise ChildDiedError(f"gave no sign of life for {limit_s:g} s") from None
        if not line:
            raise self._died()
        message: Message = json.loads(line)
        return message

    def close(self, *, now: bool = False) -> None:
        """End the child: it leaves when its input ends, or, `now`, at SIGTERM. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a last message that never arrived
            self._process.stdin.close()
        for end in (self._process.terminate,) if now else (lambda: None, self._process.terminate):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
                return
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(now=error is not None)

    def _read(self) -> None:
        """Queue lines, and an empty one when the process has ended: a pipe has no deadline."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def _died(self) -> ChildDiedError:
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return ChildDiedError("closed its output")
        if code < 0:
            return ChildDiedError(f"was ended by {signal.Signals(-code).name}")
        return ChildDiedError(f"ended with exit code {code}")


@contextlib.contextmanager
def serving() -> Iterator[tuple[Iterator[Message], Callable[[Message], None]]]:
    """Yield the child's side.

    The messages that come, until the parent closes them, and how to answer.

    What libraries print goes to standard error. SIGTERM unwinds the stack, so that what was opened
    is closed, and ends the process without a traceback.
    """
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)

        def say(message: Message) -> None:
            out.write(json.dumps(message).encode() + b"\n")
            out.flush()

        signal.signal(signal.SIGTERM, _leave)
        sys.unraisablehook = _leave_later
        yield map(json.loads, sys.stdin.buffer), say


def _leave_later(unraisable: Any) -> None:
    """Send SIGTERM again where its exception was raised, and lost, in a finaliser."""
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGTERM, _leave)
    threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _leave(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)

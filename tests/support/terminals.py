"""A terminal for the commands under test: what they see and write when a person uses them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

HETERO = (sys.executable, "-m", "hetero")


class Terminal:
    """`hetero ARGUMENTS`, or another program, in a terminal of so many columns; `text` is all that
    it wrote so far.
    """

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        env: dict[str, str] | None = None,
        program: Sequence[str] = HETERO,
    ):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # for shells in the background
        try:
            self._process = subprocess.Popen(
                [*program, *arguments],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env={**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **(env or {})},
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            )
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(slave)
        self.text = ""

    def wait_for(self, wanted: str, times: int = 1, limit_s: float = 120.0) -> str:
        """Read until the text has `wanted` so often; fails where it ends without."""
        until_s = time.monotonic() + limit_s
        while self.text.count(wanted) < times:
            assert self._read(until_s - time.monotonic()), f"no {wanted!r} in {self.text[-2000:]}"
        return self.text

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._master, text.encode())

    def end(self, limit_s: float = 120.0) -> int:
        """Read to the end; the exit code."""
        until_s = time.monotonic() + limit_s
        while self._read(until_s - time.monotonic()):
            pass
        return self._process.wait(10)

    def _read(self, limit_s: float) -> bool:
        if not select.select([self._master], [], [], max(limit_s, 0.0))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.text += data.decode("utf-8", "replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

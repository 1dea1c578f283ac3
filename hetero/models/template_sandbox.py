"""Chat templates are programs that come with a model: they run in a process of their own.

Jinja's sandbox keeps a template away from Python; it does not stop one that loops for ever or
multiplies a text by a billion. `hetero.models.template_worker` renders with little memory, and is
killed when it does not answer in time. One process serves all templates, started with the first
chat (0.1 s) and ended with the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from hetero.backends.host.time_limits import time_limit

START_LIMIT_S: Final = 30.0
RENDER_LIMIT_S: Final = 2.0
_SCRIPT: Final = Path(__file__).with_name("template_worker.py")


class TemplateSyntaxError(ValueError):
    """The template cannot be compiled."""


class TemplateRefusalError(ValueError):
    """The template refuses these values, in its own words."""


class TemplateLimitError(ValueError):
    """The template needs too much time or memory."""


class _Worker:
    """The process, and a thread that reads its lines: pipes have no deadline of their own."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Only what Jinja needs is imported there; -S leaves out site-packages' start-up code.
        paths = os.pathsep.join(x for x in sys.path if x)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=os.name == "posix",  # Ctrl-C is for the parent alone
            )
        except OSError as error:
            raise TemplateLimitError(
                f"the process that renders it does not start: {error.strerror or error}"
            ) from error
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="chat-template").start()
        if self._next(time_limit(START_LIMIT_S)).strip() != b"ready":
            self.end()
            raise TemplateLimitError("the process that renders it does not start")

    @property
    def usable(self) -> bool:
        """Return whether it runs, and is this process's own (not a copy after a fork)."""
        return self._process.poll() is None and self.owner == os.getpid()

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, str]:
        """Return the answer to a request.

        Kills the process and raises `TemplateLimitError` if none comes in time.
        """
        assert self._process.stdin is not None
        text = json.dumps(request).encode() + b"\n"
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
            line = self._next(limit_s)
        except BrokenPipeError:
            line = b""
        except BaseException:
            self.end()  # also on Ctrl-C: an answer that comes late must not be taken for the next
            raise
        if not line:
            self.end()
            raise TemplateLimitError("its text or its values grow too large")
        reply: dict[str, str] = json.loads(line)
        return reply

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written last never arrived
                    pipe.close()

    def _read(self) -> None:
        """Put lines into the queue, and an empty one when the process has ended."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed by `end`
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _next(self, limit_s: float) -> bytes:
        try:
            return self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise TemplateLimitError(f"it does not end within {limit_s:g} seconds") from None


_lock = threading.Lock()
_current: list[_Worker] = []


def render(
    source: str, values: Mapping[str, Any], now: datetime, *, limit_s: float = RENDER_LIMIT_S
) -> str:
    """Return the text of a Jinja template. `values` must be JSON values (`TypeError` otherwise).

    `now` is the time of `strftime_now`. Raises `TemplateSyntaxError`, `TemplateRefusalError`,
    `TemplateLimitError`.
    """
    request = {"source": source, "values": dict(values), "now": now.isoformat()}
    with _lock:
        reply = _worker().ask(request, time_limit(limit_s))
    if "text" in reply:
        return reply["text"]
    kinds = {"syntax": TemplateSyntaxError, "refused": TemplateRefusalError}
    raise kinds.get(reply["kind"], TemplateLimitError)(reply["error"])


def _worker() -> _Worker:
    if not _current or not _current[0].usable:
        _current[:] = [_Worker()]
    return _current[0]


def _after_fork() -> None:
    """Replace the lock in a forked child: the thread that had locked it is not there."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end() -> None:
    while _current:
        worker = _current.pop()
        if worker.owner == os.getpid():
            worker.end()

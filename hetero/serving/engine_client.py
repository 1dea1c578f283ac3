"""The HTTP process's side of the engine: starts it, asks it, hears from it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from hetero.errors import UserError
from hetero.serving.errors import ApiError
from hetero.serving.messages import (
    Ask,
    Cancel,
    Control,
    Finished,
    Ready,
    Refused,
    Replied,
    Run,
    Said,
    Stop,
    ToEngine,
    decode,
    encode,
)

log = logging.getLogger("hetero.serving")
LONGEST_LINE: Final = 256 << 20  # bytes
READ_BYTES: Final = 1 << 20  # at a time
STOP_S: Final = 30.0  # for the engine to write what is to be written, and end
TERMINATE_S: Final = 5.0
_STATUS: Final = {"user": 400, "quota": 429, "disk": 507, "missing": 404, "engine": 500}
Event = Said | Run | Finished | Replied | Refused


class Inbox:
    """What came for one number and was not taken yet. Used in one event loop, by one task."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """It came."""
        self._events.append(event)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Event]:
        """All there is, at least one."""
        while not self._events:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        taken, self._events = self._events, []
        return taken


class Question:
    """What the engine says to an `Ask`, up to `Finished`. Closing it before that cancels it."""

    def __init__(self, client: EngineClient, number: int, app: str) -> None:
        self.number, self.app = number, app
        self._client, self._over, self._closed = client, False, False
        self._refused: Refused | None = None
        self._inbox = client.listen(number, app)

    async def told(self) -> list[Said | Run | Finished]:
        """What came, at least one; empty after `Finished`. Raises `ApiError` where the question is
        refused, which follows what came before.
        """
        found = list[Said | Run | Finished]()
        while not (found or self._over):
            for event in await self._inbox.take():
                if isinstance(event, Refused):
                    self._refused = event
                else:
                    assert not isinstance(event, Replied)
                    found.append(event)
                self._over = isinstance(event, Finished | Refused)
                if self._over:
                    break
        if self._refused is not None and not found:
            raise _error(self._refused)
        return found

    def close(self) -> None:
        """Nobody listens any more; idempotent."""
        if not self._closed:
            self._closed = True
            self._client.leave(self.number, self.app, cancel=not self._over)


class EngineClient:
    """Used in one event loop. `longest_queue` bounds answers that are made or waited for, of all
    apps; an app may have half of them, but at least 8. `on_end` is called once, if the engine ends
    without being told to.
    """

    def __init__(self, options: dict[str, Any], longest_queue: int) -> None:
        self.about: dict[str, Any] = {}
        self.waiting: Counter[str] = Counter()
        self.on_end: Callable[[], None] = lambda: None
        self._options, self._longest = options, longest_queue
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopping = self._broken = False

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._reader is not None and not self._reader.done()

    @property
    def told_to_stop(self) -> bool:
        """Whether it ends because this process does."""
        return self._stopping and not self._broken

    async def start(self) -> None:
        """Return when it takes questions. Raises `UserError` if it cannot."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "hetero.serving.engine",
            json.dumps(self._options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        first = decode(line) if line else None
        if not isinstance(first, Ready):
            await self._end()
            why = first.message if isinstance(first, Refused) else "it ended without a word"
            raise UserError(f"the engine did not start: {why}")
        self.about = first.about
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """Give up what runs; return when everything is written and the process has ended. One that
        hangs (in a driver, for one) is terminated after `STOP_S`, then killed.
        """
        self._stopping = True
        if self._process is None:
            return
        with suppress(OSError, TimeoutError):  # a full pipe without a reader
            await asyncio.wait_for(self._tell(Stop()), TERMINATE_S)
        await self._end()
        if self._reader is not None:
            await self._reader

    async def _end(self) -> None:
        """Wait for the process; end it where it hangs."""
        process = self._process
        assert process is not None
        limit_s = STOP_S
        for name, send in (("SIGTERM", process.terminate), ("SIGKILL", process.kill)):
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), limit_s)
                return
            log.error("the engine does not end: sending %s", name)
            send()
            limit_s = TERMINATE_S
        await process.wait()

    def admit(self, app: str) -> None:
        """Raise `ApiError` where another answer would be one too many."""
        if self._stopping or not self.alive:
            raise ApiError(503, "the server is ending: ask another one, or later", retry_s=5)
        if self.waiting.total() >= self._longest:
            raise ApiError(
                503,
                f"{self._longest} answers are made or waited for, which is all that --queue "
                "allows: try again later",
                code="queue_full",
                retry_s=2,
            )
        share = max(self._longest // 2, 8)
        if self.waiting[app] >= share:
            raise ApiError(
                429,
                f"{share} answers are made or waited for here, which is all that one app may "
                "have: try again when one is finished",
                code="queue_full",
                retry_s=2,
            )

    async def ask(self, app: str, **fields: Any) -> Question:
        """Put an `Ask`; close what this gives. Raises `ApiError` where there is no room."""
        self.admit(app)
        question = Question(self, next(self._numbers), app)
        try:
            await self._tell(Ask(id=question.number, app=app, **fields))
        except BaseException:
            question.close()
            raise
        return question

    def listen(self, number: int, app: str) -> Inbox:
        """What comes for a number, which counts as an app's from here on."""
        self.waiting[app] += 1
        inbox = self._inboxes[number] = Inbox()
        return inbox

    def leave(self, number: int, app: str, *, cancel: bool) -> None:
        """The end of that."""
        del self._inboxes[number]
        self.waiting[app] -= 1
        if not self.waiting[app]:
            del self.waiting[app]
        if cancel and self.alive and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(encode(Cancel(id=number)))

    async def control(self, app: str, action: str, **arguments: Any) -> dict[str, Any]:
        """What a `Control` gives. Raises `ApiError`."""
        if self._stopping or not self.alive:
            raise ApiError(503, "the server is ending: ask another one, or later", retry_s=5)
        number = next(self._numbers)
        inbox = self._inboxes[number] = Inbox()
        try:
            await self._tell(Control(id=number, app=app, action=action, arguments=arguments))
            event = (await inbox.take())[0]  # the engine's end may follow
        finally:
            del self._inboxes[number]
        if isinstance(event, Refused):
            raise _error(event)
        assert isinstance(event, Replied)
        return event.value

    async def _tell(self, message: ToEngine) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(encode(message))
        await self._process.stdin.drain()

    async def _read(self) -> None:
        """Every event to who waits for it; at the end everybody is told."""
        assert self._process is not None
        assert self._process.stdout is not None
        parts: list[bytes] = []  # of a line that has not ended
        try:
            while data := await self._process.stdout.read(READ_BYTES):
                parts.append(data)
                if b"\n" not in data:
                    continue
                *lines, rest = b"".join(parts).split(b"\n")
                parts = [rest]
                for event in map(decode, lines):
                    inbox = self._inboxes.get(event.id)
                    if inbox is not None:
                        inbox.put(event)
        finally:
            for number, inbox in self._inboxes.items():
                inbox.put(Refused(id=number, kind="engine", message="the engine has ended"))
            if not self._stopping:
                self._broken = True
                log.error("the engine has ended")
                self.on_end()


def _error(refused: Refused) -> ApiError:
    status = _STATUS[refused.kind]
    message = refused.message
    if status == 500:
        message = "the engine could not make this answer: see the server's own messages"
    return ApiError(status, message)

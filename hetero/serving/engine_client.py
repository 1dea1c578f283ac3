"""The HTTP process's side of the engine: start it, submit requests, receive events."""

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
    Cancel,
    Control,
    ControlResult,
    Done,
    Embedded,
    EmbedRequest,
    ErrorReply,
    GenerateRequest,
    Ready,
    Run,
    Stop,
    ToEngine,
    TokenEvent,
    decode,
    encode,
)

log = logging.getLogger("hetero.serving")
LONGEST_LINE: Final = 256 << 20  # bytes
READ_BYTES: Final = 1 << 20  # at a time
START_S: Final = 1800.0  # for it to load the model
STOP_S: Final = 30.0  # for the engine to write what is to be written, and end
TERMINATE_S: Final = 5.0
DELETED: Final = "this conversation was deleted while its answer was made: begin another one"
_STATUS: Final = {
    "user": 400,
    "quota": 429,
    "disk": 507,
    "missing": 404,
    "deleted": 404,
    "engine": 500,
}
_CODES: Final = {
    "quota": "too_many_contexts",
    "disk": "storage_full",
    "deleted": "conversation_deleted",
}
_MESSAGES: Final = {  # in the API's words, where the engine's own are for Python or the log
    "quota": (
        "this app's conversations and saved slots are all that --contexts-per-app allows: delete a "
        "conversation, or a saved slot by POST /slots/0?action=erase with its `filename`"
    ),
    "disk": (
        "the server's disk, or --context-disk, has no room for this text: delete a conversation or "
        "a saved slot, or see the server's own messages"
    ),
    "engine": "the engine could not make this answer: see the server's own messages",
}
Event = TokenEvent | Run | Done | Embedded | ControlResult | ErrorReply


class Inbox:
    """Events of one number that were not taken yet. Used in one event loop, by one task."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Event]:
        """Return all events so far, at least one."""
        while not self._events:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        taken, self._events = self._events, []
        return taken


class AnswerStream:
    """The engine's events for a `GenerateRequest`, up to `Done`. Closing it earlier cancels it."""

    def __init__(self, client: EngineClient, number: int, app: str) -> None:
        self.number, self.app = number, app
        self._client, self._over, self._closed = client, False, False
        self._error: ErrorReply | None = None
        self._inbox = client.listen(number, app)

    async def events(self) -> list[TokenEvent | Run | Done]:
        """Return the events so far, at least one; none after `Done`.

        Raises `ApiError` for an `ErrorReply`, after the events before it.
        """
        events = list[TokenEvent | Run | Done]()
        while not (events or self._over):
            for event in await self._inbox.take():
                if isinstance(event, ErrorReply):
                    self._error = event
                else:
                    assert not isinstance(event, ControlResult | Embedded)
                    events.append(event)
                self._over = isinstance(event, Done | ErrorReply)
                if self._over:
                    break
        if self._error is not None and not events:
            raise _error(self._error)
        return events

    def close(self) -> None:
        """Stop listening; idempotent."""
        if not self._closed:
            self._closed = True
            self._client.leave(self.number, self.app, cancel=not self._over)


class EngineClient:
    """The engine process, used in one event loop.

    `longest_queue` bounds the running and waiting answers of all apps; an app may have half of
    them, but at least 8. `on_end` is called once, if the engine ends without `stop`.
    """

    def __init__(self, options: dict[str, Any], longest_queue: int) -> None:
        self.about: dict[str, Any] = {}
        self.waiting: Counter[str] = Counter()
        self.on_end: Callable[[], None] = lambda: None
        self._options, self._longest = options, longest_queue
        self._inboxes: dict[int, Inbox] = {}
        self._contexts: dict[int, tuple[str, str]] = {}  # app and context of an answer
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopping = self._broken = False

    @property
    def alive(self) -> bool:
        """Return whether the engine takes requests."""
        return self._reader is not None and not self._reader.done()

    @property
    def is_stopping(self) -> bool:
        """Return whether the engine ends because this process does."""
        return self._stopping and not self._broken

    async def start(self) -> None:
        """Start the engine and wait until it takes requests. Raises `UserError` if it cannot."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "hetero.serving.engine_process",
            json.dumps(self._options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
        except BaseException as error:
            self._process.kill()
            await self._process.wait()
            if isinstance(error, TimeoutError):
                raise UserError(f"the engine did not start within {START_S:g} s") from None
            raise
        first = decode(line) if line else None
        if not isinstance(first, Ready):
            await self._end()
            why = first.message if isinstance(first, ErrorReply) else "it ended without a word"
            raise UserError(f"the engine did not start: {why}")
        self.about = first.about
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """Cancel the running answers, wait until everything is written, and end the process.

        One that hangs (in a driver, for one) is terminated after `STOP_S`, then killed.
        """
        self._stopping = True
        if self._process is None:
            return
        with suppress(OSError, TimeoutError):  # a full pipe without a reader
            await asyncio.wait_for(self._send(Stop()), TERMINATE_S)
        await self._end()
        if self._reader is not None:
            await self._reader

    async def _end(self) -> None:
        """Wait for the process; kill it if it hangs."""
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
        """Raise `ApiError` if the queue is full."""
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

    async def submit(self, app: str, **fields: Any) -> AnswerStream:
        """Submit a request; the caller closes the stream.

        Raises `ApiError` if the queue is full.
        """
        self.admit(app)
        stream = AnswerStream(self, next(self._numbers), app)
        if fields.get("context"):
            self._contexts[stream.number] = app, fields["context"]
        try:
            await self._send(GenerateRequest(id=stream.number, app=app, **fields))
        except BaseException:
            stream.close()
            raise
        return stream

    async def embed(self, app: str, **fields: Any) -> Embedded:
        """Return the answer to an `EmbedRequest`. Raises `ApiError`."""
        self.admit(app)
        number = next(self._numbers)
        inbox, event = self.listen(number, app), None
        try:
            await self._send(EmbedRequest(id=number, app=app, **fields))
            event = (await inbox.take())[0]  # the engine's end may follow
        finally:
            self.leave(number, app, cancel=event is None)
        if isinstance(event, ErrorReply):
            raise _error(event)
        assert isinstance(event, Embedded)
        return event

    def listen(self, number: int, app: str) -> Inbox:
        """Return the inbox of a number, which counts towards an app from now on."""
        self.waiting[app] += 1
        inbox = self._inboxes[number] = Inbox()
        return inbox

    def leave(self, number: int, app: str, *, cancel: bool) -> None:
        """Stop listening to a number."""
        del self._inboxes[number]
        self._contexts.pop(number, None)
        self.waiting[app] -= 1
        if not self.waiting[app]:
            del self.waiting[app]
        if cancel:
            self._cancel(number)

    def end_answers(self, app: str, context: str) -> None:
        """Cancel the answers that are made in a context, with an error for who waits for them."""
        for number, whose in self._contexts.items():
            if whose == (app, context):
                self._inboxes[number].put(ErrorReply(id=number, kind="deleted", message=DELETED))
                self._cancel(number)

    def _cancel(self, number: int) -> None:
        if self.alive and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(encode(Cancel(id=number)))

    async def control(self, app: str, action: str, **arguments: Any) -> dict[str, Any]:
        """Return the value of a `Control`. Raises `ApiError`."""
        if self._stopping or not self.alive:
            raise ApiError(503, "the server is ending: ask another one, or later", retry_s=5)
        number = next(self._numbers)
        inbox = self._inboxes[number] = Inbox()
        try:
            await self._send(Control(id=number, app=app, action=action, arguments=arguments))
            event = (await inbox.take())[0]  # the engine's end may follow
        finally:
            del self._inboxes[number]
        if isinstance(event, ErrorReply):
            raise _error(event)
        assert isinstance(event, ControlResult)
        return event.value

    async def _send(self, message: ToEngine) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(encode(message))
        await self._process.stdin.drain()

    async def _read(self) -> None:
        """Pass every event to its inbox, and at the end an `ErrorReply` to all."""
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
                inbox.put(ErrorReply(id=number, kind="engine", message="the engine has ended"))
            if not self._stopping:
                self._broken = True
                log.error("the engine has ended")
                self.on_end()


def _error(reply: ErrorReply) -> ApiError:
    kind = reply.kind
    message = _MESSAGES.get(kind, reply.message)
    return ApiError(_STATUS[kind], message, code=_CODES.get(kind))

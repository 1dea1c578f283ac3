"""The engine process: owns model, contexts and the thread that drives the devices.

Lines come in on standard input and go out on standard output (`hetero.serving.messages`). It ends
with `Stop`, or with the end of its input, when its parent has died. A reader thread waits for
lines; everything else is this one thread, which loops over:

    read      messages: requests into the queue, cancelled ones out of it
    controls  of apps without a running answer
    begin     the next requests, as long as there is a cache for them
    decode    the next token of all answers, in one step of the devices; meanwhile the last tokens
              become texts and are sent
    step      every answer: choose the token, or read the next call of a prompt

so that an answer joins and leaves between two tokens of the others. Messages are flushed before
anything that takes long; where tokens come faster than `FLUSH_INTERVAL_S` several are sent at once,
since each flush wakes another process, which on two cores is at the devices' expense.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from hetero.backends.errors import DeviceError, DeviceLostError
from hetero.backends.host.signals import WholeSteps
from hetero.contexts.recent import RecentTexts
from hetero.contexts.scratch import another_answer, embeddings
from hetero.contexts.service import App, Service
from hetero.contexts.working_set import Switch
from hetero.errors import DiskFullError, QuotaError, StoredFileError, UserError
from hetero.generation.embedding import shortened
from hetero.generation.loop import Delta, GenerationResult, Pending
from hetero.models.pooling import pooling_of
from hetero.runtime.watchdog import WATCHDOG
from hetero.serving import controls
from hetero.serving.fair_queue import FairQueue
from hetero.serving.grammars import GrammarConstraint, TokenBytes
from hetero.serving.messages import (
    Cancel,
    Control,
    ControlResult,
    Embedded,
    EmbedRequest,
    ErrorReply,
    FromEngine,
    GenerateRequest,
    Outbox,
    Ready,
    TokenEvent,
    decode,
)
from hetero.serving.request_choices import RequestChoices, scored
from hetero.serving.thought_budget import ThoughtBudget, ThoughtLimit

FLUSH_INTERVAL_S: Final = 0.01
ORPHAN_S: Final = 30.0
log = logging.getLogger("hetero.serving")
Send = Callable[[FromEngine], None]


class Stopped(Exception):  # noqa: N818  (no error: what runs is given up)
    """The message `Stop` arrived."""


@dataclass(eq=False)
class RunningAnswer:
    """A running answer: its `messages`, None for a step without one.

    `choices`: which it begins others of. `reading`: its prompt is being read. `pending`: its next
    message needs no device.
    """

    request: GenerateRequest | EmbedRequest
    messages: Generator[FromEngine | Pending | None]
    choices: RequestChoices | None = None
    reading: bool = True
    pending: bool = False


@dataclass
class ServingEngine:
    """The loop over messages from `incoming` until `Stop` or None, with answers by `send`.

    `flush` follows when there is nothing more to send for now.
    """

    service: Service
    incoming: queue.SimpleQueue[Any]
    send: Send
    flush: Callable[[], None] = lambda: None
    slots: int = 8
    waiting: FairQueue[GenerateRequest | EmbedRequest] = field(default_factory=FairQueue)
    recent: dict[str, RecentTexts] = field(default_factory=dict)
    running: list[RunningAnswer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._controls: deque[Control] = deque()
        model = self.service.llm.model
        self._eos = frozenset(model.eos_ids)
        self._bytes: TokenBytes | None = None
        self._urgent, self._flushed_s = False, 0.0
        self._arrived_s: dict[int, float] = {}  # of requests that wait

    def run(self) -> None:
        """Run the loop of the module's docstring."""
        try:
            while True:
                self._flush_due()
                self._read(wait=not (self.waiting or self._controls or self.running))
                self._control()
                while (request := self.waiting.next(self._can_begin)) is not None:
                    self._flush_due(now=True)
                    answer = self._answer(request)
                    self.running.append(answer)
                    self._step(answer)
                self._flush_due()
                self.service.decode_together(self._on_device_busy)
                for answer in list(self.running):
                    self._step(answer)
        except Stopped:
            for answer in self.running:
                answer.messages.close()
        finally:
            self.flush()

    def _answer(self, request: GenerateRequest | EmbedRequest) -> RunningAnswer:
        queued_s = time.monotonic() - self._arrived_s.pop(request.id)
        if isinstance(request, EmbedRequest):
            return RunningAnswer(request, self._embed(request, queued_s))
        choices = RequestChoices(request, queued_s)
        return RunningAnswer(request, self._messages(choices), choices)

    def _on_device_busy(self) -> None:
        """Send pending messages while the devices compute."""
        for answer in list(self.running):
            if answer.pending:
                self._step(answer)
        self._flush_due(now=time.monotonic() >= self._flushed_s + FLUSH_INTERVAL_S)

    def _flush_due(self, *, now: bool = False) -> None:
        """Flush what cannot wait for the next token; with `now` everything."""
        reading = any(answer.reading for answer in self.running)
        if now or self._urgent or reading or not self.running:
            self.flush()
            self._urgent, self._flushed_s = False, time.monotonic()

    @property
    def requests(self) -> list[GenerateRequest]:
        """Return the requests for answers that are being made."""
        requests = (answer.request for answer in self.running)
        return [request for request in requests if isinstance(request, GenerateRequest)]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many requests run, and how many wait."""
        running = {answer.request.id for answer in self.running}
        return {"running": len(running), "waiting": len(self.waiting)}

    def _read(self, *, wait: bool) -> None:
        """Take the messages that have arrived; with `wait` at least one."""
        while True:
            try:
                message = self.incoming.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(message, GenerateRequest | EmbedRequest):
                self.waiting.add(message.app, message)
                self._arrived_s[message.id] = time.monotonic()
            elif isinstance(message, Cancel):
                self._cancel(message.id)
            elif isinstance(message, Control) and message.action in controls.AT_ONCE:
                self._reply(message)
            elif isinstance(message, Control):
                self._controls.append(message)
            else:
                raise Stopped

    def _cancel(self, number: int) -> None:
        self._arrived_s.pop(number, None)
        for answer in self.running:
            if answer.request.id == number:
                answer.messages.close()
        self.running = [answer for answer in self.running if answer.request.id != number]
        self.waiting.remove(lambda request: request.id == number)

    def _control(self) -> None:
        """Run the actions of apps without a running answer.

        Others wait, and the app's next requests with them.
        """
        busy = {request.app for request in self.requests}
        ready = [control for control in self._controls if control.app not in busy]
        self._controls = deque(control for control in self._controls if control.app in busy)
        for control in ready:
            self._reply(control)

    def _can_begin(self, request: GenerateRequest | EmbedRequest) -> bool:
        """Return whether no answer runs on the same text, and there is a cache for it."""
        if isinstance(request, EmbedRequest):
            return self.service.room()
        if any(control.app == request.app for control in self._controls):
            return False
        app = self.service.bound(request.app)
        if request.context:
            free = all((x.app, x.context) != (request.app, request.context) for x in self.requests)
        elif app is None:
            free = True
        else:
            busy = self.recent_of(app).busy
            free = request.slot not in busy if request.slot >= 0 else len(busy) < self.slots
        return free and self.service.room()

    # --- an answer --------------------------------------------------------------------------

    def _step(self, answer: RunningAnswer) -> None:
        """Advance an answer by a step and send its message; an error ends all its choices."""
        if answer not in self.running:
            return
        number = answer.request.id
        message: FromEngine | Pending | None
        try:
            message = next(answer.messages)
        except StopIteration:
            message = None
        except UserError as error:
            message = _error_reply(number, error)
        except DeviceLostError:
            raise
        except (DeviceError, ValueError, MemoryError) as error:
            log.exception("an answer failed")
            message = ErrorReply(id=number, kind="engine", message=str(error))
        else:
            answer.pending = isinstance(message, Pending)
            if not isinstance(message, Pending | None):
                first_or_last = answer.reading or not isinstance(message, TokenEvent)
                self._urgent = self._urgent or first_or_last
                answer.reading = False
                self.send(message)
            if answer.choices is not None and isinstance(message, TokenEvent):
                self._begin_others(answer.choices)
            return
        self.running.remove(answer)
        self._urgent = True
        if message is not None:
            self._cancel(number)
            self.send(message)

    def _embed(
        self, request: EmbedRequest, queued_s: float
    ) -> Generator[FromEngine | Pending | None]:
        coded = [""] * len(request.texts)
        pooling = pooling_of(None, request.pooling)
        with closing(embeddings(self.service, request.texts, pooling)) as steps:
            for step in steps:
                if step is None:
                    yield None
                    continue
                place, embedding = step
                part = shortened(embedding, request.dimensions or None)
                coded[place] = base64.b64encode(part.astype("<f4").tobytes()).decode()
        yield Embedded(id=request.id, embeddings=coded, queued_s=queued_s)

    def _messages(self, choices: RequestChoices) -> Generator[FromEngine | Pending | None]:
        """Yield the messages of the first choice, and of those that there was no slot for."""
        request, app = choices.request, self.service.bind(choices.request.app)
        while (choice := choices.next()) is not None:
            options, results = self._options(request, choice), list[GenerationResult]()
            if request.choices > 1:
                options["prompt"] = choices.prompt
            deltas, switch, where = self._deltas_of(request, app, options, results)
            yield from self._events(request, choice, deltas)
            yield from choices.ended(choice, results[0], switch(), where())

    def _another(
        self, choices: RequestChoices, choice: int
    ) -> Generator[FromEngine | Pending | None]:
        """Yield the messages of a choice that runs together with the first one."""
        options, results = self._options(choices.request, choice), list[GenerationResult]()
        deltas = another_answer(self.service, choices.prompt, results, options)
        yield from self._events(choices.request, choice, deltas)
        yield from choices.ended(choice, results[0])

    def _begin_others(self, choices: RequestChoices) -> None:
        """Begin choices while another one runs, as long as no other request waits for a slot."""
        while choices.prompt.answer is not None and not self.waiting and self.service.room():
            if (choice := choices.next()) is None:
                return
            answer = RunningAnswer(choices.request, self._another(choices, choice))
            self.running.append(answer)
            self._step(answer)

    def _events(
        self, request: GenerateRequest, choice: int, deltas: WholeSteps[Delta | Pending | None]
    ) -> Generator[TokenEvent | Pending | None]:
        with closing(deltas):
            for delta in deltas:
                if not isinstance(delta, Delta):
                    yield delta
                    continue
                end = delta.token in self._eos and delta.finish_reason is not None
                yield TokenEvent(
                    id=request.id,
                    choice=choice,
                    text=delta.text,
                    token=delta.token,
                    end=end,
                    logprob=None if end else scored(delta.logprob),
                    finish=delta.finish_reason or "",
                )

    def _deltas_of(
        self,
        request: GenerateRequest,
        app: App,
        options: dict[str, Any],
        results: list[GenerationResult],
    ) -> tuple[Any, Callable[[], Switch], Callable[[], Any]]:
        """Return the deltas of a choice, and a function for its switch and its chunks' places."""
        histogram = self.service.memory.histogram
        if request.context:
            name = request.context
            context = app.context(name) or app.new_context(chat=False, name=name)
            deltas = context.stream_text(request.tokens, results, **options)
            return deltas, lambda: context.last_switch or Switch(), context.where
        recent = self.recent_of(app)
        at = request.slot if request.slot >= 0 else recent.choose(request.tokens, request.salt)
        text = recent.texts[at]
        deltas = recent.stream(at, request.tokens, results, request.salt, **options)
        return deltas, lambda: text.switch, lambda: histogram(text.cached.chunks)

    def _options(self, request: GenerateRequest, choice: int) -> dict[str, Any]:
        options = {**request.options, "ahead": True}
        if (seed := options.get("seed")) is not None:
            options["seed"] = seed + choice
        if bias := options.pop("logit_bias", None):
            options["logit_bias"] = {int(token): value for token, value in bias.items()}
        if request.grammar:
            if self._bytes is None:
                self._bytes = TokenBytes(self.service.llm.model)
            vocabulary = self.service.llm.model.config.vocab_size
            options["constraint"] = GrammarConstraint(self._bytes, request.grammar, vocabulary)
        if request.thoughts:
            vocabulary = self.service.llm.model.config.vocab_size
            limit = ThoughtLimit(**request.thoughts)
            options["constraint"] = ThoughtBudget(limit, vocabulary, options.get("constraint"))
        return options

    def recent_of(self, app: App) -> RecentTexts:
        """Return an app's recent texts."""
        if app.name not in self.recent:
            self.recent[app.name] = RecentTexts(app, self.slots)
        return self.recent[app.name]

    def _reply(self, control: Control) -> None:
        self._urgent = True
        try:
            value = controls.ACTIONS[control.action](self, control)
        except controls.MissingError as error:
            self.send(ErrorReply(id=control.id, kind="missing", message=str(error)))
        except UserError as error:
            self.send(_error_reply(control.id, error))
        except OSError as error:  # a file that cannot be deleted
            log.error("%s", error)
            self.send(ErrorReply(id=control.id, kind="engine", message=str(error)))
        else:
            self.send(ControlResult(id=control.id, value=value))


def _error_reply(number: int, error: UserError) -> ErrorReply:
    kinds = {QuotaError: "quota", DiskFullError: "disk", StoredFileError: "engine"}
    kind = kinds.get(type(error), "user")
    if kind in ("disk", "engine"):  # whose clients are not shown the path
        log.error("%s", error)
    return ErrorReply(id=number, kind=kind, message=str(error))


def _lines(source: int, incoming: queue.SimpleQueue[Any]) -> None:
    """Read messages until the input ends, because the server has died.

    Ends the process if the main thread, which may hang in a driver, has not done so `ORPHAN_S`
    later. Reads the descriptor itself: a buffered file that a thread waits in cannot be closed when
    the process ends.
    """
    rest = b""
    while data := os.read(source, 1 << 20):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            incoming.put(decode(line))
    incoming.put(None)
    time.sleep(ORPHAN_S)
    log.error("the server has died and this process has not ended: ending it")
    os._exit(1)


def _end_hung(sentence: str) -> None:
    """End this process, whose requests would wait for ever; the server then reports it."""
    log.error("%s: ending the engine", sentence)
    os._exit(1)


def main() -> None:
    """Run `python -P -m hetero.serving.engine_process OPTIONS`, as `hetero serve` does.

    The server handles Ctrl-C and then sends `Stop`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries is no message
    logging.basicConfig(level=logging.WARNING, format="hetero: engine: %(message)s")

    def write(data: bytes) -> None:
        answers.write(data)
        answers.flush()

    WATCHDOG.on_hang = _end_hung
    outbox = Outbox(write)
    options: dict[str, Any] = json.loads(sys.argv[1])
    slots = options.pop("slots")
    incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = threading.Thread(target=_lines, args=(0, incoming), daemon=True)
    reader.start()
    try:
        with Service(options.pop("model"), **options) as service:
            service.warm()
            engine = ServingEngine(service, incoming, outbox.send, outbox.flush, slots)
            outbox.send(Ready(about=controls.about(engine)))
            # For good: to be moved there for each step takes as long as a tenth of it and more,
            # where clients and HTTP have the core that the system would choose.
            with service.llm.engine.runner.control.on_core():
                engine.run()
    except (UserError, DeviceError, OSError, MemoryError) as error:
        outbox.send(ErrorReply(id=-1, kind="engine", message=str(error)))
        outbox.flush()
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

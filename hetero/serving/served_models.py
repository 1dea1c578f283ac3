"""The models that a server has, by name: loaded when asked for, unloaded for others or when idle.

Each loaded model has an engine process. A request holds its model until the response was sent, and
a model in use is not unloaded. Requests pass one gate in the order of their arrival: while
one waits there until a model can be unloaded for its own, those behind it wait too, so that two
models that are asked for all the time take turns. Loading itself happens behind the gate.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request

from hetero.errors import UserError
from hetero.serving.answers import unless_disconnected
from hetero.serving.engine_client import EngineClient
from hetero.serving.errors import ApiError
from hetero.serving.metrics import Metrics
from hetero.serving.state import State
from hetero.serving.store import Store

log = logging.getLogger("hetero.serving")
WAIT_S: Final = 600.0  # of a request for its model
RETRY_S: Final = 5


@dataclass(eq=False)
class ServedModel:
    """A model, and who holds it. `options` are those of its engine process.

    `nbytes` is the memory that it takes: weights and kept contexts, and once an engine was loaded,
    what that one said. `loading` is the task that loads it, complete in a loaded model; None in one
    that has no place in memory. `closing` ends its last engine. `failed` says why it could not be
    loaded.
    """

    state: State
    options: dict[str, Any]
    nbytes: int = 0
    longest_queue: int = 64
    holders: int = 0
    used_s: float = 0.0
    loading: asyncio.Task[UserError | None] | None = None
    closing: asyncio.Task[None] | None = None
    failed: bool = False

    @property
    def name(self) -> str:
        """Return its own name, which is no alias."""
        return self.state.model.name

    @property
    def loaded(self) -> bool:
        """Return whether it answers at once."""
        return self.loading is not None and self.loading.done()

    @property
    def status(self) -> str:
        """Return what llama-server's router calls it."""
        return "loaded" if self.loaded else "unloaded" if self.loading is None else "loading"

    def keeps(self, context: str) -> bool:
        """Return whether a context is in its folder."""
        apps = Path(self.options["directory"]) / "apps"
        return any(apps.glob(f"*/ctx-{context}.log"))


@dataclass(eq=False)
class Models:
    """The models of a server, in one event loop.

    At most `most` are in memory (0: all), with `most_bytes` together (None: no limit). One that is
    unused for `idle_s` is unloaded (-1: never). The only model of a server is loaded from the
    start, and the server ends with it: `on_end` is called.
    """

    served: Sequence[ServedModel]
    store: Store
    metrics: Metrics
    most: int = 4
    most_bytes: int | None = None
    idle_s: float = -1
    on_end: Callable[[], None] = lambda: None
    failed: UserError | None = None  # why the server could not start, or ended by itself
    ending: bool = False
    _gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Task[None] | None = None

    @property
    def only(self) -> ServedModel | None:
        """Return the model of a server that has one."""
        return self.served[0] if len(self.served) == 1 else None

    @property
    def contended(self) -> bool:
        """Return whether requests wait until a model can be unloaded."""
        return self._gate.locked()

    @property
    def idle(self) -> list[ServedModel]:
        """Return the loaded models without a running request, the least recently used one first."""
        idle = [x for x in self.served if x.loaded and not x.holders]
        return sorted(idle, key=lambda x: x.used_s)

    def check_sizes(self) -> None:
        """Raise `UserError` for a model that is alone larger than what all may take."""
        for model in self.served:
            if self.most_bytes is not None and model.nbytes > self.most_bytes:
                raise UserError(
                    f"{model.name} takes {model.nbytes / 2**30:.2f} GiB with --context-memory, "
                    "more than --models-memory allows: raise that, or lower --context-memory"
                )

    def _fits(self, *more: ServedModel) -> bool:
        """Return whether there is a place in memory for `more` models than there are."""
        models = [*(x for x in self.served if x.loading is not None), *more]
        if self.most and len(models) > self.most:
            return False
        nbytes = sum(x.nbytes for x in models)
        return len(models) < 2 or self.most_bytes is None or nbytes <= self.most_bytes

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name; without one, the first. Raises `ApiError`."""
        if not name:
            return self.served[0]
        for model in self.served:
            if name in model.state.names:
                return model
        if "*" in self.served[0].state.names:
            return self.served[0]
        known = ", ".join(repr(model.name) for model in self.served)
        raise ApiError(
            404,
            f"there is no model of this name here: use {known}, or start the server with "
            "--alias NAME",
            param="model",
            code="model_not_found",
        )

    def keepers(self, context: str) -> list[ServedModel]:
        """Return the models that may keep a context."""
        return [x for x in self.served if self.only is not None or x.keeps(context)]

    async def delete_context(self, app: str, context: str) -> int:
        """Delete a context from the disk, of every model that keeps it.

        Return how many tokens it had. Raises `ApiError`.
        """
        tokens = 0
        for model in self.keepers(context):
            with ExitStack() as leases:
                await self.hold(model, leases)
                control = model.state.engine.control
                value = await control(app, "delete_context", context=context)
                tokens = max(tokens, value["tokens"])
        return tokens

    def end_answers(self, app: str, context: str) -> None:
        """End the answers that are made in a context, which is being deleted."""
        for model in self.served:
            if model.loaded:
                model.state.engine.end_answers(app, context)

    async def hold(self, model: ServedModel, leases: ExitStack) -> None:
        """Load a model, if it is not, and hold it until `leases` is closed. Raises `ApiError`."""
        give_up_s = asyncio.get_running_loop().time() + WAIT_S
        try:
            async with asyncio.timeout_at(give_up_s), self._gate:
                await self._place(model)
        except TimeoutError:
            raise ApiError(
                503,
                "the models in memory are at work, and --models-max or --models-memory allows no "
                "more: try again later",
                code="models_busy",
                retry_s=RETRY_S,
            ) from None
        model.holders += 1
        leases.callback(self.release, model)
        await self._loaded(model, give_up_s)

    def look(self, model: ServedModel, leases: ExitStack) -> bool:
        """Hold a model as `hold` does if it is loaded, which is no use of it; return whether."""
        if model.loaded:
            model.holders += 1
            leases.callback(self.release, model, used=False)
        return model.loaded

    async def _loaded(self, model: ServedModel, give_up_s: float) -> None:
        """Wait until a model that has its place is loaded. Raises `ApiError`."""
        loading = model.loading
        assert loading is not None
        if not loading.done():
            if model.holders > model.longest_queue:
                raise ApiError(
                    503,
                    f"{model.longest_queue} requests wait for this model to be loaded, which is "
                    "all that --queue allows: try again later",
                    code="queue_full",
                    retry_s=RETRY_S,
                )
            left_s = give_up_s - asyncio.get_running_loop().time()
            await asyncio.wait({loading}, timeout=left_s)
        if not loading.done():
            raise ApiError(
                503,
                "this model is still being loaded: try again later",
                code="model_loading",
                retry_s=RETRY_S,
            )
        if loading.cancelled():
            raise _ending()
        if loading.result() is not None:
            raise ApiError(
                503,
                "this model could not be loaded: see the server's own messages, then try again",
                param="model",
                code="model_not_loaded",
                retry_s=RETRY_S,
            )

    def release(self, model: ServedModel, *, used: bool = True) -> None:
        """Hold a model no longer; it was `used`, or only looked at."""
        model.holders -= 1
        if used:
            model.used_s = asyncio.get_running_loop().time()
        self._freed.set()

    async def _place(self, model: ServedModel) -> None:
        """Wait for a place in memory for a model, and begin to load it if it is not loaded."""
        if self.ending:
            raise _ending()
        if model.loading is not None:
            return
        before = [] if model.closing is None else [model.closing]
        while not self._fits(model):
            if idle := self.idle:
                before.append(self._unload(idle[0]))
                continue
            self._freed.clear()
            await self._freed.wait()
            if self.ending:
                raise _ending()
        model.loading = asyncio.create_task(self._load(model, before))

    async def _load(
        self, model: ServedModel, before: Sequence[asyncio.Task[None]] = ()
    ) -> UserError | None:
        """Start a model's engine when those `before` have ended; return why it did not start."""
        state, mine = model.state, asyncio.current_task()
        try:
            if before:
                await asyncio.wait(before)
            engine = state.engine = EngineClient(model.options, model.longest_queue)
            engine.on_end = partial(self._ended, model, mine)
            await engine.start()
        except UserError as error:
            model.loading, model.failed = None, True
            if model is not self.only:  # whose server ends with the same sentence
                log.error("%s could not be loaded: %s", model.name, error)
            return error
        except BaseException:
            model.loading = None
            raise
        else:
            model.failed, model.nbytes = False, engine.about["memory_bytes"]
            for other in self.idle:  # which have less room where it takes more than was known
                if other is not model and not self._fits():
                    self._unload(other)
            self.metrics.loads.labels(model.name).inc()
            for note in engine.about["notes"]:
                print(f"hetero: {note}", file=sys.stderr)
            return None
        finally:
            model.used_s = asyncio.get_running_loop().time()
            self._freed.set()

    def _unload(self, model: ServedModel) -> asyncio.Task[None]:
        """Return the task that ends a model's engine; its place is free at once."""
        model.loading = None
        self._freed.set()
        model.closing = asyncio.create_task(model.state.engine.stop())
        return model.closing

    def _ended(self, model: ServedModel, loading: object) -> None:
        """Handle an engine that ended by itself. Its model is loaded again when asked for."""
        if model.loading is loading:
            self._unload(model)
            model.failed = True
        if model is self.only:
            self.ending = True
            self.failed = UserError("the engine ended by itself: see its message above")
            self.on_end()

    async def start(self) -> None:
        """Load the only model. Raises `UserError`."""
        if (only := self.only) is not None:
            only.loading = asyncio.create_task(self._load(only))
            if (error := await only.loading) is not None:
                self.failed = error
                raise error
        if self.idle_s >= 0:
            self._idle = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Unload what is idle."""
        now_s = asyncio.get_running_loop().time
        while True:
            idle = self.idle
            for model in idle:
                if now_s() >= model.used_s + self.idle_s:
                    self._unload(model)
            due_s = [x.used_s + self.idle_s - now_s() for x in idle if x.loaded]
            await asyncio.sleep(max(min(due_s, default=self.idle_s), 0.05))

    async def stop(self) -> None:
        """Unload all models, when everything is written, and close the store."""
        self.ending = True
        self._freed.set()
        loading = [x.loading for x in self.served if x.loading is not None and not x.loaded]
        for task in [*loading, *([] if self._idle is None else [self._idle])]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for model in self.served:
            if model.loaded:
                self._unload(model)
        closing = [x.closing for x in self.served if x.closing is not None]
        await asyncio.gather(*closing, return_exceptions=True)
        self.store.close()


def _ending() -> ApiError:
    return ApiError(503, "the server is ending: ask another one, or later", retry_s=RETRY_S)


def models_of(request: Request) -> Models:
    """Return the server's models."""
    models: Models = request.app.state.hetero
    return models


def store_of(request: Request) -> Store:
    """Return what is kept for all models."""
    return models_of(request).store


async def acquire(request: Request, name: str | None) -> State:
    """Return the model of a name, loaded and in use until the response was sent.

    Raises `ApiError`, and `ClientDisconnectedError` where the client does not wait for it.
    """
    models = models_of(request)
    model = models.find(name)
    holding = models.hold(model, request.state.leases)
    if model.loaded and not models.contended:
        await holding
    else:
        await unless_disconnected(request, holding)
    return model.state

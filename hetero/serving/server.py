"""`hetero serve`: puts model, engine process and HTTP together, and ends them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetero.arguments import parse_size
from hetero.backends.host.folders import data_folder
from hetero.contexts.encryption import vault_of
from hetero.errors import UserError
from hetero.models import open_model
from hetero.serving.database import Records
from hetero.serving.engine_client import EngineClient
from hetero.serving.grammars import TokenBytes
from hetero.serving.guard import LOOPBACK, AsgiApp
from hetero.serving.http_app import make_app
from hetero.serving.keys import Keys
from hetero.serving.metrics import Metrics
from hetero.serving.served_models import Models, ServedModel
from hetero.serving.state import State
from hetero.serving.store import Store

GRACE_S: Final = 5  # for running answers when the server ends
HEADER_DEADLINE_S: Final = 30
MAX_CONNECTIONS: Final = 2000
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")


def serve(
    names: Sequence[str],
    *,
    host: str,
    port: int,
    keys: Path | None,
    hosts: Sequence[str],
    origins: Sequence[str],
    aliases: Sequence[str],
    queue: int,
    models_max: int,
    models_memory: str | None,
    sleep_idle_s: float,
    reasoning_budget: int,
    pooling: str | None,
    weights: str | None,
    directory: Path,
    engine: dict[str, Any],
) -> None:
    """Serve the models of `names` until a signal ends it.

    `engine` are options of each engine process: `slots` and those of `Service`. Raises `UserError`
    for what cannot be served.
    """
    if keys is None and host not in _LOCAL:
        raise UserError(
            f"--host {host} lets other machines ask: give --keys FILE too (`hetero serve-key` "
            "makes one), or leave --host out"
        )
    _check_address(host, port)
    known = None if keys is None else Keys.load(keys)
    most_bytes = None if models_memory is None else parse_size(models_memory)
    models = _opened(
        names, aliases, queue, weights, directory, engine,
        reasoning_budget=reasoning_budget, pooling=pooling,
    )  # fmt: skip
    models.most, models.most_bytes, models.idle_s = models_max, most_bytes, sleep_idle_s
    models.check_sizes()

    def ready() -> None:
        at = f"[{host}]" if ":" in host else host
        listed = ", ".join(x.state.model.name for x in models.served)
        print(f"serving {listed} at http://{at}:{port}", flush=True)

    allowed = None if known is not None and host not in _LOCAL else [*LOOPBACK, *hosts]
    app = make_app(models, known, allowed, ready, origins)
    logging.getLogger("hetero").addHandler(logging.StreamHandler())
    server = uvicorn.Server(_config(app, host, port))
    # What the user can mend is one sentence, below; uvicorn has a traceback.
    logging.getLogger("uvicorn.error").addFilter(lambda _: models.failed is None)

    models.on_end = lambda: setattr(server, "should_exit", True)
    _allow_connections()
    _run(server, models, f"{host}:{port}")


def _opened(
    names: Sequence[str],
    aliases: Sequence[str],
    queue: int,
    weights: str | None,
    directory: Path,
    engine: Mapping[str, Any],
    **of_requests: Any,
) -> Models:
    """Return the models of `names`, whose engines are not started yet.

    `of_requests` are fields of each model's `State`.
    """
    opened = [open_model(name, weights=weights) for name in names]
    _check_names([model.name for model in opened], aliases)
    vault = vault_of(engine["encryption_key"])
    store = Store(Records(directory / "responses.sqlite", vault=vault))
    metrics = Metrics([model.name for model in opened])
    served = list[ServedModel]()
    for given, model in zip(names, opened, strict=True):
        folder = directory if len(names) == 1 else directory / file_name(model.name)
        options = {**engine, "model": given, "directory": str(folder), "weights": weights}
        state = State(
            model=model,
            names=[*(() if served else aliases), model.name],
            engine=EngineClient(options, queue),
            store=store,
            metrics=metrics,
            token_bytes=TokenBytes(model),
            slots=engine["slots"],
            **of_requests,
        )
        nbytes = model.weights.nbytes + parse_size(engine["context_memory"])
        served.append(ServedModel(state, options, nbytes, queue))
    return Models(served, store, metrics)


def _check_names(names: Sequence[str], aliases: Sequence[str]) -> None:
    """Raise `UserError` where two models have one name."""
    for name, count in Counter([*names, *set(aliases) - set(names[:1])]).items():
        if count > 1:
            raise UserError(f"two models would be called {name!r}: rename one, or serve it alone")


def _run(server: uvicorn.Server, models: Models, at: str) -> None:
    """Serve until a signal ends it. Raises `UserError` where it could not start or go on."""
    try:
        server.run()
    except SystemExit:  # how uvicorn says that it could not start
        if models.failed is None:
            raise
    if models.failed is not None:
        raise models.failed
    if not server.started:
        raise UserError(f"nothing is served at {at}: see the message above")


def _config(app: AsgiApp, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_Protocol,
        ws="none",
        access_log=False,
        log_level="warning",
        lifespan="on",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
        server_header=False,
    )


def _check_address(host: str, port: int) -> None:
    """Raise `UserError` for an unusable address, before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(
            f"nothing can be served at {host}:{port} ({error.strerror or error}): choose another "
            "--port or --host"
        ) from error


def default_directory(*models: str) -> Path:
    """Return the default folder of the contexts of models that are served together."""
    return data_folder() / "contexts" / "+".join(file_name(Path(model).name) for model in models)


def file_name(name: str) -> str:
    """Return the name of a model's folder."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name) or "model"


def _allow_connections() -> None:
    """Raise the limit of open files to the system's maximum: each connection is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Protocol(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time.

    The time begins with the connection, and then with the first byte of each further request:
    uvicorn's limit for idle connections ends there. Used in the event loop's thread.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Follow asyncio's protocol."""
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        """Follow asyncio's protocol."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the head is complete
            self._stop()
        elif self._deadline is None:
            self._start()

    def _should_upgrade(self) -> bool:
        """Return that nothing is upgraded: uvicorn would log how to install WebSockets."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Follow asyncio's protocol."""
        self._stop()
        super().connection_lost(exc)

    def _start(self) -> None:
        self._deadline = self.loop.call_later(HEADER_DEADLINE_S, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

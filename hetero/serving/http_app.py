"""The application: endpoints behind the guard, errors in the shape of their API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from hetero.serving import (
    anthropic,
    chat_completions,
    completions,
    conversations,
    embeddings,
    responses,
    slots,
    text,
)
from hetero.serving.answers import ClientDisconnectedError, server_fault
from hetero.serving.errors import ApiError
from hetero.serving.guard import AsgiApp, Guard, Message, Receive, Scope, Send
from hetero.serving.keys import Keys
from hetero.serving.served_models import Models

REQUEST_ID: Final = (b"x-request-id", b"request-id")  # that OpenAI's and Anthropic's clients read
PAGE = Path(__file__).parent / "page.html"
_ROUTERS: tuple[APIRouter, ...] = (
    chat_completions.router,
    completions.router,
    embeddings.router,
    responses.router,
    conversations.router,
    anthropic.router,
    slots.router,
    text.router,
)


def make_app(
    models: Models,
    keys: Keys | None,
    hosts: list[str] | None,
    on_ready: Callable[[], None],
    origins: Sequence[str] = (),
) -> AsgiApp:
    """Return the application with everything that a request passes.

    `origins` are those of pages elsewhere whose scripts may use it (`*`: all).
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await models.start()
        on_ready()
        try:
            yield
        finally:
            await models.stop()

    app = FastAPI(
        title="hetero", version=version("hetero"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.hetero = models
    for router in _ROUTERS:
        app.include_router(router)
    app.add_api_route("/", _page, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnectedError, _disconnected)
    app.add_exception_handler(Exception, _broken)
    guarded: AsgiApp = Guard(app, keys, hosts, origins=origins)
    if origins:  # outside of the guard, since browsers send no key with a preflight request
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[name.decode() for name in REQUEST_ID],
        )
    return _Requests(guarded, models)


class _Requests:
    """Middleware that names requests and counts them by status and path (existing, or `other`).

    `scope["state"]["leases"]` is closed when the response was sent: it holds the request's model.
    `request_id` there is what `REQUEST_ID` of the response says.
    """

    def __init__(self, inner: AsgiApp, models: Models) -> None:
        self._inner, self._models = inner, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI defines it."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        request_id = f"req_{uuid.uuid4().hex}"

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._models.metrics.requests.labels(path, str(message["status"])).inc()
                names = [(name, request_id.encode()) for name in REQUEST_ID]
                message["headers"] = [*message.get("headers", ()), *names]
            await send(message)

        if scope["method"] == "HEAD":  # the HTTP server sends no body for it
            scope = {**scope, "method": "GET"}
        with ExitStack() as leases:
            own = {"leases": leases, "request_id": request_id}
            scope["state"] = {**scope.get("state", {}), **own}
            await self._inner(scope, receive, seen)


async def _page() -> Response:
    """Return a chat page that also shows the contexts. Nothing of it is loaded from elsewhere."""
    rules = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    headers = {
        "Content-Security-Policy": f"{rules}connect-src 'self'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    return FileResponse(PAGE, media_type="text/html", headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(
        error.body(request.url.path), status_code=error.status, headers=error.headers
    )


async def _invalid(request: Request, error: Exception) -> Response:
    """Return the error of a body that is no JSON or has a wrong field, in one sentence."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    if "json" not in request.headers.get("content-type", "") and first["loc"] == ("body",):
        what = "send the body as JSON, with the header `Content-Type: application/json`"
        return await _failed(request, ApiError(400, what))
    what = "the body is not JSON" if first["type"] == "json_invalid" else f"{where}: {first['msg']}"
    wrong = ApiError(400, what if where else f"the request's body: {first['msg']}", param=where)
    return await _failed(request, wrong)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    missing_here = "there is no such endpoint"
    if request.url.path.startswith("/v1/v1/"):
        missing_here += ": the path has /v1 twice, so leave it out of the base URL or of the path"
    elif not request.url.path.startswith("/v1/"):
        missing_here += ": the API is under /v1, so a base URL ends with it"
    texts = {404: missing_here, 405: "this endpoint has another method"}
    wrong = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
    response = await _failed(request, wrong)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


async def _broken(request: Request, error: Exception) -> Response:
    return await _failed(request, server_fault(request, error))

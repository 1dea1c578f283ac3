"""The checks that every request passes first: its host, its key, its body's size and pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

from hetero.serving.errors import ApiError
from hetero.serving.json_text import whole_characters
from hetero.serving.keys import LOCAL, Keys

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

LONGEST_BODY: Final = 4 << 20  # bytes
MAX_BYTES: Final = 128 << 20  # of all bodies at a time
BODY_DEADLINE_S: Final = 30.0
OPEN: Final = frozenset({"/", "/health", "/v1/health"})  # no key needed
LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """Middleware that sets `scope["state"]["app"]`, and reads the body before anything else.

    `hosts` are names that requests may be addressed to; None: any (keys protect then). Without
    keys, pages of other origins than `origins` (`*`: any) can change nothing.
    """

    def __init__(
        self,
        inner: AsgiApp,
        keys: Keys | None,
        hosts: Iterable[str] | None,
        *,
        origins: Iterable[str] = (),
        longest_body: int = LONGEST_BODY,
        max_bytes: int = MAX_BYTES,
        deadline_s: float = BODY_DEADLINE_S,
    ) -> None:
        self._inner, self._keys = inner, keys
        self._hosts = None if hosts is None else frozenset(hosts)
        self._origins = frozenset(origins)
        self._longest, self._deadline_s = longest_body, deadline_s
        self._free = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI defines it."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_host(headers.get(b"host", ""))
            opens = scope["path"] in OPEN and scope["method"] in ("GET", "HEAD")
            if self._keys is None and scope["method"] != "OPTIONS" and not opens:
                self._check_origin(headers)
            scope.setdefault("state", {})["app"] = self._app(scope["path"], headers)
            room = self._room(headers)
        except ApiError as error:
            await _answer(send, error, scope["path"])
            return
        self._free -= room
        try:
            body = await self._body(room, receive)
        except ApiError as error:
            await _answer(send, error, scope["path"])
        else:
            await self._inner(scope, _replayed(whole_characters(body), receive), send)
        finally:
            self._free += room

    def _check_host(self, given: str) -> None:
        """Raise `ApiError` for a page elsewhere whose name was bound to this address.

        That is DNS rebinding.
        """
        name = given.rsplit(":", 1)[0] if not given.endswith("]") else given
        if self._hosts is not None and name.lower() not in self._hosts:
            raise ApiError(
                421,
                "this server does not answer to that Host: use its address, or start it with "
                "--allow-host NAME",
            )

    def _check_origin(self, headers: dict[bytes, str]) -> None:
        """Raise `ApiError` for a request that a page elsewhere makes a browser send."""
        origin = headers.get(b"origin")
        if origin is None:
            foreign = headers.get(b"sec-fetch-site") == "cross-site"
        else:
            foreign = origin.partition("://")[2] != headers.get(b"host")
        if foreign and not self._origins & {origin, "*"}:
            raise ApiError(
                403,
                "pages of another origin may not use this server: start it with --allow-origin "
                "ORIGIN",
            )

    def _app(self, path: str, headers: dict[bytes, str]) -> str:
        if self._keys is None:
            return LOCAL
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get(b"x-api-key", "")
        app = self._keys.app(key.strip())
        if app is None and path not in OPEN:
            raise ApiError(
                401,
                "no key, or none that this server knows: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        return app or ""

    def _room(self, headers: dict[bytes, str]) -> int:
        """Return the bytes to reserve for the body. One without a length may be the longest."""
        length = headers.get(b"content-length", "0")
        if not length.isdigit() or len(length) > 20 or int(length) > self._longest:
            raise self._too_long()
        room = self._longest if b"transfer-encoding" in headers else int(length)
        if room > self._free:
            raise ApiError(503, "too much is being sent to this server: try again later", retry_s=1)
        return room

    def _too_long(self) -> ApiError:
        return ApiError(
            413, f"a request's body has at most {self._longest} bytes: send less in one request"
        )

    async def _body(self, room: int, receive: Receive) -> bytes:
        parts, total = list[bytes](), 0
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the request was not sent to its end")
                    parts.append(message.get("body", b""))
                    total += len(parts[-1])
                    if total > room:
                        raise self._too_long()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408, f"a request's body must arrive within {self._deadline_s:g} s: send it faster"
            ) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receiver of the body, then of the connection's other messages."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, error: ApiError, path: str) -> None:
    body = json.dumps(error.body(path)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    headers |= error.headers | {"Connection": "close"}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})

"""What every request passes first, with connections that are slow, long or cut."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hetero.serving.guard import Guard, Message, Receive, Scope, Send
from hetero.serving.http_app import make_app
from hetero.serving.keys import Keys
from hetero.serving.metrics import Metrics


async def _inner(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def asked(
    guard: Guard,
    parts: Sequence[bytes | float],
    headers: dict[str, str],
    method: str = "POST",
    path: str = "/v1/completions",
) -> tuple[int, bytes]:
    """Status and body; a number is a pause in seconds, the end without a last part a disconnect."""
    sent: list[Message] = []

    async def messages() -> AsyncIterator[Message]:
        for i, part in enumerate(parts):
            if isinstance(part, float):
                await asyncio.sleep(part)
                continue
            yield {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        yield {"type": "http.disconnect"}

    async def run() -> None:
        source = messages()

        async def receive() -> Any:
            return await anext(source)

        async def send(message: Message) -> None:
            sent.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs}
        await guard(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def guard(**options: Any) -> Guard:
    given: dict[str, Any] = {"longest_body": 100, "max_bytes": 150, "deadline_s": 0.2}
    return Guard(_inner, None, ["localhost"], **(given | options))


HERE = {"host": "localhost:1"}


@pytest.mark.parametrize(
    ("parts", "headers", "status"),
    [
        ([b"ab", b"cd"], {"content-length": "4"}, 200),
        ([b"ab", b"cd"], {"transfer-encoding": "chunked"}, 200),
        ([b"ab" * 60], {"transfer-encoding": "chunked"}, 413),
        ([], {"content-length": "101"}, 413),
        ([], {"content-length": "-1"}, 413),
        ([], {"content-length": "9" * 5000}, 413),
        ([b"a", 0.5, b"b"], {"content-length": "2"}, 408),
        ([b"a"], {"content-length": "2", "host": "evil.example"}, 421),
        ([b"a"], {"host": ""}, 421),
    ],
)
def test_bodies(parts: list[bytes | float], headers: dict[str, str], status: int) -> None:
    found, body = asked(guard(), parts, HERE | headers)
    assert found == status
    if status == 200:
        assert body == b"".join(part for part in parts if isinstance(part, bytes))
    else:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_all_bodies_together_are_bounded_and_room_comes_back() -> None:
    full = guard(max_bytes=3)
    headers = HERE | {"content-length": "4"}
    assert asked(full, [b"abcd"], headers)[0] == 503
    for parts in ([b"abc"], [], [b"abcd"], [b"abc"]):
        asked(full, parts, HERE | {"content-length": "3"})
    assert asked(full, [b"abc"], HERE | {"content-length": "3"}) == (200, b"abc")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://localhost:1"}, 200),
        ({"origin": "http://localhost:2"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://good.example"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_pages_elsewhere_change_nothing(headers: dict[str, str], status: int) -> None:
    allowing = guard(origins=["https://good.example"])
    sent = HERE | headers | {"content-length": "1"}
    assert asked(allowing, [b"a"], sent)[0] == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/slots", 403),  # it loads a model
        ("HEAD", "/props", 403),
        ("GET", "/", 200),  # a link to the page
        ("GET", "/health", 200),
        ("POST", "/health", 403),
    ],
)
def test_pages_elsewhere_load_no_model(method: str, path: str, status: int) -> None:
    sent = HERE | {"sec-fetch-site": "cross-site"}
    assert asked(guard(), [b""], sent, method, path)[0] == status


def test_half_a_character_does_not_come_in() -> None:
    _, body = asked(guard(), [rb'"cut \ud8', rb'3d"'], HERE | {"content-length": "12"})
    assert body == rb'"cut \ufffd"'


@pytest.mark.parametrize("origins", [["https://good.example"], ["*"], []])
@pytest.mark.few(3)
def test_a_browser_may_ask_before_it_sends_a_key(origins: list[str]) -> None:
    keys = Keys({hashlib.sha256(b"key").digest(): "notes"})
    models: Any = SimpleNamespace(metrics=Metrics(["m"]), ending=False)
    app: Any = make_app(models, keys, None, lambda: None, origins)

    async def answers() -> list[httpx.Response]:
        transport, found = httpx.ASGITransport(app), list[httpx.Response]()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for origin in ("https://good.example", "https://evil.example"):
                wanted = {"Access-Control-Request-Method": "POST", "Origin": origin}
                wanted["Access-Control-Request-Headers"] = "authorization, content-type"
                found.append(await client.options("/v1/chat/completions", headers=wanted))
                found.append(await client.get("/health", headers={"Origin": origin}))
        return found

    good, health, evil, other = asyncio.run(answers())
    allow = "access-control-allow-origin"
    if not origins:
        assert good.status_code == evil.status_code == 401
        assert allow not in health.headers
        return
    assert good.status_code == 200
    assert good.headers[allow] == health.headers[allow] == origins[0]
    assert "POST" in good.headers["access-control-allow-methods"]
    assert "authorization" in good.headers["access-control-allow-headers"].lower()
    assert (evil.status_code == 200) is (origins == ["*"])
    assert (allow in other.headers) is (origins == ["*"])

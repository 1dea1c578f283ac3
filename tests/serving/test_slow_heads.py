"""A connection that sends a request's head slowly is closed, the first request or a later one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from hetero.serving import server

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _app(_scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


async def _listening() -> tuple[int, asyncio.Server]:
    config = uvicorn.Config(_app, http=server._Protocol, lifespan="off", timeout_keep_alive=60)
    config.load()
    state: Any = uvicorn.Server(config).server_state
    listening = await asyncio.get_running_loop().create_server(
        lambda: server._Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    return listening.sockets[0].getsockname()[1], listening


def test_an_upgrade_is_answered_as_any_request(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing in the log tells to install WebSockets."""

    async def main() -> None:
        port, listening = await _listening()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        writer.write(WHOLE.removesuffix(b"\r\n") + upgrade)
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        listening.close()

    asyncio.run(main())
    assert caplog.records == []


@pytest.mark.parametrize("sent", [b"", b"GET", WHOLE + b"GET", WHOLE + b"GET / HTTP/1.1\r\nX: "])
def test_it_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_DEADLINE_S", 0.3)

    async def main() -> None:
        port, listening = await _listening()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head, _, rest = sent.partition(WHOLE) if sent.startswith(WHOLE) else (sent, b"", b"")
        if not head and rest:
            writer.write(WHOLE)
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.5)  # an idle connection may stay
        async with asyncio.timeout(10):
            for byte in head or rest:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
            assert await reader.read() == b""
        writer.close()
        listening.close()

    asyncio.run(main())

"""Clients that go, queues that are full, signals, restarts; the engine that dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero.serving import engine_client
from hetero.serving.engine_client import EngineClient
from hetero.serving.messages import ControlResult, ErrorReply
from tests.serving.servers import Server, serving, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 480, "logit_bias": {"1": -100}}


def idle(server: Server) -> bool:
    with server.client() as client:
        text = client.get("/metrics").text
    return 'hetero_queue_length{model="demo"} 0.0' in text


def wait_for(condition: Any, limit_s: float = 20) -> None:
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_with_its_client(server: Server, stream: bool) -> None:
    with server.client() as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as got:
                next(got.iter_lines())
        else:
            many = {**LONG, "n": 16}
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=many, timeout=0.3)
    wait_for(lambda: idle(server), 5)


@pytest.mark.full
def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    with serving(tmp_path, "--queue", "10") as server:

        def one(app: str) -> httpx.Response:
            with server.client(app) as client:
                return client.post("/v1/completions", json={**LONG, "max_tokens": 100})

        with concurrent.futures.ThreadPoolExecutor(28) as pool:
            apps = ["notes"] * 14 + ["mail"] * 14
            answers = list(pool.map(one, apps))
        statuses = {answer.status_code for answer in answers}
        assert 200 in statuses
        assert statuses & {429, 503}
        for answer in answers:
            if answer.status_code != 200:
                assert answer.status_code in (429, 503)
                assert int(answer.headers["Retry-After"]) > 0
                assert answer.json()["error"]["code"] == "queue_full"
        wait_for(lambda: idle(server))


@pytest.mark.full
def test_applications_take_turns(server: Server) -> None:
    """Six long answers of one app do not keep the one of another waiting for all of them."""
    done: list[str] = []

    def one(app: str, tokens: int) -> None:
        with server.client(app) as client:
            client.post("/v1/completions", json={**LONG, "max_tokens": tokens})
        done.append(app)

    threads = [threading.Thread(target=one, args=("notes", 200)) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    other = threading.Thread(target=one, args=("mail", 1))
    other.start()
    for thread in [*threads, other]:
        thread.join()
    assert done.index("mail") < len(done) - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="INT", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 143, id="TERM"),
    ],
)
def test_what_was_acknowledged_outlives_a_signal(tmp_path: Path, number: int, code: int) -> None:
    """With SIGTERM encrypted: then no file has a word of it."""
    options: list[str] = []
    if number == signal.SIGTERM and importlib.util.find_spec("cryptography"):
        (tmp_path / "key").write_text("0f" * 32)
        (tmp_path / "key").chmod(0o600)
        options = ["--encryption-key", str(tmp_path / "key")]
    server = start(tmp_path, *options)
    kept: list[tuple[str, str]] = []
    with server.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        asked = {"model": "demo", "max_output_tokens": 8, "temperature": 0}

        def ask() -> None:
            try:
                for i in range(1000):
                    given = {**asked, "input": f"And {i}?", "conversation": conversation}
                    said = client.post("/v1/responses", json=given | {"truncation": "auto"})
                    if said.status_code != 200:
                        return
                    text = said.json()["output"][0]["content"][0]["text"]
                    kept.append((said.json()["id"], text))
            except httpx.TransportError:
                return

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: len(kept) >= 3)
        assert server.end(number) == code
        asking.join()
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log
    assert "interrupted" in log
    files = [path for path in (tmp_path / "contexts").rglob("*") if path.is_file()]
    assert options == [] or not any(b"And 1?" in path.read_bytes() for path in files)
    again = start(tmp_path, *options)
    with again.client() as client:
        for name, text in kept:
            stored = client.get(f"/v1/responses/{name}").json()
            assert stored["output"][0]["content"][0]["text"] == text
        items = client.get(f"/v1/conversations/{conversation}/items?limit=100").json()["data"]
        assert len(items) >= min(2 * len(kept), 100)
        given = {**asked, "input": "Go on", "conversation": conversation, "truncation": "auto"}
        said = client.post("/v1/responses", json=given).json()
        cached = said["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached == 0 or said["hetero"]["loaded_bytes"] > 0  # from the disk, if at all
        assert client.delete(f"/v1/conversations/{conversation}").json()["deleted"]
    assert again.end() == 143
    texts = list((tmp_path / "contexts").rglob("*.log"))
    assert texts == []


def children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


@pytest.mark.full
def test_neither_process_outlives_the_other(tmp_path: Path) -> None:
    server = start(tmp_path)
    engines = children(server.process.pid)
    assert engines
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))
    again = start(tmp_path)  # the folder is free
    (engine,) = [
        pid
        for pid in children(again.process.pid)
        if b"hetero.serving.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(engine, signal.SIGKILL)
    assert again.process.wait(timeout=30) == 2
    assert "engine" in (tmp_path / "server.log").read_text()


@pytest.mark.full
def test_an_engine_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "STOP_S", 0.5)
    monkeypatch.setattr(engine_client, "TERMINATE_S", 0.5)

    async def stopped() -> tuple[EngineClient, int]:
        options = {"model": "demo", "device": "npu", "directory": str(tmp_path), "slots": 1}
        client = EngineClient(options, 8)
        await client.start()
        assert client._process is not None
        engine = client._process.pid
        os.kill(engine, signal.SIGSTOP)  # as one that waits for a driver for ever
        await client.stop()
        return client, engine

    client, engine = asyncio.run(asyncio.wait_for(stopped(), 60))
    assert not client.alive
    assert not Path(f"/proc/{engine}").exists()


HUNG = """
import os, threading, queue, time
from hetero.serving import engine_process as engine
engine.ORPHAN_S = 0.2
threading.Thread(target=engine._lines, args=(0, queue.SimpleQueue()), daemon=True).start()
time.sleep(60)
"""


@pytest.mark.full
def test_a_hung_engine_ends_with_its_server() -> None:
    engine = subprocess.Popen([sys.executable, "-c", HUNG], stdin=subprocess.PIPE)
    assert engine.stdin is not None
    engine.stdin.close()
    assert engine.wait(timeout=30) == 1


def test_an_engine_that_ends_behind_its_answer_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def asked() -> dict[str, Any]:
        client = EngineClient({}, 8)
        client._reader = asyncio.create_task(asyncio.sleep(60))

        async def both(message: Any) -> None:
            inbox = client._inboxes[message.id]
            inbox.put(ControlResult(id=message.id, value={"a": 1}))
            inbox.put(ErrorReply(id=message.id, kind="engine", message="the engine has ended"))

        monkeypatch.setattr(client, "_send", both)
        try:
            return await client.control("app", "status")
        finally:
            client._reader.cancel()

    assert asyncio.run(asked()) == {"a": 1}

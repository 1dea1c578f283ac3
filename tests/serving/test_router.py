"""Two servers behind LiteLLM's proxy, with the files of `docs/litellm`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.servers import KEYS, Server, free_port, start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("litellm") is None or os.name != "posix",
    reason="needs LiteLLM's proxy: pip install 'litellm[proxy]'",
)
FILES = Path(__file__).resolve().parents[2] / "docs" / "litellm"
ROUTER_KEY = "sk-key-of-the-router"
USERS = [f"user {i}" for i in range(8)]


@contextmanager
def routing(folder: Path, servers: list[Server]) -> Iterator[httpx.Client]:
    """The proxy in front of the servers."""
    shutil.copy(FILES / "sticky.py", folder)
    config = (FILES / "config.yaml").read_text().replace("KEY}", f"{KEYS['notes']}}}")
    for name, server in zip(("one", "two"), servers, strict=True):
        config = config.replace(f"http://{name}:8080", server.url)
    (folder / "config.yaml").write_text(config)
    port, command = free_port(), Path(sys.executable).parent / "litellm"
    with (folder / "router.log").open("w") as log:
        process = subprocess.Popen(
            [command, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_LOG": "ERROR",
                "LITELLM_MASTER_KEY": ROUTER_KEY,
            },
            start_new_session=True,
        )
    try:
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {ROUTER_KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
            give_up_s = time.monotonic() + 180
            while True:
                try:
                    if client.get("/health/liveliness").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert process.poll() is None, (folder / "router.log").read_text()[-3000:]
                assert time.monotonic() < give_up_s
                time.sleep(0.3)
            yield client
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def counted(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def chat(client: httpx.Client, said: list[dict[str, str]], **who: str) -> Any:
    body = {"model": "hetero", "messages": said, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body | who)
    assert answer.status_code == 200, answer.text
    return answer.json()


def grown(said: list[dict[str, str]], answer: Any) -> list[dict[str, str]]:
    text = answer["choices"][0]["message"]["content"] or "…"
    return [*said, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


def test_who_asks_stays_with_a_server_and_another_takes_over(tmp_path: Path) -> None:
    servers = [start(tmp_path / name) for name in ("one", "two")]
    (tmp_path / "router").mkdir()
    try:
        with routing(tmp_path / "router", servers) as client:
            texts: dict[str, Any] = {}
            for i, user in enumerate(USERS):
                said = [{"role": "user", "content": f"{user} tells a long story, please"}]
                who = {"user": user} if i % 2 else {"prompt_cache_key": user}
                texts[user] = grown(said, chat(client, said, **who))
            made = [counted(server, "hetero_tokens_total") for server in servers]
            assert all(made), "each server has some of the users"
            for i, user in enumerate(USERS):
                who = {"user": user} if i % 2 else {"prompt_cache_key": user}
                usage = chat(client, texts[user], **who)["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > 10, user
            paths = 'hetero_requests_total{path="/v1/chat/completions",status="200"}'
            assert sum(counted(server, paths) for server in servers) == 2 * len(USERS)

            kept = [
                client.post(
                    "/v1/responses",
                    json={"model": "hetero", "input": f"{user} asks", "user": user}
                    | {"max_output_tokens": 5},
                )
                for user in USERS
            ]
            assert {answer.status_code for answer in kept} == {200}
            for answer in kept:
                body = {"model": "hetero", "input": "More", "max_output_tokens": 5}
                again = client.post(
                    "/v1/responses", json=body | {"previous_response_id": answer.json()["id"]}
                )
                assert again.status_code == 200, again.text

            before = responses_of(servers[0])
            assert before
            gone = servers[0]
            gone.process.send_signal(signal.SIGKILL)
            gone.process.wait(30)
            for user in USERS:  # those of the server that is gone, too
                assert chat(client, texts[user], user=user)["usage"]["completion_tokens"] > 0
            port = int(gone.url.rsplit(":", 1)[1])
            servers[0] = start(tmp_path / "one", port=port)
            assert responses_of(servers[0]) == before
    finally:
        for server in servers:
            server.end()


def responses_of(server: Server) -> list[str]:
    """Ids of responses that a server says it has, which its key may read."""
    import sqlite3

    with sqlite3.connect(server.folder / "contexts" / "responses.sqlite") as records:
        names = [row[0] for row in records.execute("select id from responses order by id")]
    with server.client() as client:
        found = [client.get(f"/v1/responses/{name}").status_code for name in names]
    assert set(found) <= {200}
    return names

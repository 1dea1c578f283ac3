"""Keys, hosts, sizes; and everything of another application, which is as if it were not there."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero import UserError
from hetero.serving.keys import Keys, add_key
from tests.serving.servers import Server, serving
from tests.support.helpers import Command

ASKED: dict[str, Any] = {"model": "demo", "input": "Tell me a story", "max_output_tokens": 4}
UNKNOWN = "0" * 32
GUESSES = [
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}/input_items", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("POST", "/v1/responses", ASKED | {"previous_response_id": "{response}"}),
    ("POST", "/v1/responses", ASKED | {"conversation": "{conversation}"}),
    ("POST", "/v1/responses", ASKED | {"conversation": {"id": "{conversation}"}, "stream": True}),
    ("GET", "/v1/conversations/{conversation}", None),
    ("POST", "/v1/conversations/{conversation}", {"metadata": {}}),
    ("DELETE", "/v1/conversations/{conversation}", None),
    ("GET", "/v1/conversations/{conversation}/items", None),
    (
        "POST",
        "/v1/conversations/{conversation}/items",
        {"items": [{"role": "user", "content": "x"}]},
    ),
    ("GET", "/v1/conversations/{conversation}/items/{item}", None),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}", None),
    ("POST", "/slots/0?action=restore", {"filename": "{slot}"}),
]


@pytest.fixture(scope="module")
def mine(server: Server) -> Iterator[dict[str, str]]:
    """What an application has."""
    with server.client("notes") as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        response = client.post("/v1/responses", json=ASKED | {"conversation": conversation}).json()[
            "id"
        ]
        item = client.get(f"/v1/conversations/{conversation}/items").json()["first_id"]
        client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 2})
        slots = client.get("/slots").json()
        used = next(slot["id"] for slot in slots if slot["tokens"])
        saved = client.post(f"/slots/{used}?action=save", json={"filename": "of-notes"})
        assert saved.json()["n_saved"] > 0
        yield {
            "response": response,
            "conversation": conversation,
            "item": item,
            "slot": "of-notes",
        }
        assert client.get(f"/v1/responses/{response}").status_code == 200
        assert client.delete(f"/v1/conversations/{conversation}").json()["deleted"]


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        return value.format(**names)
    if isinstance(value, dict):
        return {key: filled(inner, names) for key, inner in value.items()}
    return value


@pytest.mark.parametrize(("method", "path", "body"), GUESSES)
def test_ids_of_another_application_are_as_if_missing(
    server: Server, mine: dict[str, str], method: str, path: str, body: Any
) -> None:
    missing = {
        "response": f"resp_{UNKNOWN}",
        "conversation": f"conv_{UNKNOWN}",
        "item": f"msg_{UNKNOWN}",
        "slot": "of-nobody",
    }
    with server.client("mail") as other:
        answers = [
            other.request(method, filled(path, names), json=filled(body, names))
            for names in (mine, missing)
        ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].content == answers[1].content
    own = ("date", "x-request-id", "request-id")
    same = [
        {name: value for name, value in answer.headers.items() if name not in own}
        for answer in answers
    ]
    assert same[0] == same[1]


def test_nothing_is_shared_between_applications(server: Server) -> None:
    prompt = list(range(1500, 1540))  # begins as nothing else does
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    cached = []
    for app in ("notes", "notes", "mail", "mail"):
        with server.client(app) as client:
            use = client.post("/v1/completions", json=asked).json()["usage"]
            cached.append(use["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, use["prompt_tokens"] - 1, 0, use["prompt_tokens"] - 1]
    with server.client("mail") as client:
        assert "of-notes" not in client.get("/v1/hetero/contexts").text
        assert "notes" not in client.get("/metrics").text


def test_every_endpoint_but_health_needs_a_key(server: Server) -> None:
    with server.client(None) as client:
        paths = client.get("/openapi.json")
        assert paths.status_code == 401
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/slots", "/props", "/v1/responses/x", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        answer = client.post("/v1/messages", json={})
        assert answer.json()["error"]["type"] == "authentication_error"


def test_other_hosts_and_long_bodies_are_refused(server: Server) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421
        answer = client.post("/v1/completions", content=b"x" * (5 << 20))
        assert answer.status_code == 413

        def parts() -> Iterator[bytes]:
            for _ in range(6):
                yield b"x" * (1 << 20)

        with suppress(httpx.WriteError):  # refused before it was all sent
            assert client.post("/v1/completions", content=parts()).status_code == 413
        assert client.get("/health").status_code == 200
        assert "access-control-allow-origin" not in client.get("/health").headers


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_clients_that_are_slow_keep_nobody_waiting(server: Server) -> None:
    """Heads and bodies that stop half-way, answers that nobody reads; memory stays bounded."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    port, before = int(server.url.rsplit(":", 1)[1]), resident(server)
    lazy = [socket.create_connection(("127.0.0.1", port)) for _ in range(1000)]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    key = b"Authorization: Bearer key-of-mail\r\n"
    asked = b'{"prompt": "Once", "max_tokens": 200, "stream": true, "logit_bias": {"1": -100}}'
    try:
        for each in lazy[:400]:
            each.sendall(head)
        for each in lazy[400:800]:
            each.sendall(head + key + b"Content-Length: 100000\r\n\r\n{")
        for each in lazy[800:810]:
            each.sendall(head + key + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
        with server.client() as client:
            start_s = time.monotonic()
            body = {"prompt": "Once", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
            assert time.monotonic() - start_s < 20
        assert resident(server) - before < 150 << 20
    finally:
        for each in lazy:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident(server: Server) -> int:
    """Bytes of memory of the HTTP process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@pytest.mark.full
def test_without_keys_only_this_machine_is_served(command: Command, tmp_path: Path) -> None:
    words = ("serve", "demo", "--host", "0.0.0.0", "--directory", str(tmp_path))
    refused = command(*words)
    assert refused.returncode == 2
    assert "--keys" in refused.stderr
    with serving(tmp_path / "server", keys=False) as found:
        port = int(found.url.rsplit(":", 1)[1])
        bound = {
            line.split()[1]
            for name in ("tcp", "tcp6")
            if (table := Path(f"/proc/net/{name}")).exists()
            for line in table.read_text().splitlines()[1:]
            if line.split()[3] == "0A" and int(line.split()[1].rsplit(":", 1)[1], 16) == port
        }
        assert bound <= {f"0100007F:{port:04X}"}
        with found.client(None) as client:
            assert client.get("/v1/models").status_code == 200


def test_keys_are_kept_as_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    one, two = add_key(path, "notes"), add_key(path, "mail")
    keys = Keys.load(path)
    assert [keys.app(one), keys.app(two), keys.app("x"), keys.app("")] == [
        "notes",
        "mail",
        None,
        None,
    ]
    assert one not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Keys.load(path)
    path.chmod(0o600)
    for broken in ("notes\n", "notes abc\n", "# nothing\n"):
        path.write_text(broken)
        with pytest.raises(UserError):
            Keys.load(path)

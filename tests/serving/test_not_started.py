"""A server that cannot start says why in one sentence, and opens no model where it need not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hetero.errors import UserError
from hetero.serving.engine_client import EngineClient
from tests.support.helpers import Command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_engine_that_does_not_start(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: EngineClient) -> None:
        raise UserError("the engine did not start: its folder is in use")

    monkeypatch.setattr(EngineClient, "start", start)
    done = command("serve", "demo", "--directory", str(tmp_path / "d"), "--port", str(free_port()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hetero: the engine did not start: its folder is in use\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_an_address_that_cannot_be_had(command: Command, tmp_path: Path, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ("--host", host, "--port", port, "--keys", str(tmp_path / "none"))
        done = command("serve", "demo", "--directory", str(tmp_path), *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hetero: nothing can be served at {host}:{port} (")
    assert done.stderr.endswith("choose another --port or --host\n")

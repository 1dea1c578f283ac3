"""A server in its own processes, as a user starts it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_S = 90  # of which a quiet machine takes 2, and 15 on an empty cache
KEYS = {"notes": "key-of-notes", "mail": "key-of-mail"}


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    folder: Path

    def client(self, app: str | None = "notes") -> httpx.Client:
        headers = {} if app is None else {"Authorization": f"Bearer {KEYS[app]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(
    folder: Path,
    *options: str,
    keys: bool = True,
    port: int | None = None,
    model: str = "demo",
    module: str = "hetero.start",
    env: Mapping[str, str] | None = None,
) -> Server:
    """Return when it answers."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port() if port is None else port
    words = ["serve", model, "--device", "npu", "--port", str(port)]
    words += ["--directory", str(folder / "contexts"), *options]
    if keys:
        path = folder / "keys"
        lines = [f"{app} {hashlib.sha256(k.encode()).hexdigest()}\n" for app, k in KEYS.items()]
        path.write_text("".join(lines))
        path.chmod(0o600)
        words += ["--keys", str(path)]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # even where these tests ignore it
    log = (folder / "server.log").open("a")
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
    finally:
        signal.signal(signal.SIGINT, before)
        log.close()
    server = Server(process, f"http://127.0.0.1:{port}", folder)
    give_up_s = time.monotonic() + START_S
    try:
        while True:
            try:
                if httpx.get(f"{server.url}/health").status_code == 200:
                    return server
            except httpx.TransportError:
                pass
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < give_up_s, (folder / "server.log").read_text()
            time.sleep(0.05)
    except BaseException:  # a server left running would take a core from the tests that follow
        process.kill()
        process.wait()
        raise


@contextmanager
def serving(
    folder: Path, *options: str, keys: bool = True, model: str = "demo", **more: Any
) -> Iterator[Server]:
    server = start(folder, *options, keys=keys, model=model, **more)
    try:
        yield server
    finally:
        server.end()
        said = (folder / "server.log").read_text()
        assert "Traceback" not in said, said

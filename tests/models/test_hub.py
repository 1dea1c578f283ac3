"""Models by name: huggingface_hub against a local server that speaks as much of the hub as it asks
for, breaks off in the middle, and sends damaged files.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ModelError
from hetero.models import hub, open_model
from hetero.models.hub import HubName, hub_name, models_here
from tests.support import tiny_files
from tests.support.helpers import Command

pytest.importorskip("huggingface_hub")
REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories as folders; what was asked for, and what goes wrong."""

    daemon_threads = True

    def __init__(self, repos: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = repos
        self.asked: list[tuple[str, str, str | None]] = []
        self.cut_after: int | None = None  # bytes of the next large answer
        self.damaged = False


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD of a model's description and files."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Range")))
        path = self.path.split("?")[0].strip("/")
        for repo, folder in self.server.repos.items():
            if path in (f"api/models/{repo}", f"api/models/{repo}/revision/{REVISION}"):
                return self._send(json.dumps(self._described(repo, folder)).encode(), body)
            if path == f"api/models/{repo}/tree/{REVISION}":
                return self._send(json.dumps(self._tree(folder)).encode(), body)
            start = f"{repo}/resolve/{REVISION}/"
            if path.startswith(start) and (folder / path.removeprefix(start)).is_file():
                return self._file(folder / path.removeprefix(start), body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _described(self, repo: str, folder: Path) -> dict[str, Any]:
        files = sorted(x for x in folder.rglob("*") if x.is_file())
        siblings = [
            {"rfilename": str(x.relative_to(folder)), "size": x.stat().st_size} for x in files
        ]
        return {"id": repo, "sha": REVISION, "siblings": siblings, "private": False, "tags": []}

    def _tree(self, folder: Path) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": str(x.relative_to(folder)), "size": x.stat().st_size,
             "oid": hashlib.sha1(x.read_bytes()).hexdigest()}
            for x in sorted(folder.rglob("*")) if x.is_file()
        ]  # fmt: skip

    def _file(self, file: Path, body: bool) -> None:
        data = file.read_bytes()
        large = file.suffix in (".safetensors", ".gguf")
        digest = (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()
        if self.server.damaged and large:
            data = bytes(len(data))
        headers = {
            "ETag": f'"{digest}"',
            "X-Repo-Commit": REVISION,
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        self._send(data, body, headers)

    def _send(self, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        start = 0
        if (wanted := self.headers.get("Range")) and body:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return
        cut = self.server.cut_after
        if cut is not None and headers and len(data) > cut:
            self.wfile.write(data[start : start + cut])
            self.wfile.flush()
            self.server.cut_after, self.close_connection = None, True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(data[start:])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of four models; huggingface_hub's cache is empty and its tries are quick."""
    from huggingface_hub import constants

    model = tiny_files.write_directory(tmp_path / "model")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (several / name).write_bytes(b"GGUF" + name.encode())
    split = tmp_path / "split"
    for number in (1, 2):
        file = split / "q4" / f"m-0000{number}-of-00002.gguf"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"GGUF" + bytes([number]))
    repos = {"some-owner/tiny": model, "some-owner/several": several, "some-owner/split": split}
    with Hub(repos) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{found.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # files here are small
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.chdir(tmp_path)
        yield found
        found.shutdown()


@pytest.mark.parametrize("name", ["hf:some-owner/tiny", "some-owner/tiny"])
def test_a_model_is_downloaded_once(
    server: Hub, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = open_model(name)
    assert model.config == open_model(tmp_path / "model").config
    assert model.encode("hi") == open_model(tmp_path / "model").encode("hi")
    assert "hetero: downloading some-owner/tiny, 0.00 GB" in capsys.readouterr().err
    asked = len(server.asked)
    assert open_model(name).config == model.config
    assert len(server.asked) == asked  # what is there whole is used without asking
    assert capsys.readouterr().err == ""


def test_one_file_of_a_repository(server: Hub) -> None:
    found = hub.fetch(HubName("some-owner/several", "b.gguf"))
    assert found.read_bytes() == b"GGUFb.gguf"
    assert not (found.parent / "a.gguf").exists()
    for file, said in (("", "has several models: name one, as hf:some-owner/several:a.gguf"),
                       ("c.gguf", "has no file c.gguf; it has a.gguf, b.gguf")):  # fmt: skip
        with pytest.raises(ModelError, match=said):
            hub._download(HubName("some-owner/several", file))


@pytest.mark.parametrize("file", ["", "q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf"])
def test_a_split_model_is_downloaded_whole(server: Hub, file: str, tmp_path: Path) -> None:
    found = hub.fetch(HubName("some-owner/split", file))
    assert found.name == (Path(file).name or "m-00001-of-00002.gguf")
    assert sorted(x.read_bytes()[-1] for x in found.parent.iterdir()) == [1, 2]
    asked = len(server.asked)
    assert hub.fetch(HubName("some-owner/split", file)) == found
    assert len(server.asked) == asked
    listed = {x.name: x.nbytes for x in models_here(tmp_path, tmp_path / "model")}
    assert listed["hf:some-owner/split:q4/m-00001-of-00002.gguf"] == 10
    (found.parent / "m-00002-of-00002.gguf").unlink()
    assert hub._in_cache(HubName("some-owner/split", file)) is None  # a part of it is no model


@pytest.mark.full
def test_a_download_that_breaks_off_is_resumed(server: Hub, tmp_path: Path) -> None:
    weights = max((tmp_path / "model").glob("*.safetensors"), key=lambda x: x.stat().st_size)
    server.cut_after = weights.stat().st_size // 2
    assert open_model("some-owner/tiny").config == open_model(tmp_path / "model").config
    assert server.cut_after is None
    ranges = [asked for _, path, asked in server.asked if path.endswith(".safetensors") and asked]
    assert any(int(x.removeprefix("bytes=").split("-")[0]) > 0 for x in ranges)


def test_a_damaged_file_is_refused_and_downloaded_again(server: Hub) -> None:
    server.damaged = True
    with pytest.raises(ModelError, match=r"safetensors arrived damaged .*run the command again"):
        open_model("some-owner/tiny")
    server.damaged = False
    open_model("some-owner/tiny")


def test_without_a_network_or_a_model(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no such directory, and no such model on the hub"):
        open_model("some-owner/none")
    monkeypatch.setattr(hub, "is_here", lambda package: False)
    with pytest.raises(ModelError, match=r"pip install 'hetero\[hub\]'"):
        open_model("hf:some-owner/tiny")


def test_models_that_are_here(server: Hub, tmp_path: Path, command: Command) -> None:
    open_model("some-owner/tiny")
    hub.fetch(HubName("some-owner/several", "a.gguf"))
    found = {x.name: x for x in models_here(tmp_path, tmp_path / "model")}
    assert set(found) == {"demo", "./model", "some-owner/tiny", "hf:some-owner/several:a.gguf"}
    assert found["hf:some-owner/several:a.gguf"].nbytes == 10
    told = json.loads(command("models", "--json").stdout)
    assert {x["name"] for x in told} == set(found)
    asked = len(server.asked)
    for x in told:
        if x["name"] != "hf:some-owner/several:a.gguf":  # four bytes of magic are no model
            assert open_model(x["name"]).config is not None
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("hf:a/b", HubName("a/b")),
        ("hf:a/b:c/d.gguf", HubName("a/b", "c/d.gguf")),
        ("meta-llama/Llama-3.2-1B", HubName("meta-llama/Llama-3.2-1B")),
        ("here/model", None),
        ("a/b/c", None),
        ("../a", None),
        ("a/b.gguf", None),
        ("demo", None),
    ],
)
def test_names(
    model: str, name: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_name(model) == name


@pytest.mark.parametrize("model", ["hf:", "hf:a", "hf:a/b:../c", "hf:a/b:/etc/passwd", "hf:../b"])
def test_names_that_are_none(model: str) -> None:
    with pytest.raises(ModelError, match="is named hf:OWNER/NAME"):
        hub_name(model)

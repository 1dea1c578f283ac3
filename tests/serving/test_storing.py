"""The API's errors where a disk, a file or the database cannot store."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero.serving.database import Records, StoredResponse
from hetero.serving.errors import ApiError
from tests.serving.servers import serving, start

ASKED: dict[str, Any] = {"input": "Once", "max_output_tokens": 4}


def log_of(folder: Path) -> Path:
    (path,) = (folder / "contexts").glob("**/ctx-*.log")
    return path


def error_of(got: httpx.Response, folder: Path) -> dict[str, Any]:
    assert str(folder) not in got.text, "a path of the server"
    error: dict[str, Any] = got.json()["error"]
    return error


@pytest.mark.full
def test_a_text_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        name = client.post("/v1/conversations", json={}).json()["id"]
        body = ASKED | {"conversation": name}
        assert client.post("/v1/responses", json=body).status_code == 200
        path = log_of(tmp_path)
        path.rename(tmp_path / "aside")
        path.mkdir()  # no file to write to, even for root
        refused = client.post("/v1/responses", json=body)
        assert refused.status_code == 507
        error = error_of(refused, tmp_path)
        assert error["code"] == "storage_full"
        assert "no room for this text" in error["message"]
        kept = client.delete(f"/v1/conversations/{name}")
        assert kept.status_code == 500
        assert "see the server's own messages" in error_of(kept, tmp_path)["message"]
        path.rmdir()
        (tmp_path / "aside").rename(path)
        assert client.post("/v1/responses", json=body).status_code == 200
    said = (tmp_path / "server.log").read_text()
    assert f"{path}: the text of a context cannot be written" in said
    whole = bytearray(path.read_bytes())
    whole[10] ^= 1
    path.write_bytes(whole)
    with serving(tmp_path) as server, server.client() as client:
        refused = client.post("/v1/responses", json=body)
        assert refused.status_code == 500
        assert "see the server's own messages" in error_of(refused, tmp_path)["message"]
    assert f"{path}: is damaged at byte" in (tmp_path / "server.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_a_locked_database_is_no_full_disk(tmp_path: Path, stream: bool) -> None:
    server = start(tmp_path)
    try:
        (path,) = tmp_path.glob("**/responses.sqlite")
        with server.client() as client, closing(sqlite3.connect(path)) as other:
            other.execute("begin immediate")
            got = client.post("/v1/responses", json=ASKED | {"stream": stream})
            other.execute("rollback")
            if stream:
                assert got.status_code == 200
                last = json.loads(got.text.strip().split("\n\n")[-1].partition("data: ")[2])
                assert last["type"] == "response.failed"
                assert last["response"]["status"] == "failed"
                error = last["response"]["error"]
                assert error["code"] == "server_error"
            else:
                assert got.status_code == 500
                error = error_of(got, tmp_path)
                assert error["type"] == "server_error"
            assert "see its own messages" in error["message"]
            assert got.headers["x-request-id"] in error["message"]
            assert got.headers["x-request-id"] in (tmp_path / "server.log").read_text()
        with server.client() as client:  # the connection of a failed request may be closed
            assert client.post("/v1/responses", json=ASKED).status_code == 200
    finally:
        server.end()
    assert "database is locked" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize(
    ("code", "full"),
    [
        (sqlite3.SQLITE_FULL, True),
        (sqlite3.SQLITE_IOERR, True),
        (sqlite3.SQLITE_IOERR_WRITE, True),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_READONLY, False),
        (None, False),
    ],
)
def test_only_errors_of_the_disk_are_said_to_be_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, full: bool
) -> None:
    def refused(*_: object) -> None:
        error = sqlite3.OperationalError("no")
        if code is not None:
            error.sqlite_errorcode = code
        raise error

    records = Records(tmp_path / "records")
    monkeypatch.setattr(records, "_check_room", refused)
    with pytest.raises(ApiError if full else sqlite3.OperationalError) as caught:
        records.keep_response("a", StoredResponse({"id": "r"}, []))
    if isinstance(caught.value, ApiError):
        assert (caught.value.status, caught.value.code) == (507, "storage_full")
    records.close()

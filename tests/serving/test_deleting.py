"""Deleting conversations in use, and saved slots to make room."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero.serving.database import Records, StoredResponse
from tests.serving.servers import Server

_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
LONG: dict[str, Any] = {  # which only its limit ends
    "input": "Once",
    "max_output_tokens": 480,
    "text": {"format": {"type": "json_schema", "name": "numbers", "schema": _SCHEMA}},
}


def logs(server: Server) -> set[Path]:
    return set((server.folder / "contexts").glob("**/ctx-*.log"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_deleted_conversation_ends_its_answers(server: Server, stream: bool) -> None:
    """One that is being made, and one that waits; nothing of either stays."""
    before = logs(server)
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(2) as pool:
        name = client.post("/v1/conversations", json={}).json()["id"]
        began = threading.Event()
        ids: list[str] = []

        def ask() -> list[dict[str, Any]]:
            """The events of an answer, or its error."""
            body = LONG | {"conversation": name, "stream": stream}
            with server.client() as own, own.stream("POST", "/v1/responses", json=body) as got:
                lines = []
                for line in got.iter_lines():
                    if line.startswith(("data: ", "{")):
                        lines.append(json.loads(line.removeprefix("data: ")))
                    began.set()
                return [{"status": got.status_code}, *lines]

        first = pool.submit(ask)
        if stream:
            assert began.wait(30)
        else:
            give_up_s = time.monotonic() + 30
            while not any(x["running"] for x in contexts(client)):
                assert time.monotonic() < give_up_s
                time.sleep(0.01)
        second = pool.submit(ask)
        time.sleep(0.1)
        assert not first.done()
        assert client.delete(f"/v1/conversations/{name}").status_code == 200
        status, *events = first.result()
        if stream:
            ids = [events[0]["response"]["id"]]
            assert status == {"status": 200}
            assert events[-1]["type"] == "response.failed"
            error = events[-1]["response"]["error"]
        else:
            assert status == {"status": 404}
            error = events[0]["error"]
        assert error["code"] == "conversation_deleted"
        assert "was deleted while its answer was made" in error["message"]
        status, *events = second.result()
        assert status == {"status": 404}
        assert "no such conversation" in events[0]["error"]["message"]
        for each in ids:
            assert client.get(f"/v1/responses/{each}").status_code == 404
        assert client.get(f"/v1/conversations/{name}").status_code == 404
        assert logs(server) == before
        assert client.delete(f"/v1/conversations/{name}").status_code == 404


def contexts(client: httpx.Client) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get("/v1/hetero/contexts").json()["conversations"]
    return [{"running": False, **each} for each in listed]


def test_a_response_of_a_deleted_conversation_is_not_stored(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    records.new_conversation("a", "c", {}, [], 9)
    assert records.keep_response("a", StoredResponse({"id": "r1"}, [], conversation="c"))
    records.delete_conversation("a", "c")
    assert not records.keep_response("a", StoredResponse({"id": "r2"}, [], conversation="c"))
    assert records.response("a", "r2") is None
    assert records.keep_response("a", StoredResponse({"id": "r3"}, []))
    records.close()


def test_saved_slots_are_deleted_by_name_and_make_room(server: Server) -> None:
    with server.client("mail") as client:
        client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 2})
        used = next(slot["id"] for slot in client.get("/slots").json() if slot["tokens"])

        def change(action: str, name: str) -> httpx.Response:
            return client.post(f"/slots/{used}?action={action}", json={"filename": name})

        names = [f"room-{i}" for i in range(9)]
        saved = [name for name in names if change("save", name).status_code == 200]
        refused = change("save", "one-more")
        assert refused.status_code == 429
        assert change("erase", "one-more").status_code == 404
        error = refused.json()["error"]
        assert error["code"] == "too_many_contexts"
        assert "action=erase" in error["message"]
        assert "delete()" not in error["message"]
        before = logs(server)
        erased = change("erase", saved[0])
        assert erased.json() == {
            "id_slot": used,
            "filename": saved[0],
            "n_erased": client.get("/slots").json()[used]["tokens"],  # the recent text stays
        }
        assert len(before - logs(server)) == 1
        for action in ("erase", "restore"):
            gone = change(action, saved[0])
            assert gone.status_code == 404
            assert "there is no such saved slot" in gone.json()["error"]["message"]
        assert change("erase", "../x").status_code == 400
        assert change("save", "one-more").status_code == 200
        assert change("restore", saved[1]).status_code == 200
        for name in ("one-more", *saved[1:]):
            assert change("erase", name).json()["n_erased"] > 0

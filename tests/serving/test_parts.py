"""Turns, messages, records and tools, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.serving.database import Records, StoredResponse, item_id
from hetero.serving.errors import ApiError
from hetero.serving.fair_queue import FairQueue
from hetero.serving.messages import (
    Cancel,
    Control,
    Done,
    GenerateRequest,
    TokenEvent,
    decode,
    encode,
)
from hetero.serving.turns import Turns
from tests.support.selection import examples


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_turns_are_fifo_inside_an_app_and_round_robin_between_them(
    steps: list[tuple[str, bool]],
) -> None:
    turns, waiting, order = FairQueue[int](), dict[str, list[int]](), list[str]()
    for number, (app, takes) in enumerate(steps):
        turns.add(app, number)
        if app not in order:
            order.append(app)
        waiting.setdefault(app, []).append(number)
        if takes:
            first = order.pop(0)
            assert turns.next() == waiting[first].pop(0)
            if waiting[first]:
                order.append(first)
        assert len(turns) == sum(map(len, waiting.values()))


def test_what_was_cancelled_is_no_longer_waited_for() -> None:
    turns = FairQueue[int]()
    for app, item in (("a", 1), ("b", 2), ("a", 3)):
        turns.add(app, item)
    assert turns.remove(lambda item: item == 2) == [2]
    assert [turns.next(), turns.next(), turns.next()] == [1, 3, None]


@given(st.lists(st.sampled_from("ab"), max_size=8), st.sets(st.integers(0, 7)))
def test_calls_of_one_key_follow_each_other_and_those_that_give_up_are_passed_over(
    keys: list[str], given_up: set[int]
) -> None:
    turns, log, inside = Turns(), list[tuple[str, int]](), Counter[str]()

    async def call(key: str, number: int) -> None:
        async with turns.of(key):
            inside[key] += 1
            assert inside[key] == 1
            await asyncio.sleep(0)
            log.append((key, number))
            inside[key] -= 1

    async def main() -> None:
        tasks = [asyncio.create_task(call(key, i)) for i, key in enumerate(keys)]
        await asyncio.sleep(0)
        first = {keys.index(key) for key in keys}  # these are inside already
        for number in given_up & set(range(len(keys))) - first:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in "ab":
            own = [i for i, each in enumerate(keys) if each == key]
            expected = [i for i in own if i in first or i not in given_up]
            assert [number for each, number in log if each == key] == expected

    asyncio.run(main())
    assert not len(turns)


@given(st.text(), st.integers(0, 9), st.booleans(), st.none() | st.just([-0.5, [[1, -0.5]]]))
def test_messages_are_one_line_each(
    text: str, number: int, end: bool, logprob: list[Any] | None
) -> None:
    said = TokenEvent(
        id=number, choice=number, text=text, token=number, end=end, logprob=logprob, finish=text
    )
    line = encode(said)
    assert line.count(b"\n") == 1
    assert decode(line) == said
    assert json.loads(line) == {"is": "TokenEvent", **vars(said)}
    for message in (
        GenerateRequest(id=1, app=text, tokens=[1], options={"stop": [text]}),
        Cancel(id=number),
        Control(id=2, app="a", action="status"),
        Done(id=3, usage={"prompt_tokens": 1}, about={"bits": {text: 1}}),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"is":"Os"}', b'{"is":"Cancel"}', b"\xff"])
def test_what_is_no_message_is_said_so(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        decode(line)


def response(name: str, **fields: object) -> StoredResponse:
    return StoredResponse({"id": name, "secret": "the text"}, [], **fields)  # type: ignore[arg-type]


def test_records_outlive_the_process_and_deleted_ones_leave_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "records"
    records = Records(path)
    records.keep_response("a", response("r1"))
    records.new_conversation("a", "c1", {}, [{"id": "i1", "text": "of it"}], 1)
    with pytest.raises(ApiError, match="contexts-per-app"):
        records.new_conversation("a", "c2", {}, [], 1)
    records.keep_response("a", response("r2", conversation="c1", tokens=[1]), [{"id": "i2"}])
    records.close()
    records = Records(path)
    stored = records.response("a", "r1")
    assert stored is not None
    assert stored.body["secret"] == "the text"
    assert [item["id"] for item in records.items("a", "c1")] == ["i1", "i2"]
    assert records.response("b", "r1") is None
    assert not records.items("b", "c1")
    assert not records.delete_response("b", "r1")
    assert not records.delete_conversation("b", "c1")
    assert records.delete_response("a", "r1")
    assert records.delete_conversation("a", "c1")
    assert records.response("a", "r2") is None
    assert b"the text" not in path.read_bytes()
    assert b"of it" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    records.close()


def test_an_app_has_its_share_of_the_records(tmp_path: Path) -> None:
    records = Records(tmp_path / "records", bytes_per_app=300)
    records.keep_response("a", response("r1"))
    records.keep_response("a", response("r3"))
    long = StoredResponse({"id": "r4", "text": "x" * 300}, [])
    with pytest.raises(ApiError, match="store: false") as refused:
        records.keep_response("a", long)
    assert refused.value.status == 507
    records.keep_response("b", response("r2"))
    records.close()


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("kcdr"), st.sampled_from("ab"), st.integers(0, 3))))
def test_the_bytes_of_an_app_are_counted_as_they_come_and_go(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
) -> None:
    path = tmp_path_factory.mktemp("counted") / "records"
    records = Records(path)
    for step, app, number in steps:
        if step == "k":
            with contextlib.suppress(sqlite3.IntegrityError):  # kept already: undone
                records.keep_response(app, response(f"{app}{number}"))
        elif step == "c":
            with contextlib.suppress(sqlite3.IntegrityError):
                items = [{"id": f"i{app}{number}{n}", "text": "x" * n} for n in range(number)]
                records.new_conversation(app, f"c{app}{number}", {}, items, 99)
        elif step == "d":
            records.delete_response(app, f"{app}{number}")
            records.delete_conversation(app, f"c{app}{number}")
        else:
            records.close()
            records = Records(path)
        for name in "ab":
            counted = records._db.execute("select bytes from used where app=?", (name,)).fetchone()
            (real,) = records._db.execute(
                "select (select ifnull(sum(length(body) + length(input) + length(tokens)), 0) from "
                "responses where app=?1) + (select ifnull(sum(length(body)), 0) from items where "
                "app=?1)",
                (name,),
            ).fetchone()
            assert (counted or (0,))[0] == real
    records.close()


def test_no_row_is_read_to_keep_another(tmp_path: Path) -> None:
    records, said = Records(tmp_path / "records"), list[str]()
    records.keep_response("a", response("r1"))
    records._db.set_trace_callback(said.append)
    records.keep_response("a", response("r2"))
    assert said
    assert not any("sum(" in statement for statement in said)
    records.close()


def test_a_full_disk_is_said_so_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    records.keep_response("a", response("resp_1"))
    (pages,) = records._db.execute("pragma page_count").fetchone()
    records._db.execute(f"pragma max_page_count={pages}")
    long = StoredResponse({"id": "resp_2", "text": "x" * 100_000}, [])
    with pytest.raises(ApiError, match="make room") as refused:
        records.keep_response("a", long)
    assert refused.value.status == 507
    with pytest.raises(ApiError, match="make room"):
        records.new_conversation("a", "c", {"x": "y" * 100_000}, [], 9)
    stored = records.response("a", "resp_1")
    assert stored is not None
    assert records.response("a", "resp_2") is None
    records._db.execute("pragma max_page_count=1000000")
    records.keep_response("a", long)
    assert records.delete_response("a", "resp_1")
    records.close()


def test_an_item_is_in_a_conversation_or_in_a_responses_output(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    mine = {"id": item_id("msg", "resp_ab", 0), "text": "mine"}
    records.keep_response("a", StoredResponse({"id": "resp_ab", "output": [mine]}, []))
    records.new_conversation("a", "c", {}, [{"id": "msg_x", "text": "of it"}], 9)
    assert records.item("a", mine["id"]) == mine
    assert records.item("a", "msg_x") == {"id": "msg_x", "text": "of it"}
    for app, name in (
        ("b", mine["id"]),
        ("b", "msg_x"),
        ("a", "msg_ab0001"),
        ("a", ""),
        ("a", "x"),
    ):
        assert records.item(app, name) is None
    records.close()

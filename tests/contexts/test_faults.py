"""What a service does when it is closed, forked, kept waiting, short of disk, or opened again."""

from __future__ import annotations

import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, Service, UserError
from hetero.contexts.budget import ByteBudget
from hetero.contexts.compaction import compact
from hetero.contexts.eviction import victims
from hetero.contexts.service_lock import ServiceLock
from hetero.contexts.unbound import UnboundApps
from tests.contexts.fake_service import FakeService

PROMPT = "Once upon a time there was a fox and a hen and a bear who lived in a wood"
CHUNK_BYTES = 12288  # of the fake model, raw


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu") as opened:
        yield opened


def opened(llm: LLM, folder: Path, **options: Any) -> Service:
    given: dict[str, Any] = {"context_memory": "8MiB", "context_disk": "64MiB", "kv_bits": "8"}
    return Service(llm, directory=folder, **(given | options))


# --- closed -----------------------------------------------------------------------------------


@pytest.mark.full
def test_calls_after_close_are_one_sentence(llm: LLM, tmp_path: Path) -> None:
    service = opened(llm, tmp_path)
    app = service.bind("a")
    context = app.new_context(chat=False)
    context.call(PROMPT, max_tokens=2)
    stream = context.stream(" And", max_tokens=8)
    next(stream)
    tokens = context.tokens
    service.close()
    service.close()
    for call in (
        lambda: context.call("x"),
        lambda: next(context.stream("x")),
        lambda: next(stream),
        context.fork,
        context.delete,
        app.new_context,
        lambda: service.bind("b"),
    ):
        with pytest.raises(UserError, match="this service was closed: open another one"):
            call()
    assert context.tokens == tokens
    with opened(llm, tmp_path) as again:
        assert again.bind("a").contexts()[0].tokens == tokens


@pytest.mark.full
def test_closing_waits_for_another_threads_call(llm: LLM, tmp_path: Path) -> None:
    service = opened(llm, tmp_path)
    context = service.bind("a").new_context(chat=False)
    begun, over, found = threading.Event(), threading.Event(), []

    def answer() -> None:
        with suppress(UserError):
            for piece in context.stream(PROMPT, max_tokens=20):
                begun.set()
                over.wait(30)
                found.append(piece)

    thread = threading.Thread(target=answer)
    thread.start()
    begun.wait(30)
    service._lock.wait_s = 0.01
    with pytest.raises(UserError, match=r"has not ended within 0\.01 s"):
        service.close()
    service._lock.wait_s = 30
    over.set()
    service.close()
    thread.join(30)
    assert found


# --- deadlines --------------------------------------------------------------------------------


def test_a_turn_that_does_not_come_is_a_sentence() -> None:
    turn = ServiceLock(wait_s=0.05)
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with turn.taken():
            begun.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(30)
    with pytest.raises(UserError, match=r"has not ended within 0\.05 s"), turn.taken():
        pass
    over.set()
    thread.join(30)
    with turn.taken():
        pass


def test_a_disk_that_hangs_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService(tmp_path, memory=40 * CHUNK_BYTES, disk=400 * CHUNK_BYTES)
    held, over = service.held("a"), threading.Event()
    service.swap.wait_s = service.working.wait_s = 0.05
    text = [i % 4 for i in range(60)]
    with monkeypatch.context() as patch:
        patch.setattr(service.files("a"), "write", lambda *_, **__: over.wait(30) and [])
        service.call(held, text)
        for wait in (service.swap.drain, service.swap.close):
            with pytest.raises(UserError, match=r"encoded or written for 0\.05 s"):
                wait()
        service.swap.wait_encoded(service.active.cache)  # it is encoded
        over.set()
        service.swap.wait_s = 30
        with pytest.raises(ValueError, match="zip"):  # of the patch
            service.swap.drain()
    service.swap.close()


def test_a_read_that_hangs_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService(
        tmp_path, memory=40 * CHUNK_BYTES, disk=400 * CHUNK_BYTES, recompute=False
    )
    held, over = service.held("a"), threading.Event()
    text = [i % 4 for i in range(60)]
    service.call(held, text)
    service.call(service.held("b"), text)
    service.swap.drain()
    service.memory.reclaim(service.memory.budget.used)
    files = service.files("a")
    reader = files.reader

    def slow(*arguments: Any) -> Any:
        over.wait(30)
        return reader(*arguments)

    monkeypatch.setattr(files, "reader", slow)
    service.working.wait_s = 0.05
    for _ in service.working.answering(held, [*text, 1], lambda _: iter([0])):
        with pytest.raises(UserError, match=r"have been read for 0\.05 s"):
            service.working.forget()
        over.set()
        service.working.wait_s = 30
    service.call(held, [*text, 1])
    service.close()


# --- forks ------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_a_sentence_and_takes_nothing_away(llm: LLM, tmp_path: Path) -> None:
    service = opened(llm, tmp_path)
    context = service.bind("a").new_context(chat=False)
    context.call(PROMPT, max_tokens=2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            context.call("x")
        except UserError as error:
            said = str(error)
        service.close()
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    deadline_s = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline_s, "the child hangs"
        time.sleep(0.01)
    said = os.read(reader, 4000).decode()
    os.close(reader)
    assert "opened before this process was forked" in said
    assert "start processes by spawn" in said
    with pytest.raises(UserError, match="another process uses these contexts"):
        opened(llm, tmp_path)  # the child has not let go of the lock
    assert context.call(" And", max_tokens=2).tokens
    service.close()


# --- bytes ------------------------------------------------------------------------------------


def test_compaction_takes_no_more_memory_than_a_piece(tmp_path: Path) -> None:
    service = FakeService(tmp_path, memory=40 * CHUNK_BYTES, disk=400 * CHUNK_BYTES, bits=32)
    held, text = service.held("a"), [i % 4 for i in range(120)]
    service.call(held, text)
    service.swap.drain()
    before = {chunk.key: chunk.place for chunk in held.chunks}
    kept = service.held("a")
    with service.memory.lock:
        kept.chunks = service.memory.table.refer("a", held.root, text[:112], 32)
    service.working.release(held.chunks)
    files = service.files("a")
    service.memory.reclaim(service.memory.budget.used)
    tracemalloc.start()
    compact(files, service.memory, "a", everything=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 7 * CHUNK_BYTES, "seven chunks were copied"
    assert all(chunk.place not in (None, before[chunk.key]) for chunk in kept.chunks)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["00000001.kv"]
    service.call(kept, text[:112])
    service.close()


@pytest.mark.parametrize("everything", [False, True])
def test_compaction_without_room_loses_no_chunk(tmp_path: Path, everything: bool) -> None:
    """With `everything` what was forgotten is not in the file any more all the same."""
    service = FakeService(tmp_path, memory=40 * CHUNK_BYTES, disk=400 * CHUNK_BYTES, bits=32)
    held, text = service.held("a"), [i % 4 for i in range(160)]
    service.call(held, text)
    service.swap.drain()
    kept = service.held("a")
    with service.memory.lock:
        kept.chunks = service.memory.table.refer("a", held.root, text[:48], 32)
    files, before = service.files("a"), {chunk: chunk.place for chunk in kept.chunks}
    gone = held.chunks[-1]
    (path,) = (tmp_path / "a").iterdir()
    whole, place = path.read_bytes(), gone.place
    assert gone.codes is not None
    assert place is not None
    forgotten = gone.codes.planes[0][0].tobytes()
    assert forgotten in whole
    service.working.release(held.chunks)
    service.memory.reclaim(service.memory.budget.used)
    service.disk.limit = service.disk.used
    compact(files, service.memory, "a", everything=everything)
    assert {chunk: chunk.place for chunk in kept.chunks} == before
    assert list((tmp_path / "a").iterdir()) == [path]
    assert (forgotten in path.read_bytes()) != everything
    service.call(kept, text[:48])
    assert service.working.shared(kept.root, text[:48]) > 40
    service.close()


def test_files_that_two_threads_write_have_numbers_of_their_own(tmp_path: Path) -> None:
    service = FakeService(tmp_path, memory=400 * CHUNK_BYTES, disk=4000 * CHUNK_BYTES, bits=32)
    held = service.held("a")
    service.call(held, [i % 4 for i in range(64)])
    service.swap.drain()
    pairs = [(chunk, chunk.codes) for chunk in held.chunks if chunk.codes is not None]
    files, places = service.files("a"), list[Any]()

    def write() -> None:
        for _ in range(20):
            places.extend(files.write(pairs, durable=False))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert len({place.file for place in places}) == 80
    service.close()


@pytest.mark.full
def test_bytes_of_apps_that_nobody_bound_count(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        for name in "ab":
            service.bind(name).new_context(chat=False).call(PROMPT, max_tokens=60)
        service.swap.drain()
        used = service.disk.used
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("apps/*/*"))
    assert used == on_disk > 0
    (tmp_path / "apps" / next((tmp_path / "apps").iterdir()) / ".x.kv.partial").write_bytes(b"left")
    with opened(llm, tmp_path) as service:
        assert service.disk.used == used
        assert not list(tmp_path.glob("apps/*/.*.partial"))
        service.bind("a")
        assert service.disk.used == used
        service.bind("b")
        assert service.disk.used == used


@pytest.mark.full
def test_files_of_apps_that_nobody_bound_make_room_oldest_first(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        for name in "ab":
            service.bind(name).new_context(chat=False).call(PROMPT, max_tokens=60)
            service.swap.drain()
            (path,) = service.bind(name).folder.glob("*.kv")
            os.utime(path, (1e9 + ord(name), 1e9 + ord(name)))
        used = service.disk.used
    with opened(llm, tmp_path, context_disk=used + 100) as service:
        service.bind("c").new_context(chat=False).call("A", max_tokens=1)
        service.swap.drain()
        assert service.disk.used <= service.disk.limit
        assert service.bind("a").contexts()[0].where().keys() == {"text"}
        assert service.bind("b").contexts()[0].where().keys() == {"disk"}
    texts = sum(path.stat().st_size for path in tmp_path.glob("apps/*/*.log"))
    with pytest.raises(UserError, match="the texts of the contexts alone need more than"):
        opened(llm, tmp_path, context_disk=texts - 1)
    with opened(llm, tmp_path, context_disk=texts) as service:
        assert service.bind("b").contexts()[0].where().keys() == {"text"}


def test_a_folder_that_cannot_be_bound_is_counted_on(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "ctx-1.log").write_bytes(b"12345")
    (tmp_path / "x" / "00000000.kv").write_bytes(b"123")
    budget = ByteBudget(100)
    unbound = UnboundApps(tmp_path, budget)
    assert budget.used == 8
    unbound.bind(tmp_path / "x")
    assert (budget.used, list(unbound.files())) == (0, [])
    unbound.unbind(tmp_path / "x")
    assert (budget.used, len(list(unbound.files()))) == (8, 1)


@pytest.mark.full
def test_the_order_of_ages_survives(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        app = service.bind("a")
        contexts = [app.new_context(chat=False) for _ in range(4)]
        for i in np.random.default_rng(3).permutation([0, 1, 2, 3, 1, 2]):
            contexts[i].call(f"{i} {PROMPT}", max_tokens=2)
        service.swap.drain()
        order = [chunk.key for chunk in victims(service.memory.table, "lctru") if chunk.full]
        last = max(chunk.used for chunk in service.memory.table)
    with opened(llm, tmp_path, recompute=False) as service:
        (context, *_) = service.bind("a").contexts()
        for chunk in service.memory.table:  # as if all were in memory
            chunk.codes = service._codec.empty(len(chunk.tokens), chunk.bits)
        again = [chunk.key for chunk in victims(service.memory.table, "lctru") if chunk.full]
        assert again == order
        for chunk in service.memory.table:
            chunk.codes = None
        context.call(" And", max_tokens=1)
        assert min(chunk.used for chunk in context._cached.chunks) > last

"""Between two calls chunks of the contexts used last come into memory; nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from hetero import LLM, Service, UserError
from hetero.contexts.chunk_files import Reader
from hetero.contexts.codec import CHUNK_TOKENS
from hetero.contexts.working_set import CachedText
from tests.contexts.fake_service import FakeService

RAW_BYTES = 3 * 2 * 2 * CHUNK_TOKENS * 4 * 4  # of a chunk
TOKENS = 4 * CHUNK_TOKENS
CHUNKS = 4
LIMIT_S = 30.0


@contextmanager
def service(folder: Path, chunks: int, **options: Any) -> Iterator[FakeService]:
    memory, disk = chunks * RAW_BYTES, 1000 * RAW_BYTES
    given: dict[str, Any] = {"bits": 32, "recompute": False, "read_ahead": True} | options
    with closing(FakeService(folder, memory=memory, disk=disk, **given)) as opened:
        yield opened


def texts(opened: FakeService, count: int) -> dict[CachedText, list[int]]:
    """Contexts that were called in turn, each with a text of its own."""
    called = {}
    for number in range(count):
        held = opened.held("a")
        called[held] = [number, *(i % 4 for i in range(TOKENS))]
        opened.call(held, called[held])
    return called


def wait_until_read(opened: FakeService) -> None:
    opened.swap.drain()
    assert opened.ahead is not None
    assert opened.ahead.wait(LIMIT_S)
    opened.memory.check()


def in_memory(held: CachedText) -> int:
    return sum(chunk.codes is not None for chunk in held.chunks if chunk.full)


def evict(opened: FakeService, known: Iterable[CachedText]) -> None:
    for held in known:
        for chunk in held.chunks:
            opened.memory.evict(chunk)


@pytest.mark.parametrize("read_ahead", [True, False])
def test_the_context_before_the_last_is_read_before_it_is_called(
    tmp_path: Path, read_ahead: bool
) -> None:
    with service(tmp_path, CHUNKS + 2, read_ahead=read_ahead) as opened:
        (first, text), (last, _) = texts(opened, 2).items()
        if read_ahead:
            wait_until_read(opened)
            assert in_memory(first) == CHUNKS
            assert in_memory(last) < CHUNKS  # the cache has it
        opened.swap.drain()
        switch = opened.call(first, [*text, 1])
        assert (switch.loaded_bytes == 0) == read_ahead
        assert switch.loaded_tokens + switch.recomputed_tokens >= TOKENS


@pytest.mark.parametrize("chunks", [1, 3, 6, 9, 14, 40])
def test_what_is_in_memory_was_used_last(tmp_path: Path, chunks: int) -> None:
    """Nothing is absent that was used later than something there, but for the cached text."""
    with service(tmp_path, chunks) as opened:
        known = texts(opened, 5)
        wait_until_read(opened)
        cached = list(known)[-1].chunks
        others = [x for held in known for x in held.chunks if x not in cached and x.full]
        there = [x.used for x in others if x.codes is not None]
        absent = [x.used for x in others if x.codes is None]
        assert not there or not absent or min(there) >= max(absent)
        assert (
            len(there) == min(chunks - (chunks > 16) * 0, len(others)) or chunks <= len(there) + 1
        )
        assert opened.memory.budget.peak <= opened.memory.budget.limit


def test_a_call_waits_for_one_layer_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(tmp_path, CHUNKS + 2) as opened:
        known = texts(opened, 3)
        wait_until_read(opened)
        began, read, layers = Event(), Reader.layer, []

        def slowly(reader: Reader, layer: int, codes: Any) -> None:
            began.set()
            layers.append(layer)
            time.sleep(0.05)
            read(reader, layer, codes)

        with opened.turn():  # after it there is something to read
            evict(opened, known)
            monkeypatch.setattr(Reader, "layer", slowly)
        assert began.wait(LIMIT_S)
        with opened.turn():
            count = len(layers)
            time.sleep(0.12)
            assert len(layers) == count
            opened.memory.check()
            used = sum(x.codes.nbytes for x in opened.memory.table if x.codes is not None)
            assert opened.memory.budget.used == used  # what was half read is given back
        monkeypatch.setattr(Reader, "layer", read)
        wait_until_read(opened)


def test_a_disk_that_hangs_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(tmp_path, CHUNKS + 2) as opened:
        known = texts(opened, 3)
        wait_until_read(opened)
        began, go_on, read = Event(), Event(), Reader.layer

        def never(reader: Reader, layer: int, codes: Any) -> None:
            began.set()
            go_on.wait(LIMIT_S)
            read(reader, layer, codes)

        first, text = next(iter(known.items()))
        with opened.turn():
            evict(opened, known)
            monkeypatch.setattr(Reader, "layer", never)
        assert began.wait(LIMIT_S)
        opened.swap.wait_s = 0.1
        with pytest.raises(UserError, match=r"read for 0\.1 s: check that the disk"):
            opened.call(first, [*text, 1])
        opened.swap.wait_s = LIMIT_S
        go_on.set()
        opened.call(first, [*text, 1])
        wait_until_read(opened)


def test_what_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    with service(tmp_path, 2 * CHUNKS + 3) as opened:
        known = texts(opened, 3)
        wait_until_read(opened)
        first, second, third = known
        opened.call(third, [*known[third], 1])
        place = second.chunks[1].place
        assert place is not None
        path = opened.files("a").folder / f"{place.file:08d}.kv"
        path.write_bytes(path.read_bytes()[:200])
        with opened.turn():
            evict(opened, [first, second])
        wait_until_read(opened)
        assert in_memory(first) == CHUNKS
        assert in_memory(second) == 0
        switch = opened.call(second, [*known[second], 1])
        assert switch.recomputed_tokens > 0 or switch.faults > 0


@pytest.mark.full
def test_a_service_reads_ahead_and_says_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_bits": "raw", "recompute": False}
    answers = {}
    with LLM("demo", device="npu") as llm:
        for read_ahead in (True, False):
            folder = tmp_path / str(read_ahead)
            with Service(llm, directory=folder, read_ahead=read_ahead, **options) as opened:
                budget, codec = opened.memory.budget, opened._codec
                budget.limit = codec.workspace_bytes + 5 * codec.nbytes(CHUNK_TOKENS, 32)
                app = opened.bind("a")
                a, b = (app.new_context(chat=False) for _ in range(2))
                said = [a.call("Once upon a time there was a fox", max_tokens=24, logprobs=2)]
                said += [b.call("One day " * 40, max_tokens=4)]
                opened.swap.drain()
                if opened.ahead is not None:
                    assert opened.ahead.wait(LIMIT_S)
                    assert "disk" not in a.where()
                said += [a.call(" The fox saw", max_tokens=8, logprobs=2)]
                assert a.last_switch is not None
                assert (a.last_switch.loaded_bytes == 0) == read_ahead
                opened.memory.check()
            answers[read_ahead] = [(x.tokens, x.logprobs) for x in said]
    assert answers[True] == answers[False]

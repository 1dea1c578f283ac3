"""Contexts of several apps called, forked, cut, deleted, pressed out of memory, damaged on the disk
and opened again, in any order, with a fake engine that knows every value: no budget is exceeded, no
chunk leaks, and nobody ever computes on a wrong value.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero.contexts.chunks import spans
from hetero.contexts.codec import CHUNK_TOKENS, MIXED
from hetero.contexts.working_set import CachedText
from tests.contexts.fake_service import FAST, KEEP, LONGEST, FakeService
from tests.support.selection import examples

APPS = st.sampled_from(["a", "b"])
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)  # few ids: beginnings are often equal
PICK = st.integers(0, 99)


class Machine(RuleBasedStateMachine):
    """`texts` is what each context must hold."""

    @initialize(
        bits=st.sampled_from([32, 8, 4, 2, MIXED]),
        memory=st.sampled_from([3, 9, 40]),
        disk=st.sampled_from([0, 6, 30, 400]),
        policy=st.sampled_from(["lctru", "lctru-paper", "lru"]),
        recompute=st.booleans(),
        disk_s=st.sampled_from([150.0, 1e9]),
        run_s=st.sampled_from([None, 0.0, 1.0]),
        read_ahead=st.booleans(),
    )
    def begin(
        self,
        bits: int,
        memory: int,
        disk: int,
        policy: Any,
        recompute: bool,
        disk_s: float,
        run_s: float | None,
        read_ahead: bool,
    ) -> None:
        """Where the disk reads as fast as tokens are computed, plans have some of each."""
        self.folder = tempfile.TemporaryDirectory()
        self.options: dict[str, Any] = {"bits": bits, "policy": policy, "recompute": recompute}
        self.options["read_ahead"], self.haste = read_ahead, 0
        self.options["rates"] = replace(FAST, read_bytes_per_s=disk_s, run_s=run_s)
        chunk = 3 * 2 * 2 * CHUNK_TOKENS * 4 * 4  # a raw one
        self.options |= {"memory": memory * chunk, "disk": disk * chunk}
        self.open()
        self.texts: dict[CachedText, list[int]] = {}

    def open(self) -> None:
        self.service = FakeService(Path(self.folder.name), **self.options)

    def pick(self, number: int) -> CachedText:
        return list(self.texts)[number % len(self.texts)]

    @rule(app=APPS)
    def new(self, app: str) -> None:
        if len(self.texts) < 5:
            self.texts[self.service.held(app)] = []

    @precondition(lambda self: self.texts)
    @rule(number=PICK, prompt=TOKENS, answer=st.lists(st.integers(0, 3), max_size=6))
    def call(self, number: int, prompt: list[int], answer: list[int]) -> None:
        held = self.pick(number)
        text = self.texts[held]
        if len(text) + len(prompt) + len(answer) > LONGEST:
            return
        self.service.call(held, [*text, *prompt], answer)
        text += [*prompt, *answer]

    @precondition(lambda self: self.texts)
    @rule(number=PICK, prompt=TOKENS, length=st.integers(0, LONGEST), token=st.integers(0, 3))
    def stream_on(self, number: int, prompt: list[int], length: int, token: int) -> None:
        """A call that forgets the oldest tokens where the text is full."""
        held, answer = self.pick(number), [token] * length
        text = self.texts[held]
        self.service.call(held, [*text, *prompt], answer, old=len(text))
        self.texts[held] = list(self.service.active.tokens)
        said, kept = [*text, *prompt, *answer], len(self.texts[held])
        assert kept <= LONGEST
        assert self.texts[held] == said[:KEEP] + said[len(said) - kept + KEEP :]

    @precondition(lambda self: self.texts)
    @rule(number=PICK, keep=st.floats(0, 1), prompt=TOKENS)
    def go_back(self, number: int, keep: float, prompt: list[int]) -> None:
        """A text that leaves the one before, as a chat whose oldest turns are dropped does."""
        held = self.pick(number)
        text = self.texts[held][: int(keep * len(self.texts[held]))] + prompt
        if len(text) <= LONGEST:
            self.service.call(held, text)
            self.texts[held] = text

    @precondition(lambda self: self.texts)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        if len(self.texts) < 5:
            held, service = self.pick(number), self.service
            other = service.held(held.app)
            with service.turn(), service.memory.lock:
                table, cached = service.memory.table, held.chunks[-1].stop if held.chunks else 0
                text = self.texts[held]
                other.root = held.root
                other.chunks = table.refer(held.app, held.root, text[:cached], service.bits)
            self.texts[other] = list(text)

    @precondition(lambda self: self.texts)
    @rule(number=PICK)
    def delete(self, number: int) -> None:
        held = self.pick(number)
        with self.service.turn():
            self.service.working.release(held.chunks)
        del self.texts[held]

    @rule(part=st.floats(0, 1))
    def press(self, part: float) -> None:
        """Somebody needs the memory."""
        with self.service.turn():
            self.service.memory.reclaim(int(part * self.service.memory.budget.used))

    @precondition(lambda self: self.texts)
    @rule(number=PICK, bits=st.sampled_from([8, 4, 2]))
    def lower(self, number: int, bits: int) -> None:
        """No further than this machine's tolerance."""
        held = self.pick(number)
        with self.service.turn():
            for chunk in held.chunks:
                self.service.memory.lower(chunk, max(bits, min(self.service.bits, 8)))

    @rule()
    def make_haste(self) -> None:
        """The operation after the next one does not wait until everything is read ahead."""
        self.haste = 2

    @rule(number=PICK, at=st.floats(0, 1), change=st.sampled_from(["bit", "cut", "gone"]))
    def damage(self, number: int, at: float, change: str) -> None:
        self.service.swap.drain()
        files = sorted(Path(self.folder.name).glob("*/*.kv"))
        if not files:
            return
        path = files[number % len(files)]
        data = bytearray(path.read_bytes())
        if not data:
            return
        place = min(int(at * len(data)), len(data) - 1)
        if change == "gone":
            path.unlink()
        elif change == "cut":
            path.write_bytes(data[:place])
        else:
            data[place] ^= 1
            path.write_bytes(data)

    @rule()
    def reopen(self) -> None:
        """Another process: texts are known, chunks are looked for on the disk."""
        self.service.close()
        before = self.service
        self.open()
        self.service.moved = before.moved  # roots are in the logs
        assert before.memory.budget.peak <= before.memory.budget.limit
        places = {app: self.service.files(app).scan() for app in ("a", "b")}
        for held, text in self.texts.items():
            table = self.service.memory.table
            held.chunks = table.refer(held.app, held.root, text, self.service.bits)
            for chunk in held.chunks:
                if chunk.place is None and chunk.key in places[held.app]:
                    chunk.place, _ = places[held.app][chunk.key]
                    self.service.files(held.app).adopt(chunk.place)
        for app in places:
            self.service.files(app).sweep()

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "service"):
            return
        service = self.service
        if self.haste:
            self.haste -= 1
            return
        assert service.ahead is None or service.ahead.wait(30)
        service.memory.check()
        assert service.disk.used <= service.disk.limit
        service.swap.drain()
        with service.memory.lock:
            known = {id(chunk) for held in self.texts for chunk in held.chunks}
            chunks = list(service.memory.table)
            assert known == {id(chunk) for chunk in chunks}, "a chunk that nobody refers to"
            assert all(chunk.pins == 0 for chunk in chunks)
            refs = [id(chunk) for held in self.texts for chunk in held.chunks]
            assert all(chunk.refs == refs.count(id(chunk)) for chunk in chunks)
            held_bytes = sum(chunk.codes.nbytes for chunk in chunks if chunk.codes is not None)
            assert held_bytes == service.memory.budget.used, "bytes that nobody holds"
            for held, text in self.texts.items():
                for chunk, (start, part) in zip(held.chunks, spans(text), strict=False):
                    assert chunk.app == held.app
                    assert (chunk.start, chunk.tokens) == (start, part[: len(chunk.tokens)])

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        for held, text in self.texts.items():  # each can still be gone on with
            if len(text) < LONGEST:
                self.service.call(held, [*text, 1])
        self.service.close()
        self.service.memory.check()
        self.folder.cleanup()


def test_rows_stay_until_they_are_encoded(tmp_path: Path) -> None:
    """A fork needs chunks of the call before, whose rows the next call of the text moves."""
    service = FakeService(tmp_path, memory=1 << 20, disk=1 << 20)
    encode = service.codec.encode_cached

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.02)
        return encode(*arguments)

    service.codec.encode_cached = slowly  # type: ignore[method-assign]
    held, text = service.held("a"), [i % 4 for i in range(LONGEST - 4)]
    service.call(held, text)
    other = service.held("a")
    with service.memory.lock:
        other.chunks = service.memory.table.refer("a", held.root, text, service.bits)
    service.call(held, [*text, 0, 1, 2, 3, 0, 1], old=len(text))
    assert held.shifted
    assert service.call(other, [*text, 1]).loaded_tokens > 0  # `FakeActive.check` compares
    service.close()


@pytest.mark.hypothesis
def test_any_order_of_operations() -> None:
    machine: Any = Machine
    machine.TestCase.settings = settings(
        max_examples=examples(60),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()

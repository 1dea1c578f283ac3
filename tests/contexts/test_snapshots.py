"""Kept contexts of models with states: out to the disk and back, and what goes wrong meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero import LLM, Service
from hetero.contexts.chunks import ChunkTable
from hetero.contexts.codec import STATES, ChunkCodec
from hetero.contexts.recent import RecentTexts
from hetero.contexts.service import AppContext
from hetero.contexts.working_set import Switch
from hetero.runtime.kv.kv_cache import CacheLayout
from tests.contexts.models import open_llm
from tests.contexts.test_layer_states import CASE_OF, ids
from tests.support.checkpoints import make_checkpoint
from tests.support.selection import examples

PROMPTS = (ids(1, 37), ids(2, 9), ids(3, 20), ids(4, 1))
OPTIONS: dict[str, Any] = {"max_tokens": 6, "logprobs": 2}
LONGEST = 120


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(CASE_OF[request.param], folder)
    with open_llm(folder, "tensor level", max_seq_len=200) as opened:
        yield opened


def service_of(llm: LLM, folder: Path, **options: Any) -> Service:
    given: dict[str, Any] = {"context_memory": "8MiB", "context_disk": "64MiB", "kv_bits": "raw"}
    return Service(llm, directory=folder, **(given | {"recompute": False} | options))


def answered(context: AppContext, tokens: Sequence[int]) -> Any:
    """The answer to a whole text."""
    results: list[Any] = []
    for _ in context.stream_text(list(tokens), results, **OPTIONS):
        pass
    return results[0]


def numbers(result: Any) -> Any:
    return result.tokens, result.logprobs


def story(llm: LLM) -> list[Any]:
    """A context that is never switched out, in the same calls."""
    found: list[Any] = []
    text: list[int] = []
    with llm.new_context() as context:
        for prompt in PROMPTS:
            text += prompt
            found.append(llm.generate(text, context=context, reuse=True, **OPTIONS))
            text += found[-1].tokens
    return [numbers(x) for x in found]


def switched(context: AppContext) -> Switch:
    switch = context.last_switch
    assert switch is not None
    return switch


def evict(service: Service) -> None:
    """All that can leave the memory does, and the cache is another text's."""
    service.swap.drain()
    service.memory.reclaim(sum(c.codes.nbytes for c in service.memory.table if c.codes is not None))
    service._working.forget()


def test_states_are_coded_exactly() -> None:
    shapes = (("conv_state.3", (2, 5)), ("delta_state.4", (3, 2, 7)))
    layout = CacheLayout(layers=3, kv_heads=2, capacity=32, head_dim=4, states=shapes)
    codec = ChunkCodec(layout)
    states = [np.random.default_rng(0).standard_normal(x).astype(np.float32) for _, x in shapes]
    codes = codec.encode_states(states)
    assert codes.nbytes == codec.nbytes(0, STATES)
    for one, other in zip(codec.decode_states(codes), states, strict=True):
        assert (one == other).all()


def test_snapshots_of_equal_beginnings_are_one() -> None:
    table = ChunkTable()
    text = ids(5, 50)
    first = table.refer_snapshot("a", b"root", text[:37])
    assert (first.at, first.tail and first.tail.start) == (37, 32)
    table.refer_snapshot("a", b"root", text[:32])
    table.refer_snapshot("a", b"root", [*text[:31], 1])
    found = table.refer_snapshots("a", b"root", text)
    assert [x.at for x in found] == [32, 37]
    assert found[0].tail is None
    assert found[1].states is first.states
    assert first.states.refs == 2
    assert table.refer_snapshots("a", b"other", text) == []


@pytest.mark.full
def test_through_the_disk_and_back_to_the_same_bits(llm: LLM, tmp_path: Path) -> None:
    """Also after a restart: keys, values and states are read, and nothing is computed again."""
    wanted = story(llm)
    text: list[int] = []
    for prompt, expected in zip(PROMPTS, wanted, strict=True):
        with service_of(llm, tmp_path) as service:
            app = service.bind("a")
            context = (app.contexts() or [app.new_context(chat=False)])[0]
            text += prompt
            assert numbers(answered(context, text)) == expected
            text += expected[0]
            switch = switched(context)
            assert (switch.recomputed_tokens, switch.reused_tokens) == (0, 0)
            assert bool(switch.loaded_bytes) == (prompt is not PROMPTS[0])
            evict(service)
            service.memory.check()
            other = app.new_context(chat=False)
            answered(other, ids(9, 30))
            other.delete()
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("apps/*/*"))
    with service_of(llm, tmp_path) as service:
        (context,) = service.bind("a").contexts()
        assert len(context._cached.snapshots) == 3
        assert service.disk.used == on_disk
        context.delete()
        assert service.disk.used == 0


def test_without_the_disk_it_is_read_from_memory(llm: LLM, tmp_path: Path) -> None:
    wanted = story(llm)
    with service_of(llm, tmp_path, context_disk="64KiB", swap="never") as service:
        app = service.bind("a")
        contexts = [app.new_context(chat=False) for _ in range(2)]
        texts: list[list[int]] = [[], []]
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            for i, context in enumerate(contexts):
                texts[i] += prompt
                assert numbers(answered(context, texts[i])) == expected
                texts[i] += expected[0]
                service._working.forget()
        assert switched(contexts[0]).recomputed_tokens == 0
        assert switched(contexts[0]).loaded_tokens > 0


@pytest.mark.full
def test_an_answer_is_made_again_from_the_end_of_its_prompt(llm: LLM, tmp_path: Path) -> None:
    text = [*PROMPTS[0], *PROMPTS[1]]
    with service_of(llm, tmp_path) as service:
        context = service.bind("a").new_context(chat=False)
        answer = answered(context, text)
        evict(service)
        again = [*text, answer.tokens[0], 7]  # another second token
        with llm.new_context() as fresh:
            wanted = llm.generate(again, context=fresh, **OPTIONS)
        found = answered(context, again)
        assert found.tokens == wanted.tokens
        assert switched(context).loaded_tokens == len(text)


@pytest.mark.full
def test_recent_texts_go_on(llm: LLM, tmp_path: Path) -> None:
    with service_of(llm, tmp_path) as service:
        recent = RecentTexts(service.bind("a"), 2)
        texts = [list(PROMPTS[0]), ids(9, 40)]
        for turn in range(3):
            for i, text in enumerate(texts):
                results: list[Any] = []
                at = recent.choose(text)
                for _ in recent.stream(at, text, results, **OPTIONS):
                    pass
                with llm.new_context() as fresh:
                    assert results[0].tokens == llm.generate(text, context=fresh, **OPTIONS).tokens
                switch = recent.texts[at].switch
                assert switch.recomputed_tokens == 0
                assert (switch.loaded_tokens > 0) == (turn > 0)
                texts[i] = [*text, *results[0].tokens, *ids(turn, 5)]
                evict(service)


@pytest.mark.full
@pytest.mark.parametrize("harm", ["bits", "cut", "gone"])
def test_damaged_states_cost_computing_them(llm: LLM, tmp_path: Path, harm: str) -> None:
    wanted = story(llm)
    text: list[int] = []
    with service_of(llm, tmp_path) as service:
        app = service.bind("a")
        context = app.new_context(chat=False)
        for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=True):
            text += prompt
            assert answered(context, text).tokens == tokens
            text += tokens
            evict(service)
            for snapshot in context._cached.snapshots:
                assert snapshot.states.place is not None
                damage(app.files._files[snapshot.states.place.file].path, harm)
        assert switched(context).recomputed_tokens > 0
        assert switched(context).faults > 0
        service.swap.drain()
        service.memory.check()


def damage(path: Path, harm: str) -> None:
    size = path.stat().st_size
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        os.truncate(path, size // 2)
    else:
        data = bytearray(path.read_bytes())
        for at in range(size // 2, size, 97):
            data[at] ^= 4
        path.write_bytes(data)


opened: LLM


class Machine(RuleBasedStateMachine):
    """`texts` is what each context must hold; answers are those of an empty context."""

    @initialize(
        memory=st.sampled_from([4 << 10, 30 << 10, 1 << 20]),
        disk=st.sampled_from(["40KiB", "200KiB", "8MiB"]),
        key=st.sampled_from([None, bytes(32)]),
    )
    def begin(self, memory: int, disk: str, key: bytes | None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        memory += ChunkCodec(opened.context.cache.layout).workspace_bytes
        self.options: dict[str, Any] = {"context_memory": str(memory), "context_disk": disk}
        self.options["encryption_key"] = key
        self.texts: dict[str, list[int]] = {}
        self.open()

    def open(self) -> None:
        self.service = service_of(opened, Path(self.folder.name), **self.options)
        self.app = self.service.bind("a")

    def pick(self, number: int) -> AppContext:
        return self.app.contexts()[number % len(self.texts)]

    @rule()
    def new(self) -> None:
        if len(self.texts) < 4:
            self.texts[self.app.new_context(chat=False).id] = []

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9), keep=st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.5]),
          prompt=st.lists(st.integers(3, 6), min_size=1, max_size=30))  # fmt: skip
    def call(self, number: int, keep: float, prompt: list[int]) -> None:
        """A text that goes on, or leaves the one before."""
        context = self.pick(number)
        text = self.texts[context.id]
        text = [*text[: int(keep * len(text))], *prompt]
        if len(text) + OPTIONS["max_tokens"] > LONGEST:
            return
        found = answered(context, text)
        with opened.new_context() as fresh:
            wanted = opened.generate(text, context=fresh, **OPTIONS)
        assert found.tokens == wanted.tokens
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        self.texts[context.id] = [*text, *found.tokens]

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        if len(self.texts) < 4:
            source = self.pick(number)
            self.texts[source.fork().id] = list(self.texts[source.id])

    @precondition(lambda self: self.texts)
    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        context = self.pick(number)
        context.delete()
        del self.texts[context.id]

    @rule()
    def evict(self) -> None:
        evict(self.service)

    @rule(number=st.integers(0, 99), harm=st.sampled_from(["bits", "cut", "gone"]))
    def damage(self, number: int, harm: str) -> None:
        self.service.swap.drain()
        paths = sorted(Path(self.folder.name).glob("apps/*/*.kv"))
        if paths:
            damage(paths[number % len(paths)], harm)

    @rule()
    def reopen(self) -> None:
        self.service.close()
        self.open()
        assert {x.id for x in self.app.contexts()} == {*self.texts}

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "service"):
            return
        service = self.service
        service.swap.drain()
        service.memory.check()
        assert service.disk.used <= service.disk.limit
        chunks = [chunk for x in self.app.contexts() for chunk in x._cached.all_chunks]
        assert {*map(id, chunks)} == {*map(id, service.memory.table)}
        for chunk in chunks:
            assert chunk.refs == sum(x is chunk for x in chunks)
            assert not chunk.pins

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self.service.close()
            self.folder.cleanup()


@pytest.mark.full
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["lfm2", "qwen3.5"])
def test_any_order_of_operations(kind: str, tmp_path: Path) -> None:
    global opened
    make_checkpoint(CASE_OF[kind], tmp_path)
    with open_llm(tmp_path, "npu", max_seq_len=200) as opened:
        machine: Any = Machine
        machine.TestCase.settings = settings(
            max_examples=examples(24),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        machine.TestCase().runTest()

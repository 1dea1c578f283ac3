"""Caches of layers that have windows forget what these have left: the logits stay those of caches
that keep everything, whatever is appended, cut off, forked, kept on disk or shifted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.lab.kv_quality import kv_quality
from hetero import LLM, Context, ModelError, UserError
from hetero.backends.formats import CacheFormat
from hetero.backends.memory import HostBuffer
from hetero.contexts.service import Service
from hetero.models.random_models import KNOWN_MODELS
from hetero.models.safetensors_file import SafetensorsFile
from hetero.models.sliding import EXTRA_TOKENS, Sliding, stride_of
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache
from hetero.runtime.sizes import cache_layout
from tests.contexts.models import open_llm
from tests.contexts.test_contexts import ids
from tests.support.checkpoints import CASES, make_checkpoint, relative_error
from tests.support.selection import examples

LENGTH = 448
WINDOW = 24  # of the checkpoints
OFF = {"f32": 2e-5, "f16": 2e-3, "q8": 0.03}  # a key that was computed in another order rounds so
FEW = settings(
    max_examples=examples(3, 10),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(2, 90)),
        st.tuples(st.just("decode"), st.integers(1, 12)),
        st.tuples(st.just("verify"), st.integers(0, 4)),
        st.tuples(st.just("cut"), st.one_of(st.integers(0, EXTRA_TOKENS), st.integers(0, LENGTH))),
        st.tuples(st.sampled_from(["fork", "disk"]), st.just(0)),
    ),
    min_size=4,
    max_size=12,
)


@pytest.fixture(scope="module", params=["mistral-window", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """Windows in all layers, and in every other one."""
    found: Path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(next(case for case in CASES if case.name == request.param), found)
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, "reference npu", max_seq_len=LENGTH) as opened:
        yield opened


def run(llm: LLM, context: Context, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The logits behind them, on what the context holds."""
    todo = [*context.pending, *tokens]
    step = llm.engine.decode(context, todo[0]) if len(todo) == 1 else None
    return (llm.engine.prefill(context, todo) if step is None else step).copy()


class Pair:
    """A context whose caches slide and one whose do not, through the same steps."""

    def __init__(self, sliding: LLM, whole: LLM, seed: int) -> None:
        self.llms = sliding, whole
        self.contexts = [x.new_context() for x in self.llms]
        self.random = np.random.default_rng(seed)
        self.bound = OFF[sliding.kv.value]

    def drawn(self, count: int) -> list[int]:
        room = LENGTH - len(self.contexts[0])
        return self.random.integers(1, 263, min(count, room)).tolist()  # 0 pads: its embedding is 0

    def same(self, tokens: list[int]) -> None:
        if tokens:
            found, wanted = map(run, self.llms, self.contexts, [tokens] * 2)
            assert relative_error(found, wanted) < self.bound

    def take(self, step: Step) -> None:
        kind, count = step
        match kind:
            case "prompt":
                self.same(self.drawn(count))
            case "decode":
                for token in self.drawn(count):
                    self.same([token])
            case "verify":  # some of the guesses are wrong
                self.same(self.drawn(2))
                guesses = self.drawn(5)
                if len(guesses) == 5:
                    parts = [
                        llm.engine.verify(context, guesses)
                        for llm, context in zip(self.llms, self.contexts, strict=True)
                    ]
                    assert relative_error(*parts) < self.bound
                    for context in self.contexts:
                        cached = context.cached
                        context.rewind(cached - 4 + count)
                        assert context.cached == cached - 4 + count, "guesses cost nothing"
            case "cut":
                keep = max(len(self.contexts[0]) - count, 0)
                for context in self.contexts:
                    context.truncate(keep)
            case _:
                self.replace(kind)

    def replace(self, kind: str) -> None:
        """Go on with equal contexts."""
        before = self.contexts
        if kind == "fork":
            self.contexts = [context.fork() for context in before]
        elif all(context.cached for context in before):
            with tempfile.TemporaryDirectory() as place:
                path = Path(place) / "c"
                before[0].save(path)  # and the one with room for all reads what is left
                self.contexts = [llm.load_context(path) for llm in self.llms]
        else:
            return
        for context in before:
            context.close()


@pytest.mark.few(2)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", [x.value for x in CacheFormat])
@pytest.mark.parametrize("way", ["reference npu", "gpu", "npu", "tensor level"])
def test_any_order_of_steps_gives_the_logits_of_whole_caches(
    folder: Path, way: str, kv: str
) -> None:
    with (
        open_llm(folder, way, max_seq_len=LENGTH, kv=kv) as sliding,
        open_llm(folder, way, max_seq_len=LENGTH, kv=kv, whole_caches=True) as whole,
    ):
        assert sliding.context.cache.layout.slides > whole.context.cache.layout.slides
        assert sliding.engine.memory.context_bytes < whole.engine.memory.context_bytes

        @FEW
        @given(steps=STEPS, seed=st.integers(0, 999))
        def random_steps(steps: list[Step], seed: int) -> None:
            pair = Pair(sliding, whole, seed)
            try:
                pair.same(pair.drawn(230))
                pair.same(pair.drawn(2))
                assert pair.contexts[0].cache.base > 0, "it has slid"
                for step in steps:
                    pair.take(step)
            finally:
                for context in pair.contexts:
                    context.close()

        random_steps()


@pytest.mark.full
@pytest.mark.parametrize("way", ["reference npu", "tensor level, rest on the npu"])
def test_contexts_that_decode_together_lie_each_its_own_way(folder: Path, way: str) -> None:
    with open_llm(folder, way, max_seq_len=LENGTH, adapt=False) as llm:
        contexts = [llm.new_context() for _ in range(3)]
        for context, length in zip(contexts, (10, 300, 225), strict=True):
            llm.engine.prefill(context, ids(length, length))
        for step in range(4):
            twins = [context.fork() for context in contexts]
            found = llm.engine.decode_rows([(context, step) for context in contexts])
            for logits, twin in zip(found, twins, strict=True):
                assert logits is not None
                assert relative_error(logits, llm.engine.decode(twin, step)) < OFF["f32"]
                twin.close()
        assert len({context.cache.base for context in contexts}) == 3


@pytest.mark.full
def test_calls_of_a_prompt_that_are_in_flight_together(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "gemma2")
    longer = {**case.changes, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    make_checkpoint(type(case)("longer", case.kind, longer), tmp_path)
    found = []
    for whole in (False, True):
        options: dict[str, Any] = {"max_seq_len": 2048, "whole_caches": whole, "adapt": False}
        with LLM(str(tmp_path), device="hetero", strategy="chunked", **options) as llm:
            assert llm.engine.deployment.window == 4
            found.append(llm.engine.prefill(llm.context, ids(8, 1700)).copy())
            assert len(llm.engine.runner.last_step.chunks) > 1
            assert (llm.context.cache.base == 0) == whole
    assert relative_error(*found) < OFF["f16"]


@pytest.mark.full
@given(data=st.data())
def test_rows_are_those_of_their_tokens(data: st.DataObject) -> None:
    """Without a model: tokens are appended and cut, and what a window sees is what was written."""
    window = data.draw(st.integers(1, 40))
    sliding = Sliding(layers=frozenset({1}), window=window, rows=window + EXTRA_TOKENS + 64 + 30)
    layout = CacheLayout(layers=2, kv_heads=1, capacity=900, head_dim=4, sliding=sliding)
    cache, random = KvCache(layout, HostBuffer), np.random.default_rng()
    known, at = np.zeros((2, 2, 1, 900, 4), np.float32), 0
    for _ in range(data.draw(st.integers(1, 40))):
        cut = data.draw(st.integers(0, at))
        if data.draw(st.booleans()) and cache.reaches(cut):
            at = cut
        count = data.draw(st.integers(1, 30))
        if at + count > 900:
            break
        cache.slide(at)
        assert cache.base == layout.base(at)
        new = random.standard_normal((2, 2, 1, count, 4)).astype(np.float32)
        known[:, :, :, at : at + count] = new
        cache.write(at, new)
        at += count
        seen = max(at - window + 1, 0)
        assert cache.low <= seen, "the next token has what it sees"
        np.testing.assert_array_equal(cache.read(seen, at), known[:, :, :, seen:at])
        keys, _ = cache.rows(0)
        np.testing.assert_array_equal(keys.read(0, at), known[0, 0, :, :at])


def test_a_cache_with_room_for_all_takes_one_that_has_slid() -> None:
    """And clears what lacks once, not in every step."""
    sliding, whole = (
        CacheLayout(layers=1, kv_heads=1, capacity=600, head_dim=4, sliding=Sliding.of([9], 600, x))
        for x in (20, None)
    )
    short, long = KvCache(sliding, HostBuffer), KvCache(whole, HostBuffer)
    for at in range(0, 400, 20):
        short.slide(at)
        short.write(at, np.full((1, 2, 1, 20, 4), at, np.float32))
    for each in (short, long):
        each.slide(400)
    long.layer(0)[0][:] = np.nan
    long.copy_from(short, 400)
    assert (long.base, long.low) == (0, short.low)
    assert long.low > 0
    np.testing.assert_array_equal(long.read(short.low, 400), short.read(short.low, 400))
    keys = long.layer(0)[0]
    assert not keys[:, : long.low].any()
    keys[:, 0] = 7
    long.slide(400)
    assert keys[0, 0, 0] == 7
    assert long.reaches(400)
    assert not long.reaches(short.low)


def test_the_memory_of_a_window_is_bounded_by_it() -> None:
    """Mistral's shape: 32768 tokens of context, 4096 of window."""
    config = KNOWN_MODELS["mistral-7b"]
    whole = cache_layout(config, 32768 + 256)
    sliding = cache_layout(config, 32768 + 256, written=1024)
    assert whole.nbytes == 32 * 2 * 8 * (32768 + 256) * 128 * 4
    assert sliding.nbytes == 32 * 2 * 8 * (4096 + EXTRA_TOKENS + stride_of(4096) + 1024) * 128 * 4
    assert cache_layout(config, 3000, written=1024).nbytes == cache_layout(config, 3000).nbytes
    mixed = KNOWN_MODELS["gemma-2-2b"]
    shorter = cache_layout(mixed, 8192, written=512)
    assert {shorter.rows(layer) for layer in (0, 2, 24)} == {4096 + EXTRA_TOKENS + 512 + 512}
    assert {shorter.rows(layer) for layer in (1, 3, 25)} == {8192}


def test_a_text_that_is_cut_far_back_is_computed_again(llm: LLM) -> None:
    with llm.new_context() as context, llm.new_context() as other:
        text = ids(5, 400)
        llm.engine.prefill(context, text)
        llm.engine.decode(context, 7)
        context.truncate(401 - EXTRA_TOKENS)
        assert context.cached == 401 - EXTRA_TOKENS, "a few tokens cost nothing"
        context.truncate(100)
        assert (len(context), context.cached) == (100, 0)
        with pytest.raises(UserError, match="no keys and values of its 100 tokens yet; generate"):
            context.save("s")
        fork = context.fork()
        wanted = llm.generate([*text[:100], 9, 8], max_tokens=5, context=other)
        for each in (context, fork):
            found = llm.generate([9, 8], max_tokens=5, context=each)
            assert found.tokens == wanted.tokens
        fork.close()


def test_what_a_text_shares_with_the_last_one_is_kept_where_it_can_be(llm: LLM) -> None:
    text = ids(6, 380)
    for shared, reused in ((380, 380), (350, 350), (60, 0)):
        llm.generate(text, max_tokens=2)
        again = [*text[:shared], *ids(9, 20)]
        found = llm.generate(again, max_tokens=4, reuse=True)
        assert found.stats.reused_tokens == reused
        assert found.tokens == llm.generate(again, max_tokens=4).tokens


@pytest.mark.full
def test_answers_to_one_prompt_and_guesses(llm: LLM, folder: Path) -> None:
    """A fork of the prompt after an answer that is longer than what windows keep behind them."""
    with open_llm(folder, "reference npu", max_seq_len=LENGTH, whole_caches=True) as whole:
        prompt = (ids(4, 30) * 9)[:240]
        options: dict[str, Any] = {"max_tokens": 150, "temperature": 1.0, "seed": 3}
        several = [x.generate_many([prompt], n=2, **options) for x in (llm, whole)]
        found, wanted = ({a.tokens for a in answers[0]} for answers in several)
        assert found == wanted
        guessed = llm.generate(prompt, max_tokens=150, speculative=4)
        assert guessed.tokens == whole.generate(prompt, max_tokens=150).tokens


@pytest.mark.parametrize("keep", [0, 30])
def test_a_full_context_goes_on(tmp_path: Path, keep: int) -> None:
    """One layer, in which a shift is exact: as every token from an empty context."""
    case = next(case for case in CASES if case.name == "mistral-window")
    make_checkpoint(
        type(case)("one", "Mistral", {**case.changes, "num_hidden_layers": 1}), tmp_path
    )
    with open_llm(tmp_path, "reference npu", max_seq_len=LENGTH) as llm, llm.new_context() as mine:
        assert mine.cache.layout.slides
        prompt = ids(3, LENGTH - 4)
        found = llm.generate(prompt, max_tokens=9, context=mine, context_shift=True, keep=keep)
        assert found.stats.shifted_tokens
        seen, wanted = list(prompt), []
        for _ in range(9):
            if len(seen) >= LENGTH:
                del seen[keep : keep + (len(seen) - 1 - keep) // 2]
            wanted.append(llm.generate(seen, max_tokens=1).tokens[0])
            seen.append(wanted[-1])
        assert list(found.tokens) == wanted
        mine.shift(2, len(mine) - 10)  # the window has lost some of the first two
        assert len(mine) == 10
        assert llm.generate([5], max_tokens=3, context=mine).tokens


def test_a_session_that_lacks_too_much_is_broken(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with llm.new_context() as context:
        llm.generate(ids(2, 300), max_tokens=40, context=context)
        context.save(path)
        raw, first = path.read_bytes(), context.cache.low
        assert first > 0
        at = SafetensorsFile(path).entries["first"].start
        for wrong in (first - 1, first + 1, 0, -4, 10**9):
            path.write_bytes(raw[:at] + np.array([wrong], np.int32).tobytes() + raw[at + 4 :])
            with pytest.raises(ModelError, match="save it again"):
                llm.load_context(path)
        sliding = context.cache.layout.sliding
        assert sliding is not None
        context.cache.low = sliding.seen(context.cached) + 1  # nothing can go on from it
        context.save(tmp_path / "short")
        with pytest.raises(ModelError, match="save it again"):
            llm.load_context(tmp_path / "short")
        length = int.from_bytes(raw[:8], "little")
        for shape in ([0], [1, 0], [1, 1], []):
            header = json.loads(raw[8 : 8 + length])
            bytes_of = header["first"]["data_offsets"]
            header["first"]["shape"] = shape
            if 0 in shape:
                header["first"]["data_offsets"] = bytes_of[:1] * 2
                header["padding"] = {"dtype": "I32", "shape": [1], "data_offsets": bytes_of}
            made = json.dumps(header).encode()
            path.write_bytes(len(made).to_bytes(8, "little") + made + raw[8 + length :])
            with pytest.raises(ModelError, match="save it again"):
                llm.load_context(path)


def test_a_service_keeps_all_tokens(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="open it with whole_caches=True"):
        Service(llm, directory=tmp_path)
    with pytest.raises(UserError, match="open it with whole_caches=True"):
        kv_quality(llm, ids(1, 200), ["8"], ratio=0.5, window=64, seeds=0)

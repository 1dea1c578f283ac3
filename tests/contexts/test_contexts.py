"""Contexts beside each other on one model: each as if it were alone, bit for bit."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, Context, ModelError, UserError
from hetero.backends.errors import DeviceLostError
from hetero.errors import FallbackWarning
from hetero.generation.loop import Generation, GenerationResult
from hetero.models import open_model
from hetero.runtime import memory_estimate
from hetero.runtime.engine import ContextFullError, Engine
from hetero.solver.handmade import layer_level
from tests.contexts.models import VOCABULARY, open_llm, plan_of
from tests.runtime.test_faults import make_engine

SAMPLED: dict[str, Any] = {"max_tokens": 9, "logprobs": 2, "temperature": 1.2}


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def numbers(result: GenerationResult) -> Any:
    """Everything that a wrong key or value would change, to the last bit."""
    return result.tokens, result.logprobs


PROMPTS = [ids(seed, count) for seed, count in ((1, 40), (2, 3), (3, 23), (4, 40))]


@pytest.fixture
def alone(llm: LLM) -> list[Any]:
    """Answers one after the other, each on a context that nothing else was on."""
    found = []
    for seed, prompt in enumerate(PROMPTS):
        with llm.new_context() as context:
            found.append(numbers(llm.generate(prompt, context=context, seed=seed, **SAMPLED)))
    return found


# --- beside each other ------------------------------------------------------------------------


def test_streams_that_one_thread_reads_in_turn(llm: LLM, alone: list[Any]) -> None:
    streams = [
        llm.stream(prompt, context=llm.new_context(), seed=seed, **SAMPLED)
        for seed, prompt in enumerate(PROMPTS)
    ]
    order = np.random.default_rng(5)
    while unread := [stream for stream in streams if not stream.finished]:
        unread[order.integers(len(unread))].step()
    assert [numbers(stream.result()) for stream in streams] == alone


def test_streams_that_threads_read_at_once(llm: LLM, alone: list[Any]) -> None:
    found: list[Any] = [None] * len(PROMPTS)

    def work(seed: int) -> None:
        for _ in range(2):
            with llm.new_context() as context:
                options = SAMPLED | {"seed": seed, "context": context}
                found[seed] = numbers(llm.generate(PROMPTS[seed], **options))
            assert found[seed] == alone[seed]

    run_in_threads(work, len(PROMPTS))
    assert found == alone


def run_in_threads(work: Callable[[int], None], count: int) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_fork_is_a_fresh_prefill(llm: LLM, alone: list[Any]) -> None:
    """Also after the original went on, and was dropped."""
    original = llm.new_context()
    llm.engine.prefill(original, PROMPTS[0])
    forks = [original.fork(), original.fork()]
    llm.generate(ids(9, 5), context=original, max_tokens=4)
    original.close()
    for fork in forks:
        assert fork.tokens == tuple(PROMPTS[0])
        first = llm.engine.decode(fork, 5).copy()
        again = llm.new_context()
        llm.engine.prefill(again, PROMPTS[0])
        assert np.array_equal(first, llm.engine.decode(again, 5))


def test_going_back_forgets(llm: LLM) -> None:
    fresh, cut = llm.new_context(), llm.new_context()
    prompt, other = ids(6, 30), ids(7, 17)
    llm.engine.prefill(fresh, prompt)
    llm.engine.prefill(cut, prompt)
    llm.engine.prefill(cut, other)
    cut.truncate(30)
    assert cut.tokens == fresh.tokens
    for token in (5, 6):
        found = llm.engine.decode(cut, token).copy()
        assert np.array_equal(found, llm.engine.decode(fresh, token))


@pytest.mark.full
def test_guesses_on_two_contexts_change_no_token(llm: LLM) -> None:
    prompts = [[9, 8, 7, 6] * 6, [5, 4, 5, 4] * 5]
    options: dict[str, Any] = {"max_tokens": 20}
    wanted = [llm.generate(prompt, **options).tokens for prompt in prompts]
    streams = [
        llm.stream(prompt, context=llm.new_context(), speculative=5, **options)
        for prompt in prompts
    ]
    while not all(stream.finished for stream in streams):
        for stream in streams:
            if not stream.finished:
                stream.step()
    assert [stream.result().tokens for stream in streams] == wanted


def test_a_long_prompt_lets_others_run_between_its_calls(folder: Path) -> None:
    plan = plan_of(folder, "npu").model_copy(update={"step_tokens": 64})
    with open_llm(folder, "npu", plan=plan, max_seq_len=300) as llm:
        assert llm.engine.plan.steps(200) == (64, 64, 64, 8)
        wanted = llm.generate(ids(1, 200), max_tokens=2).tokens
        long = llm.stream(ids(1, 200), context=llm.new_context(), max_tokens=2)
        for _ in range(3):
            assert long.step() is None
            llm.generate([1, 2, 3], max_tokens=3)
        assert tuple(piece.token for piece in long) == wanted


# --- what a context is ------------------------------------------------------------------------


def test_a_prompt_goes_on_from_its_context(one: LLM) -> None:
    prompt, more = ids(1, 12), ids(2, 5)
    with one.new_context() as context:
        first = one.generate(prompt, context=context, max_tokens=6)
        assert context.tokens == (*prompt, *first.tokens)
        assert (len(context), context.cached) == (18, 17), "the last token is still to be computed"
        second = one.generate(more, context=context, max_tokens=6)
        assert context.tokens == (*prompt, *first.tokens, *more, *second.tokens)
    whole = one.generate([*prompt, *first.tokens, *more], max_tokens=6)
    assert second.tokens == whole.tokens
    assert second.stats.prompt_tokens == 5


def test_reuse_keeps_what_is_shared(one: LLM) -> None:
    with one.new_context() as context:
        one.generate(ids(1, 12), context=context, max_tokens=3)
        changed = [*ids(1, 12)[:8], 5, 6]
        result = one.generate(changed, context=context, reuse=True, max_tokens=3)
        assert result.stats.reused_tokens == 8
        assert context.tokens == (*changed, *result.tokens)
    assert result.tokens == one.generate(changed, max_tokens=3).tokens


def test_a_text_that_goes_on_has_one_beginning(stories: Path) -> None:
    with LLM(str(stories), device="npu", max_seq_len=64) as llm, llm.new_context() as context:
        start = llm.model.tokenizer.bos_id
        assert start is not None
        llm.generate("Once upon a time", context=context, max_tokens=4)
        llm.generate("Then a dog", context=context, max_tokens=4)
        assert context.tokens.count(start) == 1
        assert context.tokens[0] == start


@pytest.mark.full
def test_conversations_on_contexts_of_their_own_do_not_meet(one: LLM) -> None:
    with LLM("demo", device="npu", max_seq_len=200) as llm:
        talks = [llm.conversation(context=llm.new_context()) for _ in range(2)]
        for text in ("Tell me a story.", "And then?"):
            found = [talk.say(text, max_tokens=12) for talk in talks]
            assert found[0].text == found[1].text
        for talk in talks:
            assert talk.last is not None
            assert talk.last.stats.reused_tokens > 8
        assert len(llm.context) == 0


@pytest.mark.full
def test_an_answer_that_is_left_leaves_what_was_read(one: LLM) -> None:
    prompt = ids(1, 12)
    with one.new_context() as context:
        stream = one.stream(prompt, context=context, max_tokens=9)
        said = [next(stream).token for _ in range(4)]
        del stream
        gc.collect()
        assert context.tokens == (*prompt, *said)
        assert one.generate([5], context=context, max_tokens=2).tokens


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("drop", ["close", "forget"])
def test_memory_comes_back(llm: LLM, drop: str) -> None:
    context: Context | None = llm.new_context()
    assert context is not None
    llm.generate(ids(1, 30), context=context, max_tokens=3)
    fork: Context | None = context.fork()
    llm.generate(ids(1, 30), context=fork, max_tokens=3)  # its steps are the last that ran
    assert fork is not None
    buffers = [
        weakref.ref(x.cache[slot].buffer) for x in (context, fork) for slot in x.cache.layout.slots
    ]
    if drop == "close":
        context.close()
        fork.close()
    else:
        context = fork = None
    gc.collect()
    assert not any(buffer() for buffer in buffers)
    assert llm.generate(ids(1, 30), max_tokens=3).tokens


@pytest.mark.full
def test_more_contexts_than_fit_are_refused_with_the_remedy(folder: Path) -> None:
    with open_llm(folder, "npu") as free:
        needs = free.engine.memory
    budget = needs.total_bytes + 2 * needs.context_bytes + 5000
    with open_llm(folder, "npu", memory_budget=budget) as llm:
        more = [llm.new_context(), llm.new_context()]
        for call in (llm.new_context, more[0].fork, lambda: llm.load_context("none")):
            with pytest.raises(
                UserError,
                match=r"4 contexts of .* each need .* the memory budget is .* close\(\) a context",
            ):
                call()
        more.pop().close()
        more.append(llm.new_context())
        more.pop()
        gc.collect()
        assert llm.new_context().tokens == ()


def test_the_machines_memory_is_a_limit_too(one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: one.engine.memory.total_bytes)
    with pytest.raises(UserError, match=r"2 contexts of .* this machine's memory is"):
        one.new_context()


def test_a_device_that_fails_takes_no_context_along(folder: Path) -> None:
    """Every context goes on, on the device that is left."""

    def answers(engine: Engine) -> list[Any]:
        contexts = [engine.new_context() for _ in range(3)]
        for seed, context in enumerate(contexts):
            engine.prefill(context, ids(seed, 11 + seed))
        return [engine.decode(context, token).copy() for token in (5, 6) for context in contexts]

    with make_engine(folder) as engine:
        wanted = answers(engine)
    with make_engine(folder, gpu={"fail_launch": 140}) as engine:
        with pytest.warns(FallbackWarning, match="the gpu failed"):
            found = answers(engine)
        assert set(engine.devices) == {"npu"}
    assert np.allclose(found, wanted, rtol=1e-4, atol=1e-5)


# --- one context, one call at a time ----------------------------------------------------------


def test_two_streams_on_one_context_are_one_clear_error(one: LLM) -> None:
    context = one.new_context()
    stream = one.stream([1, 2, 3], context=context, max_tokens=9)
    next(stream)
    calls: list[Callable[[], object]] = [
        lambda: one.stream([5], context=context),
        lambda: one.generate([5], context=context),
        lambda: context.truncate(0),
        context.fork,
        lambda: context.save("nowhere"),
    ]

    def refused(index: int) -> None:
        with pytest.raises(UserError, match="a stream of this context is unfinished"):
            calls[index]()

    for index in range(len(calls)):
        refused(index)
    run_in_threads(refused, len(calls))
    assert len(list(stream)) == 8
    assert one.generate([5], context=context, max_tokens=2).tokens


def test_a_reader_that_stalls_stops_nobody(one: LLM) -> None:
    with one.new_context() as slow, one.new_context() as quick:
        stalled = one.stream([1, 2, 3], context=slow, max_tokens=9)
        next(stalled)
        run_in_threads(lambda _: list(one.stream([4, 5], context=quick, max_tokens=5)), 1)
        run_in_threads(lambda _: one.generate([4, 5], max_tokens=5), 3)  # the model's own
        assert len(list(stalled)) == 8


def test_the_last_piece_frees_the_context(one: LLM) -> None:
    stream = one.stream([1, 2, 3], max_tokens=2)
    next(stream)
    assert next(stream).finish_reason == "length"
    assert one.generate([5], max_tokens=2).tokens, "nobody has asked for another piece"


def test_wrong_contexts_are_named(folder: Path, one: LLM) -> None:
    with open_llm(folder, "npu") as other, other.new_context() as strange:
        with pytest.raises(UserError, match="this context belongs to another model"):
            one.generate([1], context=strange)
        with pytest.raises(UserError, match="this context belongs to another model"):
            one.engine.prefill(strange, [1])
    closed = one.new_context()
    closed.close()
    closed.close()
    for call in (
        lambda: one.generate([1], context=closed),
        closed.fork,
        lambda: closed.truncate(0),
    ):
        with pytest.raises(UserError, match="this context was closed: make another one"):
            call()
    with pytest.raises(UserError, match="context must be a Context from new_context"):
        one.generate([1], context=7)  # type: ignore[arg-type]
    assert "closed" in repr(closed)


def test_a_full_context_says_what_it_holds(one: LLM) -> None:
    with one.new_context() as context:
        one.generate(ids(1, 100), context=context, max_tokens=10)
        with pytest.raises(
            ContextFullError,
            match=r"a prompt of 10 tokens after the 110 .* truncate\(\) the context",
        ):
            one.generate(ids(2, 10), context=context)
        assert len(context) == 110
        result = one.generate(ids(2, 8), context=context, max_tokens=50)
        assert (result.finish_reason, len(context)) == ("context", 120)


@pytest.mark.parametrize("tokens", [-1, 4])
def test_a_cut_that_is_no_cut_is_refused(one: LLM, tokens: int) -> None:
    with one.new_context() as context:
        one.engine.prefill(context, [1, 2, 3])
        with pytest.raises(UserError, match="give a number from 0 to 3"):
            context.truncate(tokens)


def test_an_impossible_prompt_leaves_the_context_as_it_was(one: LLM) -> None:
    one.generate([1, 2, 3], max_tokens=2)
    before = one.context.tokens
    for prompt in ([], [VOCABULARY], ids(1, 120)):
        with pytest.raises(UserError):
            one.generate(prompt)
        assert one.context.tokens == before


def test_a_model_that_is_closed_ends_its_streams(folder: Path) -> None:
    llm = open_llm(folder, "npu")
    streams = [llm.stream([1, 2], context=llm.new_context(), max_tokens=9) for _ in range(2)]
    streams.append(llm.stream([1, 2], max_tokens=9))
    for stream in streams[1:]:
        next(stream)
    llm.close()
    for stream in streams:
        with pytest.raises(DeviceLostError, match="the model was closed"):
            next(stream)
    with pytest.raises(DeviceLostError, match="the model was closed"):
        llm.new_context()


def test_a_context_that_is_closed_ends_its_stream(one: LLM) -> None:
    context = one.new_context()
    stream = one.stream([1, 2], context=context, max_tokens=9)
    next(stream)
    context.close()
    with pytest.raises(UserError, match="this context was closed"):
        next(stream)


# --- statistics -------------------------------------------------------------------------------


def test_statistics_are_those_of_one_answer(llm: LLM) -> None:
    """Interleaved answers count what they count alone."""

    def operations(result: GenerationResult) -> dict[str, int]:
        found = result.stats.placement
        return {kind: share.ops for kind, share in found.items() if not isinstance(share, str)}

    prompts = [ids(1, 20), ids(2, 9)]
    wanted = [
        llm.generate(prompt, context=llm.new_context(), max_tokens=count)
        for prompt, count in zip(prompts, (8, 3), strict=True)
    ]
    streams = [
        llm.stream(prompt, context=llm.new_context(), max_tokens=count)
        for prompt, count in zip(prompts, (8, 3), strict=True)
    ]
    while not all(stream.finished for stream in streams):
        for stream in streams:
            if not stream.finished:
                stream.step()
    for stream, result in zip(streams, wanted, strict=True):
        found = stream.result()
        counts, expected = operations(found), operations(result)
        assert set(counts) == set(expected)
        for kind, count in counts.items():  # each may have a gate or a flag with it, or not
            assert expected[kind] / 2 <= count <= 2 * expected[kind]
        assert found.stats.completion_tokens == result.stats.completion_tokens
        assert found.stats.ttft_s > 0
        assert found.stats.decode_tokens_per_s > 0


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
def test_several_answers_read_their_prompt_once(one: LLM, own: bool) -> None:
    """What was computed: the prompt once, and for each answer all tokens but the last."""
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.3, "logit_bias": {2: -1e3}}
    prompt = ids(1, 30)
    wanted = [numbers(one.generate(prompt, seed=7 + i, logprobs=0, **options)) for i in range(4)]
    context = one.new_context() if own else None
    computed = [0]
    attempt = one.engine.runner.run

    def counted(context: Context, phase: Any, tokens: Any, *others: Any) -> Any:
        computed[0] += len(tokens)
        return attempt(context, phase, tokens, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.engine.runner, "run", counted)
        (answers,) = one.generate_many([prompt], n=4, seed=7, context=context, **options)
    assert sorted(map(numbers, answers)) == sorted(wanted)
    assert computed[0] == 30 + sum(len(answer.tokens) - 1 for answer in answers)
    assert sorted(a.stats.reused_tokens for a in answers) == [0, 30, 30, 30]
    if context is not None:
        assert context.tokens == (), "it stays as it was"
    gc.collect()
    assert len(one.engine.contexts.open_contexts()) == 1 + own


def test_several_answers_echo_one_prompt(one: LLM) -> None:
    (answers,) = one.generate_many(
        [ids(1, 9)], n=2, seed=1, temperature=1.0, echo=True, max_tokens=2
    )
    for answer in answers:
        assert [x.token for x in answer.prompt_logprobs] == ids(1, 9)[1:]
        assert answer.text.startswith(one.model.tokenizer.decode(ids(1, 9)))


# --- on disk ----------------------------------------------------------------------------------


def test_a_saved_context_goes_on_with_the_same_bits(llm: LLM, tmp_path: Path) -> None:
    context = llm.new_context()
    llm.generate(ids(1, 23), context=context, max_tokens=5)
    context.save(tmp_path / "c", messages=[{"role": "user", "content": "hi"}])
    again = llm.load_context(tmp_path / "c")
    assert (again.tokens, again.cached) == (context.tokens, context.cached)
    found = [
        numbers(llm.generate([7, 8], context=x, logprobs=2, max_tokens=6)) for x in (context, again)
    ]
    assert found[0] == found[1]
    assert llm.context.load(tmp_path / "c") == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("way", ["gpu", "tensor level", "tensor level, rest on the npu"])
def test_any_plan_takes_a_saved_context(one: LLM, folder: Path, tmp_path: Path, way: str) -> None:
    with one.new_context() as context:
        one.generate(ids(1, 23), context=context, max_tokens=5)
        context.save(tmp_path / "c")
        wanted = one.generate([7, 8], context=context, max_tokens=6).tokens
    with open_llm(folder, way) as other, other.load_context(tmp_path / "c") as context:
        assert other.generate([7, 8], context=context, max_tokens=6).tokens == wanted


def test_a_file_of_the_version_before_is_read(one: LLM, folder: Path, tmp_path: Path) -> None:
    """It names a plan, and all of its tokens are cached."""
    path = tmp_path / "c"
    with one.new_context() as context:
        one.engine.prefill(context, ids(1, 23))
        context.save(path)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        about = header["__metadata__"]
        del about["numerics"]
        about |= {"schema_version": "1", "plan": "another"}
        text = json.dumps(header).encode().ljust(length)
        path.write_bytes(data[:8] + text + data[8 + length :])
        old = one.load_context(path)
        found = [one.engine.decode(x, 5).copy() for x in (old, context)]
    assert np.array_equal(*found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": "4"}, "was written by another version of hetero"),
        ({"model": "other"}, "belongs to another model"),
        ({"weights": "w4a16"}, "was saved with --weights w4a16"),
        ({"numerics": "int8"}, "holds keys and values as int8"),
    ],
)
def test_a_file_of_something_else_says_of_what(
    one: LLM, tmp_path: Path, change: dict[str, str], sentence: str
) -> None:
    path = tmp_path / "c"
    with one.new_context() as context:
        one.engine.prefill(context, ids(1, 5))
        context.save(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    before = len(one.engine.contexts.open_contexts())
    with pytest.raises(ModelError, match=sentence):
        one.load_context(path)
    gc.collect()
    assert len(one.engine.contexts.open_contexts()) == before


@pytest.mark.full
def test_a_model_of_other_shapes_refuses_a_context(one: LLM, tmp_path: Path) -> None:
    with one.new_context() as context:
        one.engine.prefill(context, ids(1, 5))
        context.save(tmp_path / "c")
    with LLM("demo", device="npu") as other, pytest.raises(ModelError, match="another model"):
        other.load_context(tmp_path / "c")


def test_generations_can_be_driven_from_outside(one: LLM) -> None:
    """As a server does: one iteration of the loop for each call."""
    context = one.new_context()
    generation: Generation = one.stream(ids(1, 8), context=context, max_tokens=3)
    seen = []
    while not generation.finished:
        piece = generation.step()
        seen += [piece] if piece is not None else []
    assert [piece.token for piece in seen] == list(generation.result().tokens)
    with pytest.raises(ValueError, match="this answer is finished"):
        generation.step()
    assert list(generation) == []


def test_layer_level_too(folder: Path) -> None:
    plan = layer_level(open_model(str(folder), weights="f32").spec())
    with LLM(str(folder), plan=plan, weights="f32", max_seq_len=120, kv="f32") as llm:
        wanted = [llm.generate(p, max_tokens=5).tokens for p in PROMPTS[:2]]
        streams = [llm.stream(p, max_tokens=5, context=llm.new_context()) for p in PROMPTS[:2]]
        pairs = list(zip(*streams, strict=True))
    assert [tuple(piece.token for piece in pieces) for pieces in zip(*pairs, strict=True)] == wanted

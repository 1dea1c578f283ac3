"""The engine: contexts, pieces, errors, fallbacks, reopening."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero import LLM, UserError
from hetero.backends.errors import DeviceLostError, DeviceUnavailableError, WaitTimeoutError
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.runtime import executor
from hetero.runtime.engine import ContextFullError, Engine
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from tests.runtime.models import context_of, tiny_model
from tests.support.checkpoints import relative_error
from tests.support.selection import examples

VOCABULARY = 263


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder: str) -> Any:
    with LLM(folder, device="hetero", weights="f32", max_seq_len=200, kv="f32") as opened:
        yield opened


@pytest.mark.full
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_any_way_of_feeding_a_prompt_gives_the_same_logits(
    llm: LLM, cuts: list[int], seed: int
) -> None:
    """Chunks over a filled cache, padded graphs and decode agree with one prefill."""
    cuts = cuts if sum(cuts) <= 199 else [sum(cuts) % 199 + 1]
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, sum(cuts)).tolist()
    engine, context = llm.engine, llm.context
    context.truncate(0)
    whole = engine.prefill(context, tokens).copy()
    context.truncate(0)
    start = 0
    for cut in cuts:
        part = engine.prefill(context, tokens[start : start + cut]).copy()
        start += cut
    assert relative_error(part, whole) < 2e-5


def test_cutting_the_context_back_forgets(llm: LLM) -> None:
    engine, context = llm.engine, llm.context
    context.truncate(0)
    expected = engine.prefill(context, [1, 2, 3]).copy()
    engine.prefill(context, list(range(50)))
    context.truncate(2)
    assert relative_error(engine.decode(context, 3), expected) < 2e-5


def test_the_context_ends_an_answer_and_refuses_a_prompt(llm: LLM) -> None:
    result = llm.generate([5] * 195, max_tokens=50)
    assert (result.finish_reason, len(result.tokens)) == ("context", 5)
    with pytest.raises(
        ContextFullError, match="201 tokens and its answer do not fit the context of 200"
    ):
        llm.generate([5] * 201)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "the prompt is empty"), ([5, 263], "token id 263 is outside"), ([-1], "token id -1")],
)
def test_impossible_prompts_are_named(llm: LLM, tokens: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(tokens)


def test_streamed_pieces_are_the_text(llm: LLM) -> None:
    options: Any = {"max_tokens": 30, "temperature": 1.5, "seed": 3}
    stream = llm.stream([7, 8, 9], **options)
    pieces = list(stream)
    ended = stream.result()
    assert "".join(piece.text for piece in pieces) == ended.text
    assert ended.text == llm.generate([7, 8, 9], **options).text
    assert pieces[-1].finish_reason == ended.finish_reason


@pytest.mark.full
def test_closed_models_say_so_and_open_again(folder: str) -> None:
    first = LLM(folder)
    text = first.generate([1, 2], max_tokens=4).tokens
    first.close()
    first.close()
    with pytest.raises(DeviceLostError, match="the model was closed"):
        first.generate([1, 2])
    with LLM(folder) as second:
        assert second.generate([1, 2], max_tokens=4).tokens == text


def test_calls_from_several_threads_are_served_in_turn(llm: LLM) -> None:
    expected = [llm.generate([seed], max_tokens=8).tokens for seed in range(4)]
    found: list[Any] = [None] * 4

    def work(seed: int) -> None:
        found[seed] = llm.generate([seed], max_tokens=8).tokens

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected


def test_two_models_side_by_side_do_not_disturb_each_other(folder: str, llm: LLM) -> None:
    with LLM(folder, device="hetero", weights="f32", max_seq_len=200, kv="f32") as other:
        tokens = [3, 1, 4, 1, 5]
        expected = llm.logits(tokens)
        other.logits([9, 9, 9])
        assert np.array_equal(llm.logits(tokens), expected)
        assert relative_error(other.logits(tokens), expected) < 2e-5


@pytest.mark.parametrize(("missing", "left"), [("gpu", "npu"), ("npu", "gpu")])
def test_a_missing_device_is_named_once_and_its_work_done(
    folder: str, monkeypatch: pytest.MonkeyPatch, missing: str, left: str
) -> None:
    from hetero.placement import device_set

    real = device_set.open_device
    gone = {"gpu": "opencl", "npu": "ort-cpu"}[missing]

    def open_or_fail(name: str, **options: Any) -> Any:
        if name == gone:
            raise DeviceUnavailableError(name, "opening", "NO_DRIVER", "install one")
        return real(name, **options)

    monkeypatch.setattr(device_set, "open_device", open_or_fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(folder, device="hetero") as llm:
            result = llm.generate([1, 2, 3], max_tokens=3)
    assert [w.category for w in caught] == [FallbackWarning]
    assert set(result.stats.placement) == {left, "fallback"}
    assert "NO_DRIVER" in str(result.stats.placement["fallback"])
    assert llm.devices.mode == left


@pytest.mark.full
@pytest.mark.parametrize("as_path", [str, Path])
def test_a_plan_file_decides_the_placement(folder: str, tmp_path: Path, as_path: Any) -> None:
    with LLM(folder) as llm:
        spec = llm.model.spec()
    plan = layer_level(spec, prefill="gpu", decode="npu", non_matmul="npu")
    plan.save(tmp_path / "plan.json")
    with LLM(folder, plan=as_path(tmp_path / "plan.json")) as llm:
        assert isinstance(llm.plan, ExecutionPlan)
        assert llm.plan.plan_id == plan.plan_id
        kinds = {launch.kind for launch in llm.engine.steps.step(llm.context, "decode", 1).launches}
    assert kinds == {"npu"}


def open_reference(folder: str, **options: Any) -> Engine:
    from hetero.models import open_model

    loaded = open_model(folder)
    device = open_device("reference", kind="gpu", asynchronous=True, **options)
    return Engine(
        loaded.weights, single_device(loaded.spec(), "gpu"), {"gpu": device}, max_seq_len=64
    )


def test_a_wait_past_its_deadline_names_the_kernel(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DRAIN_DEADLINE_S", 0.2)  # nothing comes any more
    with open_reference(folder, delay_s=float("inf")) as engine:
        engine.deployment.synchroniser.deadline_s = 0.05
        with pytest.raises(WaitTimeoutError, match=r"w4a16\).*\(gpu: reference open\)"):
            engine.prefill(context_of(engine), [1, 2, 3])


def test_delays_change_no_token(folder: str) -> None:
    with open_reference(folder) as fast, open_reference(folder, delay_s=0.001) as slow:
        for engine in (fast, slow):
            engine.prefill(context_of(engine), [1, 2, 3])
        assert np.array_equal(*(e.decode(context_of(e), 4) for e in (fast, slow)))


def test_calls_inside_an_unfinished_stream_have_a_context_of_their_own(llm: LLM) -> None:
    expected = llm.generate([1, 2, 3], max_tokens=8).tokens
    other, logits = llm.generate([1], max_tokens=4).tokens, llm.logits([1])
    stream = llm.stream([1, 2, 3], max_tokens=8)
    assert next(stream).token == expected[0]
    assert llm.generate([1], max_tokens=4).tokens == other
    assert np.array_equal(llm.logits([1]), logits)
    assert [piece.token for piece in llm.stream([1], max_tokens=4)] == list(other)
    assert [piece.token for piece in stream] == list(expected[1:])
    abandoned = llm.stream([1, 2, 3], max_tokens=8)
    next(abandoned)
    abandoned.close()
    assert llm.generate([1, 2, 3], max_tokens=8).tokens == expected


def test_another_thread_answers_beside_a_stream(llm: LLM) -> None:
    expected = llm.generate([4, 5], max_tokens=6).tokens
    stream = llm.stream([1, 2, 3], max_tokens=8)
    next(stream)
    found: list[tuple[int, ...]] = []
    other = threading.Thread(
        target=lambda: found.append(llm.generate([4, 5], max_tokens=6).tokens), daemon=True
    )
    other.start()
    other.join(60)
    assert found == [expected]
    assert len(list(stream)) == 7


def test_a_plan_for_another_model_is_refused(folder: str, llm: LLM) -> None:
    other = layer_level(llm.model.spec().model_copy(update={"name": "elsewhere"}))
    wide = [op.model_copy(update={"k": 2 * op.k}) for op in other.ops]
    with pytest.raises(PlanError, match="the plan is for elsewhere, whose qkv is 128×128"):
        LLM(folder, plan=other.model_copy(update={"ops": tuple(wide)}))

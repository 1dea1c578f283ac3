"""Calls without a context: each has one of its own while it runs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero import LLM, UserError
from tests.contexts.models import open_llm
from tests.contexts.test_contexts import ids, numbers, run_in_threads
from tests.support.selection import examples

PROMPTS = [ids(1, 40), ids(2, 3), ids(3, 23)]
OPTIONS: dict[str, Any] = {"max_tokens": 7, "logprobs": 1, "temperature": 1.1}


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Any]:
    return [numbers(llm.generate(x, seed=i, **OPTIONS)) for i, x in enumerate(PROMPTS)]


def open_count(llm: LLM) -> int:
    return len(llm.engine.contexts.open_contexts())


@settings(
    max_examples=examples(6, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.integers(0, 2), max_size=30))
def test_streams_read_in_any_order_are_those_alone(
    llm: LLM, alone: list[Any], order: list[int]
) -> None:
    streams = [llm.stream(x, seed=i, **OPTIONS) for i, x in enumerate(PROMPTS)]
    for index in order:
        next(streams[index], None)
    for stream in reversed(streams):
        list(stream)
    assert [numbers(stream.result()) for stream in streams] == alone
    assert open_count(llm) == 1


def test_threads_have_a_context_each(llm: LLM, alone: list[Any]) -> None:
    def work(index: int) -> None:
        for _ in range(3):
            got = llm.generate(PROMPTS[index], seed=index, **OPTIONS)
            assert numbers(got) == alone[index]

    run_in_threads(work, len(PROMPTS))
    assert open_count(llm) == 1


@pytest.mark.full
def test_a_stream_that_is_dropped_gives_its_context_back(one: LLM) -> None:
    for _ in range(3):
        streams = [one.stream(x, max_tokens=9) for x in PROMPTS]
        for stream in streams:
            next(stream)
        assert open_count(one) == 3
        del stream, streams
        gc.collect()
        assert open_count(one) == 1


def test_one_call_after_another_goes_on_with_what_it_shares(one: LLM) -> None:
    text = ids(4, 30)
    one.generate(text, max_tokens=2)
    assert one.generate([*text, 5], max_tokens=2, reuse=True).stats.reused_tokens == 30
    first = one.stream(text, max_tokens=9)
    next(first)
    second = one.stream([*text[:20], 1], max_tokens=9, reuse=True)
    assert list(second)[-1].finish_reason
    assert second.result().stats.reused_tokens == 0, "the context that shares it is in use"
    first.close()
    assert one.generate([*text, 5], max_tokens=2, reuse=True).stats.reused_tokens == 30


def test_logits_are_computed_beside_a_stream(one: LLM) -> None:
    wanted = one.logits(PROMPTS[0])
    stream = one.stream(PROMPTS[1], max_tokens=5)
    next(stream)
    assert np.array_equal(one.logits(PROMPTS[0]), wanted)
    assert len(list(stream)) == 4


def test_without_room_for_another_context_threads_take_turns(folder: Path) -> None:
    with open_llm(folder, "npu") as free:
        needs, wanted = free.engine.memory, free.generate(PROMPTS[0], max_tokens=4).tokens
    with open_llm(folder, "npu", memory_budget=needs.total_bytes + 5000) as llm:
        stream = llm.stream(PROMPTS[1], max_tokens=5)
        next(stream)
        with pytest.raises(UserError, match=r"1 streams? of this model .* unfinished.*close\(\)"):
            llm.stream(PROMPTS[0])

        def ask(_: int) -> None:
            assert llm.generate(PROMPTS[0], max_tokens=4).tokens == wanted

        llm.context.wait_s = 0.05
        with pytest.raises(AssertionError, match=r"has not ended within 0\.05 s"):
            run_in_threads(ask, 1)
        llm.context.wait_s = 60
        stream.close()
        run_in_threads(ask, 3)

"""Contexts of models with states: texts that go on, go back, fork and are saved say the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, ModelError, UserError
from hetero.backends.memory import HostBuffer
from hetero.errors import FallbackWarning
from hetero.runtime.engine import Engine
from hetero.runtime.kv.layer_states import States, copies_of
from tests.contexts.models import WAYS, open_llm
from tests.runtime.test_faults import make_engine
from tests.runtime.test_rows import engine_of, joins_and_leaves
from tests.support.checkpoints import CASES, make_checkpoint, relative_error

CASE_OF = {case.name: case for case in CASES}
PROMPT = [9, 8, 7, 6] * 8


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(CASE_OF[request.param], path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, "tensor level", max_seq_len=200) as opened:
        yield opened


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 263) for _ in range(count)]


def test_the_last_copy_before_a_position_is_restored() -> None:
    states = States([("conv_state.1", (2, 3))], HostBuffer, 8)
    (tensor,) = states.tensors.values()
    for at in (5, 9, 12):
        tensor.array[:], states.at = at, at
        states.keep()
    assert states.restore(11) == 9
    assert (tensor.array == 9).all()
    assert states.kept == (5, 9)
    assert states.restore(4) == 0
    assert states.kept == ()


def test_copies_are_as_many_as_a_budget_holds() -> None:
    assert [copies_of(x) for x in (0, 4096, 16 << 20, 50 << 20, 1 << 30)] == [0, 8, 4, 2, 2]


def test_copies_are_few_and_spread() -> None:
    states = States([("conv_state.1", (2, 3))], HostBuffer, 8)
    for at in range(1, 101):
        states.at = at
        states.keep()
    assert len(states.kept) == 8
    assert states.kept[-1] == 100
    assert max(b - a for a, b in zip((0, *states.kept), states.kept, strict=False)) < 50


REPEATS = pytest.mark.parametrize("folder", ["lfm2"], indirect=True)  # its text, so some are right


@pytest.mark.full
@REPEATS
def test_guesses_change_no_token(llm: LLM) -> None:
    plain = llm.generate(PROMPT, max_tokens=80, logprobs=0)
    guessed = llm.generate(PROMPT, max_tokens=80, speculative=7, logprobs=0)
    assert guessed.tokens == plain.tokens
    wanted = [x.logprob for x in plain.logprobs]
    assert np.allclose([x.logprob for x in guessed.logprobs], wanted, rtol=1e-3, atol=1e-4)
    speculation = guessed.stats.speculation
    assert speculation is not None
    assert speculation.accepted > 0


@REPEATS
def test_wrong_guesses_leave_the_state_of_the_text(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.5, "seed": 3}
    plain = llm.generate(PROMPT, **options)
    guessed = llm.generate(PROMPT, speculative=5, **options)
    assert guessed.tokens == plain.tokens
    speculation = guessed.stats.speculation
    assert speculation is not None
    assert speculation.drafted > speculation.accepted


def test_a_text_goes_on_and_back(llm: LLM) -> None:
    """A conversation, an answer made again, and another question, each as from an empty context."""
    with llm.new_context() as context:
        text = ids(1, 40)
        for change in ("on", "again", "back", "on"):
            if change == "back":
                text = text[:25] + ids(2, 9)
            found = llm.generate(text, context=context, reuse=True, max_tokens=6, logprobs=0)
            wanted = llm.generate(text, max_tokens=6, logprobs=0, context=llm.new_context())
            assert found.tokens == wanted.tokens
            if change == "on":
                text = [*text, *found.tokens, *ids(4, 5)]


@pytest.mark.full
def test_several_answers_to_one_prompt(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.3}
    wanted = [llm.generate(ids(1, 30), seed=7 + i, **options).tokens for i in range(3)]
    (answers,) = llm.generate_many([ids(1, 30)], n=3, seed=7, **options)
    assert sorted(x.tokens for x in answers) == sorted(wanted)


def test_a_shift_is_refused(llm: LLM) -> None:
    context = llm.new_context()
    llm.generate(PROMPT, max_tokens=2, context=context)
    with pytest.raises(UserError, match="layers have states: leave out context_shift"):
        context.shift(2, 4)


def test_a_file_without_states_is_refused(llm: LLM, tmp_path: Path) -> None:
    context = llm.new_context()
    llm.generate(PROMPT, max_tokens=2, context=context)
    context.save(tmp_path / "whole")
    raw = (tmp_path / "whole").read_bytes()
    (tmp_path / "broken").write_bytes(raw.replace(b'"s.0"', b'"s.7"'))
    with pytest.raises(ModelError, match="does not hold this model's cache"):
        llm.new_context().load(tmp_path / "broken")
    other = llm.new_context()
    other.load(tmp_path / "whole")
    wanted = llm.generate([5, 6], context=context, max_tokens=8).tokens
    assert llm.generate([5, 6], context=other, max_tokens=8).tokens == wanted


@pytest.mark.parametrize("failed", ["gpu", "npu"])
@pytest.mark.parametrize("launch", [3, 21, 40])
def test_a_device_that_fails_in_the_middle_leaves_a_text_that_goes_on(
    folder: Path, failed: str, launch: int
) -> None:
    """The other device computes again what the states went on without."""

    def numbers(engine: Engine) -> list[Any]:
        context = engine.new_context()
        found = [engine.prefill(context, PROMPT).copy()]
        return found + [engine.decode(context, token).copy() for token in range(5, 12)]

    with make_engine(folder) as twin:
        wanted = numbers(twin)
    faults: dict[str, Any] = {failed: {"fail_launch": launch}}
    with make_engine(folder, **faults) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = numbers(engine)
        assert engine.deployment.fallback
    assert relative_error(np.stack(found), np.stack(wanted)) < 2e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [39, 41, 107, 179])
def test_long_prompts_in_several_calls(folder: Path, way: str, tokens: int) -> None:
    """Also in chunks that are in flight together, on devices with graphs of other lengths."""
    text = ids(tokens, tokens + 3)
    with make_engine(folder) as twin:
        context = twin.new_context()
        wanted = [twin.score(context, text[:60])[-1]] if tokens < 60 else []
    with open_llm(folder, way, max_seq_len=200) as llm:
        engine, context = llm.engine, llm.engine.new_context()
        found = [engine.prefill(context, text[:tokens]).copy()]
        found += [engine.decode(context, token).copy() for token in text[tokens:]]
        scored = engine.score(engine.new_context(), text)
        assert relative_error(np.stack(found), scored[tokens - 1 :]) < 2e-5
        if wanted:
            assert relative_error(found[-1], wanted[0]) < 2e-5


@pytest.mark.parametrize("non_matmul", ["gpu", "npu"])
def test_rows_of_several_contexts(folder: Path, non_matmul: str) -> None:
    with engine_of(folder, (1, 2, 4, 8, 32, 64), non_matmul) as engine:
        joins_and_leaves(engine, random.Random(5))

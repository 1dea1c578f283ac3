"""A first text on the NPU alone, and the move to the plan's devices between two steps."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.backends.errors import DeviceUnavailableError, KernelBuildError
from hetero.backends.protocol import Device
from hetero.cli import options
from hetero.contexts.service import Service
from hetero.errors import FallbackWarning
from hetero.generation import early_loading, late_plan
from hetero.generation.loop import Generation
from hetero.placement import decisions, timing_lock
from hetero.runtime import deployment
from tests.support.helpers import Command

pytest.importorskip("pyopencl")
PROMPT = "Once upon a time"
EXACT: dict[str, Any] = {"device": "hetero", "weights": "f32", "kv": "f32", "max_seq_len": 128}
Ends = Callable[[], None]
Result = subprocess.CompletedProcess[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of decisions and locks."""
    monkeypatch.setattr(decisions, "folder", lambda: tmp_path / "decisions")
    monkeypatch.setattr(timing_lock, "lock_path", lambda: tmp_path / "timing.lock")
    return tmp_path


@pytest.fixture
def child_ends(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """A child that prepares nothing and ends when this is called."""
    gate = cache / "gate"
    code = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    monkeypatch.setattr(late_plan, "child_command", lambda *_: [sys.executable, "-c", code])
    return gate.touch


@pytest.fixture(scope="module")
def expected() -> Iterator[list[int]]:
    """The tokens of a model that waits for its plan."""
    with LLM("demo", **EXACT) as llm:
        yield list(llm.generate(PROMPT, max_tokens=24).tokens)


def fail_on_gpus(monkeypatch: pytest.MonkeyPatch, errors: Iterator[BaseException]) -> None:
    """Preparing kernels where a GPU is open raises these, one a time, and then works."""
    prepare = deployment.prepare_kernels

    def failing(weights: Any, placement: Any, devices: Any, *more: Any, **options: Any) -> Any:
        error = next(errors, None) if "gpu" in devices else None
        if error is not None:
            raise error
        return prepare(weights, placement, devices, *more, **options)

    monkeypatch.setattr(deployment, "prepare_kernels", failing)


def read(answer: Generation, count: int) -> None:
    for _ in range(count):
        next(answer)


def test_an_answer_moves_between_two_steps_and_its_tokens_are_the_same(
    child_ends: Ends, expected: list[int]
) -> None:
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        assert (llm.devices.mode, llm.finish_preparing(0)) == ("npu", False)
        answer = llm.stream(PROMPT, max_tokens=24)
        read(answer, 8)
        assert set(llm.engine.devices) == {"npu"}
        child_ends()
        assert llm.finish_preparing(60)
        read(answer, 1)
        assert set(llm.engine.devices) == {"gpu", "npu"}
        assert llm.devices.mode == "hetero"
        assert "npu alone" not in llm.choice.reason
        list(answer)
        result = answer.result()
        again = llm.generate(PROMPT, max_tokens=24)
    assert [*result.tokens] == [*again.tokens] == expected
    first, second = result.stats.parts
    assert first.devices == {"npu": "ort-cpu"}
    assert [*second.devices] == ["gpu", "npu"]
    assert (first.answer_tokens, second.prompt_tokens) == (7, 0)
    assert first.answer_tokens + second.answer_tokens == 23
    assert [x.devices for x in again.stats.parts] == [second.devices]


@pytest.mark.full
def test_several_contexts_move_together(child_ends: Ends, expected: list[int]) -> None:
    prompts = [PROMPT, "One day", "The little dog"]
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        answers = [llm.stream(x, max_tokens=16) for x in prompts]
        read(answers[0], 1)
        read(answers[1], 6)  # the third has not begun
        child_ends()
        assert llm.finish_preparing(60)
        threads = [threading.Thread(target=list, args=(x,)) for x in answers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        results = [x.result() for x in answers]
        wanted = [llm.generate(x, max_tokens=16).tokens for x in prompts]
        assert not llm.engine.deployment.fallback
    assert [x.tokens for x in results] == wanted
    assert list(results[0].tokens) == expected[:16]
    assert [len(x.stats.parts) for x in results] == [2, 2, 1]


@pytest.mark.full
def test_the_second_start_waits_for_nothing(child_ends: Ends) -> None:
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        child_ends()
        assert llm.finish_preparing(60)
        llm.generate(PROMPT, max_tokens=2)
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        assert (llm.devices.mode, llm.finish_preparing(0)) == ("hetero", True)


@pytest.mark.parametrize("message", ["the disk is full", ""])
def test_a_child_that_fails_leaves_the_model_on_the_npu(
    cache: Path, monkeypatch: pytest.MonkeyPatch, expected: list[int], message: str
) -> None:
    assert cache
    code = f"import sys; print({message!r}, file=sys.stderr) if {message!r} else 0; sys.exit(3)"
    monkeypatch.setattr(late_plan, "child_command", lambda *_: [sys.executable, "-c", code])
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        late = llm._opened.late
        assert late is not None
        assert late._job.wait(60)
        with pytest.warns(FallbackWarning, match=message or "it ended with 3"):
            result = llm.generate(PROMPT, max_tokens=24)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            llm.generate(PROMPT, max_tokens=2)
            assert llm.finish_preparing(0)
    assert [*result.tokens] == expected
    assert (message or "ended with 3") in str(result.stats.placement["fallback"])


def test_kernels_that_cannot_be_compiled_leave_the_model_on_the_npu(
    child_ends: Ends, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    fail_on_gpus(monkeypatch, repeat(KernelBuildError("opencl", "building", "injected", "none")))
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        answer = llm.stream(PROMPT, max_tokens=24)
        read(answer, 4)
        child_ends()
        assert llm.finish_preparing(60)
        with pytest.warns(FallbackWarning, match="injected"):
            read(answer, 1)
        list(answer)
        assert set(llm.engine.devices) == {"npu"}
        assert llm.devices.mode == "npu"
    assert [*answer.result().tokens] == expected


@pytest.mark.full
def test_an_interrupted_move_is_made_again(
    child_ends: Ends, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    fail_on_gpus(monkeypatch, iter([KeyboardInterrupt()]))
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        answer = llm.stream(PROMPT, max_tokens=24)
        read(answer, 4)
        child_ends()
        assert llm.finish_preparing(60)
        with pytest.raises(KeyboardInterrupt):
            read(answer, 1)
        assert set(llm.engine.devices) == {"npu"}
        assert [*llm.generate(PROMPT, max_tokens=24).tokens] == expected
        assert set(llm.engine.devices) == {"gpu", "npu"}


def test_closing_ends_the_child(child_ends: Ends) -> None:
    assert child_ends
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        late = llm._opened.late
        assert late is not None
        for _ in range(500):
            if late._process is not None:
                break
            time.sleep(0.01)
        process = late._process
        assert process is not None
        assert process.poll() is None
    assert process.wait(10) != 0
    assert llm.finish_preparing(0)


@pytest.mark.parametrize(
    "named",
    [
        {"device": "gpu"},
        {"max_gpu_share": 0.5, "weights": "w4a16"},
        {"strategy": "layer"},
        {"gpu": "null"},
    ],
)
def test_what_was_asked_for_by_name_computes_from_the_first_token_on(
    cache: Path, named: dict[str, Any]
) -> None:
    assert cache
    with LLM("demo", **(EXACT | named), wait_for_plan=False) as llm:
        assert llm.finish_preparing(0)
        assert "gpu" in llm.engine.devices


def test_a_step_waits_while_the_machine_is_timed(cache: Path) -> None:
    assert cache
    begun, waited = threading.Event(), list[float]()

    def timed() -> None:
        with timing_lock.timing():
            begun.set()
            time.sleep(0.3)

    thread = threading.Thread(target=timed)
    thread.start()
    assert begun.wait(5)
    assert not timing_lock.wait_while_timed(0.05)
    start_s = time.monotonic()
    assert timing_lock.wait_while_timed(5.0)
    waited.append(time.monotonic() - start_s)
    thread.join()
    assert 0.05 < waited[0] < 3
    assert timing_lock.wait_while_timed(0.0)


@pytest.mark.full
@pytest.mark.usefixtures("cache")
def test_a_real_child_prepares_the_plan(expected: list[int]) -> None:
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        assert set(llm.engine.devices) == {"npu"}
        assert llm.finish_preparing(200)
        assert [*llm.generate(PROMPT, max_tokens=24).tokens] == expected
        assert set(llm.engine.devices) == {"gpu", "npu"}


@pytest.mark.usefixtures("cache")
def test_a_child_that_fails_is_said_where_no_step_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('injected')"
    monkeypatch.setattr(late_plan, "child_command", lambda *_: [sys.executable, "-c", code])
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        with pytest.warns(FallbackWarning, match="npu alone because .* injected"):
            assert llm.finish_preparing(60)
        assert "injected" in llm.engine.deployment.fallback
        assert llm.finish_preparing(0)
        assert llm.generate(PROMPT, max_tokens=2).tokens


GENERATE = ("generate", "demo", PROMPT, "--device", "hetero", "--raw", "--max-tokens", "6")


def said(result: Result) -> list[str]:
    """The notices on standard error."""
    return [line for line in result.stderr.splitlines() if line.startswith("hetero: ")]


def test_generate_answers_before_its_plan_is_ready(
    command: Command, child_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is prepared, and waits for it no longer than it may."""
    assert child_ends
    monkeypatch.delenv("HETERO_WAIT_FOR_PLAN")
    monkeypatch.setattr(options, "PREPARING_S", 0.1)
    start_s = time.monotonic()
    result = command(*GENERATE, "--stats")
    assert time.monotonic() - start_s < 30
    assert (result.returncode, bool(result.stdout.strip())) == (0, True)
    first, last = said(result)
    assert "preparing OpenCL kernels in another process" in first
    assert "preparing OpenCL kernels for later starts" in last
    table = re.sub(r"\s+", " ", result.stderr)
    assert "npu alone" in table
    assert "gpu │" not in table


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [("--wait-for-plan",), ("--json",), ("--seed", "1"), ("--trace", "trace.json")],
    ids=lambda given: given[0],
)
def test_what_is_read_at_once_or_repeated_waits_for_the_plan(
    command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    monkeypatch.delenv("HETERO_WAIT_FOR_PLAN")
    monkeypatch.setattr(late_plan, "child_command", lambda *_: ["no-such-program"])
    monkeypatch.chdir(cache)
    result = command(*GENERATE, *given)
    assert result.returncode == 0
    assert not [line for line in said(result) if "another process" in line]
    assert len(list(decisions.folder().glob("prepared-*.json"))) == 1


def test_a_chat_answers_before_its_plan_is_ready(
    command: Command, child_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    child_ends()
    monkeypatch.delenv("HETERO_WAIT_FOR_PLAN")
    talk = ("chat", "demo", "--device", "hetero", "--max-tokens", "4", "--temperature", "0")
    result = command(*talk, stdin="Hello\nAnd then?\n")
    assert result.returncode == 0
    assert "preparing OpenCL kernels in another process" in said(result)[0]


@pytest.mark.full
def test_why_a_first_text_has_to_wait_is_in_the_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ONNX Runtime is missing: the plan's devices are then one too."""
    assert cache

    def missing(*_: Any) -> Device:
        raise DeviceUnavailableError("ort-cpu", "importing onnxruntime", "injected", "install it")

    monkeypatch.setattr(early_loading, "open_device", missing)
    with LLM("demo", **EXACT, wait_for_plan=False) as llm:
        assert "gpu" in llm.engine.devices
        assert "the first text waited for it because" in llm.choice.reason
        assert not [note for note in llm.choice.notes if "first text" in note]


@pytest.mark.full
def test_a_service_answers_before_its_plan_is_ready_and_after(
    child_ends: Ends, tmp_path: Path
) -> None:
    kept: dict[str, Any] = {"directory": tmp_path / "kept", "kv_bits": "raw"}
    with Service("demo", **kept, **EXACT, wait_for_plan=False) as service:
        app, llm = service.bind("app"), service.llm
        assert set(llm.engine.devices) == {"npu"}
        context = app.new_context()
        before = context.call(PROMPT, max_tokens=24)
        child_ends()
        assert llm.finish_preparing(60)
        after = app.new_context().call(PROMPT, max_tokens=24)
        assert set(llm.engine.devices) == {"gpu", "npu"}
        assert context.call(" and", max_tokens=4).tokens
    assert [*before.tokens] == [*after.tokens]

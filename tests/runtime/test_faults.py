"""Devices that are slow, fail, hang or are interrupted: the right text, or one clear sentence."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.backends.protocol import BoundCall, Completion, Device, DeviceKind
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.runtime import executor
from hetero.runtime.engine import Engine
from hetero.runtime.program import SIGNAL, SUBMIT
from hetero.runtime.step import Step
from hetero.runtime.waits import WaitPolicy
from hetero.runtime.waits.trials import Trials
from hetero.solver.handmade import single_device
from tests.runtime.models import context_of, greedy_tokens, tiny_model
from tests.runtime.plans import random_plan
from tests.support.checkpoints import relative_error

GRAPHS = (1, 2, 4, 8, 32, 64)
TOKENS = np.random.default_rng(6).integers(0, 263, 40).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def make_engine(
    folder: Path,
    gpu: Mapping[str, Any] | None = None,
    npu: Mapping[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """Reference devices with faults and a plan that cuts every matmul."""
    loaded = open_model(str(folder), weights="f32")
    plan = random_plan(loaded.spec(), 40, GRAPHS, random.Random(3), strategies=["hybrid-cut"])
    devices: dict[DeviceKind, Device] = {
        "gpu": open_device("reference", kind="gpu", asynchronous=True, **(gpu or {})),
        "npu": open_device("reference", kind="npu", graph_sizes=GRAPHS, **(npu or {})),
    }
    return Engine(loaded.weights, plan, devices, max_seq_len=80, **options)


def answer(engine: Engine, steps: int = 12) -> list[int]:
    return greedy_tokens(engine, TOKENS, steps)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[int]:
    loaded = open_model(str(folder), weights="f32")
    device = open_device("reference", kind="gpu", asynchronous=True)
    with Engine(
        loaded.weights, single_device(loaded.spec(), "gpu"), {"gpu": device}, max_seq_len=80
    ) as engine:
        return answer(engine)


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_no_token(folder: Path, wanted: list[int], seed: int) -> None:
    """Each launch late by its own random time; a stale read would show."""
    delays = random.Random(seed)
    with make_engine(folder, gpu={"delay_s": 1e-9}) as engine:
        slow_down(engine, lambda: delays.choice((0.0, 0.0, 2e-4, 1e-3)))
        assert answer(engine) == wanted


def slow_down(engine: Engine, delay_s: Callable[[], float], kind: DeviceKind = "gpu") -> None:
    """Give every launch of a reference device a delay of its own."""
    device = engine.devices[kind]
    enqueue = device.enqueue  # type: ignore[attr-defined]

    def late(call: BoundCall) -> Completion:
        launch = enqueue(call)
        launch.ready_s += delay_s()
        return launch  # type: ignore[no-any-return]

    device.enqueue = late  # type: ignore[attr-defined]


@pytest.mark.parametrize("failed", ["gpu", "npu"])
@pytest.mark.parametrize("launch", [0, 7, 60, 150])
def test_a_device_that_fails_is_dropped_with_one_warning(
    folder: Path, wanted: list[int], failed: str, launch: int
) -> None:
    faults = {failed: {"fail_launch": launch}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_engine(folder, **faults) as engine:
            assert answer(engine) == wanted
            left = "npu" if failed == "gpu" else "gpu"
            assert set(engine.devices) == {left}
    assert [w.category for w in caught] == [FallbackWarning]
    assert (
        f"going on with {left} (reference) alone because the {failed} failed"
        in engine.deployment.fallback
    )
    assert "INJECTED_FAILURE" in engine.deployment.fallback


def test_both_failing_is_an_error_and_the_next_model_works(folder: Path, wanted: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        with (
            make_engine(folder, gpu={"fail_launch": 3}, npu={"fail_launch": 100}) as engine,
            pytest.raises(DeviceError, match=r"INJECTED_FAILURE|lost"),
        ):
            answer(engine)
    with make_engine(folder) as engine:
        assert answer(engine) == wanted


def test_a_hang_is_dropped_like_a_failure(
    folder: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DRAIN_DEADLINE_S", 0.2)  # nothing comes any more
    with make_engine(folder, deadline_s=0.05) as engine:
        answer(engine, 2)
        slow_down(engine, lambda: float("inf"))
        with pytest.warns(FallbackWarning, match=r"not complete after 0\.05\d* s") as caught:
            assert answer(engine) == wanted
    assert len(caught) == 1


def test_a_hang_without_another_device_is_a_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DRAIN_DEADLINE_S", 0.2)
    loaded = open_model(str(folder), weights="f32")
    device = open_device("reference", kind="gpu", asynchronous=True, delay_s=float("inf"))
    plan = single_device(loaded.spec(), "gpu")
    with (
        Engine(loaded.weights, plan, {"gpu": device}, max_seq_len=80, deadline_s=0.05) as engine,
        pytest.raises(WaitTimeoutError, match=r"\(gpu: reference open\) failed"),
    ):
        engine.prefill(context_of(engine), TOKENS)


class Interrupt:
    """Raises `KeyboardInterrupt` at the n-th action of a step."""

    def __init__(self, step: Step, at: int) -> None:
        self.step, self.at = step, at

    def broken(self) -> Step:
        import dataclasses

        def stop(*_: Any) -> Any:
            raise KeyboardInterrupt

        program = list(self.step.program)
        program[self.at] = program[self.at]._replace(target=stop)
        return dataclasses.replace(self.step, program=tuple(program))


@pytest.mark.parametrize("backends", [("reference", "reference"), ("opencl", "ort-cpu")])
def test_ctrl_c_at_any_action_leaves_a_usable_model(
    folder: Path, wanted: list[int], backends: tuple[str, str]
) -> None:
    loaded = open_model(str(folder), weights="f32")
    plan = random_plan(loaded.spec(), 40, GRAPHS, random.Random(3), strategies=["row-cut"])
    extra: dict[str, Any] = {"kind": "gpu", "asynchronous": True}
    devices: dict[DeviceKind, Device] = {
        "gpu": open_device(backends[0], **(extra if backends[0] == "reference" else {})),
        "npu": open_device(
            backends[1],
            **({"kind": "npu"} if backends[1] == "reference" else {}),
            graph_sizes=GRAPHS,
        ),
    }
    with Engine(loaded.weights, plan, devices, max_seq_len=80) as engine:
        assert answer(engine) == wanted
        step = engine.steps.step(context_of(engine), "prefill", 40)
        for at in random.Random(1).sample(range(len(step.program)), 12):
            context_of(engine).truncate(0)
            with pytest.raises(KeyboardInterrupt):
                engine.runner.executor.run(Interrupt(step, at).broken())
            assert answer(engine, 4) == wanted[:4]


def test_interrupted_steps_are_drained(folder: Path) -> None:
    with make_engine(folder) as engine:
        answer(engine, 1)
        step = engine.steps.step(context_of(engine), "prefill", 40)
        at = next(i for i, a in enumerate(step.program) if a.code != SUBMIT and i > 20)
        with pytest.raises(KeyboardInterrupt):
            engine.runner.executor.run(Interrupt(step, at).broken())
        assert not engine.devices["gpu"]._queue  # type: ignore[attr-defined]


@pytest.mark.full
def test_two_models_in_two_threads(folder: Path) -> None:
    tokens: dict[str, Any] = {}

    def work(name: str, llm: LLM, seed: int) -> None:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, 263, int(n)).tolist() for n in rng.integers(1, 60, 8)]
        tokens[name] = [llm.generate(prompt, max_tokens=6).tokens for prompt in prompts]

    options: dict[str, Any] = {"weights": "f32", "device": "hetero"}
    with LLM(str(folder), **options) as one, LLM(str(folder), **options) as two:
        for name, llm, seed in (("a", one, 1), ("b", two, 2)):
            work(f"{name} alone", llm, seed)
        threads = [
            threading.Thread(target=work, args=(name, llm, seed))
            for name, llm, seed in (("a", one, 1), ("b", two, 2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert tokens["a"] == tokens["a alone"]
    assert tokens["b"] == tokens["b alone"]


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = make_engine(folder)
    context = context_of(engine)
    expected = engine.prefill(context, TOKENS).copy()
    engine.close()
    with pytest.raises(DeviceLostError, match="the model was closed"):
        engine.prefill(context_of(engine), TOKENS)
    with make_engine(folder) as again:
        assert relative_error(again.prefill(context_of(again), TOKENS), expected) < 1e-6


def gated_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, non_matmul: str) -> Engine:
    """Real devices in every matmul, decoding with wait values even where they are not faster."""
    monkeypatch.setattr(Trials, "signal_is_faster", lambda *_: True)
    loaded = open_model(str(folder), weights="f32")
    plan = random_plan(
        loaded.spec(), 40, GRAPHS, random.Random(3), strategies=["row-cut"], non_matmul=non_matmul
    )
    devices = {"gpu": open_device("opencl"), "npu": open_device("ort-cpu", graph_sizes=GRAPHS)}
    engine = Engine(loaded.weights, plan, devices, max_seq_len=80)  # type: ignore[arg-type]
    if engine.steps.step(context_of(engine), "decode", 1).signal is None:
        engine.close()
        pytest.skip("no stream signal works on this device")
    monkeypatch.setattr(
        engine.deployment.synchroniser.contention, "preempted", lambda *_: None
    )  # keeps its wait values
    return engine


@pytest.mark.full
def test_a_core_that_others_use_gets_steps_without_gates(
    folder: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_engine(folder, monkeypatch, "gpu") as engine:
        assert answer(engine, 2) == wanted[:2]
        assert engine.runner.last_step.signal is not None
        engine.deployment.synchroniser.contention.mark_contended()
        assert answer(engine) == wanted
        assert engine.runner.last_step.signal is None
        for _ in range(WaitPolicy().no_wait_value_steps):
            engine.deployment.synchroniser.wait_values_now()
        assert engine.deployment.synchroniser.wait_values_now()


@pytest.mark.parametrize("non_matmul", ["gpu", "npu"])
def test_gates_change_no_token_whatever_is_late(
    folder: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch, non_matmul: str
) -> None:
    """Every action of a decode step takes its own random time: nothing starts before its inputs."""
    import dataclasses

    delays = random.Random(5)

    def late(target: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            end_s = time.perf_counter() + delays.choice((0.0, 0.0, 2e-5, 2e-4))
            while time.perf_counter() < end_s:
                pass
            return target(*arguments)

        return run

    with gated_engine(folder, monkeypatch, non_matmul) as engine:
        assert answer(engine) == wanted
        step = engine.steps.step(context_of(engine), "decode", 1)
        assert SIGNAL in {action.code for action in step.program}
        program = tuple(a._replace(target=late(a.target)) for a in step.program)
        late_step = dataclasses.replace(step, program=program)
        engine.steps.lowered("decode", 1, 1).bound[context_of(engine).cache] = late_step
        for _ in range(4):
            assert answer(engine) == wanted


@pytest.mark.full
def test_a_broken_off_step_leaves_no_gate_closed(
    folder: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_engine(folder, monkeypatch, "npu") as engine:
        assert answer(engine, 4) == wanted[:4]
        step = engine.steps.step(context_of(engine), "decode", 1)
        for at in random.Random(1).sample(range(len(step.program)), 12):
            with pytest.raises(KeyboardInterrupt):
                engine.runner.executor.run(Interrupt(step, at).broken())
            engine.devices["gpu"].finish()  # would hang
            assert answer(engine, 4) == wanted[:4]


def test_a_gate_that_gave_up_drops_the_gpu(
    folder: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_engine(folder, monkeypatch, "npu") as engine:
        signal = engine.steps.step(context_of(engine), "decode", 1).signal
        signal.wait_value._call = signal.wait_value._bound(1)  # type: ignore[union-attr]
        with pytest.warns(FallbackWarning, match="waiting for the control thread"):
            assert answer(engine) == wanted
        assert set(engine.devices) == {"npu"}


@pytest.mark.parametrize("launch", [0, 5])
@pytest.mark.parametrize("call", ["score", "verify"])
def test_every_logit_is_computed_where_the_device_left_has_shorter_calls(
    folder: Path, call: str, launch: int
) -> None:
    """The rows of all tokens are asked for: those of an earlier step must not stand in for them."""
    loaded = open_model(str(folder), weights="f32")
    plan = random_plan(loaded.spec(), 40, (1, 2), random.Random(3), strategies=["gpu-only"])
    tokens = TOKENS[: 8 if call == "verify" else 20]
    with make_engine(folder) as whole:
        wanted = getattr(whole, call)(context_of(whole), tokens)
    devices: dict[DeviceKind, Device] = {
        "gpu": open_device("reference", kind="gpu", asynchronous=True, fail_launch=launch),
        "npu": open_device("reference", kind="npu", graph_sizes=(1, 2)),
    }
    with Engine(loaded.weights, plan, devices, max_seq_len=80) as engine:
        context = context_of(engine)
        with pytest.warns(FallbackWarning, match="the gpu failed"):
            found = getattr(engine, call)(context, tokens)
        assert set(engine.devices) == {"npu"}
        assert engine.placement.longest < len(tokens)
        assert context.tokens == tuple(tokens)
    assert found.shape == wanted.shape
    assert relative_error(found, wanted) < 1e-5

"""The engine on a simulated chip: the same program, executor and waits, in virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import hetero
from hetero.backends.errors import DeviceError, WaitTimeoutError
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.protocol import DeviceKind
from hetero.errors import FallbackWarning
from hetero.models import LoadedModel, model_spec, open_model
from hetero.models.random_models import known_config, limited
from hetero.models.shape_weights import ShapeWeights
from hetero.profiler.records import DeviceProfile
from hetero.profiler.simulated_chip import VirtualChip
from hetero.runtime.adaptive import AdaptPolicy
from hetero.runtime.engine import Engine
from hetero.runtime.waits.wait_point import WaitPoint
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan

CHIP = "snapdragon-8-gen-3"
LLAMA = "llama-3-8b"
PROMPT = "Once upon a time there was a"
QUICK = AdaptPolicy(decode=2, price=1e9, every=24, gain=0.02)


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return DeviceProfile.load(CHIP)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return open_model("demo")


@contextmanager
def demo_on_a_chip(
    demo: LoadedModel, profile: DeviceProfile, strategy: Any, **options: Any
) -> Iterator[tuple[VirtualChip, Engine]]:
    chip = VirtualChip(profile, numbers=True)
    plan = strategy_plan(demo.spec(), profile, strategy, [8])
    with Engine(
        demo.weights, plan, chip.devices, max_seq_len=64, clock=chip.clock, adapt=False, **options
    ) as engine:
        yield chip, engine


def answer(engine: Engine, demo: LoadedModel, tokens: int = 20) -> str:
    assert demo.tokenizer is not None
    context, chosen = engine.new_context(), list[int]()
    logits = engine.prefill(context, demo.tokenizer.encode(PROMPT))
    for _ in range(tokens):
        chosen.append(int(np.argmax(logits)))
        logits = engine.decode(context, chosen[-1])
    return demo.tokenizer.decode(chosen)


@contextmanager
def shapes_on_a_chip(
    profile: DeviceProfile, model: str = LLAMA, **drift: float
) -> Iterator[tuple[VirtualChip, Engine]]:
    """A large model whose cuts follow measured speeds; devices compute nothing."""
    factors: dict[DeviceKind, float] = {"gpu": drift.get("gpu", 1.0), "npu": drift.get("npu", 1.0)}
    chip = VirtualChip(profile, drift=factors)
    request = PlanRequest(seq_lens=(64, 256), explain=False)
    solver = PreparedSolver(Planner(model_spec(model), profile), request)
    weights = ShapeWeights(limited(known_config(model)), WeightFormat.W4A16)
    with Engine(
        weights, solver.plan, chip.devices, max_seq_len=512, clock=chip.clock, solver=solver
    ) as engine:
        assert engine.deployment.adapter is not None
        engine.deployment.adapter.policy = QUICK
        yield chip, engine


def run(chip: VirtualChip, engine: Engine, steps: int) -> list[float]:
    """A prompt, then decode steps: the virtual seconds of each."""
    context, seconds = engine.new_context(), []
    for step in range(steps + 1):
        start_s = chip.clock.now()
        if step:
            engine.decode(context, 1)
        else:
            engine.prefill(context, [1] * 200)
        seconds.append(chip.clock.now() - start_s)
    return seconds


@pytest.mark.parametrize("strategy", ["row-cut", "hybrid-cut", "layer"])
def test_the_answer_is_that_of_this_machine(
    demo: LoadedModel, profile: DeviceProfile, strategy: str
) -> None:
    with hetero.LLM("demo") as llm:
        here = llm.generate(PROMPT, max_tokens=20).text
    with demo_on_a_chip(demo, profile, strategy) as (chip, engine):
        assert answer(engine, demo) == here
        assert 1e-3 < chip.clock.now() < 1.0
        counts = engine.runner.last_run.counts
        assert set(counts) == ({"gpu"} if strategy == "layer" else {"gpu", "npu"})


@pytest.mark.full
def test_what_is_read_before_it_is_waited_for_is_not_there(
    demo: LoadedModel, profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with demo_on_a_chip(demo, profile, "row-cut") as (_, engine):
        right = answer(engine, demo)
    monkeypatch.setattr(WaitPoint, "_fast", lambda *_: 0.0)
    with demo_on_a_chip(demo, profile, "row-cut") as (_, engine):
        assert answer(engine, demo) != right


@pytest.mark.full
def test_two_runs_take_the_same_time_to_the_nanosecond(profile: DeviceProfile) -> None:
    runs = []
    for _ in range(2):
        with shapes_on_a_chip(profile) as (chip, engine):
            runs.append((run(chip, engine, 3), engine.runner.last_run.stamps))
        time.sleep(0.01)
    assert runs[0] == runs[1]


@pytest.mark.full
@pytest.mark.parametrize("sync", ["fast", "event", "finish", "copy"])
def test_every_way_to_wait_is_in_virtual_time(
    demo: LoadedModel, profile: DeviceProfile, sync: Any
) -> None:
    with demo_on_a_chip(demo, profile, "row-cut") as (chip, engine):
        right, fast_s = answer(engine, demo), chip.clock.now()
    with demo_on_a_chip(demo, profile, "row-cut", sync=sync) as (chip, engine):
        assert answer(engine, demo) == right
        waited_s = chip.clock.now()
    if sync in ("finish", "copy"):  # 400 us more for each wait, and for each copy
        assert waited_s > 2 * fast_s
    else:
        assert waited_s == pytest.approx(fast_s, rel=0.05)


@pytest.mark.full
def test_a_device_that_is_slower_than_predicted_shows(profile: DeviceProfile) -> None:
    with shapes_on_a_chip(profile) as (chip, engine):
        *_, usual_s = run(chip, engine, 12)
    with shapes_on_a_chip(profile, gpu=1.2) as (chip, engine):
        *_, slow_s = run(chip, engine, 12)
        adapter = engine.deployment.adapter
        assert adapter is not None
        assert adapter.factors()["gpu", "decode"] == pytest.approx(1.2, rel=0.03)
        assert adapter.factors()["npu", "decode"] == pytest.approx(1.0, rel=0.03)
    assert slow_s == pytest.approx(1.2 * usual_s, rel=0.03)


@pytest.mark.full
def test_a_device_that_throttles_is_adapted_to_in_virtual_time(profile: DeviceProfile) -> None:
    with shapes_on_a_chip(profile) as (chip, engine):
        *_, usual_s = run(chip, engine, 12)
        chip.simulated["npu"].drift = 1.4
        seconds = run(chip, engine, 40)
        assert "npu 1.3" in engine.deployment.adaptations[0]
        assert max(seconds[1:]) > 1.25 * usual_s


def test_a_wait_ends_at_its_deadline_in_virtual_time(
    demo: LoadedModel, profile: DeviceProfile
) -> None:
    with demo_on_a_chip(demo, profile, "npu-only", deadline_s=0.05) as (chip, engine):
        context = engine.new_context()
        engine.prefill(context, [5] * 8)
        chip.simulated["gpu"].drift = 1e9
        before_s = chip.clock.now()
        with pytest.raises(DeviceError), pytest.warns(FallbackWarning, match="0.05"):
            engine.decode(context, 5)  # the NPU has no kernels of all operations
        assert 0.05 < chip.clock.now() - before_s < 30


def test_the_error_of_a_late_wait_names_the_call(profile: DeviceProfile) -> None:
    chip = VirtualChip(profile, drift={"gpu": 1e9})
    tensor = Tensor(HostBuffer(4), (1, 1))
    copy = chip.simulated["gpu"].transfer(tensor, tensor, to_device=True)
    with pytest.raises(WaitTimeoutError, match="copy of 4 bytes"):
        copy.submit().wait(2.0)
    assert chip.clock.now() == 2.0

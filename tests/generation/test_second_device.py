"""A device that was chosen alone is left where it is slower than predicted, and only there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetero
from hetero.backends import simulated
from hetero.backends.errors import KernelBuildError
from hetero.backends.ops import MatMul, Op
from hetero.backends.protocol import DeviceKind
from hetero.backends.reference.device import ReferenceDevice
from hetero.backends.simulated import SimulatedChip
from hetero.errors import FallbackWarning
from hetero.generation import late_plan
from hetero.generation.second_device import SecondDevice, TrialPolicy
from hetero.models import LoadedModel, model_spec, open_model
from hetero.placement import decisions, timing_lock
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.decisions import Decision
from hetero.placement.device_times import DeviceTimes
from hetero.placement.phase_choice import PhaseChoice
from hetero.profiler.records import DeviceProfile
from hetero.runtime.deployment import MoveTarget
from hetero.runtime.engine import Engine
from hetero.solver.handmade import single_device
from tests.runtime.models import context_of, emptied, greedy_tokens, tiny_model
from tests.runtime.test_faults import slow_down

QUICK = TrialPolicy(prefill=2, decode=4)
PROMPT = np.random.default_rng(8).integers(0, 263, 16).tolist()
PREDICTED_S: dict[DeviceKind, float] = {"npu": 1e-6, "gpu": 1.5e-6}  # for a token and a row


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> LoadedModel:
    folder: Path = tiny_model(tmp_path_factory.mktemp("tiny"))
    return open_model(str(folder), weights="f32")


@dataclass
class Chip:
    """An engine on one device of a chip, each so many times as slow as it was predicted."""

    loaded: LoadedModel
    slower: dict[DeviceKind, float] = field(default_factory=dict)
    moves: list[DeviceKind] = field(default_factory=list)
    closed: int = 0
    failing: bool = False

    def __post_init__(self) -> None:
        self.chip = SimulatedChip()

    def target(self, kind: DeviceKind) -> MoveTarget:
        def cost(op: Op, m: int) -> float:
            return (op.n * m if isinstance(op, MatMul) else m) * PREDICTED_S[kind]

        device = simulated.open(kind=kind, asynchronous=False, cost=cost, chip=self.chip)
        device.drift = self.slower.get(kind, 1.0)
        return MoveTarget(devices={kind: device}, plan=single_device(self.loaded.spec(), kind))

    @contextmanager
    def engine(self, kind: DeviceKind = "npu") -> Iterator[Engine]:
        to = self.target(kind)
        with Engine(
            self.loaded.weights, to.plan, to.devices, max_seq_len=128, clock=self.chip.clock
        ) as engine:
            yield engine

    def move(self, engine: Engine, kind: DeviceKind) -> None:
        if self.failing:
            raise KernelBuildError("simulated", "building", "injected", "none")
        engine.deployment.move(self.target(kind))
        self.moves.append(kind)

    def watched(self, engine: Engine, error: float = 0.05) -> SecondDevice:
        """The watch, which finds the GPU prepared before the next step."""
        first, second = (replace(times_of(self.loaded, x), error=error) for x in ("npu", "gpu"))

        def moved() -> bool:
            self.move(engine, "gpu")
            watch.moved()
            return True

        def prepare() -> Chip:
            engine.before_step = moved
            return self

        watch = SecondDevice(
            engine, first, second,
            prepare=prepare, back=lambda: self.move(engine, "npu"), policy=QUICK,
        )  # fmt: skip
        return watch

    def close(self) -> None:
        self.closed += 1


def times_of(loaded: LoadedModel, kind: DeviceKind) -> DeviceTimes:
    """What a profile would say: the seconds of a prompt and of steps on a device as predicted."""
    seen: dict[str, list[tuple[int, float]]] = {"prefill": [], "decode": []}
    with Chip(loaded).engine(kind) as engine:
        engine.runner.watch = lambda phase, tokens, at, s: seen[phase].append(
            (tokens if phase == "prefill" else at, s)
        )
        greedy_tokens(engine, PROMPT, 20)
    prompts, steps = tuple(seen["prefill"]), tuple(seen["decode"])
    return DeviceTimes(kind, prompts[0][1], 20 * steps[0][1], prompts, ((0, steps[0][1]), *steps))


def answered(engine: Engine, count: int = 3) -> list[list[int]]:
    return [greedy_tokens(engine, PROMPT, 12) for _ in range(count)]


@pytest.fixture(scope="module")
def wanted(loaded: LoadedModel) -> list[int]:
    with Chip(loaded).engine() as engine:
        return greedy_tokens(engine, PROMPT, 12)


def test_a_device_three_times_slower_than_predicted_is_left(
    loaded: LoadedModel, wanted: list[int]
) -> None:
    chip = Chip(loaded, {"npu": 3.0})
    with chip.engine() as engine:
        chip.watched(engine)
        assert answered(engine, 6) == [wanted] * 6
        assert (chip.moves, set(engine.devices)) == (["gpu"], {"gpu"})
        tried, kept = engine.deployment.adaptations
        assert tried == "after 9 steps: gpu alone is tried because npu alone took answers 3.0 x " \
            "as long as predicted"  # fmt: skip
        assert kept.endswith(": gpu alone is kept because gpu is measured 2.00 x npu")
        assert engine.runner.watch is None


@pytest.mark.parametrize(
    ("slower", "error"),
    [({}, 0.05), ({"npu": 1.6}, 0.05), ({"npu": 3.0}, 0.6), ({"gpu": 3.0}, 0.05)],
)
def test_a_device_that_the_next_one_does_not_beat_for_sure_stays(
    loaded: LoadedModel, wanted: list[int], slower: Any, error: float
) -> None:
    """As predicted, slower by less than the margin, or by less than predictions may be off."""
    chip = Chip(loaded, slower)
    with chip.engine() as engine:
        chip.watched(engine, error)
        assert answered(engine) == [wanted] * 3
        assert chip.moves == engine.deployment.adaptations == []


def test_a_second_device_that_is_no_faster_is_left_again_and_not_tried_twice(
    loaded: LoadedModel, wanted: list[int]
) -> None:
    chip = Chip(loaded, {"npu": 3.0, "gpu": 2.5})
    with chip.engine() as engine:
        chip.watched(engine)
        assert answered(engine, 8) == [wanted] * 8
        assert (chip.moves, set(engine.devices)) == (["gpu", "npu"], {"npu"})
        _, back = engine.deployment.adaptations
        assert back.endswith("npu alone computes again because gpu is measured 0.80 x npu")


def test_prompts_alone_that_are_slower_are_a_reason(loaded: LoadedModel, wanted: list[int]) -> None:
    """Answers are then judged by what both took, not prompts by answers."""
    chip = Chip(loaded)
    with chip.engine() as engine:
        watch = chip.watched(engine)
        times = watch.first.times
        watch.first.times = replace(times, prompts_s=50 * times.prompts_s)
        watch.second.times = replace(
            watch.second.times, prompts_s=50 * watch.second.times.prompts_s
        )
        for _ in range(2):
            chip_device(engine).drift = 4.0
            engine.prefill(emptied(engine), PROMPT)
            chip_device(engine).drift = 1.0
            for token in (1, 2, 3):
                engine.decode(context_of(engine), token)
        assert answered(engine, 2) == [wanted] * 2
        assert set(engine.devices) == {"gpu"}
        # The prompt before the move was as fast as predicted.
        assert "npu alone took prompts 2.5 x and answers 1.0 x" in engine.deployment.adaptations[0]


def chip_device(engine: Engine) -> Any:
    (device,) = engine.devices.values()
    return device


def test_a_move_back_that_fails_leaves_the_model_where_it_is(
    loaded: LoadedModel, wanted: list[int]
) -> None:
    chip = Chip(loaded, {"npu": 3.0, "gpu": 4.0})
    with chip.engine() as engine:
        chip.watched(engine)
        greedy_tokens(engine, PROMPT, 12)
        assert set(engine.devices) == {"gpu"}
        chip.failing = True
        with pytest.warns(FallbackWarning, match="going on with gpu alone because .* injected"):
            assert answered(engine) == [wanted] * 3
        assert set(engine.devices) == {"gpu"}


def test_closing_ends_what_is_prepared(loaded: LoadedModel) -> None:
    chip = Chip(loaded, {"npu": 3.0})
    with chip.engine() as engine:
        watch = chip.watched(engine)
        watch._prepare = lambda: chip  # which takes for ever
        answered(engine)
        assert (chip.moves, chip.closed) == ([], 0)
        watch.close()
        assert chip.closed == 1


def test_steps_that_nothing_was_predicted_of_say_nothing() -> None:
    times = DeviceTimes("npu", 1.0, 1.0, ((64, 0.1), (128, 0.2)), ((64, 0.01), (164, 0.02)))
    found = [times.step_s("prefill", tokens, at) for tokens, at in
             [(63, 0), (64, 0), (65, 0), (128, 0), (129, 0), (64, 1)]]  # fmt: skip
    assert found == [None, 0.1, 0.2, 0.2, None, None]
    found = [
        times.step_s("decode", m, at) for m, at in [(1, 0), (1, 114), (1, 164), (1, 165), (2, 9)]
    ]
    assert found == [0.01, pytest.approx(0.015), 0.02, None, None]


def of_a_phase(kind: str) -> DeviceTimes:
    """Times that no device keeps: both seem slow, and the second one only as predicted."""
    return DeviceTimes(kind, 1e-6, 1e-6, ((1, 1e-9), (512, 1e-9)), ((0, 1e-9), (512, 1e-9)))


@pytest.fixture
def auto_takes_the_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choice:
    """The choice of the NPU alone, and a child process that prepares nothing."""
    phases = tuple(PhaseChoice(x, "npu", 1e-6, "gpu", 2e-6) for x in ("prefill", "decode"))  # type: ignore[arg-type]
    alone = of_a_phase("npu"), of_a_phase("gpu")
    choice = Choice("npu", reason="auto: npu alone", phases=phases, alone=alone)
    monkeypatch.setattr("hetero.generation.loading.choose", lambda *_: choice)
    monkeypatch.setattr(decisions, "folder", lambda: tmp_path / "decisions")
    monkeypatch.setattr(timing_lock, "lock_path", lambda: tmp_path / "timing.lock")
    monkeypatch.setattr(late_plan, "child_command", lambda *_: [sys.executable, "-c", ""])
    return choice


@pytest.mark.full
def test_a_model_moves_and_says_so(
    auto_takes_the_npu: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"gpu": "reference", "npu": "reference", "weights": "f32"}
    prompt, asked = "Once upon a time", {"max_tokens": 24}
    with hetero.LLM("demo", kv="f32", **options) as llm:
        assert llm._opened.second is None, "it computes on this processor"
        wanted = llm.generate(prompt, **asked).tokens
    monkeypatch.setattr(ReferenceDevice, "on_host", False, raising=False)
    with hetero.LLM("demo", kv="f32", adapt=False, **options) as llm:
        assert llm._opened.second is None, "nothing is to move"
    with hetero.LLM("demo", kv="f32", **options) as llm:
        slow_down(llm.engine, lambda: 1e-3, "npu")
        answers = [llm.generate(prompt, **asked)]
        second = llm._opened.second
        assert second is not None
        assert isinstance(second._preparation, late_plan.LatePlan)
        assert second._preparation._job.wait(60)
        answers += [llm.generate(prompt, **asked) for _ in range(4)]
        assert [x.tokens for x in answers] == [wanted] * 5
        assert (set(llm.engine.devices), llm.devices.mode) == ({"gpu"}, "gpu")
        assert llm.choice.reason.startswith("gpu alone, because npu alone took ")
        assert llm.choice.reason.endswith(f"; before: {auto_takes_the_npu.reason}")
        assert [x.device_set for x in llm.phases] == ["gpu", "gpu"]
        tried, kept = answers[-1].stats.adaptations
        assert "gpu alone is tried because npu alone took" in tried
        assert "gpu alone is kept" in kept
        assert answers[-1].stats.parts[0].devices == {"gpu": "reference"}
        assert not llm.engine.deployment.fallback


@pytest.mark.full
def test_auto_keeps_the_times_of_the_next_best_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip, predictors = DeviceProfile.load("snapdragon-8-elite"), []
    for known in chip.predictors:
        slow = known
        if known.device == "gpu" and known.knots is not None:
            seconds = tuple(tuple(30 * x for x in y) for y in known.knots.coefficients)
            slow = known.model_copy(
                update={"knots": known.knots.model_copy(update={"coefficients": seconds})}
            )
        predictors.append(slow)
    changed = chip.model_copy(update={"predictors": tuple(predictors)})
    request = PlacementRequest(
        mode="auto", gpu="reference", npu="reference", profile=changed, context=512
    )
    choice = choose(model_spec("qwen3-0.6b"), request)
    assert (choice.mode, choice.plan) == ("npu", None)
    first, second = choice.alone
    assert (first.device_set, second.device_set) == ("npu", "gpu")
    assert first.total_s({"prefill": 1.0, "decode": 1.0}) < choice.seconds["gpu"]
    for times in choice.alone:
        assert times.error > 0
        assert [at for at, _ in times.prompts] == sorted(at for at, _ in times.prompts)
        known = times.step_s("prefill", 256, 0), times.step_s("decode", 1, 300)
        assert all(x is not None and 0 < x < 30 for x in known)
    monkeypatch.setattr(decisions, "folder", lambda: tmp_path)
    kept = Decision("npu", None, "", (), {}, choice.phases, choice.alone)
    decisions.keep("k" * 40, kept)
    assert decisions.load_cached("k" * 40) == kept

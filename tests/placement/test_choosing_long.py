"""`auto` and `hetero` from short prompts to long ones: no jumps, no layer level, always a reason.

Predictions alone, but for the last two: no device is opened.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.models import model_spec
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.comparing import (
    ANSWER_TOKENS,
    PromptMix,
    answering,
    compare,
)
from hetero.placement.phase_choice import TENSOR_LEVEL
from hetero.profiler.records import DeviceProfile
from hetero.solver.plan import PHASES
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver
from hetero.solver.prompts import call_scenarios
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from tests.runtime.models import tiny_model
from tests.support.helpers import Command
from tests.support.selection import exhaustive

CONTEXT = 8192
EVERY_LENGTH = (
    64, 65, 100, 128, 129, 200, 256, 257, 400, 511, 512, 513, 514, 700, 1023, 1024, 1025, 1300,
    1536, 1537, 2000, 2047, 2048, 2049, 2050, 2560, 2561, 3000, 3500, 4095, 4096, 4097, 5000, 5633,
    6500, 7168, 7169, 8000, 8127, 8128,
)  # fmt: skip
LENGTHS = EVERY_LENGTH[:: 1 if exhaustive() else 2]
SLACK = 0.02  # of a time, where neighbours have other cuts


@pytest.fixture(autouse=True)
def _as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are taken as they are."""
    monkeypatch.setattr(
        "hetero.placement.by_profile.scaled_here", lambda profile, notice: (profile, notice)
    )


class Case:
    """A model on a shipped profile, as on a machine with two cores."""

    def __init__(self, profile: str, weights: str) -> None:
        self.profile = DeviceProfile.load(profile)
        self.spec = model_spec("llama-3.2-1b", weights)
        self.planner = Planner(self.spec, self.profile)
        request = PlanRequest(seq_lens=(64, 512), step_tokens=512)
        self.solver = prepare_solver(self.spec, self.profile, request)

    def choice(self, mode: Any, tokens: int) -> Choice:
        return choose(
            self.spec,
            PlacementRequest(mode=mode, profile=self.profile, seq_lens=(tokens,), context=CONTEXT),
        )

    def of(self, tokens: int, cores: int = 2) -> dict[str, float]:
        kinds = ("gpu", "npu", "opencl-cores")
        mix = PromptMix((tokens,))
        times = compare(self.planner, self.solver, mix, kinds=kinds, cores=cores)
        return {name: seconds.total_s for name, seconds in times.items()}

    def call_s(self, name: str, scenario: Scenario) -> float:
        """One more call of a prompt."""
        if name == TENSOR_LEVEL:
            return self.solver.solution_for(scenario).seconds
        one = self.planner.single(scenario, "npu" if name == "npu" else "gpu")
        assert one is not None
        return one.seconds


@pytest.fixture(
    scope="module",
    params=[
        ("host", "w4a16"),
        pytest.param(("host", "w4a8"), marks=pytest.mark.full),
        ("snapdragon-8-gen-3", "w4a16"),
    ],
    ids=" ".join,
)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.placement.by_profile.every_core_count", lambda: 2)


@pytest.mark.full
def test_times_and_devices_are_continuous_from_short_prompts_to_long_ones(case: Case) -> None:
    """From one length to the next every candidate's time grows, by no more than the calls of the
    tokens between take and what the answer attends to; the chosen device changes only where two
    are as fast.
    """
    found = {tokens: case.choice("auto", tokens) for tokens in LENGTHS}
    for (a, before), (b, after) in itertools.pairwise(found.items()):
        assert before.seconds.keys() == after.seconds.keys()
        for name, seconds in after.seconds.items():
            padded = 2 if name == "npu" else 1  # at most: graphs are powers of two
            new = call_scenarios(case.solver.plan.steps(padded * (b - a)), a)
            more = sum(case.call_s(name, call) for call in new)
            steps = [case.call_s(name, Scenario("prefill", 1, tokens)) for tokens in (a, b)]
            more += ANSWER_TOKENS * max(steps[1] - steps[0], 0.0)
            slack = SLACK * before.seconds[name]
            assert -slack <= seconds - before.seconds[name] <= more + slack, (name, b)
        one, other = name_of(before), name_of(after)
        for times in (before.seconds, after.seconds):
            assert times[one] == pytest.approx(times[other], rel=0.05), (a, b, one, other)


def name_of(choice: Choice) -> str:
    if choice.mode == "hetero":
        return TENSOR_LEVEL
    return choice.gpu or choice.mode


@pytest.mark.full
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["auto", "hetero"])
def test_no_length_falls_to_layer_level(case: Case, mode: str) -> None:
    for tokens in (1, 2, 64, 513, 2048, 2049, 3500, 4097, 6145, 8127):
        found = case.choice(mode, tokens)
        assert "layer level" not in found.reason
        if mode == "auto":
            assert f"predicted for {PromptMix((tokens,))}: gpu" in found.reason
        if found.mode == "hetero":
            assert found.plan is not None
            assert sum(found.plan.steps(tokens)) == tokens
            assert max(found.plan.steps(tokens)) <= 512
        else:
            assert mode == "auto"


@pytest.mark.full
def test_predictions_are_those_of_the_calls_and_of_an_answer_behind_the_prompt() -> None:
    """A prompt of 3500 tokens: seven calls, each behind those before it, and 64 tokens that attend
    to 3532 on average.
    """
    case = Case("host", "w4a8")
    found = case.of(3500)
    prompt = [case.planner.single(s, "gpu") for s in call_scenarios((512,) * 6 + (428,))]
    decode = case.planner.single(Scenario("decode", 1, 3532), "gpu")
    assert decode is not None
    calls = [call for call in prompt if call is not None]
    assert len(calls) == 7
    prompt_s = sum(c.without_head().seconds for c in calls[:-1]) + calls[-1].seconds
    assert found["gpu"] == pytest.approx(prompt_s + 64 * decode.seconds, rel=1e-9)
    every = {x.phase: x for x in case.profile.every_core if x.weight_format == "w4a8"}
    layers = case.spec.layers
    cores_s = prompt_s / every["prefill"].speedup + 7 * layers * every["prefill"].layer_s
    cores_s += 64 * every["decode"].seconds(decode.seconds, layers)
    assert found["opencl-cores"] == pytest.approx(cores_s, rel=1e-9)
    both = case.solver.prompt(3500).seconds + 64 * case.solver.solution_for(answering(3500)).seconds
    assert found[TENSOR_LEVEL] == pytest.approx(both, rel=1e-9)
    assert "opencl-cores" not in case.of(3500, cores=1)
    short = case.planner.single(Scenario("decode", 1, 256), "gpu")
    assert short is not None
    assert decode.seconds > 1.3 * short.seconds


@pytest.mark.full
def test_a_device_that_is_worse_at_attention_is_chosen_for_short_prompts_only() -> None:
    """So the length that is asked for decides."""
    case = Case("host", "w4a8")
    slow = tuple(
        p.model_copy(update={"coefficients": p.coefficients | {"pairs": 3e-10}, "decode": None})
        if (p.device, p.op) == ("gpu", "Attention")
        else p
        for p in case.profile.other_predictors
    )
    whole = {
        kind: record.model_copy(
            update={
                "capabilities": record.capabilities.model_copy(update={"attention_heads": False})
            }
        )
        for kind, record in case.profile.devices.items()
    }
    changed = {"other_predictors": slow, "every_core": (), "devices": whole}
    case.profile = case.profile.model_copy(update=changed)
    chosen = [case.choice("auto", tokens) for tokens in (32, 3500)]
    assert [choice.mode for choice in chosen] == ["gpu", "hetero"]
    assert chosen[1].plan is not None
    assert chosen[1].plan.non_matmul.prefill == "npu"
    assert "for a prompt of 32 tokens and 64 more" in chosen[0].reason
    assert "for a prompt of 3500 tokens and 64 more" in chosen[1].reason


@pytest.mark.parametrize(
    ("asked", "context", "prompts", "said"),
    [
        ((3500,), 4096, (3500,), "a prompt of 3500 tokens and 64 more"),
        ((64, 900), None, (64, 900), "prompts of 64 and 900 tokens and 64 more each"),
        ((), None, (64, 256, 1024), "prompts of 64, 256 and 1024 tokens and 64 more each"),
        ((), 4096, (64, 256, 1024), "prompts of 64, 256 and 1024 tokens and 64 more each"),
        ((), 512, (64, 256), "prompts of 64 and 256 tokens and 64 more each"),
        ((), 100, (36,), "a prompt of 36 tokens and 64 more"),
        ((), 2, (1,), "a prompt of 1 token and 64 more"),
    ],
)
def test_what_devices_are_compared_by(
    asked: tuple[int, ...], context: int | None, prompts: tuple[int, ...], said: str
) -> None:
    work = PromptMix.of(asked, context)
    assert (work.prompts, str(work)) == (prompts, said)


def test_the_work_is_all_prompts_and_their_answers() -> None:
    case = Case("snapdragon-8-gen-3", "w4a16")
    both = compare(case.planner, case.solver, PromptMix((64, 600)), kinds=("gpu",))
    parts = [compare(case.planner, case.solver, PromptMix((m,)), kinds=("gpu",)) for m in (64, 600)]
    for name, seconds in both.items():
        for phase in PHASES:
            assert seconds.of(phase) == pytest.approx(sum(part[name].of(phase) for part in parts))


def unplannable(case: Case) -> DeviceProfile:
    """A profile without what the model needs."""
    return case.profile.model_copy(update={"other_predictors": ()})


@pytest.mark.parametrize("mode", ["hetero", "auto"])
@pytest.mark.parametrize("strategy", ["auto", "layer"])
def test_a_model_that_cannot_be_planned_says_so_whatever_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, mode: Any, strategy: Any
) -> None:
    case = Case("host", "w4a16")
    monkeypatch.setattr(
        "hetero.placement.by_profile.locate_profile", lambda *_: (unplannable(case), "")
    )
    found = choose(case.spec, PlacementRequest(mode=mode, strategy=strategy))
    assert (found.mode, found.plan) == ("hetero", None)
    assert found.reason.startswith(
        f"{mode}: layer level, because profile host lacks operators of llama-3.2-1b ("
    )
    assert found.notes == (found.reason,)


def test_what_cannot_be_shared_is_told_beside_what_is_known_of_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("host", "w4a16")
    gpu = tuple(p for p in case.profile.predictors if p.device == "gpu")
    alone = case.profile.model_copy(update={"predictors": gpu})
    monkeypatch.setattr(
        "hetero.placement.by_profile.locate_profile", lambda *_: (alone, "a notice")
    )
    found = choose(case.spec, PlacementRequest())
    assert found.plan is None
    assert found.reason == (
        "hetero: layer level, because by profile host no plan has both devices in every prompt"
    )
    assert found.notes == ("a notice", found.reason)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "gpu"}, "gpu alone, as asked for"),
        ({"mode": "hetero"}, "hetero: tensor level (profile host)"),
        ({"strategy": "padding", "seq_lens": (3500,)}, "strategy padding, as asked for (profile"),
    ],
)
def test_a_reason_is_never_empty(options: dict[str, Any], reason: str) -> None:
    case = Case("host", "w4a16")
    assert choose(case.spec, PlacementRequest(profile=case.profile, **options)).reason.startswith(
        reason
    )
    plan = case.solver.plan
    given = choose(case.spec, PlacementRequest(plan=plan))
    assert given.reason == f"plan {plan.plan_id}, as given"


@pytest.mark.full
def test_a_memory_budget_bounds_the_calls_of_strategies_too() -> None:
    case = Case("host", "w4a16")
    request = PlacementRequest(profile=case.profile, strategy="gpu-only", seq_lens=(3500,))
    plan = choose(case.spec, request).plan
    assert plan is not None
    assert plan.steps(3500) == (2048, 1452)
    tight = choose(case.spec, replace(request, weight_budget_bytes=4 << 30)).plan
    assert tight is not None
    assert max(tight.steps(3500)) == 512


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open what is chosen: how many threads OpenCL has is fixed in a process."""
    monkeypatch.setattr("hetero.placement.by_profile.every_core_count", lambda: 0)


@pytest.mark.full
@pytest.mark.usefixtures("two_cores", "one_core")  # in this order
def test_the_first_prompts_length_decides_where_it_is_known(tmp_path: Path) -> None:
    """`generate` knows it; an API that does not compares the prompts that it states."""
    folder = str(tiny_model(tmp_path / "model"))
    for prompt, said in (("once upon a time", "16 tokens"), ([5] * 40, "64 tokens"), (None, "64")):
        with LLM(
            folder, device="auto", max_seq_len=200, first_prompt=prompt, weights="w4a16"
        ) as llm:
            assert f" of {said}" in llm.choice.reason


@pytest.mark.full
@pytest.mark.usefixtures("two_cores", "one_core")  # in this order
def test_generate_tells_its_choice_and_notes(command: Command, tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    options = ("generate", folder, "some text", "--max-tokens", "2", "--json")
    found = command(*options, "--device", "auto")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout.splitlines()[-1])
    assert "for a prompt of 16 tokens and 64 more" in document["choice"]
    assert "hetero: auto: " not in found.stderr  # that is for --stats
    stats = command(*options, "--stats")  # auto is the default
    assert " ".join(stats.stderr.split()).count("auto: ") == 1
    fallen = command(*options, "--device", "hetero", "--weights", "f32", "--stats")
    document = json.loads(fallen.stdout.splitlines()[-1])
    assert document["choice"].startswith("hetero: layer level, because profile ")
    assert "has no times of f32" in document["choice"]
    assert document["choice"] in document["notes"]
    assert fallen.stderr.count("hetero: hetero: layer level, because profile ") == 1
    quiet = command(*options, "--device", "gpu")
    assert "hetero: gpu" not in quiet.stderr
    assert json.loads(quiet.stdout.splitlines()[-1])["choice"] == "gpu alone, as asked for"

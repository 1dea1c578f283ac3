"""Where prompts and answers are fastest, and the arguments of other engines for that."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import hetero
from hetero.cli.app import app
from hetero.errors import UserError
from hetero.models import model_spec
from hetero.placement.choice import PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.engine_arguments import engine_arguments
from hetero.placement.where_fastest import (
    DEPTHS,
    choose_fastest,
    confidence,
    fastest_answers,
    fastest_of,
    not_sure_because,
)
from hetero.profiler.fitted_units import ModelWork, unit_s
from hetero.profiler.records import DeviceProfile
from hetero.solver.decode_bands import STEP
from hetero.solver.plan import FastestDevices, PredictedRun
from hetero.solver.report import fastest_table
from hetero.solver.request import PlanRequest
from tests.profiler.fakes import without_ops

X2, PHONE = "snapdragon-x2-elite", "snapdragon-8-elite"


def answers_of(model: str, profile: str) -> dict[tuple[str, int], FastestDevices]:
    plan = hetero.plan(model, profile, seq_lens=(64,), curves=False, fastest=True)
    return {(x.phase, x.depth): x for x in plan.fastest}


@pytest.mark.full
def test_every_depth_and_phase_has_an_answer_whose_order_is_that_of_the_seconds() -> None:
    answers = answers_of("qwen3-4b", X2)
    assert list(answers) == [(p, d) for d in DEPTHS for p in ("prefill", "decode")]
    for (phase, depth), answer in answers.items():
        seconds = [x.predicted_s for x in answer.candidates]
        assert seconds == sorted(seconds)
        assert answer.devices == answer.candidates[0].devices
        assert answer.over == answer.candidates[1].devices
        assert answer.gain == pytest.approx(seconds[1] / seconds[0])
        assert {("gpu",), ("npu",), ("cpu",)} <= {x.devices for x in answer.candidates}
        assert answer.tokens_per_s == pytest.approx(
            (depth if phase == "prefill" else 1) / answer.predicted_s
        )


@pytest.mark.full
def test_on_a_phone_the_npu_alone_has_prompts_and_the_answer_changes_devices_with_depth() -> None:
    answers = answers_of("qwen3-0.6b", PHONE)
    assert {answers["prefill", depth].devices for depth in DEPTHS} == {("npu",)}
    assert answers["decode", 512].devices == ("cpu",)
    assert answers["decode", 16384].devices == ("npu",)


@pytest.mark.full
def test_answers_move_where_the_gain_is_beyond_the_error_of_predictions() -> None:
    spec, profile = model_spec("qwen3-4b"), DeviceProfile.load(PHONE)
    first, second = fastest_answers(spec, profile, PlanRequest())
    assert (first.depth_from, first.devices, first.gain) == (0, ("cpu",), None)
    assert second.devices == ("npu",)
    cpu = next(x for x in profile.units if x.device == "cpu")
    (error,) = (x.mape for x in cpu.validation if x.phase == "decode")
    work = ModelWork(spec)
    npu_s = {
        depth: next(
            x.predicted_s
            for x in fastest_of(spec, profile, [depth], PlanRequest())
            if x.phase == "decode"
            for x in x.candidates
            if x.devices == ("npu",)
        )
        for depth in (second.depth_from - STEP, second.depth_from)
    }
    cpu_s = {depth: unit_s(cpu, work, "decode", 1, depth) for depth in npu_s}
    before, after = (npu_s[depth] < cpu_s[depth] * (1 - error) for depth in npu_s)
    assert (before, after) == (False, True)


@pytest.mark.full
def test_a_measured_profile_compares_every_core_with_the_errors_of_its_predictors() -> None:
    answers = answers_of("llama-3.2-1b", "host")
    for answer in answers.values():
        assert ("cpu",) in {x.devices for x in answer.candidates}
        assert all(x.error is not None and 0 < x.error < 0.3 for x in answer.candidates)
        assert answer.confidence is not None
        assert 0.5 <= answer.confidence <= 1


@pytest.mark.full
def test_a_fit_is_not_sure_of_models_with_experts_which_it_does_not_know() -> None:
    for model, profile, sure in (("qwen3-moe-3b", X2, False), ("qwen3-4b", X2, True)):
        answers = answers_of(model, profile).values()
        assert {x.confidence is not None for x in answers} == {sure}


@pytest.mark.parametrize(
    ("model", "depths"), [("llama-2-7b", [512, 4096]), ("demo", [512]), ("gemma-2b", [512, 4096])]
)
def test_no_answer_is_beyond_the_models_context(model: str, depths: list[int]) -> None:
    assert sorted({depth for _, depth in answers_of(model, "host")}) == depths


@pytest.mark.full
def test_a_plan_says_what_a_third_device_would_give_and_what_forbids_it() -> None:
    plan = hetero.plan("qwen3-4b", X2, curves=False, fastest=True)
    (note,) = (x for x in plan.notes if x.startswith("a third device: "))
    said = re.search(
        r"a prompt of 512 tokens alone takes (\d+) ms on GPU, NPU and CPU \(fitted\), (\d\.\d\d) × "
        r"without the CPU; the added rates of all three, less what synchronisation takes, are "
        r"(\d+) ms \(\d% less\); this plan has none",
        note,
    )
    assert said is not None, note
    planned_ms, gain, ideal_ms = map(float, said.groups())
    assert ideal_ms <= planned_ms <= 1.1 * ideal_ms
    assert 1.03 < gain < 1.5
    assert "llama.cpp's, predicted with a mean error of 58%" in note
    assert "more than it gains" in note
    assert "--measure-cpu" in note
    assert not any("third device" in x for x in answers_notes("qwen3-0.6b", "host"))


def answers_notes(model: str, profile: str) -> tuple[str, ...]:
    return hetero.plan(model, profile, seq_lens=(64,), curves=False, fastest=True).notes


@pytest.mark.parametrize(
    ("model", "profile", "reason"),
    [
        ("gpt-oss-20b", X2, "is fitted to models without routed experts"),
        ("llama-3.2-1b", "snapdragon-8-gen-3", "does not say how well it predicts"),
        ("qwen3-4b", X2, ""),
        ("llama-3.2-1b", "host", ""),
    ],
)
def test_what_is_not_sure_is_said_with_the_reason(model: str, profile: str, reason: str) -> None:
    why = not_sure_because(model_spec(model), DeviceProfile.load(profile))
    assert why.endswith(reason)
    assert bool(why) == bool(reason)


@pytest.mark.full
def test_a_plan_says_that_nothing_is_known_of_how_sure_it_is() -> None:
    plan = hetero.plan("qwen3-moe-3b", X2, seq_lens=(64,), curves=False, fastest=True)
    assert any("is not known: profile" in x for x in plan.notes)
    assert any(x.startswith("answers stay on the devices of this plan") for x in plan.notes)
    table = fastest_table.table(plan)
    assert table is not None
    assert {row[-1] for row in table.rows} == {"not known"}


def test_an_error_of_a_states_operator_is_needed_where_times_were_measured() -> None:
    host = without_ops(DeviceProfile.load("host"), "GatedDelta", "ShortConv")
    why = not_sure_because(model_spec("qwen3.5-0.8b"), host)
    assert why == "profile host has no error of GatedDelta, ShortConv"
    first, ops = host.other_predictors[0], ("GatedDelta", "ShortConv")
    known = [first.model_copy(update={"op": op, "mape": 0.1}) for op in ops]
    more = host.model_copy(update={"other_predictors": (*host.other_predictors, *known)})
    assert not_sure_because(model_spec("qwen3.5-0.8b"), more) == ""


def test_a_plan_that_was_not_asked_has_no_such_key() -> None:
    plan = hetero.plan("llama-3.2-1b", X2, seq_lens=(64,), curves=False)
    assert "fastest" not in json.loads(plan.model_dump_json())
    assert fastest_table.table(plan) is None


@pytest.mark.parametrize(
    ("gain", "errors", "expected"),
    [
        (1.0, (0.1, 0.1), 0.5),
        (1.1, (None, 0.1), None),
        (1.1, (0.0, 0.0), 1.0),
        (1.2, (0.1, 0.0), 0.927),  # Φ(ln 1.2 / (0.1 · √(π/2)))
        (1.2, (0.3, 0.4), 0.614),
    ],
)
def test_confidence_is_the_probability_that_the_order_is_right(
    gain: float, errors: tuple[float | None, float | None], expected: float | None
) -> None:
    assert confidence(gain, *errors) == (
        expected if expected is None else pytest.approx(expected, abs=2e-3)
    )


def test_one_candidate_is_an_answer_without_a_gain() -> None:
    run = PredictedRun(devices=("npu",), predicted_s=2.0, tokens_per_s=0.5)
    answer = choose_fastest("decode", 512, [run])
    assert (answer.devices, answer.gain, answer.over, answer.confidence) == (
        ("npu",),
        None,
        (),
        None,
    )


@pytest.mark.parametrize(
    ("profile", "model", "lengths", "words", "environment"),
    [
        (PHONE, "llama-3.2-1b", (4096,), "--device HTP0 -ngl 99 -t 6", {}),
        (PHONE, "llama-3-8b", (4096,), "--device HTP0,HTP1 -ngl 99 -t 6",
         {"GGML_HEXAGON_NDEV": "2"}),
        (X2, "qwen3-4b", (64,), "--device none -ngl 0 -t 6", {}),
    ],
)  # fmt: skip
def test_llama_cpp_gets_the_device_that_its_own_rates_make_the_fastest(
    profile: str, model: str, lengths: tuple[int, ...], words: str, environment: dict[str, str]
) -> None:
    asked = PlanRequest(seq_lens=lengths)
    best = engine_arguments("llama.cpp", model_spec(model), DeviceProfile.load(profile), asked)
    assert (" ".join(best.arguments), dict(best.environment)) == (words, environment)
    assert list(best.seconds.values()) == sorted(best.seconds.values())
    assert all("llama.cpp" in name for name in best.seconds)


def test_an_adreno_and_few_cores_have_their_own_names() -> None:
    profile = DeviceProfile.load(X2)
    gpu = tuple(x for x in profile.units if x.device == "gpu")
    few = profile.environment.model_copy(update={"cores": 4})
    only = profile.model_copy(update={"units": gpu, "environment": few})
    best = engine_arguments("llama.cpp", model_spec("qwen3-4b"), only, PlanRequest())
    assert " ".join(best.arguments) == "--device GPUOpenCL -ngl 99 -t 4"
    best = engine_arguments("geniex", model_spec("qwen3-4b"), only, PlanRequest())
    assert best.arguments == ("--compute", "gpu")


def test_prompts_count_as_often_as_they_come() -> None:
    graph, profile = model_spec("qwen3-4b"), DeviceProfile.load(X2)
    asked = PlanRequest(seq_lens=(64, 4096))
    rare = replace(asked, length_weights=(99.0, 1.0))
    one, other = (engine_arguments("geniex", graph, profile, x).seconds for x in (asked, rare))
    assert other["GPU (llama.cpp)"] < one["GPU (llama.cpp)"]


def test_a_profile_without_an_engines_rates_says_where_to_get_them() -> None:
    with pytest.raises(UserError, match=r"profile host has no rates of geniex: .*--from"):
        engine_arguments(
            "geniex", model_spec("qwen3-4b"), DeviceProfile.load("host"), PlanRequest()
        )


@pytest.mark.full
def test_the_command_prints_answers_and_arguments() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["plan", "qwen3-4b", "--profile", X2, "--seq-lens", "64"])
    assert "Where it is fastest (fitted)" in shown.stdout
    words = ["plan", "qwen3-4b", "--profile", X2, "--print-args", "geniex"]
    assert runner.invoke(app, words).stdout == "--compute npu\n"
    document = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    assert document["arguments"] == ["--compute", "npu"]
    assert document["reason"].startswith("NPU (qairt)")


@pytest.mark.full
def test_an_npu_that_compiles_graphs_is_given_experts() -> None:
    """Where the fitted profile of its chip predicts a gain."""
    spec, request = model_spec("gpt-oss-20b"), PlacementRequest(profile=X2, seq_lens=(64,))
    planned, for_qnn = (choose(spec, replace(request, npu=x)).plan for x in ("auto", "qnn"))
    assert planned is not None
    assert planned.npu_experts
    assert for_qnn is not None
    assert for_qnn.npu_experts == planned.npu_experts

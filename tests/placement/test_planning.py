"""`hetero plan` and `hetero.plan`: options, documents and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero import UserError
from hetero.backends.formats import DEFAULT_CACHE
from hetero.models.graph import model_graph
from hetero.models.random_models import known_config
from hetero.placement.planning import parse_lengths, planned_cache, spec_on
from hetero.profiler.records import DeviceProfile
from hetero.solver.errors import PlanError
from tests.support.helpers import Command

KEYS = {
    "model", "profile", "objective", "solve_s", "ops", "totals", "graph_sizes", "memory_bytes",
}  # fmt: skip
OP_KEYS = {"phase", "m", "op", "n", "k", "strategy", "tiles", "predicted_s", "candidates"}
TOTAL_KEYS = {"phase", "m", "predicted_s", "tokens_per_s", "best_single_device_s"}
CHIP = ("--profile", "snapdragon-8-gen-3")


@pytest.mark.full
def test_json_has_the_documented_keys_and_is_the_plans_file(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    result = command(
        "plan", "llama-3-8b", *CHIP, "--seq-lens", "64,300", "--json", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert set(document) >= KEYS
    assert document == json.loads(out.read_text())
    assert all(set(op) >= OP_KEYS for op in document["ops"])
    assert all(set(total) >= TOTAL_KEYS for total in document["totals"])
    assert {(t["phase"], t["m"]) for t in document["totals"]} == {
        ("prefill", 64), ("prefill", 300), ("decode", 1)
    }  # fmt: skip
    losers = [
        c for op in document["ops"] for c in op["candidates"] if c["strategy"] != op["strategy"]
    ]
    assert losers
    assert all(c["reason"] for c in losers)


@pytest.mark.full
def test_the_best_graph_sizes_for_a_distribution(command: Command) -> None:
    arguments = ("plan", "llama-3-8b", *CHIP, "--graph-sizes", "auto", "--json")
    arguments += ("--preparation-budget", "1.0")
    short = json.loads(command(*arguments, "--seq-lens", "96:50,400").stdout.splitlines()[-1])
    long = json.loads(command(*arguments, "--seq-lens", "96,400:50").stdout.splitlines()[-1])
    assert short["graph_sizes"] != long["graph_sizes"]
    assert max(short["graph_sizes"]) < max(long["graph_sizes"])
    assert any("graph sizes chosen for these lengths" in note for note in short["notes"])


@pytest.mark.full
def test_a_budget_that_cannot_bind_says_so(command: Command) -> None:
    arguments = ("plan", "llama-3.2-1b", *CHIP, "--graph-sizes", "auto", "--graph-memory", "1GiB")
    result = command(*arguments)
    assert "graphs of all sizes share their weights on this NPU" in " ".join(result.stdout.split())


@pytest.mark.full
def test_explain_shows_every_candidate_of_one_matmul(command: Command) -> None:
    result = command("plan", "llama-3-8b", *CHIP, "--seq-lens", "300", "--explain", "down")
    assert result.returncode == 0
    for strategy in ("gpu-only", "npu-only", "row-cut", "sequence-cut", "hybrid-cut"):
        assert strategy in result.stdout
    wrong = command("plan", "llama-3-8b", *CHIP, "--explain", "up_and_down")
    assert wrong.returncode == 2
    assert "the plan's matmuls are" in wrong.stderr


@pytest.mark.full
def test_a_plan_beside_another_chip(command: Command, tmp_path: Path) -> None:
    for ending in ("html", "md", "json"):
        report = tmp_path / f"r.{ending}"
        result = command(
            "plan", "llama-3.2-1b", *CHIP, "--seq-lens", "256", "--compare",
            "snapdragon-8-gen-3-strong-npu", "--report", str(report),
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert "What if" in report.read_text(encoding="utf-8")
        again = tmp_path / "again.html"
        if ending == "json":
            assert command("report", str(report), "--out", str(again)).returncode == 0
            assert "llama-3.2-1b" in again.read_text(encoding="utf-8")


@pytest.mark.full
def test_the_api_takes_lengths_with_weights() -> None:
    plan = hetero.plan(
        "llama-3-8b", "snapdragon-8-gen-3", seq_lens={96: 50.0, 400: 1.0}, graph_sizes="auto",
        preparation_budget_s=1.0, curves=False,
    )  # fmt: skip
    assert {t.m for t in plan.totals} == {96, 400, 1}
    assert plan.graph_sizes == (1, 96, 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_lens": (10**20,)}, "prompt lengths are token counts from 1 to 1048576"),
        ({"seq_lens": (1.5,)}, "prompt lengths are token counts"),
        ({"seq_lens": (True,)}, "prompt lengths are token counts"),
        ({"seq_lens": range(1, 3000)}, "at most 128 prompt lengths are solved, got 2999"),
        ({"graph_sizes": ()}, "graph sizes are token counts"),
        ({"graph_sizes": (0,)}, "graph sizes are token counts"),
        ({"memory_budget": 0.5}, "not a size of at least a byte"),
        ({"memory_budget": 0}, "not a size of at least a byte"),
        ({"memory_budget": 10**400}, "not a size"),
        ({"context": 10**20}, "--context is from 0 to 1048576 tokens"),
        ({"margin": float("nan")}, "margin"),
        ({"max_gpu_share": float("nan")}, "--max-gpu-share is between 0 and 1"),
    ],
)
def test_impossible_numbers_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, PlanError), match=message):
        hetero.plan("llama-3-8b", "host", **options)


def test_a_profile_takes_a_time_that_ends() -> None:
    for budget_s in (0.0, -1.0, 1e-320, float("inf"), float("nan")):
        with pytest.raises(UserError, match="budget_s is from 1 to 1e\\+06 seconds"):
            hetero.profile_device(budget_s=budget_s)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("64,256", ((64, 256), ())),
        ("64:3, 256", ((64, 256), (3.0, 1.0))),
        ("64:0.5", ((64,), (0.5,))),
    ],
)
def test_lengths_and_how_often_they_come(value: str, expected: object) -> None:
    assert parse_lengths(value, "--seq-lens") == expected


@pytest.mark.parametrize(
    "value", ["", ":", "64:", "64:nan", "64:inf", "64:-1", "x:1", "64:1:2", ":2,3"]
)
def test_other_lengths_are_refused(value: str) -> None:
    with pytest.raises(UserError, match="--seq-lens"):
        parse_lengths(value, "--seq-lens")


@pytest.mark.full
def test_a_plan_is_made_for_caches_that_the_profile_timed_or_those_asked_for() -> None:
    own = profile = DeviceProfile.load("snapdragon-8-gen-3")
    assert planned_cache(own) == "f16"
    floats = [p for p in own.other_predictors if not p.op.startswith("Attention+")]
    assert planned_cache(own.model_copy(update={"other_predictors": tuple(floats)})) == "f32"
    with pytest.raises(UserError, match="kv"):
        planned_cache(profile, "f8")
    spec, _ = spec_on("llama-3-8b", None, own)
    assert spec == model_graph(known_config("llama-3-8b"), "w4a16", "llama-3-8b", kv=DEFAULT_CACHE)
    steps = {
        kv: hetero.plan("llama-3-8b", profile, seq_lens=(64,), kv=kv, context=4096, curves=False)
        for kv in ("f32", "f16", "q8")
    }
    seconds = [x.totals[-1].predicted_s for x in steps.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.01 * seconds[-1]

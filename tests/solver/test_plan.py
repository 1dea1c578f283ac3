"""Execution plans: rules, resolution, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.backends.formats import WeightFormat
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import (
    Candidate,
    NonMatmulDevices,
    OpPlan,
    Tile,
    check_cover,
)
from hetero.solver.request import PlanRequest


def op(**changes: Any) -> OpPlan:
    fields: dict[str, Any] = {
        "phase": "prefill",
        "m": None,
        "op": "qkv",
        "n": 64,
        "k": 32,
        "strategy": "npu-only",
        "tiles": [{"device": "npu", "tokens": [0, None], "rows": [0, 64]}],
    }
    return OpPlan.model_validate(fields | changes)


def plan(*ops: OpPlan) -> ExecutionPlan:
    return ExecutionPlan(
        model="m", ops=ops, non_matmul=NonMatmulDevices(prefill="gpu", decode="gpu")
    )


def test_open_token_ranges_end_at_the_call() -> None:
    (tile,) = plan(op()).partition("prefill", 7, "qkv")
    assert tile.tokens == (0, 7)


def test_an_exact_entry_goes_before_one_for_any_length() -> None:
    exact = op(m=7, tiles=[{"device": "gpu", "tokens": [0, 7], "rows": [0, 64]}])
    for ops in ((op(), exact), (exact, op())):
        assert plan(*ops).partition("prefill", 7, "qkv")[0].device == "gpu"
        assert plan(*ops).partition("prefill", 8, "qkv")[0].device == "npu"


def test_a_missing_entry_names_operator_phase_and_length() -> None:
    with pytest.raises(PlanError, match="no entry for down in decode at 1 tokens"):
        plan(op()).partition("decode", 1, "down")


def test_row_cut_of_any_length_is_allowed_but_not_a_token_cut() -> None:
    rows = [
        {"device": "npu", "tokens": [0, None], "rows": [0, 32]},
        {"device": "gpu", "tokens": [0, None], "rows": [32, 64]},
    ]
    assert len(op(strategy="row-cut", tiles=rows).tiles) == 2
    tokens = [
        {"device": "npu", "tokens": [0, 32], "rows": [0, 64]},
        {"device": "gpu", "tokens": [32, None], "rows": [0, 64]},
    ]
    with pytest.raises(ValueError, match="needs an exact m"):
        op(strategy="sequence-cut", tiles=tokens)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ([((0, 4), (0, 3))], "cover 12 of 16"),
        ([((0, 4), (0, 4)), ((1, 2), (1, 2))], "overlaps another"),
        ([((0, 5), (0, 4))], "is outside 4×4"),
        ([((2, 2), (0, 4))], "is outside 4×4"),
    ],
)
def test_tiles_must_cover_once(tiles: list[Any], message: str) -> None:
    records = tuple(Tile(device="gpu", tokens=tokens, rows=rows) for tokens, rows in tiles)
    with pytest.raises(ValueError, match=message):
        check_cover(records, m=4, n=4, what="prefill qkv")


@given(st.data())
def test_every_guillotine_cut_covers(data: st.DataObject) -> None:
    m, n = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    row, token = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    parts = [((0, token), (0, row)), ((token, m), (0, row)), ((0, m), (row, n))]
    tiles = tuple(
        Tile(device="npu", tokens=t, rows=r) for t, r in parts if t[0] < t[1] and r[0] < r[1]
    )
    check_cover(tiles, m=m, n=n, what="any")


def test_files_round_trip_and_leave_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    plan(op()).save(target)
    assert ExecutionPlan.load(target) == plan(op())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_id_follows_the_placement_and_nothing_else() -> None:
    base = plan(op())
    assert base.plan_id == base.model_copy(update={"solve_s": 1.0}).plan_id
    moved = plan(op(tiles=[{"device": "gpu", "tokens": [0, None], "rows": [0, 64]}]))
    assert base.plan_id != moved.plan_id


def test_predictions_have_no_part_in_the_id() -> None:
    """A plan that adapts to other speeds and keeps its tiles keeps its id."""
    base = plan(op(predicted_s=1.0))
    entry = base.ops[0]
    candidate = Candidate(strategy="npu-only", predicted_s=2.0, reason="slower")
    changes: list[dict[str, Any]] = [
        {"predicted_s": 1.1},
        {"gpu_s": 0.5, "npu_s": 0.25, "energy_j": 3.0},
        {"candidates": (candidate,)},
    ]
    for change in changes:
        other = base.model_copy(update={"ops": (entry.model_copy(update=change),)})
        assert other.plan_id == base.plan_id, change
    two = base.model_copy(update={"ops": (entry, entry.model_copy(update={"m": 128}))})
    assert two.plan_id == two.model_copy(update={"ops": two.ops[::-1]}).plan_id


@pytest.mark.parametrize(
    "change",
    [
        {"order": "permuted"},
        {"precision": WeightFormat.W4A8},
        {"device": "gpu"},
        {"graph_size": 512},
        {"rows": (0, 32)},
    ],
)
def test_every_field_of_a_tile_has_a_part_in_the_id(change: dict[str, Any]) -> None:
    base = plan(op())
    entry = base.ops[0]
    tile = entry.tiles[0].model_copy(update=change)
    other = base.model_copy(
        update={"ops": (entry.model_copy(update={"tiles": (tile, *entry.tiles[1:])}),)}
    )
    assert other.plan_id != base.plan_id


def test_the_keys_of_earlier_plans_are_read() -> None:
    base = plan(op())
    total = {"phase": "prefill", "m": 64, "predicted_s": 1.0, "tokens_per_s": 64.0,
             "best_single_device_s": 1.0, "non_matmul_s": {"head": 0.5}, "mode": "both",
             "modes": {"cut": 2.0, "both": 1.0}}  # fmt: skip
    flight = {"mode": "both", "ops": [op(m=None).model_dump(mode="json")]}
    now = base.model_dump(mode="json") | {"totals": [total], "in_flight": [flight]}
    text = json.dumps(now)
    for new, old in [
        ("mode", "form"), ("modes", "forms"), ("non_matmul", "rest"), ("non_matmul_s", "rest_s"),
    ]:  # fmt: skip
        text = text.replace(f'"{new}":', f'"{old}":')
    assert ExecutionPlan.model_validate_json(text) == ExecutionPlan.model_validate(now)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": 3}, "ops: Input should be a valid array"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"schema_version": 2}, "schema_version: Input should be 1"),
        (
            {"non_matmul": {"prefill": "cpu", "decode": "gpu"}},
            "a CPU takes rows of matmuls and computes nothing else",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    document = json.loads(plan(op()).model_dump_json()) | change
    target = tmp_path / "plan.json"
    target.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(PlanError, match=message) as caught:
        ExecutionPlan.load(target)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_politely(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(PlanError):
            ExecutionPlan.load(file.name)


def test_between_two_lengths_the_longer_partition_is_clipped() -> None:
    rows: list[Any] = [
        {"device": "npu", "tokens": [0, 32], "rows": [0, 32], "graph_size": 32},
        {"device": "gpu", "tokens": [32, 40], "rows": [0, 32]},
        {"device": "gpu", "tokens": [0, 40], "rows": [32, 64]},
    ]
    known = plan(op(m=40, strategy="hybrid-cut", tiles=rows))
    for m in range(1, 41):
        check_cover(known.partition("prefill", m, "qkv"), m=m, n=64, what="clipped")
    assert [t.graph_size for t in known.partition("prefill", 20, "qkv")] == [32, None]
    with pytest.raises(PlanError, match="no entry for qkv in prefill at 41 tokens, only for up to"):
        known.partition("prefill", 41, "qkv")


@pytest.mark.parametrize(
    ("step_tokens", "longest", "expected"),
    [
        (None, None, (600,)),
        (256, None, (256, 256, 88)),
        (512, 300, (300, 300)),
        (600, None, (600,)),
    ],
)
def test_long_prompts_run_in_steps(
    step_tokens: int | None, longest: int | None, expected: tuple[int, ...]
) -> None:
    long = plan(op()).model_copy(update={"step_tokens": step_tokens})
    assert long.steps(600, longest) == expected


@pytest.mark.full
def test_what_is_faster_alone_has_one_reason_not_three() -> None:
    profile = DeviceProfile.load("snapdragon-8-gen-3")
    spec = model_spec("llama-3-8b")
    lengths = (64, 256, 1024)
    free = make_plan(spec, profile, PlanRequest(seq_lens=lengths))
    budget = make_plan(spec, profile, PlanRequest(seq_lens=lengths, memory_budget_bytes=5 << 30))
    of = {
        (op.phase, op.m, op.op, x.strategy): x.reason
        for plan in (free, budget)
        for op in plan.ops
        for x in op.candidates
        if x.predicted_s is not None and x.predicted_s < op.predicted_s * (1 - 1e-6)
    }
    assert of
    causes = ("other lengths", "all lengths share", "slower with it", "memory budget", "margin")
    for place, reason in of.items():
        assert sum(cause in reason for cause in causes) == 1, (place, reason)
    assert any("memory budget" in reason for reason in of.values())
    assert any("all lengths share it takes" in x.reason for op in free.ops for x in op.candidates)


def test_a_plan_names_the_devices_of_each_phase(tmp_path: Path) -> None:
    """By its totals and as a whole; the devices of a phase are those of its entries."""
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    solved = make_plan(model_spec("llama-3-8b"), chip, PlanRequest(seq_lens=(64, 256)))
    assert [(x.phase, x.depth_from, x.devices) for x in solved.phases] == [
        ("prefill", 0, ("gpu", "npu")),
        ("decode", 0, ("gpu", "npu")),
    ]
    for planned in solved.phases:
        assert set(planned.devices) == solved.devices_of(planned.phase)
        totals = [x for x in solved.totals if x.phase == planned.phase]
        assert {kind for x in totals for kind in x.devices} == set(planned.devices)
        assert planned.predicted_s == max(totals, key=lambda x: x.m).predicted_s
    solved.save(tmp_path / "plan.json")
    assert ExecutionPlan.load(tmp_path / "plan.json") == solved


@pytest.mark.parametrize(
    ("head", "devices"), [("gpu", {"npu"}), ("npu", {"npu"}), ("both", {"gpu", "npu"})]
)
def test_an_output_head_that_is_cut_is_work_of_both(head: str, devices: set[str]) -> None:
    npu = {"device": "npu", "tokens": [0, None], "rows": [0, 64]}
    gpu = {**npu, "device": "gpu"}
    halves = [{**npu, "rows": [0, 32]}, {**gpu, "rows": [32, 64]}]
    tiles = {"gpu": [gpu], "npu": [npu], "both": halves}[head]
    strategy = "row-cut" if head == "both" else f"{head}-only"
    ops = [
        changed
        for phase in ("prefill", "decode")
        for changed in (
            op(phase=phase),
            op(phase=phase, op="lm_head", tiles=tiles, strategy=strategy),
        )
    ]
    on_npu = NonMatmulDevices(prefill="npu", decode="npu")
    planned = plan(*ops).model_copy(update={"non_matmul": on_npu})
    assert planned.devices_of("prefill") == planned.devices_of("decode") == devices
    assert planned.apart == (head != "both")

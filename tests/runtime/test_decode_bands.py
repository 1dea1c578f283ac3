"""Decoding moves to other devices at a depth, between two steps, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.protocol import DeviceKind
from hetero.backends.registry import open_device
from hetero.measuring.executed import opened
from hetero.models import LoadedModel, model_spec, open_model
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.plan import DecodeBand, Tile
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.request import PlanRequest
from tests.runtime.models import greedy_tokens, tiny_model
from tests.runtime.test_adaptive import GRAPHS

TOKENS = np.random.default_rng(6).integers(0, 263, 40).tolist()
CHIP = "snapdragon-8-elite"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> LoadedModel:
    folder: Path = tiny_model(tmp_path_factory.mktemp("tiny"))
    return open_model(str(folder), weights="f32")


def band_on(spec: ModelGraph, depth: int, device: DeviceKind, rows: DeviceKind) -> DecodeBand:
    """Decode steps that attend on a device and have their matmuls on the same or another."""
    plan = single_device(spec, rows)
    ops = tuple(op for op in plan.ops if op.phase == "decode" and op.op not in spec.sampled)
    return DecodeBand(
        depth_from=depth, device=device, devices=tuple(sorted({device, rows})), ops=ops
    )


def cut(band: DecodeBand) -> DecodeBand:
    """The same with half of the rows of each matmul on either device."""

    def halves(n: int) -> tuple[Tile, ...]:
        half = n // 32 * 16
        return (
            Tile(device="npu", tokens=(0, None), rows=(0, half)),
            Tile(device="gpu", tokens=(0, None), rows=(half, n)),
        )

    ops = [op.model_copy(update={"tiles": halves(op.n), "strategy": "row-cut"}) for op in band.ops]
    return band.model_copy(update={"ops": tuple(ops), "devices": ("gpu", "npu")})


def engine_of(model: LoadedModel, plan: ExecutionPlan) -> Engine:
    devices: dict[DeviceKind, Any] = {
        "gpu": open_device("reference", kind="gpu", asynchronous=True),
        "npu": open_device("reference", kind="npu", graph_sizes=GRAPHS),
    }
    return Engine(model.weights, plan, devices, max_seq_len=200)


def works(engine: Engine) -> set[str]:
    """Devices that computed anything but the output head in the last step."""
    return {x.kind for x in engine.runner.last_step.launches if x.kind and x.node != "lm_head"}


def test_decoding_moves_between_two_steps_and_no_token_changes(loaded: LoadedModel) -> None:
    """GPU, then matmuls on the NPU with attention on the GPU, then the NPU, then both."""
    spec = loaded.spec()
    with engine_of(loaded, single_device(spec, "gpu")) as engine:
        wanted = greedy_tokens(engine, TOKENS, 40)
    bands = (
        band_on(spec, 46, "gpu", "npu"),
        band_on(spec, 52, "npu", "npu"),
        cut(band_on(spec, 60, "gpu", "gpu")),
    )
    plan = single_device(spec, "gpu").model_copy(update={"bands": bands})
    with engine_of(loaded, plan) as engine:
        context = engine.new_context()
        logits = engine.prefill(context, TOKENS)
        found, seen = [int(np.argmax(logits))], {}
        while len(found) < 40:
            seen[context.cached] = works(engine)
            logits = engine.decode(context, found[-1])
            found.append(int(np.argmax(logits)))
            seen[context.cached - 1] = works(engine)
        assert found == wanted
        moves = [(46, {"gpu"}), (52, {"gpu", "npu"}), (60, {"npu"}), (79, {"gpu", "npu"})]
        start = 40
        for stop, kinds in moves:
            assert all(seen[depth] == kinds for depth in range(start, stop)), (start, stop)
            start = stop
        context.truncate(45)
        engine.decode(context, wanted[5])
        assert works(engine) == {"gpu"}, "a shorter context is decoded where it was"


def test_contexts_of_one_step_decode_where_their_mean_depth_is(loaded: LoadedModel) -> None:
    spec = loaded.spec()
    plan = single_device(spec, "gpu").model_copy(
        update={"bands": (band_on(spec, 50, "npu", "npu"),)}
    )
    with engine_of(loaded, plan) as engine:
        short, long = engine.new_context(), engine.new_context()
        for context, tokens in ((short, TOKENS[:30]), (long, TOKENS + TOKENS)):
            engine.prefill(context, tokens)
        rows = engine.decode_rows([(short, 3), (long, 4)])
        assert works(engine) == {"npu"}
        with engine_of(loaded, single_device(spec, "gpu")) as alone:
            for tokens, token, row in ((TOKENS[:30], 3, rows[0]), (TOKENS + TOKENS, 4, rows[1])):
                context = alone.new_context()
                alone.prefill(context, tokens)
                assert row is not None
                np.testing.assert_allclose(row, alone.decode(context, token), rtol=1e-4, atol=1e-4)


def test_a_device_that_a_band_needs_must_be_there(loaded: LoadedModel) -> None:
    spec = loaded.spec()
    plan = single_device(spec, "gpu").model_copy(
        update={"bands": (band_on(spec, 50, "npu", "npu"),)}
    )
    assert plan.devices() == {"gpu", "npu"}
    assert plan.devices_of("decode") == {"gpu"}
    assert plan.apart
    assert plan.plan_id != single_device(spec, "gpu").plan_id
    with pytest.raises(PlanError, match="the depths of decode's bands rise"):
        ExecutionPlan.parse(
            plan.model_copy(update={"bands": plan.bands * 2}).model_dump_json(), "x"
        )
    assert ExecutionPlan.parse(plan.model_dump_json(), "x") == plan


@pytest.fixture(scope="module")
def solver() -> PreparedSolver:
    spec, profile = model_spec("llama-3.2-1b"), DeviceProfile.load(CHIP)
    return prepare_solver(
        spec, profile, PlanRequest(seq_lens=spread_lengths((), 512), explain=False)
    )


@pytest.mark.full
def test_a_simulated_chip_decodes_faster_from_the_depth_on(solver: PreparedSolver) -> None:
    """In virtual time, with the step that moves no slower than the ones before it."""
    moving = solver.with_bands(4096)
    (band,) = moving.plan.bands
    assert 512 < band.depth_from < 4096
    stays = _step_seconds(solver.plan, [band.depth_from + 64] * 4)
    moves = _step_seconds(moving.plan, [band.depth_from - 64, *[band.depth_from + 64] * 3])
    assert max(moves[1:]) < 0.9 * min(stays)
    assert moves[1] == pytest.approx(moves[-1], rel=0.02), "moving itself takes no time"
    assert max(moves) < stays[0]
    assert band.predicted_s is not None
    assert moves[-1] == pytest.approx(band.predicted_s, rel=0.1)


def _step_seconds(plan: ExecutionPlan, depths: list[int]) -> list[float]:
    """Seconds of decode steps after so many tokens."""
    profile = DeviceProfile.load(CHIP)
    with opened(profile, "llama-3.2-1b", plan, max_seq_len=4096) as (chip, engine, context):
        found = []
        for depth in depths:
            context.truncate(min(depth, len(context)))
            if depth > len(context):
                engine.prefill(context, [1] * (depth - len(context)))
            start_s = chip.clock.now()
            engine.decode(context, 1)
            found.append(chip.clock.now() - start_s)
    return found

"""One directory with weights of two storages: each phase computes with its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.compiling.calibration import calibrated_together
from hetero.errors import ModelError, UserError
from hetero.models import open_model, quantized
from hetero.models.model_weights import ModelWeights
from hetero.models.packed_file import OtherStorage
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level
from hetero.solver.plan import Phase
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest
from tests.runtime.models import context_of
from tests.runtime.test_split import devices_of
from tests.support.helpers import Command

TEXT = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 6
TOKENS = 37


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as w8a8 and w4a16, every matmul with a shadow."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "text").write_text(TEXT)
    formats = [WeightFormat.W8A8, WeightFormat.W4A16]
    first, others = calibrated_together(formats, "demo", folder / "text", 96, outliers="all")
    return quantized.save(first, folder / "out", also=others)


def in_format(
    plan: ExecutionPlan, weight_format: WeightFormat, phases: tuple[Phase, ...]
) -> ExecutionPlan:
    """The plan with all tiles of these phases in a format."""
    ops = [
        op.model_copy(
            update={
                "tiles": tuple(x.model_copy(update={"precision": weight_format}) for x in op.tiles)
            }
        )
        if op.phase in phases
        else op
        for op in plan.ops
    ]
    return plan.model_copy(update={"ops": tuple(ops)})


def run(weights: ModelWeights, plan: ExecutionPlan, tokens: list[int], pair: str) -> Any:
    """Logits after a prompt and after one more token, [2, vocab]."""
    with Engine(weights, plan, devices_of(pair), max_seq_len=64, adapt=False) as engine:
        context = context_of(engine)
        first = engine.prefill(context, tokens).copy()
        return np.stack([first, engine.decode(context, tokens[3]).copy()])


@pytest.mark.parametrize("pair", ["reference", pytest.param("real", marks=pytest.mark.full)])
def test_each_phase_computes_with_its_own(stored: Path, pair: str) -> None:
    loaded = open_model(stored, verify=True)
    spec, tokens = loaded.spec(), loaded.encode(TEXT)[:TOKENS]
    assert (spec.weight_format, spec.also) == ("w8a8", ("w4a16",))
    plan = layer_level(spec)
    mixed = run(loaded.weights, in_format(plan, WeightFormat.W4A16, ("decode",)), tokens, pair)
    alone = run(open_model(stored, weights="w8a8").weights, plan, tokens, pair)
    assert np.array_equal(mixed[0], alone[0])
    assert not np.array_equal(mixed[1], alone[1])


@pytest.mark.full
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_phase_in_the_other_storage_is_that_model(stored: Path, phase: Phase) -> None:
    """But for the embeddings, which are of the first storage: as floats they are all the same."""
    loaded, other = open_model(stored), open_model(stored, weights="w4a16")
    assert isinstance(other.weights, OtherStorage)
    assert other.weights.outliers() == loaded.weights.outliers()
    for index in range(loaded.config.num_layers):
        besides = loaded.weights.block(index).also[WeightFormat.W4A16.storage]
        block = other.weights.block(index)
        for name, matrix in besides.items():
            assert np.array_equal(matrix.data, block.matrix(name).data)
    plan = in_format(layer_level(loaded.spec()), WeightFormat.W4A16, ("prefill", "decode"))
    tokens = loaded.encode(TEXT)[:TOKENS]
    mixed = run(loaded.weights, plan, tokens, "reference")
    alone = run(other.weights, layer_level(other.spec()), tokens, "reference")
    row = int(phase == "decode")
    off = np.linalg.norm(mixed[row] - alone[row]) / np.linalg.norm(alone[row])
    assert 0 < off < 0.2  # w4's embeddings against w8's


def test_hot_columns_are_in_neither(stored: Path) -> None:
    block = open_model(stored).weights.block(0)
    assert block.shadows
    dense = open_model("demo", weights="f32").weights.block(0)
    for name, shadow in block.shadows.items():
        assert not block.matrix(name).dequantize()[:, shadow.channels].any()
        wanted = dense.matrix(name).dequantize()[:, shadow.channels].astype(np.float16)
        assert np.array_equal(shadow.weight, wanted)


def test_a_plan_in_a_format_that_is_not_stored_is_refused(stored: Path) -> None:
    loaded = open_model(stored)
    plan = in_format(layer_level(loaded.spec()), WeightFormat.W8A16, ("decode",))
    with pytest.raises(PlanError, match=r"takes q8 weights; demo has q4 and q8r"):
        plan.check_fits(loaded.spec())
    in_format(layer_level(loaded.spec()), WeightFormat.W4A8, ("decode",)).check_fits(loaded.spec())


def test_a_damaged_second_file_is_refused(stored: Path, tmp_path: Path) -> None:
    for path in stored.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    second = tmp_path / "weights-q4.safetensors"
    data = bytearray(second.read_bytes())
    data[-5000] ^= 1
    second.write_bytes(data)
    open_model(tmp_path)
    with pytest.raises(ModelError, match=r"weights-q4\.safetensors: does not have the SHA-256"):
        open_model(tmp_path, verify=True)
    second.unlink()
    with pytest.raises(ModelError, match="is missing"):
        open_model(tmp_path)
    with pytest.raises(ModelError, match="holds q8r and q4 weights, which serve"):
        open_model(stored, weights="w8a16")


def test_the_excess_of_one_format_is_not_stored_beside_another(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    formats = [WeightFormat.W8A8, WeightFormat.W4A16]
    with pytest.raises(UserError, match="--outliers paper adds"):
        calibrated_together(formats, "demo", tmp_path / "text", 96, outliers="paper")


@pytest.mark.full
def test_plan_and_bench_use_what_generate_uses(stored: Path, command: Command) -> None:
    options = ("--profile", "host-avx2", "--seq-lens", "64", "--json")
    plan = json.loads(command("plan", str(stored), *options).stdout.splitlines()[-1])
    loaded = open_model(stored)
    request = PlanRequest(seq_lens=(64,), explain=False)
    solver = prepare_solver(loaded.spec(), DeviceProfile.load("host-avx2"), request)
    assert plan["notes"][0] == "prompts are computed in {}, answers in {}".format(*solver.formats)
    tiles = {(x["phase"], y["precision"]) for x in plan["ops"] for y in x["tiles"]}
    wanted = {
        (x.phase, y.precision and y.precision.value) for x in solver.plan.ops for y in x.tiles
    }
    assert tiles == wanted
    done = command("bench", str(stored), "-p", "16", "-n", "1", "-r", "1", "-o", "json")
    assert json.loads(done.stdout)["environment"]["weights"] == "w8a8,w4a16"


def test_names_of_formats(tmp_path: Path, command: Command) -> None:
    for asked, said in (("w8a8,q3", "'q3' is not a format"), ("w4a8,w4a16", "in one way twice")):
        done = command("quantize", "demo", "--weights", asked, "--out", str(tmp_path / "x"))
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())

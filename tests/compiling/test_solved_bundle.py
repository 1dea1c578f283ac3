"""A bundle that was solved by its chip's profile plans any length, on the emulated chip."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hetero import LLM
from hetero.compiling.npu_graphs import (
    CompileRequest,
    compile_model,
    prepare,
    prepare_by_default,
)
from hetero.errors import UserError
from hetero.generation.loading import OTHER_SOLVER
from hetero.models.bundle import BUNDLE_FILE, BundleManifest, find_bundle
from hetero.profiler.records import DeviceProfile
from hetero.profiler.scaling import scaled
from hetero.runtime.adaptive import Adaptation
from hetero.solver.plan import PHASES, Phase
from hetero.solver.prepared import PreparedSolver
from tests.support.checkpoints import Case, make_checkpoint
from tests.support.helpers import Command

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("no_graphs")

GRAPHS = (8, 32)
CONTEXT = 80
PROMPT = [3 + i % 90 for i in range(50)]
CHIP = "snapdragon-8-gen-3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    changes = {"num_hidden_layers": 1, "vocab_size": 96, "hidden_size": 256,
               "intermediate_size": 2048}  # fmt: skip
    make_checkpoint(Case("tiny", "Llama", changes), folder)
    return str(folder)


def slow_gpu(*phases: Phase) -> DeviceProfile:
    """The chip's profile with a GPU that is slow in these phases: the model is small for it."""
    profile = DeviceProfile.load(CHIP)
    formats = {x.weight_format for x in profile.predictors}
    keys = product(("gpu", "npu"), PHASES, formats)
    slow = {key: 100.0 if key[0] == "gpu" and key[1] in phases else 1.0 for key in keys}
    return scaled(profile, slow)


@pytest.fixture(scope="module")
def request_of(model: str) -> CompileRequest:
    profile = slow_gpu(*PHASES)
    return CompileRequest(model, "sm8650", profile=profile, graph_sizes=GRAPHS, max_seq_len=CONTEXT)


@pytest.fixture(scope="module")
def bundle(request_of: CompileRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "bundle"
    manifest = compile_model(prepare(request_of), out)
    assert manifest.solver is not None
    assert manifest.solver.adapts
    return out


@pytest.mark.full
def test_it_has_the_graphs_of_every_length_and_of_other_speeds(bundle: Path) -> None:
    with LLM(str(bundle)) as llm:
        assert OTHER_SOLVER not in llm.choice.notes
        solver, store = llm.choice.solver, llm.devices.devices["npu"].store  # type: ignore[attr-defined]
        assert isinstance(solver, PreparedSolver)
        assert llm.engine.deployment.window > 1
        engine, context = llm.engine, llm.context
        first, strategies = engine.placement, set()
        for slow in (None, "gpu", "npu"):
            now = solver
            if slow is not None:
                now = solver.drifted({(slow, phase): 8.0 for phase in PHASES})
                change = Adaptation(first.with_plan(now.plan, now), f"the {slow} is slow")
                engine.deployment.change_cuts(change)
            for m in range(1, engine.placement.longest + 1):
                engine.steps.step(context, "prefill", m)
                strategies |= {x.strategy for x in now.plan_for(m).ops if x.op != "lm_head"}
            for m in range(1, 9):
                engine.steps.step(context, "decode", m, m)
        assert (store.counts.compiled, store.counts.rebuilt) == (0, [])
        assert len(strategies) > 1


@pytest.mark.full
def test_it_gives_the_text_of_a_pc(model: str, bundle: Path) -> None:
    with LLM(model, device="npu", max_seq_len=CONTEXT, weights="w4a16", npu="reference") as llm:
        wanted = llm.generate(PROMPT, max_tokens=6).tokens
    with LLM(str(bundle)) as llm:
        assert llm.generate(PROMPT, max_tokens=6).tokens == wanted
        assert {tile.device for op in llm.plan.ops for tile in op.tiles} == {"gpu", "npu"}


def test_times_of_another_profile_are_refused(bundle: Path) -> None:
    with pytest.raises(UserError, match="so --profile cannot be honoured"):
        LLM(str(bundle), profile=CHIP)


@pytest.mark.full
def test_a_solver_of_another_version_is_not_used(bundle: Path, tmp_path: Path) -> None:
    """Its plan, which the graphs are of, runs as it is."""
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    manifest = find_bundle(copy)
    assert manifest is not None
    assert manifest.solver is not None
    other = manifest.solver.model_copy(update={"seq_lens": (7,)})
    changed: BundleManifest = manifest.model_copy(update={"solver": other})
    (copy / BUNDLE_FILE).write_text(changed.document())
    with LLM(str(copy)) as llm:
        assert OTHER_SOLVER in llm.choice.notes
        assert llm.choice.solver is None
        assert llm.plan.plan_id == manifest.plan_id
        assert len(llm.generate(PROMPT, max_tokens=2).tokens) == 2


def test_graphs_for_other_speeds_are_left_out_where_they_do_not_fit(
    request_of: CompileRequest,
) -> None:
    """The NPU has no part in decoding, and would on a device with a slower GPU."""
    request_of = replace(request_of, profile=slow_gpu("prefill"), max_seq_len=max(GRAPHS))
    whole = prepare(request_of)
    least = prepare(replace(request_of, max_bytes=whole.estimate.graphs_bytes - 1))
    assert least.solved is not None
    assert not least.solved.record.adapts
    assert least.estimate.graphs_bytes < whole.estimate.graphs_bytes
    with pytest.raises(UserError, match="--max-size 0 MiB is less than"):
        prepare(replace(request_of, max_bytes=1))
    with pytest.raises(UserError, match="--seq-lens and --max-size are for plans that are solved"):
        prepare(replace(request_of, strategy="layer", max_bytes=1))


def test_without_a_profile_it_is_solved_by_that_of_the_chip(
    command: Command, model: str, request_of: CompileRequest
) -> None:
    plain = replace(request_of, profile=None)
    assert prepare(plain).solved is None
    assert prepare_by_default(plain).solved is not None
    other = prepare_by_default(replace(plain, soc="sm8550"))
    assert other.solved is None
    assert "no profile of Snapdragon 8 Gen 2 is shipped" in other.notes[0]
    other = prepare_by_default(replace(plain, weights="w8a16"))
    assert other.solved is None
    assert "snapdragon-8-gen-3 has no times of w8a16" in other.notes[0]
    done = command("compile", model, "--soc", "sm8550", "--dry-run")
    assert done.returncode == 0
    assert "layer level, matmuls of prompts on the NPU, because" in done.stderr

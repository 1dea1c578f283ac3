"""Predicted times of types: uniform ones as plans have them, and no choice that is faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends.formats import WeightFormat
from hetero.cli import app as cli
from hetero.compiling.precision import Losses, Tensors, choose, least_cost
from hetero.compiling.type_costs import CONTEXT, PROMPT_TOKENS, Goal, StepName, StepTimes
from hetero.errors import UserError
from hetero.models import model_spec
from hetero.models.gguf import GgufFile
from hetero.models.gguf.float_rows import GgufRows
from hetero.models.gguf.kinds import Kind
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.report.page import to_html
from hetero.solver.request import PlanRequest
from tests.models.gguf_files import write_tiny
from tests.profiler.fakes import only_formats
from tests.support.selection import examples

STEPS: tuple[StepName, ...] = get_args(StepName)
HOST = DeviceProfile.load("host")
WORDS = ("blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight")


def opened(folder: Path, profile: DeviceProfile = HOST) -> tuple[Tensors, StepTimes]:
    path = write_tiny(folder / "m.gguf")
    tensors = Tensors.of(GgufRows(GgufFile(path)))
    return tensors, tensors.step_times(model_spec(path, "gguf-a16"), profile)


@cache
def small(folder: Path) -> tuple[Tensors, StepTimes]:
    """A model three of whose tensors may have three types."""
    tensors, times = opened(folder)
    kinds = (Kind.Q4_0, Kind.Q5_1, Kind.Q8_0)
    return Tensors(tensors.weights, dict.fromkeys(WORDS, kinds)), times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


@pytest.mark.full
@pytest.mark.parametrize("int8", [False, True])
def test_uniform_types_take_as_long_as_planned(folder: Path, int8: bool) -> None:
    tensors, times = opened(folder)
    spec = model_spec(folder / "m.gguf", "w4a8" if int8 else "w4a16")
    request = PlanRequest(seq_lens=(PROMPT_TOKENS,), context=CONTEXT)
    totals = make_plan(spec, HOST, request).totals
    kinds = dict.fromkeys(tensors.options, Kind.Q4_0)
    for step, total in zip(STEPS, totals, strict=True):
        alone = {x.devices: x.cost(kinds, int8) for x in times.layouts[step]}
        assert alone["gpu",] == pytest.approx(total.single_devices["gpu"], rel=1e-4)
        # What an NPU's calls cost besides their kernels differs a little by the format.
        assert alone["npu",] == pytest.approx(total.single_devices["npu"], rel=0.15)
        fastest, devices = times.fastest(step, kinds, int8)
        assert alone[devices] == fastest == min(alone.values())
        assert ("cpu",) in alone


@pytest.mark.full
def test_fewer_bits_are_read_faster(folder: Path) -> None:
    """By predictions from the bytes of 4-bit weights; kernels of files may take longer."""
    known = only_formats(HOST, WeightFormat.W4A16, WeightFormat.W4A8, WeightFormat.W8A8)
    tensors, times = opened(folder, known)
    order = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16, Kind.F32)
    steps = [times.seconds("decode", dict.fromkeys(tensors.options, x), False) for x in order]
    assert steps == sorted(steps)
    prompts = [times.seconds("prompt", dict.fromkeys(tensors.options, order[0]), x)
               for x in (True, False)]  # fmt: skip
    assert prompts[0] < prompts[1]


@pytest.mark.full
@settings(deadline=None, max_examples=examples(25))
@given(seed=st.integers(0, 10**6), budget=st.floats(0, 3), step=st.sampled_from(STEPS))
def test_nothing_within_the_budget_is_faster(
    seed: int, budget: float, step: StepName, folder: Path
) -> None:
    tensors, times = small(folder)
    rng = np.random.default_rng(seed)

    def drawn(names: Mapping[str, Sequence[Kind]]) -> Mapping[str, Mapping[Kind, float]]:
        return {x: {y: float(rng.exponential()) for y in kinds} for x, kinds in names.items()}

    losses = Losses(drawn(tensors.smaller), drawn({x: tensors.options[x] for x in WORDS}))
    found = least_cost(tensors, losses, budget, Goal(step, times))
    own = {x: kinds[0] for x, kinds in tensors.options.items()}
    least = math.inf
    for way in itertools.product(*(tensors.options[x] for x in WORDS)):
        kinds = own | dict(zip(WORDS, way, strict=True))
        changed = {x: y for x, y in kinds.items() if y is not own[x]}
        if losses.total(changed, int8=False) <= budget:
            least = min(least, times.seconds(step, kinds, False))
        if losses.total(kinds, int8=True) <= budget:
            least = min(least, times.seconds(step, kinds, True))
    assert found.cost == pytest.approx(least, rel=1e-9)
    assert times.seconds(step, own | found.kinds, found.int8) == pytest.approx(least, rel=1e-9)
    assert found.gap < 1e-9
    if not found.int8:
        assert losses.total(found.kinds, int8=False) <= budget


def test_an_npu_of_graphs_has_no_part_in_mixed_types(folder: Path) -> None:
    tensors, times = opened(folder, DeviceProfile.load("snapdragon-8-gen-3"))
    kinds = {x: y[0] for x, y in tensors.options.items()}
    for step in STEPS:
        assert times.fastest(step, kinds, False)[1] == ("gpu",)
    assert any("computes matrices of one format" in x for x in times.notes)


def test_a_profile_without_the_formats_says_how_to_measure_them(folder: Path) -> None:
    kept = tuple(x for x in HOST.predictors if x.weight_format is WeightFormat.W8A8)
    with pytest.raises(UserError, match=r"profile host.*hetero profile"):
        opened(folder, HOST.model_copy(update={"predictors": kept}))


@pytest.mark.full
def test_a_goal_that_gains_nothing_is_said(folder: Path) -> None:
    tensors, times = opened(folder)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 260, 48).tolist()]
    losses = tensors.losses(texts, int8=True)
    goals = [Goal("bytes", times), Goal("decode", times)]
    both = choose(tensors, losses, texts, 0.02, goals=goals)
    assert [x.name.partition(",")[0] for x in both.choices] == ["fewest bytes", "fastest answers"]
    fewest, fastest = both.choices
    assert fewest.nbytes <= fastest.nbytes
    assert fastest.seconds["decode"] <= fewest.seconds["decode"]
    assert not both.refused
    with pytest.raises(UserError, match=r"every smaller type of any tensor of .* costs more"):
        choose(tensors, losses, texts, 1e-12, goals=goals)


@pytest.mark.full
def test_the_plan_says_what_quality_buys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "m.gguf", tmp_path / "text"
    write_tiny(path)
    text.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 300)))
    words = ["plan", str(path), "--profile", "host", "--seq-lens", "32", "--calibrate", str(text)]
    report = tmp_path / "plan.md"
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--quality", "0.02", "--json"])
    assert ended.value.code == 0
    plan = ExecutionPlan.parse(capsys.readouterr().out.splitlines()[-1], "stdout")
    assert plan.quality is not None
    assert plan.quality.budget == 0.02
    names = {x.name.partition(",")[0] for x in plan.quality.choices}
    assert names == {"fewest bytes", "fastest prompt", "fastest answers"}
    by_name = {x.name.partition(",")[0]: x for x in plan.quality.choices}
    assert by_name["fastest prompt"].prompt_s == min(x.prompt_s for x in by_name.values())
    # Inputs in int8 need an option, so they are no way to fewer bytes.
    floats = [x for x in by_name.values() if x.inputs == "float"]
    assert by_name["fewest bytes"].weight_bytes == min(x.weight_bytes for x in floats)
    assert all(x.kl <= 0.02 for x in plan.quality.choices)
    uniform = {x.name for x in plan.quality.frontier}
    assert {"Q4_0", "Q4_0, int8 inputs", "Q8_0", "F16"} <= uniform
    plan.report(report)
    assert "## What quality buys" in report.read_text()
    assert "| Q4_0, int8 inputs | " in report.read_text()
    page = to_html(plan.model_copy(update={"ops": (), "totals": ()}))
    assert "What quality buys" in page
    assert "Q4_0, int8 inputs" in page

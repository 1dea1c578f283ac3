"""Compiler mode: the physical model on known cases, and the profile of a chip that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.lab.chip_fit import fit_model, leave_one_out
from hetero import LLM
from hetero.backends.host.clock import ManualClock
from hetero.cli.app import main
from hetero.models import model_spec
from hetero.profiler.compiled import (
    SNAPDRAGON_8_GEN_3,
    CallWork,
    ChipModel,
    Scheduler,
    compiler_profile,
)
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileWarning
from hetero.profiler.quality import grade
from hetero.profiler.records import DeviceProfile, DeviceRecord, MatMulRow
from tests.profiler.fakes import W4

TRUE = ChipModel(launch_s=2e-4, dram_bytes_per_s=4e10, hvx_bytes_per_s=5e10)
WORKS = [
    CallWork(1, 1e7, 4e7),
    CallWork(1, 2e7, 9e7),
    CallWork(2, 5e7, 3e8),
    CallWork(1, 4e7, 1e7),
    CallWork(1, 1e6, 1e7),
]


def test_the_slower_of_memory_and_vector_units_decides() -> None:
    assert TRUE.seconds(CallWork(1, 4e7, 1e7)) == pytest.approx(2e-4 + 1e-3)
    assert TRUE.seconds(CallWork(2, 4e7, 1e8)) == pytest.approx(4e-4 + 2e-3)


def test_known_constants_are_found_again() -> None:
    found = fit_model(WORKS, [TRUE.seconds(work) for work in WORKS], TRUE.dram_bytes_per_s)
    for work in WORKS:
        assert found.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)


@pytest.mark.full
def test_a_point_that_does_not_fit_shows_when_it_is_left_out() -> None:
    seconds = [TRUE.seconds(work) for work in WORKS]
    errors = leave_one_out(WORKS, seconds, TRUE.dram_bytes_per_s)
    assert max(map(abs, errors)) < 0.05
    seconds[2] *= 3
    assert leave_one_out(WORKS, seconds, TRUE.dram_bytes_per_s)[2] < -0.5


def test_the_fitted_model_is_physical() -> None:
    assert SNAPDRAGON_8_GEN_3.launch_s >= 0
    assert 1e10 < SNAPDRAGON_8_GEN_3.hvx_bytes_per_s < 1e12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DeviceProfile:
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    shapes = ((256, 256), (512, 256), (256, 512), (512, 512))
    return compiler_profile(
        "sm8750", shapes, (1, 32, 64), directory=tmp_path_factory.mktemp("schedules")
    )


def test_a_profile_of_another_chip(small: DeviceProfile, tmp_path: Path) -> None:
    assert small.name == "sm8750"
    npu = small.devices["npu"]
    assert (npu.numbers, npu.backend) == ("compiler-predicted", "qnn")
    assert "Snapdragon 8 Elite" in npu.name
    assert small.devices["gpu"].numbers == "simulated"
    assert len(small.matmuls) == 12
    assert all(row.seconds > 0 for row in small.matmuls)
    assert any("compiler-predicted" in note for note in small.notes)
    small.save(tmp_path / "profile.json")
    assert DeviceProfile.load(tmp_path / "profile.json") == small


def test_its_graph_sizes_are_those_that_the_npu_opens(small: DeviceProfile) -> None:
    from hetero.backends.qnn.opening import DEFAULT_GRAPH_SIZES

    assert small.devices["npu"].capabilities.graph_sizes == DEFAULT_GRAPH_SIZES
    assert {row.m for row in small.matmuls} == {1, 32, 64}  # where it knows times is another thing
    assert small.devices["npu"].capabilities.launch_tokens[W4] == ((1, 256), (4096, 128))
    coverage = small.coverage
    assert (coverage.measured_tasks, coverage.grid_tasks, coverage.finished) == (12, 12, True)


@pytest.mark.parametrize(("budget_s", "graphs"), [(0.5, 1), (4.0, 4), (1e6, 8)])
def test_compiling_ends_with_its_budget(
    budget_s: float, graphs: int, monkeypatch: Any, tmp_path: Path
) -> None:
    """Small weights first, each graph a second; what is left out is predicted."""
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    clock = ManualClock()

    def row(scheduler: Scheduler, n: int, k: int, m: int) -> MatMulRow:
        clock.sleep(1.0)
        return MatMulRow(device="npu", weight_format=W4, m=m, n=n, k=k, seconds=1e-9 * m * n * k)

    monkeypatch.setattr("hetero.profiler.compiled._row", row)
    monkeypatch.setattr(Scheduler, "preparation_s", lambda *_: 1.0)
    profile = compiler_profile(
        "sm8650", ((512, 256), (256, 256), (256, 512), (512, 512)), (1, 32),
        budget_s=budget_s, directory=tmp_path, clock=clock,
    )  # fmt: skip
    assert len(profile.matmuls) == profile.coverage.measured_tasks
    assert (len(profile.matmuls) == 8) == (graphs == 8)
    assert profile.coverage.spent_s == len(profile.matmuls) <= max(budget_s, 1)
    assert profile.coverage.finished == (graphs == 8)
    assert (profile.matmuls[0].n, profile.matmuls[0].k) == (256, 256)
    done = f"Compiler-predicted: {len(profile.matmuls)} of 8 matmuls"
    assert any(x.startswith(done) for x in grade(profile).sentences) == (graphs < 8)


@pytest.mark.full
def test_a_model_is_planned_by_its_profile(tmp_path: Path) -> None:
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    matmuls = model_spec("demo").matmuls
    profile = compiler_profile(
        "sm8650", [(x.n, x.k) for x in matmuls], (1, 32, 64), directory=tmp_path
    )
    with pytest.warns(ProfileWarning, match="its gpu is Adreno"):
        llm = LLM("demo", npu="qnn", device="hetero", profile=profile, max_seq_len=64)
    with llm:
        assert DeviceRecord.of(llm.devices.devices["npu"]).numbers == "emulated"
        assert llm.generate("Once upon a time", max_tokens=2).text


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--weights", "w8a16"], "leave out --weights"), (["--resume"], "leave out --resume")],
)
def test_what_the_compiler_knows_nothing_of_is_refused(
    options: list[str], message: str, capsys: Any
) -> None:
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    with pytest.raises(SystemExit, match="2"):
        main(["profile", "--soc", "sm8650", *options])
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_solver_can_ask_it(small: DeviceProfile) -> None:
    cost = CostModel(small)
    graphs = small.devices["npu"].capabilities.graph_sizes
    row = max((x for x in small.matmuls if x.m in graphs), key=lambda row: row.seconds)
    found = float(cost.matmul_s("npu", row.weight_format, row.m, row.n, row.k).seconds)
    assert found == pytest.approx(row.seconds, rel=0.6)
    assert small.preparation_predictors[0].fixed_s >= 0


def test_a_name_that_is_no_chip_measures_this_machine(capsys: Any, monkeypatch: Any) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "hetero.measuring.profiling.profile_device", lambda path, **o: asked.update(o)
    )
    monkeypatch.setattr("hetero.cli.profile.report", lambda *_: None)
    with pytest.raises(SystemExit, match="0"):
        main(["profile", "--soc", "my-laptop"])
    assert asked["name"] == "my-laptop"


@pytest.mark.full
def test_the_command_writes_a_profile(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hetero.profiler.compiled.TOKENS", (1, 32))
    out = tmp_path / "chip.json"
    with pytest.raises(SystemExit, match="0"):
        main(["profile", "--soc", "sm8650", "--model", "demo", "--out", str(out), "--json"])
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert answer["name"] == "sm8650"
    assert DeviceProfile.load(out).devices["npu"].numbers == "compiler-predicted"

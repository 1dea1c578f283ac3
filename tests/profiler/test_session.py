"""Whole profiles on a virtual clock: complete, resumable at any row, pruned, quarantined."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends import null
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import ManualClock
from hetero.backends.ops import MatMul
from hetero.measuring.every_core import measure_every_core
from hetero.profiler import bandwidth, energy, non_matmul_ops, preparation, sync
from hetero.profiler.cost import CostModel
from hetero.profiler.device_overheads import BANDWIDTH_REPEATS
from hetero.profiler.errors import ProfileError
from hetero.profiler.grid import Shape
from hetero.profiler.journal import Journal, journal_path, read_entries, to_line
from hetero.profiler.non_matmul_ops import BLOCKS
from hetero.profiler.options import Event, Options
from hetero.profiler.records import DeviceProfile, EveryCore
from hetero.profiler.report import write_report
from hetero.profiler.session import MeasureEveryCore, profile_devices
from tests.profiler.fakes import GRAPHS, TOKENS, W4, devices, gpu_cost, npu_cost, options


def matmuls_only(**changes: object) -> Options:
    """Options without the other operations, whose timing takes most of a run's time."""
    return options(blocks=(), **changes)


def take(
    out: Path | None = None,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    opts: Options | None = None,
    every_core: MeasureEveryCore | None = None,
) -> DeviceProfile:
    """A profile of the null devices; `stop_after` rows the process is interrupted."""
    clock = ManualClock()
    seen = 0

    def progress(event: Event) -> None:
        nonlocal seen
        if event.what == "matmuls":
            seen += 1
            if seen == stop_after:
                raise KeyboardInterrupt

    return profile_devices(
        devices(clock),
        opts or matmuls_only(),
        out=out,
        resume=resume,
        clock=clock,
        progress=progress,
        every_core=every_core,
    )


FULL = pytest.mark.full  # a whole run takes a second or two


@pytest.fixture(scope="module")
def whole() -> DeviceProfile:
    """One complete profile."""
    return take(opts=options(blocks=BLOCKS))


def test_a_profile_has_every_part(whole: DeviceProfile) -> None:
    assert whole.coverage.finished
    assert len(whole.matmuls) == whole.coverage.grid_tasks
    assert {row.m for row in whole.matmuls if row.device == "npu"} == set(GRAPHS)
    assert {row.m for row in whole.matmuls if row.device == "gpu"} == set(TOKENS)
    assert {p.device for p in whole.predictors} == {"gpu", "npu"}
    assert {p.op for p in whole.other_predictors} == {
        "RMSNorm", "RMSNorm+add", "LayerNorm", "LayerNorm+add", "Rope", "GatedAct", "Attention",
        "Attention+f16", "Attention+q8",
        "Act", "Add", "AddPositions", "Embed", "ShortConv", "ShortConv+gated", "GatedDelta",
        "SigmoidGate", "GatedInput", "GatedAdd", "Experts+w4a16",
    }  # fmt: skip
    assert {row.device for row in whole.preparation} == {"gpu", "npu"}
    kinds = {(entry.phase, entry.weight_format) for entry in whole.contention}
    assert kinds == {("decode", W4), ("prefill", W4)}
    assert whole.quarantined == ()
    assert whole.environment.packages["numpy"] == np.__version__
    assert DeviceProfile.model_validate(json.loads(whole.to_json())) == whole


@pytest.mark.full
def test_formats_of_files_are_measured() -> None:
    """On weights of a usual file's parts, and then not derived from others."""
    formats = (WeightFormat.GGUF_A16, WeightFormat.GGUF_A8)
    found = take(opts=matmuls_only(weight_formats=(W4, *formats)))
    assert {row.weight_format for row in found.matmuls} == {W4, *formats}
    own = [p for p in found.predictors if p.weight_format in formats]
    assert {(p.device, p.weight_format) for p in own} == {
        (kind, name) for kind in ("gpu", "npu") for name in formats
    }
    assert [p for p in CostModel(found).profile.predictors if p.weight_format in formats] == own


def test_every_time_is_exact(whole: DeviceProfile) -> None:
    costs = {"gpu": gpu_cost, "npu": npu_cost}
    for row in whole.matmuls:
        op = MatMul(n=row.n, k=row.k, weight_format=W4)
        assert row.seconds == pytest.approx(costs[row.device](op, row.m), rel=1e-9)


def test_devices_that_do_not_share_anything_do_not_contend(whole: DeviceProfile) -> None:
    for entry in whole.contention:
        assert (entry.gpu, entry.npu) == (pytest.approx(1), pytest.approx(1))
    size = 8192 * 2048 * 0.5625
    op = MatMul(n=8192, k=2048, weight_format=W4)
    assert whole.bandwidth.gpu_alone_bytes_per_s == pytest.approx(size / gpu_cost(op, 1))
    assert whole.bandwidth.npu_alone_bytes_per_s == pytest.approx(size / npu_cost(op, 1))


@pytest.mark.full
@pytest.mark.parametrize(
    "bursts", [{0, 1}, pytest.param({2, 4}, marks=FULL), pytest.param({1, 3}, marks=FULL)]
)
def test_bursts_in_some_stretches_of_both_devices_are_outvoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bursts: set[int]
) -> None:
    real = bandwidth.measure_concurrent
    kinds: list[str] = []  # of what was written to the journal before each stretch
    stretches: list[list[str]] = []

    def measure(*args: Any, **kwargs: Any) -> Any:
        alone, contention = real(*args, **kwargs)
        slow = 1.7 if len(stretches) in bursts else 1.1
        stretches.append(list(kinds))
        return alone, tuple(x.model_copy(update={"gpu": slow}) for x in contention)

    add = Journal.add

    def note(journal: Journal, entry: Any) -> None:
        kinds.append(entry["kind"])
        add(journal, entry)

    monkeypatch.setattr(bandwidth, "measure_concurrent", measure)
    monkeypatch.setattr(Journal, "add", note)
    found = take(out=tmp_path / "p.json")
    assert [(x.gpu, x.npu) for x in found.contention] == [(1.1, pytest.approx(1))] * 2
    rows = [before.count("row") for before in stretches]
    assert rows[0] == 0
    assert len(found.matmuls) * 0.4 < rows[2] < len(found.matmuls) * 0.8
    assert rows[-1] == len(found.matmuls)
    assert rows == sorted(rows)
    assert len(rows) == len(BANDWIDTH_REPEATS) == 5


def test_synchronisation_of_devices_without_overhead_is_free(whole: DeviceProfile) -> None:
    gpu = whole.sync["gpu"]
    assert gpu.submit_busy_s == gpu.copy_fixed_s == 0.0
    assert gpu.wait_s["finish"] == pytest.approx(0.0, abs=1e-9)
    assert gpu.wait_s["event"] < 2e-6  # the polling step of the virtual clock
    assert "flag" not in gpu.wait_s
    assert max(s.late_median_s for s in whole.host_sync.sleep) < 1e-12


def test_the_gpus_predictions_are_the_devices_times(whole: DeviceProfile) -> None:
    model = CostModel(whole)
    for n, k, m in ((1536, 1024, 32), (640, 768, 4), (3000, 1000, 128)):
        true_s = gpu_cost(MatMul(n=n, k=k, weight_format=W4), m)
        assert model.matmul_s("gpu", W4, m, n, k).seconds == pytest.approx(true_s, rel=0.01)


def test_stages_are_found(whole: DeviceProfile) -> None:
    assert whole.devices["npu"].row_stage == 64
    assert whole.devices["gpu"].row_stage == whole.devices["gpu"].token_stage == 1


@pytest.mark.full
def test_sizes_of_one_stage_are_measured_once_and_checked() -> None:
    found = take(opts=matmuls_only(pairs=((960, 512), (1000, 512), (1024, 512), (512, 1024))))
    assert found.coverage.pruned_tasks == len(GRAPHS)
    assert {row.n for row in found.matmuls if row.device == "npu"} == {960, 1024, 512}
    assert {(c.n, c.device) for c in found.stage_checks} == {(1000, "npu")}
    for check in found.stage_checks:
        assert check.measured_s == pytest.approx(check.stage_s)


@pytest.mark.full
def test_a_models_shapes_are_the_grid() -> None:
    shapes = (Shape("qkv", 768, 512), Shape("o", 512, 512), Shape("down", 512, 1024))
    found = take(opts=matmuls_only(shapes=shapes, pairs=()))
    own = {(768, 512), (512, 512), (512, 1024)}
    assert {(row.n, row.k) for row in found.matmuls} == own | {(256, 512), (256, 1024)}


@pytest.mark.full
def test_of_a_models_shapes_each_tokens_matmuls_come_before_the_prompts() -> None:
    pairs = [(256 * i, 256 * j) for i in range(1, 7) for j in range(1, 5)]
    shapes = tuple(Shape(f"{n}x{k}", n, k) for n, k in pairs)
    part = take(opts=matmuls_only(shapes=shapes, pairs=(), share=0.4))
    for kind in ("gpu", "npu"):
        rows = [row for row in part.matmuls if row.device == kind]
        assert {(row.n, row.k) for row in rows if row.m == 1} >= set(pairs)
        assert any(row.m > 1 for row in rows)


@pytest.mark.full
def test_a_share_of_the_grid_is_measured_where_it_teaches(whole: DeviceProfile) -> None:
    part = take(opts=matmuls_only(share=0.25))
    assert len(part.matmuls) == -(-len(whole.matmuls) // 4)
    assert not part.coverage.finished
    model = CostModel(part)
    op = MatMul(n=1536, k=1024, weight_format=W4)
    assert model.matmul_s("gpu", W4, 32, 1536, 1024).seconds == pytest.approx(
        gpu_cost(op, 32), rel=0.1
    )


@pytest.mark.full
@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=FULL), 33])
def test_an_interrupted_run_resumes_without_losing_a_row(
    tmp_path: Path, whole: DeviceProfile, stop_after: int
) -> None:
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=stop_after)
    kept = [e for e in read_entries(journal_path(out)) if e["kind"] == "row"]
    assert len(kept) >= stop_after - 1
    if out.exists():
        assert DeviceProfile.load(out).coverage.finished is False
    again = take(out, resume=True)
    assert {row.key for row in again.matmuls} == {row.key for row in whole.matmuls}
    for ours, theirs in zip(again.matmuls, whole.matmuls, strict=True):
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-9)
    assert not journal_path(out).exists()
    assert DeviceProfile.load(out) == again


@pytest.mark.full
def test_what_every_core_gains_is_measured_once_and_said(tmp_path: Path) -> None:
    found = [EveryCore(weight_format=W4, phase="decode", cores=8, speedup=2.5, layer_s=1e-5)]
    out, calls = tmp_path / "p.json", 0

    def measure(_: Callable[[], None]) -> list[EveryCore]:
        nonlocal calls
        calls += 1
        return found

    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=3, every_core=measure)
    taken = take(out, resume=True, every_core=measure)
    assert (calls, taken.every_core) == (1, tuple(found))
    assert "OpenCL alone on 8 cores instead of one: w4a16 decode 2.50 x" in taken.notes


@pytest.mark.full
def test_without_what_every_core_gains_a_profile_says_why() -> None:
    def broken(_: Callable[[], None]) -> list[EveryCore]:
        raise DeviceError("opencl-cores", "measuring it", "gone")

    taken = take(every_core=broken)
    assert taken.every_core == ()
    assert "opencl-cores: measuring it failed: gone" in taken.notes


@pytest.mark.full
@pytest.mark.parametrize("cut", [pytest.param(1, marks=FULL), 200])
def test_a_torn_journal_loses_its_last_line_only(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=20)
    path = journal_path(out)
    before = len(read_entries(path))
    path.write_bytes(path.read_bytes()[:-cut])
    assert 0 < before - len(read_entries(path)) <= 2
    assert take(out, resume=True).coverage.finished


@pytest.mark.full
def test_a_journal_of_other_graphs_does_not_say_which_the_device_has(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=3)
    entries, sizes = read_entries(journal_path(out)), 0
    for entry in entries:
        if entry["kind"] == "part" and entry["name"] == "npu stages":
            entry["values"][0]["capabilities"]["graph_sizes"] += [257]
            sizes += 1
    assert sizes == 1
    journal_path(out).write_text("".join(map(to_line, entries)))
    taken = take(out, resume=True)
    assert 257 not in taken.devices["npu"].capabilities.graph_sizes


def test_resuming_with_other_options_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=3)
    with pytest.raises(ProfileError, match=r"was begun with another tokens.*without --resume"):
        take(out, resume=True, opts=matmuls_only(tokens=(1, 8)))


@pytest.mark.full
def test_without_resume_a_run_starts_over(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=3)
    assert take(out).coverage.finished


@pytest.mark.full
def test_resuming_nothing_is_a_fresh_run(tmp_path: Path) -> None:
    assert take(tmp_path / "p.json", resume=True).coverage.finished


@pytest.mark.full
def test_a_small_budget_gives_a_partial_valid_profile() -> None:
    found = take(opts=matmuls_only(budget_s=0.5))
    assert 0 < len(found.matmuls) < found.coverage.grid_tasks
    assert not found.coverage.finished


@pytest.mark.parametrize(("budget_s", "share"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, 2.0)])
def test_impossible_options_are_refused(budget_s: float, share: float) -> None:
    with pytest.raises(ProfileError, match="a profile needs a budget above 0 s"):
        options(budget_s=budget_s, share=share)


def test_no_device_is_refused() -> None:
    with pytest.raises(ProfileError, match="hetero doctor"):
        profile_devices({})


def test_one_device_alone_is_a_profile_too() -> None:
    clock = ManualClock()
    found = profile_devices({"gpu": devices(clock)["gpu"]}, matmuls_only(), clock=clock)
    assert set(found.devices) == {"gpu"}
    assert found.contention == ()
    assert found.bandwidth.npu_alone_bytes_per_s is None


@FULL
def test_of_a_third_device_the_matmuls_are_measured(tmp_path: Path) -> None:
    clock = ManualClock()
    cpu = null.open(kind="cpu", asynchronous=True, cost=gpu_cost, clock=clock)
    found = profile_devices({**devices(clock), "cpu": cpu}, matmuls_only(), clock=clock)
    two = take()
    assert set(found.devices) == {"gpu", "npu", "cpu"}
    assert set(found.sync) == {"gpu", "npu"}
    assert {row.device for row in found.preparation} == {"gpu", "npu"}
    cost = CostModel(found)
    for m in TOKENS:
        times = [float(cost.matmul_s(x, W4, m, 2048, 2048).seconds) for x in ("gpu", "cpu")]
        assert times[1] == pytest.approx(times[0], rel=0.02)
    assert found.contention == two.contention
    assert found.sync == two.sync
    assert DeviceProfile.model_validate(json.loads(found.to_json())) == found
    write_report(found, tmp_path / "p.html")
    assert "cpu" in (tmp_path / "p.html").read_text("utf-8")


def test_a_foreign_line_ends_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, {"a": 1}, resume=False) as journal:
        journal.add({"kind": "spent", "spent_s": 1.0})
    for foreign in (
        "[1]\n",
        json.dumps({"kind": "spent", "spent_s": 2.0}) + "\n",  # without a checksum
        to_line({"kind": "spent", "spent_s": -2.0}),
        to_line({"kind": "part", "values": []}),
        to_line({"kind": "another"}),
        to_line({"kind": "header"}),
        to_line({"kind": "spent", "spent_s": 2.0}).replace("2.0", "3.0"),
    ):
        with path.open("a") as file:
            file.write(foreign + to_line({"kind": "spent", "spent_s": 4.0}))
        assert [entry.get("spent_s") for entry in read_entries(path)] == [None, 1.0]
        Journal(path, {"a": 1}, resume=True).close()
    with path.open("a") as file:
        file.write(to_line({"kind": "spent", "spent_s": 4.0}))
    assert [entry.get("spent_s") for entry in read_entries(path)] == [None, 1.0, 4.0]


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"values": []},
        pytest.param({"values": [{}]}, marks=FULL),
        pytest.param({"values": [{"x": 1}] * 2}, marks=FULL),
    ],
)
def test_a_part_that_is_none_is_measured_again(
    change: dict[str, Any], tmp_path: Path, whole: DeviceProfile
) -> None:
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        take(out, stop_after=3)
    path = journal_path(out)
    assert path is not None
    entries = [e | (change if e["kind"] == "part" else {}) for e in read_entries(path)]
    path.write_text("".join(map(to_line, entries)), encoding="utf-8")
    assert {row.key for row in take(out, resume=True).matmuls} == {r.key for r in whole.matmuls}


def test_power_is_read_from_rapl(tmp_path: Path) -> None:
    """A counter of microjoules that runs at 3 W, and wraps."""
    clock = ManualClock()
    folder = tmp_path / "class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "max_energy_range_uj").write_text("10000000")
    counter = folder / "energy_uj"
    counter.write_text("9000000")

    def load() -> None:
        clock.sleep(0.5)
        counter.write_text(str((int(counter.read_text()) + 1_500_000) % 10_000_000))

    meter = energy.find_meter(tmp_path)
    assert meter is not None
    assert energy.mean_power_w(meter, clock, load, 1.0) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("files", "source", "watts"),
    [
        ({"hwmon/hwmon0/power1_input": "2500000"}, "hwmon", 2.5),
        ({"power_supply/BAT0/power_now": "4000000"}, "battery", 4.0),
        (
            {"power_supply/b/current_now": "-500000", "power_supply/b/voltage_now": "4000000"},
            "battery",
            2.0,
        ),
    ],
)
def test_power_is_read_from_sysfs(
    tmp_path: Path, files: dict[str, str], source: str, watts: float
) -> None:
    for name, text in files.items():
        path = tmp_path / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    clock = ManualClock()
    meter = energy.find_meter(tmp_path)
    assert meter is not None
    assert meter.source == source
    found = energy.measure_power(clock, {"gpu": lambda: clock.sleep(0.1)}, meter=meter)
    assert found is not None
    assert (found.gpu_w, found.npu_w) == (pytest.approx(watts), None)


def test_power_is_absent_without_a_meter(tmp_path: Path) -> None:
    assert energy.find_meter(tmp_path) is None


SLOW = {
    "gpu synchronisation": (sync, "measure_device"),
    "sleep": (sync, "measure_host"),
    "preparation": (preparation, "_once"),
    "bandwidth 1": (bandwidth, "measure_concurrent"),
    "other kernels": (non_matmul_ops.NonMatmulMeter, "time"),
}


@pytest.mark.full
@pytest.mark.parametrize("part", SLOW)
def test_every_part_looks_at_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    """On a machine where one measurement of a part takes two thirds of it."""
    owner, name = SLOW[part]
    of = options if part in ("sleep", "other kernels") else matmuls_only
    clock = ManualClock()
    real, calls = getattr(owner, name), 0

    def slow(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        clock.sleep(20.0)
        return real(*args, **keywords)

    monkeypatch.setattr(owner, name, slow)
    out = tmp_path / "p.json"
    with pytest.raises(ProfileError, match=r"too short here.*--resume --budget \d+s") as raised:
        profile_devices(devices(clock), of(budget_s=30.0, keep_budget=True), out=out, clock=clock)
    assert calls <= 5  # of dozens: the kernels of one size are prepared together
    monkeypatch.setattr(owner, name, real)
    assert f"took {clock.now():.0f} s" in str(raised.value)
    again = of(budget_s=1e6, keep_budget=True)
    assert profile_devices(devices(clock), again, out=out, clock=clock, resume=True).matmuls


def test_what_every_core_gains_looks_at_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, started = ManualClock(), 0

    def stepper(*_: Any) -> Any:
        nonlocal started
        started += 1
        clock.sleep(40.0)
        return nullcontext()

    monkeypatch.setattr("hetero.measuring.every_core.Stepper", stepper)
    with pytest.raises(ProfileError, match="too short here"):
        profile_devices(
            devices(clock),
            options(budget_s=60.0, keep_budget=True),
            clock=clock,
            every_core=lambda checkpoint: measure_every_core((W4,), checkpoint=checkpoint),
        )
    assert started == 2

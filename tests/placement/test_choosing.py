"""What computes a model: `--device`, profiles, plans, and the reason of an automatic choice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, UserError
from hetero.backends.formats import WeightFormat
from hetero.backends.opencl import driver_of
from hetero.backends.opencl.drivers.levels import LEVELS
from hetero.models import model_spec
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose, plan_on
from hetero.placement.comparing import PhaseSeconds
from hetero.placement.phase_choice import TENSOR_LEVEL
from hetero.profiler.errors import ProfileError, ProfileWarning
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.nearest_profile import Nearest
from hetero.profiler.profile_files import shipped_host
from hetero.profiler.records import DeviceProfile, EveryCore
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver
from hetero.solver.report.units import duration
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from tests.profiler.fakes import only_formats
from tests.runtime.models import tiny_model

NAMES = {"gpu": "opencl", "npu": "ort-cpu"}


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3-8b")


@pytest.fixture(scope="module")
def chip() -> DeviceProfile:
    return DeviceProfile.load("snapdragon-8-gen-3")


@pytest.fixture(scope="module")
def host() -> DeviceProfile:
    return DeviceProfile.load("host")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without a profile; where one would lie."""
    path = tmp_path / "cache" / "host.json"
    monkeypatch.setattr("hetero.placement.planning.profile_files.cached_profile_path", lambda: path)
    monkeypatch.setattr("hetero.placement.planning.profile_files.own_profile_path", lambda: path)
    monkeypatch.setattr(
        "hetero.placement.planning.profile_files.shipped_names", lambda: ("snapdragon-8-gen-3",)
    )
    return path


def named(chip: DeviceProfile, *, npu_scale: float = 1.0, **backends: str) -> DeviceProfile:
    """The chip's times as if taken on these backends; the NPU's multiplied."""
    devices = {
        kind: record.model_copy(update={"backend": (NAMES | backends)[kind]})
        for kind, record in chip.devices.items()
    }
    predictors = tuple(
        p.model_copy(
            update={"model": p.model.model_copy(update={"order_slowdown": npu_scale})}  # type: ignore[union-attr]
        )
        if p.device == "npu"
        else p
        for p in chip.predictors
    )
    return chip.model_copy(update={"name": "here", "devices": devices, "predictors": predictors})


@pytest.mark.parametrize("mode", ["gpu", "npu"])
def test_one_device_needs_no_profile(spec: ModelGraph, mode: Any) -> None:
    assert choose(spec, PlacementRequest(mode=mode)) == Choice(
        mode, reason=f"{mode} alone, as asked for"
    )
    with pytest.raises(UserError, match="profile 'nowhere': there is no such file"):
        choose(spec, PlacementRequest(mode=mode, profile="nowhere"))


@pytest.mark.parametrize("mode", ["hetero", "auto"])
def test_without_any_profile_it_is_layer_level_and_says_why(spec: ModelGraph, mode: Any) -> None:
    found = choose(spec, PlacementRequest(mode=mode))
    assert (found.mode, found.plan) == ("hetero", None)
    assert found.reason.startswith(f"{mode}: layer level, because this machine has no profile")
    assert found.notes == (found.reason,)


@pytest.mark.full
def test_this_machines_profile_is_found_in_the_cache(
    spec: ModelGraph, chip: DeviceProfile, empty_cache: Path
) -> None:
    empty_cache.parent.mkdir()
    named(chip).save(empty_cache)
    found = choose(spec, PlacementRequest(mode="auto"))
    assert found.mode == "hetero"
    assert found.plan is not None
    assert found.plan.profile == "here"
    assert "(profile here)" in found.reason


def test_a_broken_cached_profile_is_no_reason_to_stop(spec: ModelGraph, empty_cache: Path) -> None:
    empty_cache.parent.mkdir()
    empty_cache.write_text("{", encoding="utf-8")
    assert choose(spec, PlacementRequest(mode="auto")).reason.startswith(
        "auto: layer level, because"
    )


def test_a_cached_profile_of_other_backends_is_not_used(
    spec: ModelGraph, chip: DeviceProfile, empty_cache: Path
) -> None:
    empty_cache.parent.mkdir()
    named(chip).save(empty_cache)
    found = choose(spec, PlacementRequest(mode="auto", gpu="reference", npu="null"))
    assert found.reason.startswith(
        "auto: layer level, because profile here says nothing of reference as GPU: take one with"
    )


@pytest.mark.full
def test_the_shipped_host_profile_comes_with_a_notice(
    spec: ModelGraph, chip: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.placement.planning.profile_files.shipped_names", lambda: ("host",))
    monkeypatch.setattr("hetero.placement.planning.DeviceProfile.load", lambda _: named(chip))
    monkeypatch.setattr(
        "hetero.placement.planning.nearest_shipped", lambda _: Nearest("host", "as it is here")
    )
    found = choose(spec, PlacementRequest(mode="auto"))
    assert found.notes == (
        "this machine has no profile yet (`hetero profile` takes one), so the shipped profile "
        "`host` is used (as it is here), its times not scaled to this machine "
        "because profile here has no times of kernels that ran",
    )


@pytest.mark.parametrize(
    ("level", "flags", "shipped", "name"),
    [
        ("avx512-vnni", "", ("host", "host-amx", "host-avx2"), "host"),
        ("avx512-vnni", "amx_int8", ("host", "host-amx", "host-avx2"), "host-amx"),
        ("avx512-vnni", "amx_int8", ("host", "host-avx2"), "host"),
        ("avx512", "", ("host", "host-avx2"), "host-avx2"),
        ("avx2", "amx_int8", ("host", "host-amx", "host-avx2"), "host-avx2"),
        ("x86-64", "", ("host",), "host"),  # of another kind of processor, which the notice says
        ("x86-64", "", ("snapdragon-8-gen-3",), None),
    ],
)
def test_the_shipped_profile_of_a_pc_like_this(
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    flags: str,
    shipped: tuple[str, ...],
    name: str | None,
) -> None:
    monkeypatch.setattr("hetero.profiler.profile_files.cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr("hetero.profiler.profile_files.processor_levels", lambda: (LEVELS[level],))
    monkeypatch.setattr("hetero.profiler.profile_files.shipped_names", lambda: shipped)
    assert shipped_host() == name


@pytest.mark.full
def test_auto_takes_what_is_predicted_fastest(spec: ModelGraph, chip: DeviceProfile) -> None:
    both = choose(spec, PlacementRequest(mode="auto", profile=named(chip)))
    assert both.mode == "hetero"
    assert both.reason.startswith(
        "auto: tensor level, predicted for prompts of 64, 256 and 1024 tokens and 64 more each: gpu"
    )
    slow = choose(spec, PlacementRequest(mode="auto", profile=named(chip, npu_scale=100.0)))
    assert (slow.mode, slow.plan) == ("gpu", None)
    assert slow.reason.startswith("auto: gpu alone, predicted for")


@pytest.mark.parametrize(
    ("weights", "share", "mode"),
    [
        ("w4a16", 0.99, "gpu"),
        ("w4a16", 0.95, "hetero"),
        ("gguf-a16", 0.95, "gpu"),
        ("gguf-a8", 0.91, "gpu"),
        ("gguf-a8", 0.88, "hetero"),
    ],
)
def test_derived_times_must_be_better_by_more(
    monkeypatch: pytest.MonkeyPatch, host: DeviceProfile, weights: str, share: float, mode: str
) -> None:
    """The profile has no times of files."""
    host = only_formats(host, WeightFormat.W4A16, WeightFormat.W4A8)
    times = {"gpu": 10.0, "npu": 20.0, TENSOR_LEVEL: 10 * share}
    seconds = {name: PhaseSeconds(s / 2, s / 2) for name, s in times.items()}
    monkeypatch.setattr("hetero.placement.by_profile.compare", lambda *_, **__: seconds)
    request = PlacementRequest(mode="auto", profile=host, seq_lens=(64,))
    assert choose(model_spec("qwen2.5-0.5b", weights), request).mode == mode


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU quota of one, whose only core plays the GPU as well."""
    monkeypatch.setattr("hetero.placement.choice.core_count", lambda: 1)
    monkeypatch.setattr("hetero.placement.choice.computes_on_processor", lambda _: True)


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
def test_auto_never_takes_two_devices_on_one_core(spec: ModelGraph, chip: DeviceProfile) -> None:
    found = choose(spec, PlacementRequest(mode="auto", profile=named(chip)))
    assert (found.mode, found.plan) == ("gpu", None)
    assert found.reason.startswith("auto: gpu alone, predicted for")
    assert found.reason.endswith("; two devices need two cores")
    without = choose(spec, PlacementRequest(mode="auto"))
    assert without.mode == "gpu"
    assert without.reason.startswith("auto: gpu alone, because two devices need two cores, and ")
    assert without.notes == (without.reason,)
    asked = choose(spec, PlacementRequest(mode="hetero", profile=named(chip)))
    assert asked.mode == "hetero"


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
def test_devices_of_their_own_share_no_core(
    spec: ModelGraph, chip: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.placement.choice.computes_on_processor", lambda _: False)
    assert choose(spec, PlacementRequest(mode="auto", profile=named(chip))).mode == "hetero"


def with_every_core(profile: DeviceProfile, cores: int = 4) -> DeviceProfile:
    """On every core prompts take half as long, and steps a little less."""
    found = tuple(
        EveryCore(weight_format=w, phase=phase, cores=cores, speedup=speedup, layer_s=1e-6)
        for w in ("w4a16", "f32")
        for phase, speedup in (("prefill", 2.0), ("decode", 1.2))
    )
    return profile.model_copy(update={"every_core": found})


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("here", "options", "chosen"),
    [
        (4, {}, True),
        (8, {}, True),
        (3, {}, False),  # than which more were measured
        (0, {}, False),  # OpenCL runs with one already
        (4, {"gpu": "opencl"}, False),  # asked for by name
        (4, {"max_gpu_share": 0.5}, False),
        (4, {"mode": "hetero"}, False),
    ],
)
def test_auto_takes_every_core_of_a_pc_where_that_is_fastest(
    spec: ModelGraph,
    chip: DeviceProfile,
    monkeypatch: pytest.MonkeyPatch,
    here: int,
    options: dict[str, Any],
    chosen: bool,
) -> None:
    monkeypatch.setattr("hetero.placement.by_profile.every_core_count", lambda: here)
    slow = named(chip, npu_scale=100.0)
    asked = PlacementRequest(**({"mode": "auto", "expected": (600,)} | options), profile=None)
    monkeypatch.setattr(
        "hetero.placement.by_profile.locate_profile", lambda *_: (with_every_core(slow), "")
    )
    found = choose(spec, asked)
    assert (found.gpu == "opencl-cores") == chosen
    assert ("does not run yet" in found.reason) == (here == 0)
    if chosen:
        assert (found.mode, found.plan) == ("gpu", None)
        assert found.reason.startswith("auto: opencl-cores alone, predicted for a prompt of 600")
        one = Planner(spec, slow)
        decode = one.single(Scenario("decode", 1, 632), "gpu")
        calls = [one.single(Scenario("prefill", m, at), "gpu") for m, at in ((512, 0), (88, 512))]
        assert decode is not None
        assert calls[0] is not None
        assert calls[1] is not None
        prompt_s = calls[0].without_head().seconds + calls[1].seconds
        both_s = prompt_s / 2 + 64 * decode.seconds / 1.2 + 66 * spec.layers * 1e-6
        assert f"opencl-cores {duration(both_s)}" in found.reason


def test_auto_with_every_core_named_needs_no_profile(spec: ModelGraph) -> None:
    found = choose(spec, PlacementRequest(mode="auto", gpu="opencl-cores"))
    assert (found.mode, found.gpu, found.plan) == ("gpu", None, None)
    assert found.reason == "auto: gpu alone, because opencl-cores leaves no other core"


@pytest.mark.full
def test_hetero_is_at_least_layer_level(spec: ModelGraph, chip: DeviceProfile) -> None:
    no_npu = named(chip).model_copy(update={"predictors": named(chip).predictors[:1]})
    assert {p.device for p in no_npu.predictors} == {"gpu"}
    assert choose(spec, PlacementRequest(profile=no_npu)).plan is None  # layer level, made by rule
    plan = choose(spec, PlacementRequest(profile=named(chip))).plan
    assert plan is not None
    assert plan.devices() == {"gpu", "npu"}


@pytest.mark.full
@pytest.mark.parametrize("npu_scale", [1.0, 8.0, 100.0])
def test_hetero_shares_every_prompt_and_leaves_the_others_as_they_are(
    spec: ModelGraph, chip: DeviceProfile, npu_scale: float
) -> None:
    found = choose(spec, PlacementRequest(profile=named(chip, npu_scale=npu_scale))).solver
    free = prepare_solver(spec, named(chip, npu_scale=npu_scale), PlanRequest(explain=False))
    assert found is not None
    alone = 0
    for m in (2, 3, 7, 16, 31, 64, 300, 512):
        shared = found.solution_for(Scenario("prefill", m))
        assert shared.devices == {"gpu", "npu"}
        devices = free.solution_for(Scenario("prefill", m)).devices
        alone += len(devices) == 1
        tiles = [t for op in found.plan_for(m).ops if op.m == m for t in op.tiles]
        assert {t.device for t in tiles} == {"gpu", "npu"}
    assert (alone > 0) == (npu_scale > 1)


@pytest.mark.full
def test_plans_are_tensor_level_for_any_length(spec: ModelGraph, chip: DeviceProfile) -> None:
    found = choose(spec, PlacementRequest(mode="auto", profile=named(chip), step_tokens=512))
    assert found.reason.startswith("auto: tensor level, predicted for")
    assert found.plan is not None
    assert max(len(op.tiles) for op in found.plan.ops) > 1
    assert found.solver is not None
    assert {op.m for op in found.solver.plan_for(301).ops} == {301, None}


@pytest.mark.full
def test_graph_sizes_are_chosen_where_each_has_something_of_its_own(
    spec: ModelGraph, chip: DeviceProfile, host: DeviceProfile
) -> None:
    choice = choose(spec, PlacementRequest(profile=chip))
    assert choice.plan is not None
    assert any("graph sizes chosen" in note for note in choice.plan.notes)
    assert choice.graph_sizes == choice.plan.graph_sizes != ()
    choice = choose(spec, PlacementRequest(profile=host))
    assert choice.plan is not None
    assert choice.graph_sizes == ()
    assert choice.plan.graph_sizes == host.devices["npu"].capabilities.graph_sizes
    many = choose(spec, PlacementRequest(profile=chip, seq_lens=range(64, 77)))
    assert many.plan is not None
    assert many.plan.graph_sizes == chip.devices["npu"].capabilities.graph_sizes


def test_an_npu_that_compiles_is_opened_with_the_sizes_of_the_plan(
    spec: ModelGraph, chip: DeviceProfile
) -> None:
    given = single_device(spec, "npu", graph_sizes=(1, 48))
    for npu, sizes in (("qnn", (1, 48)), ("ort-cpu", ())):
        choice = choose(spec, PlacementRequest(plan=given, npu=npu))
        assert choice.graph_sizes == sizes


def test_a_strategy_is_forced(spec: ModelGraph, chip: DeviceProfile) -> None:
    request = PlacementRequest(profile=named(chip), strategy="padding", seq_lens=(300,))
    plan = choose(spec, request).plan
    assert plan is not None
    assert plan.strategy == "padding"
    assert [t.graph_size for t in plan.partition("prefill", 300, "down")] == [512]
    with pytest.raises(UserError, match="this machine has no profile"):
        choose(spec, PlacementRequest(strategy="padding"))


def test_what_is_asked_for_by_name_must_work(chip: DeviceProfile) -> None:
    odd = model_spec("llama-3-8b", "f32")
    with pytest.raises(PlanError, match="has no times of f32"):
        choose(odd, PlacementRequest(profile=named(chip)))
    no_rest = named(chip).model_copy(update={"other_predictors": ()})
    with pytest.raises(ProfileError, match="lacks operators"):
        choose(model_spec("llama-3-8b"), PlacementRequest(profile=no_rest))


class _Device:
    """The parts of a device that `plan_on` looks at."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.capabilities = type("C", (), {"static_shapes": True, "graph_sizes": sizes})
        self.info = type("I", (), {"backend": "ort-cpu"})


def test_plans_follow_the_devices_that_could_be_opened(spec: ModelGraph) -> None:
    npu: Any = _Device((1, 32))
    gpu: Any = _Device(())
    plan = single_device(spec, "npu")
    found = plan_on(Choice("npu", plan), spec, {"npu": npu})
    assert (found.plan_id, found.step_tokens) == (plan.plan_id, 32)
    assert plan_on(Choice("npu", plan), spec, {"gpu": gpu}).devices() == {"gpu"}
    assert plan_on(Choice("hetero"), spec, {"gpu": gpu, "npu": npu}).devices() == {"gpu", "npu"}


def test_graphs_that_the_device_does_not_have_are_refused(
    spec: ModelGraph, chip: DeviceProfile
) -> None:
    request = PlacementRequest(profile=named(chip), strategy="padding", seq_lens=(300,))
    choice = choose(spec, request)
    npu: Any = _Device((1, 32))
    with pytest.raises(PlanError, match="a graph of 512 tokens, and the npu has graphs of 1, 32"):
        plan_on(Choice("hetero", choice.plan), spec, {"gpu": npu, "npu": npu})


@pytest.mark.full
def test_a_model_runs_by_a_profile_and_says_so(chip: DeviceProfile, tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    profile = tmp_path / "here.json"
    named(chip).save(profile)
    with pytest.warns(ProfileWarning, match="was taken elsewhere"):
        llm = LLM(folder, device="auto", profile=profile, max_seq_len=64)
    with llm:
        result = llm.generate([1, 2, 3], max_tokens=3)
        assert isinstance(llm.plan, ExecutionPlan)
        assert result.stats.choice == llm.choice.reason
        assert llm.choice.reason.startswith("auto: ")


@pytest.mark.full
@pytest.mark.parametrize("stats", [0, 1])
def test_the_command_says_its_choice_in_its_statistics(
    chip: DeviceProfile, tmp_path: Path, stats: int
) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    profile = tmp_path / "here.json"
    named(chip).save(profile)
    options = ["--max-tokens", "2", "--json", "--profile", str(profile)]
    options += ["--stats"] * stats
    command = [sys.executable, "-m", "hetero.cli.app", "generate", folder, "x", *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert said.stderr.count("auto: ") == stats
    assert said.stderr.count("was taken elsewhere") == 1
    assert json.loads(said.stdout.splitlines()[-1])["choice"].startswith("auto: ")


@pytest.mark.full
@pytest.mark.parametrize(("here", "fits"), [("pocl", True), ("intel", False), ("vendor", False)])
def test_a_profile_of_another_opencl_driver_is_not_used(
    monkeypatch: pytest.MonkeyPatch, here: str, fits: bool
) -> None:
    """Times of PoCL say nothing of a graphics card; a profile that is asked for is taken."""
    monkeypatch.setattr("hetero.placement.planning.profile_files.shipped_names", lambda: ("host",))
    monkeypatch.setattr("hetero.placement.by_profile.driver_here", lambda _wanted: here)
    spec = model_spec("llama-3.2-1b")
    choice = choose(spec, PlacementRequest(mode="auto"))
    assert ("the OpenCL driver pocl, here it is" in choice.reason) != fits
    named = choose(spec, PlacementRequest(mode="auto", profile="host"))
    assert "OpenCL driver" not in named.reason


def test_drivers_are_told_apart_by_what_profiles_have() -> None:
    assert driver_of("OpenCL 3.0 PoCL 3.0-rc2  Linux, Release, RELOC") == "pocl"
    assert driver_of("OpenCL 3.1 LINUX") == "intel"
    assert driver_of("OpenCL 3.0 CUDA 12.4.131") == "vendor"
    assert driver_of("OpenCL 3.0 QUALCOMM build: commit #1") == "vendor"

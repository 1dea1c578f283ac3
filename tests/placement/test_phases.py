"""Devices of prompts and of answers are chosen each by its own predicted times."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.protocol import DeviceKind
from hetero.backends.registry import EVERY_CORE, open_device
from hetero.models import model_spec, open_model
from hetero.placement import by_profile
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.comparing import (
    DERIVED_MARGIN,
    MARGIN,
    DeviceSets,
    PhaseSeconds,
    Price,
    fastest,
)
from hetero.placement.phase_choice import TENSOR_LEVEL, described
from hetero.placement.phases import phases_of
from hetero.profiler.errors import ProfileWarning
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.solver.decode_bands import cache_bytes
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.overheads import Overheads
from hetero.solver.plan import PHASES, DecodeBand, Phase
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from tests.placement.test_choosing import with_every_core
from tests.runtime.models import greedy_tokens, tiny_model
from tests.runtime.test_adaptive import GRAPHS, solver_of
from tests.solver.instances import planner_of, random_instance
from tests.support.selection import examples

NAMES = ("gpu", "npu", EVERY_CORE, TENSOR_LEVEL)
TOKENS = np.random.default_rng(6).integers(0, 263, 40).tolist()


def possible(prompts: str, answers: str) -> bool:
    """OpenCL has one number of cores in a process; with all of them the NPU has none of its own."""
    pair = {prompts, answers}
    return prompts == answers or EVERY_CORE not in pair or pair == {EVERY_CORE, "npu"}


def price_of(least: float, handover_s: float) -> Any:
    return lambda sets: Price(least if possible(*sets) else float("inf"), handover_s)


@pytest.mark.parametrize("seed", range(examples(60, 300)))
def test_the_choice_is_the_best_of_all_pairs(seed: int) -> None:
    """Brute force over the pairs that are worth a second device, by other means."""
    rng = np.random.default_rng(seed)
    names = [x for x in NAMES if rng.random() < 0.85]
    times = {x: PhaseSeconds(*rng.choice([0.5, 0.9, 0.96, 0.98, 1, 1.1, 2], 2)) for x in names}
    if not times:
        return
    derived, least = bool(rng.integers(2)), float(rng.choice([0.0, 0.05, 0.2]))
    margin = DERIVED_MARGIN if derived else MARGIN
    handover_s = float(rng.choice([0.0, 0.03]))
    opening_s = float(rng.choice([0.0, 0.07]))
    prices = price_of(least, handover_s)
    chosen = fastest(times, derived=derived, price_of=prices, opening_s=opening_s)
    single_s = min((sum(times[x]) for x in names if x != TENSOR_LEVEL), default=float("inf"))
    best_s, pairs = single_s, []
    for a, b in itertools.product(names, names):
        total_s = times[a][0] + times[b][1] + (handover_s if a != b else 0.0)
        needed = margin if a == b else max(margin, least)
        one = a == b != TENSOR_LEVEL
        if possible(a, b) and (one or total_s + opening_s < single_s * (1 - needed)):
            cut_s = sum(times[x][i] * margin / (1 - margin) for i, x in enumerate((a, b))
                        if x == TENSOR_LEVEL)  # fmt: skip
            pairs.append((total_s + cut_s, a, b, one))
            best_s = min(best_s, total_s if one else total_s + opening_s)
    assert possible(*chosen)
    total_s = times[chosen.prompts][0] + times[chosen.answers][1]
    total_s += 0.0 if chosen.same else handover_s
    assert total_s <= single_s
    worth = [x for x in pairs if not x[3]]
    if worth:
        assert min(worth)[0] == pytest.approx(
            next(x[0] for x in pairs if x[1:3] == tuple(chosen)), rel=1e-12
        )
    else:
        assert chosen.same
        assert total_s == single_s or set(names) == {TENSOR_LEVEL}
    assert total_s <= best_s / (1 - margin) + 1e-12


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b")


TIMES = {
    "gpu": PhaseSeconds(1.4, 0.3),
    "npu": PhaseSeconds(1.0, 0.9),
    TENSOR_LEVEL: PhaseSeconds(1.1, 0.31),
}


def chosen(
    spec: ModelGraph, monkeypatch: pytest.MonkeyPatch, times: Any = TIMES, **options: Any
) -> Choice:
    profile = with_every_core(DeviceProfile.load("host-avx2"))
    monkeypatch.setattr(by_profile, "compare", lambda *_, **__: times)
    monkeypatch.setattr(by_profile, "every_core_count", lambda: 4)
    return choose(spec, PlacementRequest(mode="auto", profile=profile, seq_lens=(64,), **options))


def test_each_phase_takes_its_fastest_device_and_says_so(
    spec: ModelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(spec, monkeypatch)
    assert choice.mode == "hetero"
    assert choice.reason.startswith(
        "auto: prompt: npu alone (1.1 x tensor level); answer: gpu alone (1.03 x tensor level), "
        "predicted for a prompt of 64 tokens and 64 more: gpu 1.70 s, npu 1.90 s, tensor level "
    )
    assert [x.device_set for x in choice.phases] == ["npu", "gpu"]
    assert choice.plan is not None
    assert choice.plan.apart
    assert [choice.plan.devices_of(phase) for phase in PHASES] == [{"npu"}, {"gpu"}]
    assert choice.seconds["npu then gpu"] == pytest.approx(1.3)


def test_every_core_computes_answers_where_the_npu_computes_prompts(
    spec: ModelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(spec, monkeypatch, {**TIMES, EVERY_CORE: PhaseSeconds(1.3, 0.2)})
    assert (choice.mode, choice.gpu) == ("hetero", EVERY_CORE)
    assert choice.plan is not None
    assert choice.plan.apart
    shared = {**TIMES, EVERY_CORE: PhaseSeconds(9.0, 0.1), TENSOR_LEVEL: PhaseSeconds(0.5, 0.31)}
    choice = chosen(spec, monkeypatch, shared)
    assert choice.gpu is None, "OpenCL has one number of cores in a process"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "mode"), [({"weight_budget_bytes": 800 << 20}, "gpu"), ({}, "hetero")]
)
def test_weights_of_both_devices_fit_the_budget(
    spec: ModelGraph, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], mode: str
) -> None:
    times = {name: s for name, s in TIMES.items() if name != TENSOR_LEVEL}
    assert chosen(spec, monkeypatch, times, **options).mode == mode


@pytest.mark.parametrize("seed", range(examples(10, 40)))
def test_a_phase_alone_takes_as_long_as_that_device(seed: int) -> None:
    """The head is the answer's device's; a call in graphs may be two on the NPU."""
    instance = random_instance(seed, tiny=False)
    planner = planner_of(instance, non_matmul_on_npu=True)
    lengths = tuple({1 + (seed * i) % (2 * instance.sizes[-1]) for i in (1, 3, 7)})
    prepared = PreparedSolver(planner, PlanRequest(seq_lens=lengths))
    for devices in (("npu", "gpu"), ("gpu", "npu")):
        kinds: dict[Phase, DeviceKind] = dict(zip(PHASES, devices, strict=True))
        apart = prepared.alone_in(kinds)
        assert apart.plan.apart
        decode = planner.single(Scenario("decode", 1), kinds["decode"])
        assert decode is not None
        assert apart.solution_for(Scenario("decode", 1)).seconds == pytest.approx(decode.seconds)
        longest = planner.longest_with(kinds["prefill"])
        assert longest is not None
        for m in range(1, longest + 1):
            alone = planner.single(Scenario("prefill", m), kinds["prefill"])
            solved = apart.solution_for(Scenario("prefill", m))
            assert solved.devices == {kinds["prefill"]}
            assert alone is not None
            assert solved.without_head().seconds <= alone.without_head().seconds * (1 + 1e-12)


def engine_of(model: Any, solver: PreparedSolver | None, kind: DeviceKind | None) -> Engine:
    devices: dict[DeviceKind, Any] = {
        "gpu": open_device("reference", kind="gpu", asynchronous=True),
        "npu": open_device("reference", kind="npu", graph_sizes=GRAPHS),
    }
    if kind is not None:
        devices = {kind: devices[kind]}
    plan = single_device(model.spec(), kind) if solver is None else solver.plan  # type: ignore[arg-type]
    return Engine(model.weights, plan, devices, max_seq_len=200, solver=solver)


def answer(engine: Engine, steps: int = 20) -> list[int]:
    return greedy_tokens(engine, TOKENS, steps)


@pytest.mark.parametrize("prompts", ["npu", "gpu", None])
def test_tokens_are_those_of_one_device(tmp_path: Path, prompts: DeviceKind | None) -> None:
    """In f32, with the devices apart, and with prompts shared."""
    model = open_model(str(tiny_model(tmp_path)), weights="f32")
    with engine_of(model, None, "gpu") as engine:
        wanted = answer(engine)
    kinds: dict[Phase, DeviceKind] = {"decode": "npu" if prompts == "gpu" else "gpu"}
    kinds |= {"prefill": prompts} if prompts is not None else {}
    with engine_of(model, solver_of(model, non_matmul_on_npu=True).alone_in(kinds), None) as engine:
        assert answer(engine) == wanted
        assert answer(engine) == wanted
        for phase, kind in kinds.items():
            assert engine.plan.devices_of(phase) == {kind}
        works = {kind for kind, calls in engine.runner.last_run.counts.items() if calls}
        assert works == {kinds["decode"]}


@pytest.mark.parametrize(("unified", "mode"), [(True, "hetero"), (False, "gpu")])
def test_keys_and_values_are_handed_over_where_memory_is_not_unified(
    spec: ModelGraph, monkeypatch: pytest.MonkeyPatch, unified: bool, mode: str
) -> None:
    """Copying those of 64 tokens takes longer than the NPU gains here."""
    copying = Overheads(copy_s=0.0, copy_s_per_byte=0.0 if unified else 1e-6)
    monkeypatch.setattr(by_profile, "Planner", partial(Planner, overheads=copying))
    times = {name: s for name, s in TIMES.items() if name != TENSOR_LEVEL}
    assert cache_bytes(spec) == 2 * 16 * 8 * 64 * 4
    assert chosen(spec, monkeypatch, times).mode == mode


def test_pairs_read_as_people_say_them() -> None:
    assert str(DeviceSets("npu", "gpu")) == "npu then gpu"
    assert str(DeviceSets("gpu", "gpu")) == "gpu"


def test_open_devices_say_what_computes_each_phase(
    spec: ModelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the times that were compared as long as it runs as chosen; by the plan otherwise."""
    devices: Any = {kind: open_device("reference", kind=kind) for kind in ("gpu", "npu")}
    choice = chosen(spec, monkeypatch)
    assert choice.plan is not None
    assert phases_of(choice.plan, devices, choice) == choice.phases
    prompt = choice.phases[0].document()
    assert (prompt["phase"], prompt["devices"], prompt["over"]) == (
        "prefill",
        ["npu"],
        TENSOR_LEVEL,
    )
    assert prompt["gain"] == pytest.approx(1.1)
    moved = single_device(spec, "gpu")
    assert described(phases_of(moved, devices, choice)) == (
        "prompt: gpu alone; answer: gpu alone (1.03 x tensor level)"
    )
    layers = phases_of(layer_level(spec), devices, Choice("hetero"))
    assert described(layers) == "prompt: layer level; answer: gpu alone"
    assert layers[0].document()["devices"] == ["gpu", "npu"]
    shared = choose(spec, PlacementRequest(mode="hetero", profile="host-avx2", seq_lens=(64,)))
    assert shared.plan is not None
    assert described(phases_of(shared.plan, devices, shared)).startswith("prompt: tensor level; ")


@pytest.mark.full
def test_phases_say_from_which_depth_on_decoding_is_elsewhere(spec: ModelGraph) -> None:
    devices: Any = {kind: open_device("reference", kind=kind) for kind in ("gpu", "npu")}
    request = PlacementRequest(mode="hetero", profile="snapdragon-8-elite", context=4096)
    choice = choose(spec, request)
    assert choice.plan is not None
    (band,) = choice.plan.bands
    assert choice.reason.endswith(f"; from {band.depth_from} tokens on, answers on the npu")
    phases = phases_of(choice.plan, devices, choice)
    assert [(x.phase, x.depth_from) for x in phases] == [
        ("prefill", 0),
        ("decode", 0),
        ("decode", band.depth_from),
    ]
    assert described(phases).endswith(
        f" until {band.depth_from} tokens, then npu alone (1.1 x {phases[1].device_set})"
        if phases[1].device_set == TENSOR_LEVEL
        else f" until {band.depth_from} tokens, then npu alone (1.1 x the gpu)"
    )
    last = phases[-1].document()
    assert (last["depth_from"], last["devices"]) == (band.depth_from, ["npu"])
    assert last["gain"] == pytest.approx(1.1, rel=0.05)


def test_an_opened_model_decodes_by_its_bands_and_says_so(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path))
    options: Any = {"gpu": "reference", "npu": "reference", "max_seq_len": 128}
    with LLM(folder, device="gpu", **options) as llm:
        wanted = llm.generate(TOKENS, max_tokens=20).tokens
        graph = llm.model.spec()
    alone = {kind: single_device(graph, kind) for kind in ("gpu", "npu")}
    ops = tuple(x for x in alone["npu"].ops if x.phase == "decode" and x.op not in graph.sampled)
    band = DecodeBand(depth_from=48, device="npu", devices=("npu",), ops=ops)
    plan = alone["gpu"].model_copy(update={"bands": (band,)})
    with LLM(folder, plan=plan, **options) as llm:
        said = described(llm.phases)
        assert said == "prompt: gpu alone; answer: gpu alone until 48 tokens, then npu alone"
        result = llm.generate(TOKENS, max_tokens=20)
        assert result.tokens == wanted
        assert result.stats.placement["npu"].ops > 0


def test_a_phase_of_every_core_is_named_so() -> None:
    plan = single_device(model_spec("demo"), "gpu")
    info = SimpleNamespace(backend=EVERY_CORE)
    devices: Any = {"gpu": SimpleNamespace(info=info)}
    assert described(phases_of(plan, devices, Choice("gpu"))) == (
        "prompt: opencl-cores alone; answer: opencl-cores alone"
    )


@pytest.mark.full
def test_auto_answers_on_a_device_for_each_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model opened by a choice of two devices, from its prompt to its statistics."""
    folder = str(tiny_model(tmp_path))
    times = {name: s for name, s in TIMES.items() if name != TENSOR_LEVEL}
    monkeypatch.setattr(by_profile, "compare", lambda *_, **__: times)
    options: Any = {"gpu": "reference", "npu": "reference", "max_seq_len": 128}
    with LLM(folder, device="gpu", **options) as llm:
        assert described(llm.phases) == "prompt: gpu alone; answer: gpu alone"
        wanted = llm.generate(TOKENS, max_tokens=20).tokens
    with pytest.warns(ProfileWarning, match="was taken elsewhere"):
        llm = LLM(folder, device="auto", profile="host-avx2", **options)
    with llm:
        assert described(llm.phases) == (
            "prompt: npu alone (1.4 x the gpu); answer: gpu alone (3.0 x the npu)"
        )
        result = llm.generate(TOKENS, max_tokens=20)
        assert result.tokens == wanted
        assert result.stats.choice.startswith(f"auto: {described(llm.phases)}, predicted for")
        assert set(result.stats.placement) == {"gpu", "npu"}
        assert llm.engine.deployment.adapter is not None

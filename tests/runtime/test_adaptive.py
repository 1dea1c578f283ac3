"""Cuts follow the devices' measured speeds: seldom, for a gain, and without another token."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.backends.registry import open_device
from hetero.models import LoadedModel, open_model
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.runtime.adaptive import Adaptation, Adapter, AdaptPolicy
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.solver.build import assemble
from hetero.solver.chooser import Rules
from hetero.solver.joint_plan import solve_jointly
from hetero.solver.overheads import Overheads
from hetero.solver.placement import Placement
from hetero.solver.plan import PHASES
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.prepared import PreparedSolver
from hetero.solver.prepared_three import PreparedThree
from hetero.solver.request import PlanRequest, scenarios_of
from tests.runtime.models import context_of, greedy_tokens, tiny_model
from tests.runtime.test_faults import slow_down
from tests.solver.instances import profile_of, random_instance

GRAPHS = (1, 2, 4, 8, 32, 64)
QUICK = AdaptPolicy(decode=2, prefill=1, price=1e9, samples=3, every=12, forget=10_000)
TOKENS = np.random.default_rng(6).integers(0, 263, 40).tolist()


class EvenCost(CostModel):
    """Both devices take as long for a row, so that every matmul is cut in the middle."""

    def table_s(
        self, device: Any, weight_format: Any, ms: Any, ns: Any, k: Any, order: Any = "plain"
    ) -> Any:
        return 1e-6 * (np.asarray(ms)[:, None] * np.asarray(ns)[None, :])

    def contention(self, device: Any, phase: Any, weight_format: Any = None) -> float:
        return 1.0


def even_profile(**options: Any) -> DeviceProfile:
    instance = random_instance(1)
    instance.sizes, instance.non_matmul_s = GRAPHS, {"gpu": 1e-5, "npu": 1e-5}
    profile = profile_of(instance, **options)
    devices = {
        kind: record.model_copy(
            update={"capabilities": record.capabilities.model_copy(update={"row_alignment": 32})}
        )
        for kind, record in profile.devices.items()
    }
    return profile.model_copy(update={"devices": devices})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> LoadedModel:
    folder: Path = tiny_model(tmp_path_factory.mktemp("tiny"))
    return open_model(str(folder), weights="f32")


def solver_of(loaded: LoadedModel, **options: Any) -> PreparedSolver:
    spec = loaded.spec().model_copy(update={"weight_format": WeightFormat.F32})
    profile = even_profile(**options)
    planner = Planner(spec, profile, cost=EvenCost(profile), overheads=Overheads(0.0, 0.0, 0.0))
    return PreparedSolver(planner, PlanRequest(seq_lens=(40, 70)))


def solver_of_three(loaded: LoadedModel) -> PreparedThree:
    """As `solver_of`, with a CPU that is as fast as both."""
    profile = even_profile(cpu=True)
    spec = loaded.spec().model_copy(update={"weight_format": WeightFormat.F32})
    settings = PlannerSettings(rules=Rules(third=True), unfused=False)
    cost, overheads = EvenCost(profile), Overheads(0.0, 0.0, 0.0)
    free = Planner(spec, profile, settings, cost=cost, overheads=overheads)
    request = PlanRequest(seq_lens=(40, 70), third=True)
    objective, lengths = free.objective(), scenarios_of(request.seq_lens)
    planner, solved = solve_jointly(free, lengths, objective, request, [])
    return PreparedThree(planner, assemble(planner, solved, request))


def npu_rows(placement: Placement, phase: Any, m: int) -> int:
    entries = placement.block_entries(phase, m)
    tiles = [tile for op in entries for tile in op.tiles if tile.device == "npu"]
    return sum(tile.rows[1] - tile.rows[0] for tile in tiles)


def make_engine(
    loaded: LoadedModel, solver: PreparedSolver | PreparedThree | None = None, **options: Any
) -> Engine:
    solver = solver or solver_of(loaded)
    devices: Any = {
        "gpu": open_device("reference", kind="gpu", asynchronous=True),
        "npu": open_device("reference", kind="npu", graph_sizes=GRAPHS),
    }
    if "cpu" in solver.plan.devices():
        devices["cpu"] = open_device("reference", kind="cpu", asynchronous=True)
    engine = Engine(loaded.weights, solver.plan, devices, max_seq_len=200, solver=solver, **options)
    if engine.deployment.adapter is not None:
        engine.deployment.adapter.policy = QUICK
    return engine


def answer(engine: Engine, steps: int) -> list[int]:
    return greedy_tokens(engine, TOKENS, steps)


def measured_seconds(
    adapter: Adapter, phase: Any, tokens: int, times: dict[Any, float]
) -> dict[Any, float]:
    """Seconds of a step's matmuls on devices that take so many times as long as first predicted."""
    return {
        kind: times.get(kind, 1.0) * seconds / adapter._applied.get((kind, phase), 1.0)
        for kind, seconds in adapter._predicted(phase, tokens).items()
    }


def set_speeds(monkeypatch: pytest.MonkeyPatch, engine: Engine, **times: float) -> None:
    """Have an engine measure such devices, however busy the machine is."""
    adapter = engine.deployment.adapter
    assert adapter is not None
    monkeypatch.setattr(
        "hetero.runtime.adaptive.matmul_seconds",
        lambda step, *_: measured_seconds(adapter, step.phase, step.tokens, times),
    )


@pytest.mark.full
@pytest.mark.parametrize("slow", ["gpu", "npu"])
def test_a_device_that_drifts_gets_less_to_do_and_no_token_changes(
    loaded: LoadedModel, slow: DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(loaded, adapt=False) as engine:
        wanted = answer(engine, 30)
        assert engine.deployment.adaptations == []
    with make_engine(loaded) as engine:
        before = gpu_part(engine)
        set_speeds(monkeypatch, engine, **{slow: 20.0})
        assert answer(engine, 30) == wanted
        assert len(engine.deployment.adaptations) == 1, engine.deployment.adaptations
        assert "new cuts because matmuls in" in engine.deployment.adaptations[0]
        after = gpu_part(engine)
        assert after < before if slow == "gpu" else after > before
        assert answer(engine, 30) == wanted
        assert len(engine.deployment.adaptations) == 1, "it does not swing"


@pytest.mark.full
@pytest.mark.parametrize("slow", ["gpu", "npu"])
def test_a_phase_moves_to_the_other_device_when_its_own_is_slow(
    loaded: LoadedModel, slow: DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts on the NPU, answers on the GPU, both alone; no token changes."""
    solver = solver_of(loaded, non_matmul_on_npu=True)
    apart = solver.alone_in({"prefill": "npu", "decode": "gpu"})
    with make_engine(loaded, apart, adapt=False) as engine:
        wanted = answer(engine, 10)
        assert [engine.plan.devices_of(x) for x in PHASES] == [{"npu"}, {"gpu"}]
    other: DeviceKind = "npu" if slow == "gpu" else "gpu"
    with make_engine(loaded, apart) as engine:
        set_speeds(monkeypatch, engine, **{slow: 20.0})
        for _ in range(6):
            assert answer(engine, 10) == wanted
        assert [engine.plan.devices_of(x) for x in PHASES] == [{other}, {other}]
        phase = "prefill" if slow == "npu" else "decode"
        (change,) = engine.deployment.adaptations
        assert change.split(" because ")[0].split(": ")[1] == f"{phase} on the {other} alone"


def test_a_machine_on_which_all_is_slower_moves_no_phase(loaded: LoadedModel) -> None:
    """The device that a phase does not use is taken to be as slow as it is in the other one."""
    apart = solver_of(loaded, non_matmul_on_npu=True).alone_in({"prefill": "npu", "decode": "gpu"})
    with make_engine(loaded, apart) as engine:
        adapter = engine.deployment.adapter
        assert adapter is not None
        assert proposed(adapter, npu=5.0, gpu=4.9) is None
        change = proposed(adapter, npu=5.0, gpu=1.0)
        assert change is not None
        assert change.placement.plan.devices_of("prefill") == {"gpu"}


def proposed(adapter: Adapter, *, npu: float, gpu: float) -> Adaptation | None:
    """The change after prompts on the NPU and answers on the GPU took so many times as long."""
    measured: dict[Any, float] = {("npu", "prefill"): npu, ("gpu", "decode"): gpu}
    count = adapter.policy.samples
    adapter._ratios = {key: deque([x] * count, maxlen=count) for key, x in measured.items()}
    adapter._steps += adapter.policy.every
    return adapter.proposal()


def test_a_third_device_that_drifts_gets_less_to_do_and_no_token_changes(
    loaded: LoadedModel,
) -> None:
    solver = solver_of_three(loaded)
    assert solver.plan.devices() == {"gpu", "npu", "cpu"}
    with make_engine(loaded, solver, adapt=False) as engine:
        wanted = [answer(engine, 6), greedy_tokens(engine, TOKENS[:33], 6)]
    with make_engine(loaded, solver) as engine:
        adapter, before = engine.deployment.adapter, rows_on(engine, "cpu")
        assert adapter is not None
        assert measured_change(adapter, gpu=3.0, npu=3.0, cpu=3.0) is None
        change = measured_change(adapter, gpu=1.0, npu=1.0, cpu=50.0)
        assert change is not None
        assert "npu 1.00, cpu 50.00" in change.reason
        engine.deployment.change_cuts(change)
        adapter.policy = AdaptPolicy(every=10**9)
        assert rows_on(engine, "cpu") < before
        assert [answer(engine, 6), greedy_tokens(engine, TOKENS[:33], 6)] == wanted
        adapter.policy = QUICK
        back = measured_change(adapter, gpu=1.0, npu=1.0, cpu=1.0)
        assert back is not None
        engine.deployment.change_cuts(back)
        assert rows_on(engine, "cpu") == before


def measured_change(adapter: Adapter, **factors: float) -> Adaptation | None:
    """The change after these kinds took so many times as long as first predicted, in all phases."""
    count = adapter.policy.samples
    adapter._ratios = {
        (kind, phase): deque([factor] * count, maxlen=count)  # type: ignore[misc]
        for kind, factor in factors.items()
        for phase in PHASES
    }
    adapter._steps += adapter.policy.every
    return adapter.proposal()


def rows_on(engine: Engine, kind: DeviceKind) -> int:
    """Rows of a prompt's blocks on a device."""
    entries = engine.placement.block_entries("prefill", 40)
    tiles = (tile for op in entries for tile in op.tiles if tile.device == kind)
    return sum(tile.rows[1] - tile.rows[0] for tile in tiles)


@pytest.mark.full
def test_a_context_goes_on_elsewhere_after_the_cuts_changed(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """Saved on other cuts than those it was opened with, and read by a model that has the first."""
    with make_engine(loaded) as engine:
        before = engine.plan.plan_id
        slow_down(engine, lambda: 1e-3, "gpu")
        answer(engine, 30)
        assert engine.deployment.adaptations
        assert engine.plan.plan_id != before
        context_of(engine).save(tmp_path / "c")
        wanted = greedy(engine, context_of(engine), 10)
    with make_engine(loaded, adapt=False) as engine:
        assert engine.plan.plan_id == before
        context = engine.new_context()
        context.load(tmp_path / "c")
        assert len(context) == len(TOKENS) + 30
        assert greedy(engine, context, 10) == wanted


def greedy(engine: Engine, context: Context, steps: int) -> list[int]:
    found = [5]
    for _ in range(steps):
        found.append(int(np.argmax(engine.decode(context, found[-1]))))
    return found


def gpu_part(engine: Engine) -> int:
    """Rows of a decode step's blocks that the GPU computes."""
    return sum(
        launch.rows[1] - launch.rows[0]
        for launch in engine.steps.step(context_of(engine), "decode", 1).launches
        if launch.kind == "gpu" and launch.rows is not None and launch.node != "lm_head"
    )


class Watched:
    """An adapter fed with made-up measurements."""

    def __init__(self, loaded: LoadedModel, policy: AdaptPolicy) -> None:
        solver = solver_of(loaded)
        able: Any = {
            "gpu": Capabilities(kind="gpu"),
            "npu": Capabilities(kind="npu", static_shapes=True, graph_sizes=GRAPHS),
        }
        self.placement = Placement(solver.plan, loaded.spec(), able, source=solver)
        self.adapter = Adapter(solver, self.placement, policy)

    def steps(self, monkeypatch: pytest.MonkeyPatch, count: int, **slower: float) -> list[Any]:
        """Changes in so many decode steps with devices so much slower than predicted at first."""
        found = []
        for _ in range(count):
            if self.adapter.due("decode", 1):
                times = measured_seconds(self.adapter, "decode", 1, slower)
                monkeypatch.setattr("hetero.runtime.adaptive.matmul_seconds", lambda *_, t=times: t)
                step: Any = type("Step", (), {"phase": "decode", "tokens": 1})
                self.adapter.observe(step, ())
            if (change := self.adapter.proposal()) is not None:
                found.append(change)
        return found


def test_steps_are_timed_as_seldom_as_what_it_costs_asks_for(loaded: LoadedModel) -> None:
    """A timed step that takes six usual ones is five too many: at 1/128, one in 640 steps."""
    now_s = 0.0
    watched = Watched(loaded, AdaptPolicy(price=1 / 128))
    watched.adapter.clock = lambda: now_s
    due = []
    for i in range(1400):
        timed = watched.adapter.due("decode", 1)
        now_s += 6 / 1024 if timed else 1 / 1024
        if timed:
            due.append(i)
            watched.adapter.observe(step_of("decode"), ())
    assert due == [15, 655, 1295]


def step_of(phase: str) -> Any:
    """A step without launches."""
    return type("Step", (), {"phase": phase, "tokens": 1, "program": (), "launches": (),
                             "completions": (), "kinds": ()})  # fmt: skip


def test_small_and_equal_drifts_change_nothing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(loaded, QUICK)
    assert watched.steps(monkeypatch, 60, gpu=1.05) == []
    assert watched.steps(monkeypatch, 60, gpu=3.0, npu=3.0) == []


def test_a_change_waits_for_its_time_and_a_device_without_work_is_tried_again(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AdaptPolicy(decode=2, prefill=1, price=1e9, samples=3, every=20, forget=200)
    watched = Watched(loaded, policy)
    before = npu_rows(watched.placement, "decode", 1)
    assert watched.steps(monkeypatch, 19, npu=50.0) == []
    (change,) = watched.steps(monkeypatch, 60, npu=50.0)
    assert npu_rows(change.placement, "decode", 1) < before
    assert "npu 50.00" in change.reason
    later = watched.steps(monkeypatch, 400)
    assert later
    assert npu_rows(later[-1].placement, "decode", 1) == before

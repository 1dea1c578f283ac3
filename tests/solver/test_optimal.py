"""The solver against trying everything, on thousands of seeded random instances."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hetero.backends.protocol import PerGraphSize
from hetero.profiler.cost import NO_IDLE_COSTS
from hetero.solver.chooser import Chooser, Rules
from hetero.solver.errors import PlanError
from hetero.solver.layer_dp import Repeated, priced, solve_layers, walk
from hetero.solver.options import GPU, HOST, INF, Objective, Option, PowerModel
from hetero.solver.place import tiles_of
from hetero.solver.plan import OpPlan
from hetero.solver.solution import Scenario
from hetero.solver.weight_memory import Limits, weight_memory
from tests.solver.instances import (
    ALIGN,
    NAMES,
    Instance,
    Way,
    allowed_costs,
    brute_force_step,
    every_way,
    planner_of,
    random_instance,
    solve_limited,
)
from tests.support.selection import examples


@pytest.mark.parametrize("block", range(examples(4, 10)))
def test_every_matmul_is_as_good_as_trying_all_tilings(block: int) -> None:
    for seed in range(200 * block, 200 * block + 200):
        instance = random_instance(seed, tiny=False)
        planner = planner_of(instance)
        m = 1 + seed % (2 * instance.sizes[-1])
        name = NAMES[seed % 4]
        chooser = Chooser(planner.overheads, Rules(margin=instance.margin), Objective())
        found = chooser.options(planner.space(name), m)  # type: ignore[arg-type]
        costs = allowed_costs(every_way(instance, name, m), instance.margin)
        for state in (GPU, HOST):
            best = min(Objective().cost(o, state) for o in found)
            assert best == pytest.approx(costs[:, state].min(), rel=1e-9), (seed, state)


@pytest.mark.parametrize("block", range(examples(4, 10)))
def test_every_path_is_as_good_as_trying_all_combinations(block: int) -> None:
    for seed in range(200 * block, 200 * block + 200):
        instance = random_instance(seed)
        m = 1 + seed % (2 * instance.sizes[-1])
        found = planner_of(instance).solve(Scenario("prefill", m))
        assert found.seconds == pytest.approx(brute_force_step(instance, m), rel=1e-9), seed
        assert found.path.cost == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("block", range(examples(2, 4)))
def test_a_prompt_that_must_be_shared_is_shared_at_the_least_cost(block: int) -> None:
    alone = 0
    for seed in range(100 * block, 100 * block + 100):
        instance = random_instance(seed)
        scenario = Scenario("prefill", 1 + seed % (2 * instance.sizes[-1]))
        free = planner_of(instance, margin=0.0).solve(scenario)
        found = planner_of(instance, margin=0.0, shared=True).solve(scenario)
        assert found.devices == {"gpu", "npu"}
        if free.devices == found.devices:
            assert found.seconds == free.seconds
            continue
        # All matmuls were the GPU's, each at its best; one of them now has a tile on the NPU.
        alone += 1
        dearer = [
            min(w.cost(GPU) + w.back for w in ways if w.kind != "gpu")
            - next(w.cost(GPU) for w in ways if w.kind == "gpu")
            for ways in (every_way(instance, name, scenario.m) for name in NAMES)
        ]
        expected = free.seconds + instance.layers * min(dearer)
        assert found.seconds == pytest.approx(expected, rel=1e-9), seed
    assert alone > 3


@pytest.mark.parametrize("seed", range(examples(300, 1000)))
def test_paths_without_gpu_operators_between_are_solved_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = [[_random_option(rng) for _ in range(rng.integers(1, 4))] for _ in range(5)]
    costs = [priced(stage, Objective()) for stage in stages]
    head, block, tail = costs[:1], costs[1:4], costs[4:]
    layers = int(rng.integers(1, 5))
    path = solve_layers(head, [Repeated(block, layers)], tail)
    best = min(_walk_all(combo, [1] * layers) for combo in itertools.product(*stages))
    if best == np.inf:
        assert path is None
    else:
        assert path is not None
        assert path.cost == pytest.approx(best)
        assert walk(path).seconds == pytest.approx(best)


@pytest.mark.parametrize("seed", range(examples(200, 600)))
def test_layers_of_two_kinds_cost_the_same_in_any_order(seed: int) -> None:
    """Against layer after layer, among the paths whose blocks all leave in one state."""
    rng = np.random.default_rng(seed)
    stages = [[_random_option(rng) for _ in range(rng.integers(1, 4))] for _ in range(7)]
    costs = [priced(stage, Objective()) for stage in stages]
    head, first, second, tail = costs[:1], costs[1:4], costs[4:6], costs[6:]
    order = [1, *rng.integers(1, 3, size=rng.integers(0, 4)).tolist(), 2]
    kinds = [Repeated(first, order.count(1)), Repeated(second, order.count(2))]
    path = solve_layers(head, kinds, tail)
    ways = [x for x in itertools.product(*stages) if x[3].leaves == x[5].leaves]
    best = min((_walk_all(combo, order) for combo in ways), default=np.inf)
    if best == np.inf:
        assert path is None
    else:
        assert path is not None
        assert path.cost == pytest.approx(best)
        assert walk(path).seconds == pytest.approx(best)
        assert len(path.block) == 5


def _random_option(rng: np.random.Generator) -> Option:
    forbidden = frozenset({int(rng.integers(2))}) if rng.random() < 0.1 else frozenset()
    enter = (float(rng.random()), float(rng.random()))
    return Option(
        "gpu-only",
        "gpu",
        float(rng.random()),
        enter_s=enter,
        leaves=int(rng.integers(2)),
        forbidden=forbidden,
    )


def _walk_all(combo: tuple[Option, ...], order: list[int]) -> float:
    """Layer after layer, each of kind 1 or 2, nothing assumed."""
    state, total = GPU, 0.0
    blocks = {1: combo[1:4], 2: combo[4:-1]}
    for option in (combo[0], *(x for kind in order for x in blocks[kind]), combo[-1]):
        total += Objective().cost(option, state)
        state = option.leaves
    return total


@pytest.mark.parametrize("seed", range(examples(100, 300)))
def test_the_path_never_loses_to_a_greedy_solver(seed: int) -> None:
    """The slow twin takes the best option of each matmul for itself."""
    instance = random_instance(seed)
    planner = planner_of(instance, margin=0.0, non_matmul_on_npu=True)
    scenario = Scenario("prefill", 1 + seed % (2 * instance.sizes[-1]))
    chooser = Chooser(planner.overheads, planner.settings.rules, planner.objective())
    greedy = {}
    for name in NAMES:
        options = chooser.options(planner.space(name), scenario.m)  # type: ignore[arg-type]
        greedy[name] = min(options, key=lambda o: planner.objective().cost(o, GPU))
    best = planner.solve(scenario).seconds
    assert best <= planner.evaluate(scenario, greedy).seconds * (1 + 1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(examples(100, 300)))
def test_tiles_cover_on_the_alignment_and_hold_two_pieces(seed: int) -> None:
    instance = random_instance(seed, tiny=False)
    planner = planner_of(instance, margin=0.0)
    m = 1 + seed % (2 * instance.sizes[-1])
    for name, option in planner.solve(Scenario("prefill", m)).options.items():
        n, k = planner.shape(name)
        tiles = tiles_of(planner.space(name), option, m)
        OpPlan(phase="prefill", m=m, op=name, n=n, k=k, strategy=option.strategy, tiles=tiles)
        for tile in tiles:
            if tile.device == "npu":
                assert tile.rows[0] == 0
                assert tile.rows[1] == n or tile.rows[1] % ALIGN == 0
                assert tile.graph_size in instance.sizes


@pytest.mark.parametrize("seed", range(examples(70, 200)))
def test_time_falls_as_the_cap_on_the_gpu_rises(seed: int) -> None:
    instance = random_instance(seed)
    scenario = Scenario("prefill", instance.sizes[-1])
    times = [
        planner_of(instance, margin=0.0, max_gpu_share=cap).solve(scenario).seconds
        for cap in (0.0, 0.3, 0.7, 1.0)
    ]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("seed", range(examples(70, 200)))
def test_energy_and_latency_each_win_at_their_own(seed: int) -> None:
    planner = planner_of(random_instance(seed), margin=0.0)
    scenario = Scenario("prefill", planner.sizes[-1])
    fast = planner.solve(scenario, planner.objective(1.0, 0.0))
    thrifty = planner.solve(scenario, planner.objective(0.0, 1.0))
    assert fast.joules is not None
    assert thrifty.joules is not None
    assert fast.seconds <= thrifty.seconds + 1e-9
    assert thrifty.joules <= fast.joules + 1e-9


@pytest.mark.parametrize("seed", range(examples(10, 40)))
def test_tilings_are_compared_by_the_energy_that_their_options_have(seed: int) -> None:
    """Also where the NPU's thread starts late, so that a device idles although both have work."""
    instance = random_instance(seed, tiny=False)
    instance.sync = replace(instance.sync, npu_restart_s=0.5, idle=NO_IDLE_COSTS)
    planner = planner_of(instance, margin=0.0)
    objective, m = planner.objective(0.0, 1.0), instance.sizes[-1]
    chooser = Chooser(planner.overheads, planner.settings.rules, objective)
    space = planner.space(NAMES[seed % 4])
    grid = space.grid(m)
    cost = chooser.cost(grid, m)
    cells = np.argwhere(np.isfinite(cost))
    assert len(cells)
    for i, j in cells.tolist():
        dominant = bool(grid.npu_dominant[i, j])
        option = chooser._cut(space, m, planner.overheads, grid, i, j, dominant)
        assert cost[i, j] == pytest.approx(objective.cost(option._replace(enter_s=(0.0, 0.0)), GPU))


def test_an_unreachable_option_costs_infinity_under_every_objective() -> None:
    """Also where seconds weigh nothing, as energy alone has it: 0 * inf is no number."""
    power = PowerModel(1.0, 2.0, 3.0)
    never = Option("gpu-only", "gpu", elapsed_s=INF)
    late = Option("gpu-only", "gpu", elapsed_s=1.0, enter_s=(0.0, INF))
    for objective in (Objective(), Objective(0.0, 1.0, power), Objective(1.0, 1.0, power)):
        assert objective.cost(never, GPU) == objective.cost_alone(never, HOST) == INF
        assert objective.cost(late, HOST) == INF
        assert objective.cost(late, GPU) < INF


@pytest.mark.full
@pytest.mark.parametrize("seed", range(examples(60, 180)))
def test_memory_is_spent_as_well_as_possible(seed: int) -> None:
    """Under a budget for both devices, and in two thirds of the cases under limits of each; in
    half of these every graph size of the NPU has its own weights. In a quarter of the cases rows
    that both devices hold are limited as well.
    """
    instance = random_instance(seed)
    own = 4.0 if seed % 3 else 10.0  # bytes of a weight in the NPU's layout
    kind: PerGraphSize = "weights" if seed % 6 >= 4 else "nothing"
    copies = len(instance.sizes) if kind == "weights" else 1
    planner = planner_of(  # every cut may be chosen
        instance, margin=-99.0, npu_bytes=own, per_graph_size=kind
    )
    scenarios = [Scenario("prefill", instance.sizes[-1]), Scenario("decode", 1)]
    once = sum(4 * k * n * instance.layers for n, k in map(planner.shape, NAMES))  # type: ignore[arg-type]
    limits = Limits(once * (1 + (seed % 4) * 0.2))
    if seed % 3:
        limits = limits._replace(
            gpu=once * (seed % 5) * 0.3 or INF, npu=once * 0.4 * (seed % 7 + 1)
        )
    if seed % 4 == 3:
        limits = limits._replace(copies=own * once * (seed % 5) / 16)
    expected = _brute_residency(instance, [s.m for s in scenarios], limits, own, copies)
    solve = partial(solve_limited, planner, scenarios, limits, places=99)
    if expected == np.inf:
        with pytest.raises(PlanError, match="no plan of tiny fits"):
            solve()
        return
    found = solve()
    assert sum(s.seconds for s in found) == pytest.approx(expected, rel=1e-5), seed
    memory = weight_memory(planner, found)
    assert memory.total_bytes <= limits.both * (1 + 1e-6)
    assert memory.gpu_bytes <= limits.gpu * (1 + 1e-6)
    assert memory.npu_bytes <= limits.npu * (1 + 1e-6)
    assert memory.twice_bytes <= limits.copies * (1 + 1e-6)
    assert memory.graphs_bytes == pytest.approx(memory.npu_bytes * (1 - 1 / copies), abs=2)


@pytest.mark.parametrize("seed", range(examples(6, 20)))
def test_time_falls_as_memory_rises(seed: int) -> None:
    instance = random_instance(seed)
    planner = planner_of(instance, margin=-99.0)
    scenarios = [Scenario("prefill", instance.sizes[-1]), Scenario("decode", 1)]
    once = sum(4 * k * n * instance.layers for n, k in map(planner.shape, NAMES))  # type: ignore[arg-type]
    for name in ("both", "gpu", "npu", "copies"):
        times = []
        for part in (1.0, 1.2, 1.5, 2.0):
            limits = Limits()._replace(**{name: part * once})
            solutions = solve_limited(planner, scenarios, limits, places=99)
            times.append(sum(s.seconds for s in solutions))
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(times)), (name, times)


@pytest.mark.parametrize("seed", range(examples(40, 100)))
def test_an_npu_of_half_or_twice_the_time_moves_the_best_time_as_far_as_it_can(seed: int) -> None:
    """Never the other way, and never by more than the NPU itself changed."""
    instance = random_instance(seed)
    times = []
    for scale in (0.5, 1.0, 2.0):
        instance.npu_scale = scale
        planner = planner_of(instance, margin=-99.0)  # every cut may be chosen
        scenarios = [
            Scenario("prefill", m) for m in (1, instance.sizes[-1], 2 * instance.sizes[-1])
        ]
        times.append([planner.solve(s).seconds for s in (*scenarios, Scenario("decode", 1))])
    for faster, slower in itertools.pairwise(times):
        for a, b in zip(faster, slower, strict=True):
            assert a <= b * (1 + 1e-9) <= 2 * a * (1 + 1e-9)


def _brute_residency(
    instance: Instance, ms: list[int], limits: Limits, own: float, copies: int
) -> float:
    """All rows on each device for each matmul. Every matmul is entered from the GPU, so the best
    tilings inside a residency are independent and only the bytes are shared.
    """
    fronts = []
    for name in NAMES:
        n, k = instance.rows[name], instance.ks[name]
        rows = [0, *range(ALIGN, n, ALIGN), n]
        points = [
            (
                k * instance.layers * np.asarray(_bytes(own, copies, n, r, s)),
                _best_inside(instance, name, ms, r, s),
            )
            for r in rows
            for s in rows
            if s <= r or (r, s) == (n, n)
        ]
        fronts.append(points)
    fixed = sum(instance.non_matmul_s["gpu"] * (2 + 5 * instance.layers) for _ in ms)
    totals = [
        sum(p[1] for p in combo)
        for combo in itertools.product(*fronts)
        if np.all(sum(p[0] for p in combo) <= np.asarray(limits[:4]) * (1 + 1e-12))
    ]
    return min(totals, default=np.inf) + fixed


def _bytes(own: float, copies: int, n: int, r: int, s: int) -> list[float]:
    """Of a row's weight, in the order of `Limits`."""
    gpu, npu = 4.0 * (n - s), own * copies * r
    return [gpu + npu, gpu, npu, own * max(r - s, 0)]


def _best_inside(instance: Instance, name: str, ms: list[int], r: int, s: int) -> float:
    total = 0.0
    for m in ms:
        inside = [w for w in every_way(instance, name, m) if _fits(w, r, s)]
        total += min((w.cost(0) + w.back for w in inside), default=np.inf)
    return instance.layers * total


def _fits(way: Way, r: int, s: int) -> bool:
    if way.kind == "gpu":
        return s == 0
    return way.npu_rows <= r and way.gpu_from >= s

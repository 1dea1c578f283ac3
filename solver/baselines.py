"""The paper's systems and strategies by name, for comparison (sections 5.1 and 5.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

import numpy as np

from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import OpName
from hetero.solver.chooser import Chooser, Rules
from hetero.solver.errors import PlanError
from hetero.solver.npu_tiles import NpuTiles
from hetero.solver.options import HOST, Objective, Option
from hetero.solver.plan import Strategy
from hetero.solver.planner import Planner, shortest
from hetero.solver.prompt_calls import chunk_size
from hetero.solver.solution import Scenario, Solution
from hetero.solver.tilings import MatMulSpace

NPU_NAMES: Final = ("padding", "pipe", "chunked", "online-prepare")
CUT_NAMES: Final = ("row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut")
STRATEGIES: Final = ("auto", "gpu-only", "npu-only", "layer", *NPU_NAMES, *CUT_NAMES)
CHUNKED_AT: Final = 1 << 20  # a prompt longer than any chunk


def force(planner: Planner, scenario: Scenario, strategy: str) -> Solution:
    """Return the step under a named strategy.

    Raises `PlanError` where it is unknown or cannot run.
    """
    if strategy == "auto":
        return planner.solve(scenario)
    planner = planner.with_heads(())  # which cuts no attention
    if strategy in ("gpu-only", "npu-only"):
        return _single(planner, scenario, "gpu" if strategy == "gpu-only" else "npu")
    if strategy == "layer":
        return layer_level(planner, scenario)
    if strategy in CUT_NAMES:
        return _only(planner, scenario, strategy)
    if strategy in NPU_NAMES:
        return _npu(planner, scenario, strategy)
    raise PlanError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")


def _single(planner: Planner, scenario: Scenario, kind: DeviceKind) -> Solution:
    solution = planner.single(scenario, kind)
    if solution is None:
        raise PlanError(
            f"{kind}-only: profile {planner.profile.name} has no {kind.upper()} kernels for "
            f"{planner.spec.name} in {scenario.phase} at {scenario.m} tokens: choose another "
            "strategy"
        )
    return solution


def layer_level(planner: Planner, scenario: Scenario) -> Solution:
    """Return hetero-layer: whole matmuls, each on the device that is faster for it."""
    chooser = Chooser(planner.overheads, Rules(margin=0.0), Objective())
    options: dict[OpName, list[Option]] = {}
    for name in _matmuls(planner):
        m = planner.spec.tokens_of(name, scenario.m)
        choices = chooser.options(planner.space(name), m)
        options[name] = [o for o in choices if not o.is_cut and o.strategy != "multi-sequence-cut"]
        if len(options[name]) < 2:
            options[name] = [o for o in choices if not o.is_cut]
    return planner.solve(scenario, options=options)


def _only(planner: Planner, scenario: Scenario, strategy: str) -> Solution:
    """Return one strategy for every matmul where it exists, the best single device elsewhere."""
    chooser = Chooser(planner.overheads, Rules(margin=0.0), Objective())
    options: dict[OpName, list[Option]] = {}
    for name in _matmuls(planner):
        m = planner.spec.tokens_of(name, scenario.m)
        named = chooser.named(planner.space(name), m)
        options[name] = [o for o in named if o.strategy == strategy] or [
            o for o in named if not o.is_cut
        ]
    return planner.solve(scenario, options=options)


def _npu(planner: Planner, scenario: Scenario, strategy: str) -> Solution:
    if strategy == "online-prepare":
        planner = planner.with_graph_sizes((*planner.sizes, scenario.m))
    sizes = tuple(g for g in planner.sizes if g > 1) or planner.sizes
    choose: Callable[[int], tuple[int, ...]] = {
        "padding": lambda m: _padding(m, sizes),
        "pipe": lambda m: _pipe(planner, m, sizes),
        "chunked": lambda m: _chunks(planner, m),
        "online-prepare": lambda m: (m,),
    }[strategy]
    options: dict[OpName, list[Option]] = {}
    for name in _matmuls(planner):
        if name in planner.spec.sampled:
            options[name] = _whole(planner, name)
        else:
            space = planner.space(name)
            options[name] = [npu_sequence(planner, space, choose(scenario.m), scenario.m)]
    return planner.solve(scenario, options=options)


def online_s(planner: Planner, m: int, strategy: str) -> float:
    """Return the seconds that a prompt of m tokens waits for its graphs that are not prepared."""
    online = strategy == "online-prepare" and m not in planner.sizes
    return planner.preparation_s(m) if online else 0.0


def latency_s(planner: Planner, scenario: Scenario, strategy: str) -> float:
    """Return the seconds of a step under a strategy, online preparation included."""
    seconds = force(planner, scenario, strategy).seconds
    return seconds + online_s(planner, scenario.m, strategy)


def _matmuls(planner: Planner) -> Iterable[OpName]:
    return [x.name for x in planner.spec.matmuls]


def _whole(planner: Planner, name: OpName) -> list[Option]:
    chooser = Chooser(planner.overheads, Rules(margin=0.0), Objective())
    return [o for o in chooser.options(planner.space(name), 1) if not o.is_cut]


def _padding(m: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the next graph; several of the largest for more."""
    largest = sizes[-1] if sizes else m
    whole, left = divmod(m, largest)
    fitting = [g for g in sizes if g >= left]
    return (largest,) * whole + ((fitting[0] if fitting else left,) if left else ())


def _pipe(planner: Planner, m: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return largest graphs first, the margin in smaller ones; padded where that is faster."""
    if not sizes:
        return (m,)
    best: tuple[float, tuple[int, ...]] | None = None
    taken: list[int] = []
    left = m
    for g in reversed(sizes):
        ending = (*taken, *_padding(left, sizes)) if left else tuple(taken)
        cost = _sum_s(planner, ending)
        best = min(best, (cost, ending)) if best is not None else (cost, ending)
        while left >= g:
            taken.append(g)
            left -= g
    ending = (*taken, *_padding(left, sizes)) if left else tuple(taken)
    return min(best or (0.0, ending), (_sum_s(planner, ending), ending))[1]


def _sum_s(planner: Planner, graphs: tuple[int, ...]) -> float:
    names = [x for x in _matmuls(planner) if x not in planner.spec.sampled]
    return sum(
        float(planner.kernels.table("npu", graphs, [n], k).seconds.sum())
        for n, k in map(planner.shape, names)
    )


def chunk_tokens(planner: Planner, m: int) -> int:
    """Return the tokens of one chunk of a prompt of m tokens (mllm-NPU)."""
    return chunk_size(planner.sizes, m)


def longest_step(planner: Planner, strategy: str) -> int | None:
    """Return the tokens of the longest call under a strategy.

    A chunk, or what the planner's calls hold.

    What one graph holds where the NPU runs everything in graphs. None where nothing limits it.
    """
    chunk = chunk_tokens(planner, CHUNKED_AT) if strategy == "chunked" else None
    in_graphs = strategy == "npu-only" and "npu" in planner.non_matmul_devices(1)
    return shortest(planner.step_tokens, chunk, planner.longest_with("npu") if in_graphs else None)


def _chunks(planner: Planner, m: int) -> tuple[int, ...]:
    """Return one fixed chunk size, the last chunk padded."""
    fixed = chunk_tokens(planner, m)
    return (fixed,) * -(-m // fixed)


def npu_sequence(planner: Planner, space: MatMulSpace, graphs: tuple[int, ...], m: int) -> Option:
    """Return all tokens on the NPU, graph after graph."""
    table = space.kernels.table("npu", graphs, [space.n], space.k).seconds[:, 0]
    if not np.isfinite(table).all():
        raise PlanError(f"the NPU has no kernel for {space.n}×{space.k} at {m} tokens")
    starts = np.minimum(np.cumsum((0, *graphs)), m)
    spans = tuple((int(a), int(b)) for a, b in pairwise(starts))
    whole = float(table.sum())
    name: Strategy = "npu-only" if len(graphs) == 1 else "multi-sequence-cut"
    base = Option(name, "npu", whole, npu_s=whole, leaves=HOST, rows=space.n)
    enter = (
        planner.overheads.wait_s
        + planner.overheads.npu_restart_s
        + planner.overheads.copy(4.0 * m * space.k)
    )
    leave = planner.overheads.copy(4.0 * m * space.n)
    return base._replace(enter_s=(enter + leave, leave), npu_tiles=NpuTiles(spans, graphs))

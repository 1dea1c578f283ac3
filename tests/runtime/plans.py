"""Random valid plans: every strategy, cut anywhere the devices allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hetero.profiler.model_graph import ModelGraph
from hetero.runtime.launch_graph import LaunchGraph
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.plan import AttentionShare, HeadCounts, NonMatmulDevices, OpPlan, Tile

STRATEGIES = (
    "gpu-only", "npu-only", "row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut",
)  # fmt: skip
ROWS = 32  # cuts at multiples of this are allowed on every backend here


def random_plan(
    spec: ModelGraph,
    tokens: int,
    graphs: Sequence[int],
    rng: random.Random,
    *,
    strategies: Sequence[str] = STRATEGIES,
    non_matmul: str = "gpu",
    shares: bool = False,
) -> ExecutionPlan:
    """A plan for prompts of `tokens` and for decoding; each matmul has a strategy of its own. With
    `shares` both devices have heads of attention, where the GPU has the other operators.
    """
    entries = []
    for matmul in spec.matmuls:
        for phase, m in (("prefill", tokens), ("decode", 1)):
            head = matmul.name == "lm_head"
            strategy = rng.choice(strategies)
            tiles = tiles_of(strategy, 1 if head else m, matmul.n, graphs, rng)
            if head:
                tiles = [tile.model_copy(update={"tokens": (0, None)}) for tile in tiles]
            entries.append(
                OpPlan.model_validate(
                    {
                        "phase": phase,
                        "m": None if head else m,
                        "op": matmul.name,
                        "n": matmul.n,
                        "k": matmul.k,
                        "strategy": strategy,
                        "tiles": tiles,
                    }
                )
            )
    shares_heads = shares and non_matmul == "gpu" and spec.kv_heads > 1
    return ExecutionPlan(
        model=spec.name,
        ops=tuple(entries),
        non_matmul=NonMatmulDevices.model_validate({"prefill": non_matmul, "decode": non_matmul}),
        attention=(share_of(spec, rng),) if shares_heads else (),
    )


def share_of(spec: ModelGraph, rng: random.Random) -> AttentionShare:
    """Some heads for each device, whatever the token count."""
    npu = rng.randint(1, spec.kv_heads - 1)
    heads = HeadCounts(gpu=spec.kv_heads - npu, npu=npu)
    return AttentionShare(phase="prefill", m=None, heads=heads)


def random_order(graph: LaunchGraph, rng: random.Random) -> list[int]:
    """Any order of a graph's launches that breaks no edge."""
    order: list[int] = []
    left = set(range(len(graph.launches)))
    while left:
        ready = sorted(i for i in left if left.isdisjoint(graph.before[i]))
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def tiles_of(
    strategy: str, m: int, n: int, graphs: Sequence[int], rng: random.Random
) -> list[Tile]:
    """Tiles of one matmul; a strategy that m or n is too small for falls back to a smaller one."""
    cuts = list(range(ROWS, n, ROWS))
    fitting = [g for g in graphs if g < m]
    covering = [g for g in graphs if g >= m]
    rows = rng.choice(cuts) if cuts else n
    if strategy == "gpu-only" or (strategy == "npu-only" and not covering):
        return [tile("gpu", (0, m), (0, n))]
    if strategy == "npu-only" or (rows == n and not fitting):
        return (
            [tile("npu", (0, m), (0, n), min(covering))]
            if covering
            else tiles_of("gpu-only", m, n, graphs, rng)
        )
    if strategy == "row-cut" or not fitting:
        npu = [tile("npu", (0, m), (0, rows), min(covering))] if covering else []
        if npu and rows == n:  # too few rows to cut
            return npu
        return [*npu, tile("gpu", (0, m), (rows if npu else 0, n))]
    if strategy == "sequence-cut":
        return cut_tokens([rng.choice(fitting)], m, n, n, rng)
    first = rng.choice(fitting)
    second = [g for g in graphs if g <= min(first, m - first)]
    sizes = [first, rng.choice(second)] if second else [first]
    return cut_tokens(sizes, m, n, n if strategy == "multi-sequence-cut" else rows, rng)


def cut_tokens(sizes: Sequence[int], m: int, n: int, rows: int, rng: random.Random) -> list[Tile]:
    """NPU graphs one after the other over rows [0, rows), the GPU's L-shape cut either way."""
    tiles, start = [], 0
    for size in sizes:
        tiles.append(tile("npu", (start, start + size), (0, rows), size))
        start += size
    if rng.random() < 0.5 or rows == n:
        if rows < n:
            tiles.append(tile("gpu", (0, start), (rows, n)))
        if start < m:
            tiles.append(tile("gpu", (start, m), (0, n)))
    else:
        tiles.append(tile("gpu", (0, m), (rows, n)))
        if start < m:
            tiles.append(tile("gpu", (start, m), (0, rows)))
    return tiles


def tile(
    device: str, tokens: tuple[int, int], rows: tuple[int, int], graph: int | None = None
) -> Tile:
    """A tile by its fields."""
    return Tile.model_validate(
        {"device": device, "tokens": tokens, "rows": rows, "graph_size": graph}
    )


def plan_for_three(spec: ModelGraph, *, third: bool = True) -> ExecutionPlan:
    """Matmuls of blocks with enough rows cut for GPU, NPU and CPU; without `third` for both."""
    base, ops = single_device(spec, "gpu"), []
    for op in base.ops:
        a, b = ROWS, 2 * ROWS
        if op.n < 3 * ROWS or op.op in spec.sampled:
            ops.append(op)
            continue
        parts = [("npu", (0, a)), ("cpu", (a, b)), ("gpu", (b, op.n))]
        if not third:
            parts = [("npu", (0, a)), ("gpu", (a, op.n))]
        tiles = [
            Tile.model_validate({"device": kind, "tokens": (0, None), "rows": rows})
            for kind, rows in parts
        ]
        ops.append(op.model_copy(update={"tiles": tuple(tiles), "strategy": "row-cut"}))
    return base.model_copy(update={"ops": tuple(ops)})

"""The tables of a report that a terminal of 80 columns has room for."""

from __future__ import annotations

from typing import Final

from hetero.profiler.table_data import TableData
from hetero.solver.plan import OpPlan, Plan, Total
from hetero.solver.report import content, units

BAR_CELLS: Final = 10


def gains(plan: Plan) -> TableData:
    """Do the same as `content.gains`, without the energy of the other device."""
    head: tuple[str, ...] = ("step", "plan", "tokens/s", "best device alone", "gain", "energy")
    rows = tuple(map(_gain, plan.totals))
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], tuple(row[:-1] for row in rows)
    note = f"Of whole steps: {content.layers(plan)}, attention, norms, output head."
    title = f"Gain over the best single device ({content.kind(plan)})"
    return TableData(title, head, rows, note, numbers=("plan", "tokens/s", "gain", "energy"))


def _gain(total: Total) -> tuple[str, ...]:
    best = min(total.single_devices, key=lambda k: total.single_devices[k], default=None)
    alone = units.duration(total.best_single_device_s)
    return (
        f"{total.phase} {total.m}",
        units.duration(total.predicted_s),
        units.rate(total.tokens_per_s),
        f"{alone} ({best.upper()})" if best else alone,
        units.gain(total.predicted_s, total.best_single_device_s),
        units.energy(total.energy_j) if total.energy_j is not None else "",
    )


def operators(plan: Plan) -> TableData:
    """Do the same as `content.operators`, with a bar of each device's share."""
    rows = [
        (content.where(op), op.op, op.strategy, _bar(op), units.duration(op.predicted_s))
        for op in plan.ops
    ]
    cpu = "CPU ▒ " if any(op.cpu_s for op in plan.ops) else ""
    head = ("step", "matmul", "strategy", f"NPU ▇ {cpu}GPU ░, %", "time")
    note = f"{content.kind(plan).capitalize()} times of one layer; --explain MATMUL says why."
    return TableData("The cut of every matmul", head, tuple(rows), note, 2, ("time",))


def _bar(op: OpPlan) -> str:
    """Return `▇▇▇▇▇▇▇▇▇░ 88:12`, or of three devices `▇▇▇▇▇▇▇▇▒░ 80:8:12`."""
    npu, cpu = content.device_share(op, "npu"), content.device_share(op, "cpu")
    if cpu:
        few = [max(round(BAR_CELLS * x), 1) for x in (cpu, 1 - npu - cpu)]
        bar = f"{'▇' * (BAR_CELLS - sum(few))}{'▒' * few[0]}{'░' * few[1]}"
        shares = round(100 * npu), round(100 * cpu)
        return f"{bar} {shares[0]}:{shares[1]}:{100 - sum(shares)}"
    cells = round(BAR_CELLS * npu)
    if 0 < npu < 1:  # a part of each is seen
        cells = min(max(cells, 1), BAR_CELLS - 1)
    return f"{'▇' * cells}{'░' * (BAR_CELLS - cells)} {100 * npu:.0f}:{100 - round(100 * npu)}"

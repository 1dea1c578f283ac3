"""The contents of a report, as plain tables; HTML and Markdown draw the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.table_data import TableData
from hetero.solver.plan import OpPlan, Plan, Total
from hetero.solver.report import units
from hetero.solver.report.labels import MODE_NAMES


def kind(plan: Plan) -> str:
    """Return what the plan's numbers are."""
    return plan.numbers or "predicted"


def _kind(plan: Plan) -> str:
    return kind(plan).capitalize()


def label(total: Total) -> str:
    """Return `prefill 256` or `decode`."""
    if total.phase == "prefill":
        calls = len(total.steps)
        cut = f" in {calls} calls of up to {max(total.steps)}" if calls > 1 else ""
        return f"prefill, {total.m} tokens{cut}"
    return f"decode after {total.context} tokens" + (f", {total.m} at once" if total.m > 1 else "")


def drawn_tokens(total: Total) -> int:
    """Return the tokens of the call that a drawing of a step shows: a prompt's first one."""
    return total.steps[0] if total.steps else total.m


def gains(plan: Plan) -> TableData:
    """Return the plan next to the best single device."""
    rows = []
    for t in plan.totals:
        best = min(t.single_devices, key=lambda k: t.single_devices[k], default=None)
        saved = "n/a"
        if t.energy_j is not None and t.best_single_device_j is not None:
            saved = units.gain(t.best_single_device_j, t.energy_j)
        rows.append(
            (
                label(t),
                units.duration(t.predicted_s),
                units.rate(t.tokens_per_s),
                f"{units.duration(t.best_single_device_s)}"
                + (f" ({best.upper()})" if best else ""),
                units.gain(t.predicted_s, t.best_single_device_s),
                units.energy(t.energy_j),
                saved,
            )
        )
    head = ("step", "plan", "tokens/s", "best single device", "speed", "energy", "energy, change")
    note = (
        f"{_kind(plan)} times of whole steps: {layers(plan)}, attention, norms, output "
        "head. A single device runs all matmuls, and the rest if it can."
    )
    return TableData("Gain over the best single device", head, tuple(rows), note)


def layers(plan: Plan) -> str:
    """Return which layers a step passes through."""
    if plan.prompt_layers is None:
        return "every layer"
    return (
        f"{plan.prompt_layers} of {plan.layers} layers (all {plan.layers} for the last token of a "
        "prompt and in decoding)"
    )


def operators(plan: Plan) -> TableData:
    """Return the chosen strategy of every matmul."""
    rows = []
    third = any(op.cpu_s for op in plan.ops)
    for op in plan.ops:
        busy = f"{units.duration(op.gpu_s)} / {units.duration(op.npu_s)}"
        busy += f" / {units.duration(op.cpu_s)}" if third else ""
        rows.append(
            (
                where(op),
                op.op,
                f"{op.n} × {op.k}",
                op.strategy,
                share(op),
                busy,
                units.duration(op.predicted_s),
            )
        )
    head = (
        "step",
        "matmul",
        "rows × features",
        "strategy",
        "computed by",
        "GPU / NPU / CPU busy" if third else "GPU / NPU busy",
        "time",
    )
    note = f"{_kind(plan)} times of one layer, synchronisation included."
    return TableData("The cut of every matmul", head, tuple(rows), note)


def modes(plan: Plan) -> TableData | None:
    """Return the mode of every prompt that has several."""
    rows = tuple(
        (
            str(total.m),
            *(units.duration(total.modes.get(mode)) for mode in MODE_NAMES),
            MODE_NAMES[total.mode],
        )
        for total in plan.totals
        if total.modes
    )
    if not rows:
        return None
    note = (
        "Makespans by the profile, calls in flight together: the plan's own cuts, or whole "
        "matmuls, or cuts that balance both devices over all operations of a call."
    )
    return TableData(
        "Prefill mode of long prompts", ("tokens", *MODE_NAMES.values(), "taken"), rows, note
    )


def attention(plan: Plan) -> TableData | None:
    """Return which device has which heads of attention, where both devices share them."""
    if not plan.shares_attention:
        return None
    rows = tuple(
        (
            f"{x.phase} {'any length' if x.m is None else x.m}",
            f"{x.heads.npu} NPU + {x.heads.gpu} GPU",
            f"{units.duration(x.gpu_s)} / {units.duration(x.npu_s)}",
            units.duration(x.predicted_s),
        )
        for x in plan.attention
    )
    note = f"{_kind(plan)} times of one layer's attention and rotary embedding (the GPU's)."
    head = ("step", "key/value heads", "GPU / NPU busy", "time")
    return TableData("Attention, shared by its heads", head, rows, note)


def where(op: OpPlan) -> str:
    """Return phase and length of an entry."""
    if op.m is None:
        return f"{op.phase}, any length"
    return f"{op.phase} {op.m}"


def share(op: OpPlan) -> str:
    """Return the part of the outputs that each device computes, and graphs."""
    npu, cpu = device_share(op, "npu"), device_share(op, "cpu")
    parts = (("NPU", npu), ("CPU", cpu), ("GPU", 1 - npu - cpu))
    graphs = [str(t.graph_size) for t in op.tiles if t.graph_size]
    text = " + ".join(f"{name} {100 * part:.0f} %" for name, part in parts if part > 0)
    return text + (f" (graph {'+'.join(graphs)})" if graphs else "")


def device_share(op: OpPlan, kind: DeviceKind) -> float:
    """Return the part of the outputs that a device computes."""
    m = op.m or 1
    return sum(_area(t, m) for t in op.tiles if t.device == kind) / (m * op.n)


def _area(tile: object, m: int) -> int:
    tokens, rows = tile.tokens, tile.rows  # type: ignore[attr-defined]
    stop = m if tokens[1] is None else tokens[1]
    return int((stop - tokens[0]) * (rows[1] - rows[0]))


def memory(plan: Plan) -> TableData | None:
    """Return weights on each device."""
    needed = plan.memory
    if needed is None:
        return None
    graphs = []
    if needed.graphs_bytes:
        graphs = [("of these again in graphs of other sizes", units.size(needed.graphs_bytes))]
    rows = [
        ("on the GPU", units.size(needed.gpu_bytes)),
        ("on the NPU", units.size(needed.npu_bytes)),
        *([("on the CPU", units.size(needed.cpu_bytes))] if needed.cpu_bytes else []),
        (
            "of these on several" if needed.cpu_bytes else "of these on both",
            units.size(needed.twice_bytes),
        ),
        *graphs,
        ("together", units.size(needed.total_bytes)),
    ]
    if needed.budget_bytes is not None:
        rows.append(("budget", units.size(needed.budget_bytes)))
    note = "Weights as stored. A row that both devices compute somewhere is stored twice."
    return TableData("Memory", ("weights", "size"), tuple(rows), note)


def quality(plan: Plan) -> TableData | None:
    """Return what a budget of quality buys, next to uniform types."""
    bought = plan.quality
    if bought is None:
        return None
    points = sorted((*bought.choices, *bought.frontier), key=lambda x: x.prompt_s)
    rows = tuple(
        (
            x.name,
            ", ".join(f"{count} {name}" for name, count in x.types.items()),
            units.size(x.weight_bytes),
            f"{x.kl:.3g} ({'measured' if x.measured else 'predicted'})",
            units.duration(x.prompt_s),
            units.duration(x.decode_s),
            " + ".join(x.prompt_devices).upper(),
        )
        for x in points
    )
    head = ("types", "tensors", "size", "KL, nats", "prompt", "decode step", "prompts on")
    note = (
        f"Types of tensors within a KL divergence of {bought.budget:g} nats a token, uniform types "
        f"and other mixes next to them. {_kind(plan)} times of a prompt of {bought.prompt_tokens} "
        f"tokens, and of a decode step after {bought.context}."
    )
    return TableData("What quality buys", head, rows, note, numbers=("size", "prompt"))


def alternatives(plan: Plan) -> Iterator[TableData]:
    """Yield why the others lost, for each matmul."""
    for op in plan.ops:
        if op.candidates:
            yield candidates_of(op)


def candidates_of(op: OpPlan) -> TableData:
    """Return why the others lost, for one matmul."""
    rows = tuple(
        (c.strategy, units.duration(c.predicted_s), c.detail, c.reason) for c in op.candidates
    )
    return TableData(f"{where(op)}: {op.op}", ("strategy", "time", "tiling", "verdict"), rows)


def reason(op: OpPlan) -> str:
    """Return why a matmul is cut as it is: the times of the devices alone, and what came next."""
    if not op.candidates:
        return ""
    times: dict[str, float | None] = {c.strategy: c.predicted_s for c in op.candidates}
    alone = [
        f"the {kind.upper()} alone would take {units.duration(seconds)}"
        for kind in KINDS
        if (seconds := times.get(f"{kind}-only")) is not None and op.strategy != f"{kind}-only"
    ]
    others = [c for c in op.candidates if c.strategy != op.strategy and c.predicted_s is not None]
    said = list(alone)
    if others:
        said.append(f"next is {others[0].strategy}: {others[0].reason}")
    if not said:
        return f"nothing else can run ({op.candidates[-1].reason})"
    return "Why: " + "; ".join(said)


def curves(plan: Plan) -> TableData | None:
    """Time by length for every strategy; the plan's own at the lengths that it was made for."""
    if not plan.curves:
        return None
    lengths = [p.m for p in plan.curves[0].points]
    own = {t.m: t.predicted_s for t in plan.totals if t.phase == "prefill"}
    rows = tuple(
        (
            str(m),
            units.duration(own[m]) if m in own else "",
            *(units.duration(c.points[i].seconds) for c in plan.curves),
        )
        for i, m in enumerate(lengths)
    )
    head = ("tokens", "this plan", *(display(c.strategy) for c in plan.curves))
    note = (
        f"{_kind(plan)} prefill times. A forced cut falls back to one device where it "
        f"does not exist; online-prepare includes preparing its graphs. {shared(plan)}"
    )
    return TableData("Time by length, every strategy", head, rows, note.strip())


def shared(plan: Plan) -> str:
    """Return what it costs that one set of weights serves all lengths.

    Where a curve without that is drawn: the reason why the plan's time is not that of its length
    alone.
    """
    alone = next((c for c in plan.curves if c.strategy == "auto"), None)
    if alone is None:
        return ""
    best = {point.m: point.seconds for point in alone.points}
    costs = {
        t.m: t.predicted_s / seconds - 1
        for t in plan.totals
        if t.phase == "prefill" and (seconds := best.get(t.m))
    }
    if not costs:
        return ""
    m = max(costs, key=lambda length: costs[length])
    return (
        f"{ALONE} is the fastest for a length if weights were laid out for it only; this plan lays "
        f"them out once for all its lengths and decoding, which costs at most "
        f"{100 * costs[m]:.0f} % ({m} tokens)."
    )


ALONE = "one length only"


def display(strategy: str) -> str:
    """Return the names of strategies for people."""
    return {"auto": ALONE, "layer": "layer level"}.get(strategy, strategy)


def front(plan: Plan) -> TableData | None:
    """Return latency against energy."""
    if not plan.front:
        return None
    rows = tuple(
        (
            f"{p.phase} {p.m}",
            f"{p.energy_weight:.1f}",
            units.duration(p.seconds),
            units.energy(p.energy_j),
            f"{p.energy_j / p.seconds:.2f} W",
        )
        for p in plan.front
    )
    head = ("step", "weight of energy", "time", "energy", "mean power")
    note = (
        f"{_kind(plan)}. The first row of each step is the fastest if weights were laid out for it "
        "only, so that it may be faster than this plan."
    )
    return TableData("Energy", head, rows, note)


def what_if(plan: Plan, others: Sequence[Plan]) -> TableData | None:
    """Return this plan next to others, step by step."""
    if not others:
        return None
    rows = []
    for t in plan.totals:
        row = [label(t), units.duration(t.predicted_s)]
        for other in others:
            twin = next((o for o in other.totals if (o.phase, o.m) == (t.phase, t.m)), None)
            row.append(units.duration(twin.predicted_s) if twin else "n/a")
            row.append(units.gain(twin.predicted_s, t.predicted_s) if twin else "n/a")
        rows.append(tuple(row))
    head = ["step", name(plan)]
    for other in others:
        head += [name(other), "speed"]
    return TableData("What if", tuple(head), tuple(rows), "Speed relative to the first column.")


def name(plan: Plan) -> str:
    """Return model and profile of a plan."""
    return f"{plan.model} on {plan.profile or 'a hand-made plan'}"


def tables(plan: Plan, others: Sequence[Plan]) -> Iterator[TableData]:
    """Yield all tables but the alternatives, in the order of the report."""
    first = (gains(plan), what_if(plan, others), modes(plan), operators(plan), attention(plan))
    for table in (*first, curves(plan), memory(plan), front(plan), quality(plan)):
        if table is not None:
            yield table

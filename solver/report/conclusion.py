"""A plan's conclusion in four sentences: the devices, the reason, the gain, the certainty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from hetero.solver.plan import OpPlan, Plan, Total
from hetero.solver.report import units
from hetero.solver.report.content import device_share, drawn_tokens

NPU: Final = "npu"
CPU: Final = "cpu"


def sentences(plan: Plan) -> tuple[str, ...]:
    """Return the conclusion; empty for a plan without predictions."""
    if not plan.totals:
        return ()
    return (
        f"Who, of the matmuls' work: {_listed(_who(plan))}.",
        *([f"Why: {_listed(why)}."] if (why := list(_why(plan.totals))) else []),
        f"Gain: {_listed(_gains(plan.totals))}.",
        f"How sure: {_certainty(plan)}.",
    )


def _who(plan: Plan) -> Sequence[str]:
    """Return each device's share of all matmuls' outputs, weighted by the work of each."""
    said = []
    for total in plan.totals:
        m = drawn_tokens(total)
        ops = [op for op in plan.ops if op.phase == total.phase and op.m in (m, None)]
        works = [op.n * op.k * _times(op, total, plan) for op in ops]
        share, cpu = (
            sum(work * device_share(op, kind) for work, op in zip(works, ops, strict=True))
            / (sum(works) or 1)
            for kind in (NPU, CPU)
        )
        if share in (0.0, 1.0):
            said.append(f"{short(total)} the {'NPU' if share else 'GPU'} alone")
        else:
            npu, third = round(100 * share), round(100 * cpu)
            more = f"CPU {third} %, " if third else ""
            said.append(f"{short(total)} NPU {npu} %, {more}GPU {100 - npu - third} %")
    return said


def _times(op: OpPlan, total: Total, plan: Plan) -> float:
    """Return how often, for each token.

    The output head comes once, and of a prompt for its last token, as the layers that only this
    passes through.
    """
    head = op.op == "lm_head"
    times = 1.0 if head else float(plan.counts.get(op.op, plan.layers or 1))
    last = head or (plan.prompt_layers is not None and op.m is None)
    return times / drawn_tokens(total) if total.phase == "prefill" and last else times


def _why(totals: Iterable[Total]) -> Iterator[str]:
    """Yield the speeds that lead there."""
    for total in totals:
        alone = total.single_devices
        if len(alone) == 2:
            fast, slow = sorted(alone, key=lambda kind: alone[kind])
            yield (
                f"{short(total)} takes the {fast.upper()} alone {units.duration(alone[fast])}, the "
                f"{slow.upper()} alone {units.duration(alone[slow])} "
                f"({alone[slow] / alone[fast]:.1f} ×)"
            )


def _gains(totals: Iterable[Total]) -> Iterator[str]:
    for total in totals:
        gain = units.gain(total.predicted_s, total.best_single_device_s)
        best = min(total.single_devices, key=lambda k: total.single_devices[k], default=None)
        over = f"the {best.upper()} alone" if best else "the best single device"
        yield f"{short(total)} {gain} over {over}"


def _certainty(plan: Plan) -> str:
    if plan.numbers == "simulated":
        return (
            "the chip is simulated from published timings of its parts "
            "(docs/reference/simulated-snapdragon.md); differences of a few percent say nothing"
        )
    if plan.numbers == "fitted":
        off = ", ".join(f"{100 * x:.0f} % in {phase}" for phase, x in plan.errors.items())
        checked = f"were predicted with a mean error of {off}" if off else "were not predicted"
        return (
            "the chip is fitted to rates of whole models (docs/reference/fitted-chips.md); those "
            f"of a model that was left out {checked}"
        )
    if plan.numbers == "emulated":
        return "predicted from times of an emulator, which say nothing of the chip's speed"
    if not plan.errors:
        return "predicted; the profile does not say how well it predicts"
    said = ", ".join(f"{100 * off:.0f} % in {phase}" for phase, off in plan.errors.items())
    close = [
        short(t)
        for t in plan.totals
        if 0 < t.best_single_device_s / t.predicted_s - 1 < plan.errors.get(t.phase, 0.0)
    ]
    less = f"; the gain of {_listed(close, ' and ')} is less than that" if close else ""
    return f"matmuls that the profile had not seen were predicted with a mean error of {said}{less}"


def short(total: Total) -> str:
    """Return `a prompt of 256` or `a token`."""
    if total.phase == "prefill":
        return f"a prompt of {total.m} tokens"
    return "a decoded token" if total.m == 1 else f"{total.m} decoded tokens"


def _listed(parts: Iterable[str], joint: str = "; ") -> str:
    return joint.join(parts)

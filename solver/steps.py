"""The operators of a step that are not matmuls, as stages of the chain."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.backends.ops import Op
from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.solver.model_spec import ModelSpec
from hetero.solver.options import GPU, HOST, Option, Sync


@dataclass(frozen=True)
class Rests:
    """One device's time of everything between the matmuls."""

    head: Option
    attention: Option
    norm: Option
    activation: Option

    @property
    def device(self) -> DeviceKind:
        """Which device that is."""
        return "gpu" if self.head.mode == "gpu" else "npu"


def rest_options(
    cost: CostModel, spec: ModelSpec, sync: Sync, m: int, context: int
) -> dict[DeviceKind, Rests]:
    """Devices that run all other operators of a step. Raises `ProfileError` if none does."""
    found: dict[DeviceKind, Rests] = {}
    reasons: list[str] = []
    ops = {step.name: (step.op, step.count) for step in spec.step_ops(context + m)}
    names = [step.name for step in spec.step_ops(context + m)][len(spec.matmuls) :]
    kinds: tuple[DeviceKind, ...] = ("gpu", "npu")
    for kind in kinds:
        missing = [
            a.reason for name in set(names) if not (a := cost.allowed_op(kind, ops[name][0], m))
        ]
        if missing or kind not in cost.profile.devices:
            reasons += missing
            continue
        found[kind] = _rests(cost, spec, sync, kind, m, context)
    if not found:
        raise ProfileError(
            f"profile {cost.profile.name} lacks operators of {spec.name} "
            f"({', '.join(sorted(set(reasons))) or 'no device'}): take it again with "
            "`hetero profile`"
        )
    return found


def _rests(
    cost: CostModel, spec: ModelSpec, sync: Sync, kind: DeviceKind, m: int, context: int
) -> Rests:
    times = {"embed": 0.0, "first_norm": 0.0, "norm": 0.0, "rope": 0.0, "attention": 0.0}
    times["gated_act"] = 0.0
    for step in spec.step_ops(context + m)[len(spec.matmuls) :]:
        seconds = _seconds(cost, kind, step.op, m, context)
        share = step.count / spec.layers if step.name == "attention" else 1.0
        times[step.name] += share * seconds
    return Rests(
        head=_option(kind, times["embed"] + times["first_norm"], sync),
        attention=_option(kind, times["rope"] + times["attention"], sync),
        norm=_option(kind, times["norm"], sync),
        activation=_option(kind, times["gated_act"], sync),
    )


def _seconds(cost: CostModel, kind: DeviceKind, op: Op, m: int, context: int) -> float:
    return float(cost.other_s(kind, op, m, context).seconds)


def _option(kind: DeviceKind, seconds: float, sync: Sync) -> Option:
    if kind == "gpu":
        return Option(
            "gpu-only", "gpu", seconds, gpu_s=seconds, enter_s=(0.0, sync.submit_s), leaves=GPU
        )
    return Option(
        "npu-only", "npu", seconds, npu_s=seconds, enter_s=(sync.wait_s, 0.0), leaves=HOST
    )

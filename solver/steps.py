"""The operators of a step that are not matmuls, as stages of the chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.predict import other_s, padded_count
from hetero.profiler.records import OtherPredictor
from hetero.solver.model_spec import ModelSpec
from hetero.solver.options import GPU, HOST, Option, Sync

# Stage of the chain that an operator belongs to, and how often a layer has that stage (0: the stage
# comes once, before the layers).
STAGES: Final = {
    "embed": ("head", 0),
    "positions": ("head", 0),
    "first_norm": ("head", 0),
    "rope": ("attention", 1),
    "attention": ("attention", 1),
    "norm": ("norm", 2),
    "out_norm": ("norm", 2),
    "join": ("norm", 2),
    "activation": ("activation", 1),
}
KEPT: Final = 1024  # times that are remembered


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


class RestCosts:
    """Times of a model's other operators on one profile. Raises `ProfileError` if no device has
    all of them.
    """

    def __init__(self, cost: CostModel, spec: ModelSpec, sync: Sync) -> None:
        self.cost, self.spec, self.sync = cost, spec, sync
        self._known: dict[tuple[DeviceKind, int, int], Rests] = {}
        steps = spec.step_ops(spec.max_position)[len(spec.matmuls) :]
        self.steps = [
            (STAGES[step.name][0], step.op, step.count / _occasions(step.name, spec))
            for step in steps
        ]
        kinds: tuple[DeviceKind, ...] = ("gpu", "npu")
        self._predictors: dict[DeviceKind, list[OtherPredictor]] = {}
        reasons = {kind: self._reasons(kind) for kind in kinds}
        self.devices = tuple(kind for kind in kinds if not reasons[kind])
        if not self.devices:
            missing = sorted({reason for found in reasons.values() for reason in found})
            raise ProfileError(
                f"profile {cost.profile.name} lacks operators of {spec.name} "
                f"({', '.join(missing)}): take it again with `hetero profile`"
            )

    def _reasons(self, kind: DeviceKind) -> list[str]:
        if kind not in self.cost.profile.devices:
            return [f"no {kind}"]
        checks = [self.cost.allowed_op(kind, op, 1) for _, op, _ in self.steps]
        return [check.reason for check in checks if not check]

    def on(self, kind: DeviceKind, m: int, context: int) -> Rests:
        """Times of m tokens after `context` others on one of `devices`."""
        key = (kind, m, context)
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = self._rests(kind, m, context)
        return self._known[key]

    def _rests(self, kind: DeviceKind, m: int, context: int) -> Rests:
        times = dict.fromkeys(("head", "attention", "norm", "activation"), 0.0)
        if kind not in self._predictors:
            self._predictors[kind] = [self.cost.other(kind, op) for _, op, _ in self.steps]
        tokens = padded_count(self.cost.device(kind), m)
        for (stage, op, share), predictor in zip(self.steps, self._predictors[kind], strict=True):
            times[stage] += share * other_s(predictor, op, tokens, context)
        sync = self.sync.at(m)
        return Rests(
            head=_option(kind, times["head"], sync),
            attention=_option(kind, times["attention"], sync),
            norm=_option(kind, times["norm"], sync),
            activation=_option(kind, times["activation"], sync),
        )

    def launches(self, stage: str) -> float:
        """Kernels of one occasion of a stage."""
        return sum(share for found, _, share in self.steps if found == stage)


def _occasions(name: str, spec: ModelSpec) -> int:
    """How often a step has an operator's stage."""
    per_layer = STAGES[name][1]
    return per_layer * spec.layers if per_layer else 1


def _option(kind: DeviceKind, seconds: float, sync: Sync) -> Option:
    if kind == "gpu":
        return Option(
            "gpu-only", "gpu", seconds, gpu_s=seconds, enter_s=(0.0, sync.submit_s), leaves=GPU
        )
    return Option(
        "npu-only", "npu", seconds, npu_s=seconds, enter_s=(sync.wait_s, 0.0), leaves=HOST
    )

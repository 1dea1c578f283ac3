"""Opens the devices of a profile's chip in virtual time, which run what real devices would.

What a launch takes alone comes from the profile's models of each device, kernel by kernel, and what
is between launches (submissions, empty queues, waits, copies, memory that both read) from the
events of `hetero.backends.simulated`. Nothing here is the solver's: what a plan is predicted to
take and what it takes when it is executed on this chip are computed in two ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hetero.backends import simulated
from hetero.backends.host.clock import ManualClock
from hetero.backends.ops import Experts, MatMul, Op, Router
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.simulated import (
    ChipTimes,
    LaunchModel,
    Load,
    Rendering,
    SimulatedChip,
    SimulatedDevice,
)
from hetero.profiler import predict
from hetero.profiler.cost import CostModel
from hetero.profiler.features import padded_count, weight_bytes
from hetero.profiler.preparation_times import PreparationTimes
from hetero.profiler.records import DeviceProfile, DeviceSync, MatMulPredictor
from hetero.profiler.substitutes import with_file_formats


class ProfiledLaunches(LaunchModel):
    """The times of launches on one device of a profile, remembered by operation and size.

    Kernels that the profile has no times of are refused.
    """

    def __init__(self, profile: DeviceProfile, kind: DeviceKind) -> None:
        self._profile, self._kind = with_file_formats(profile), kind
        # A graph has the tokens that it was made for, so nothing is padded a second time.
        record = profile.devices[kind]
        flexible = record.capabilities.model_copy(update={"static_shapes": False})
        self._device = record.model_copy(update={"capabilities": flexible})
        self._others = CostModel(profile)  # finds the predictor of an operation, or its substitute
        self._preparation = PreparationTimes(self._profile)
        self._known: dict[tuple[Op, int, int], Load] = {}

    def refusal(self, op: Op) -> str:
        """See `LaunchModel.refusal`."""
        if isinstance(op, MatMul):
            name = f"matmuls in {op.weight_format} ({op.order})"
            known = self._predictor(op) is not None
        else:
            name = predict.op_name(op)
            known = bool(self._others.allowed_op(self._kind, op, 1))
        return "" if known else f"profile {self._profile.name} has no {name} on the {self._kind}"

    def load(self, op: Op, m: int, position: int) -> Load:
        """See `LaunchModel.load`."""
        key = (op, m, position if "k_cache" in op.ports else 0)
        if key not in self._known:
            self._known[key] = self._matmul(op, m) if isinstance(op, MatMul) else self._other(*key)
        return self._known[key]

    def preparation_s(self, op: Op, m: int) -> float:
        """See `LaunchModel.preparation_s`."""
        if not isinstance(op, MatMul):
            return 0.0
        return self._preparation.seconds(self._kind, op.weight_format, op.n, op.k, m=m)

    def layers_share(self, op: Op) -> bool:
        """See `LaunchModel.layers_share`."""
        return isinstance(op, MatMul) and self._preparation.layers_share(
            self._kind, op.weight_format
        )

    def _predictor(self, op: MatMul) -> MatMulPredictor | None:
        wanted = (self._kind, op.weight_format, op.order)
        return next(
            (x for x in self._profile.predictors if (x.device, x.weight_format, x.order) == wanted),
            None,
        )

    def _matmul(self, op: MatMul, m: int) -> Load:
        predictor = self._predictor(op)
        assert predictor is not None, self.refusal(op)
        sizes = (np.asarray([float(x)]) for x in (m, op.n, op.k))
        tokens, rows, features = sizes
        seconds = predict.predict(predictor, self._device, tokens, rows, features)
        nbytes = weight_bytes(op.weight_format, op.n, op.k)
        if predictor.model is not None:
            nbytes = predictor.model.streamed_bytes(rows, features)[0]
        return Load(float(seconds[0]), float(nbytes))

    def _other(self, op: Op, m: int, position: int) -> Load:
        if isinstance(op, Router | Experts):
            nbytes = sum(
                weight_bytes(x.weight_format, x.n, x.k) for _, x in predict.as_matmuls(op, m)
            )
            seconds = float(self._others.other_s(self._kind, op, m).seconds)
            return Load(seconds, float(nbytes))
        tokens = padded_count(self._device, m)
        return Load(predict.other_s(self._others.other(self._kind, op), op, tokens, position))


class VirtualChip:
    """The devices of a profile's chip on one virtual `clock`; `numbers`: they compute results.

    `devices` are for `hetero.runtime.engine.Engine`, with the clock. `drift` are factors by which
    devices are slower than their profile says (`SimulatedDevice.drift`). `rendering` uses the GPU
    at the same time.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        numbers: bool = False,
        drift: Mapping[DeviceKind, float] | None = None,
        rendering: Rendering | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.chip = SimulatedChip(_times(profile), self.clock, rendering=rendering)
        self.simulated: dict[DeviceKind, SimulatedDevice] = {}
        for kind, record in profile.devices.items():
            able = record.capabilities.on(kind)
            device = simulated.open(
                capabilities=replace(able, early_visibility=False, reads_panels=kind == "gpu"),
                model=ProfiledLaunches(profile, kind),
                chip=self.chip,
                compute=numbers,
                name=record.name,
            )
            device.drift = (drift or {}).get(kind, 1.0)
            self.simulated[kind] = device

    @property
    def devices(self) -> dict[DeviceKind, Device]:
        """Return the open devices, for an engine."""
        return dict(self.simulated)

    def busy_s(self, since_s: float = 0.0) -> dict[str, float]:
        """Return the seconds in which the GPU alone, the NPU alone, and both have worked."""
        spans = {
            kind: [
                (x.start_s or 0.0, x.end_s or 0.0) for x in jobs if (x.start_s or 0.0) >= since_s
            ]
            for kind, jobs in self.chip.finished.items()
        }
        alone = {kind: sum(end - start for start, end in own) for kind, own in spans.items()}
        both_s = _common_s(spans["gpu"], spans["npu"])
        return {"gpu": alone["gpu"] - both_s, "npu": alone["npu"] - both_s, "both": both_s}


def _common_s(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Return the seconds that two rising lists of spans have in common."""
    total_s, j = 0.0, 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at = j
        while at < len(second) and second[at][0] < end:
            total_s += min(end, second[at][1]) - max(start, second[at][0])
            at += 1
    return total_s


def _times(profile: DeviceProfile) -> ChipTimes:
    sync = profile.sync.get("gpu", DeviceSync())
    fast_s = sync.wait_s.get("fast", min(sync.wait_s.values(), default=0.0))
    return ChipTimes(
        submit_busy_s=sync.submit_busy_s,
        submit_empty_s=sync.submit_empty_s,
        idle_gap_s=tuple(x.gap_s for x in sync.idle),
        idle_slower_s=tuple(x.slower_s for x in sync.idle),
        wait_s=fast_s,
        finish_s=sync.wait_s.get("finish", fast_s),
        copy_fixed_s=sync.copy_fixed_s,
        copy_s_per_byte=sync.copy_s_per_byte,
        bytes_per_s=profile.bandwidth.together_bytes_per_s,
    )

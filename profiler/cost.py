"""`CostModel`: what the solver asks a profile. Records and numpy only; no device, no scikit-learn.

Paper section 4.3: "retrieves performance results from the profiler".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Experts, MatMul, Op, OperandOrder, Router
from hetero.backends.protocol import DeviceKind
from hetero.profiler import predict, stats
from hetero.profiler.errors import ProfileError
from hetero.profiler.features import padded_count
from hetero.profiler.grid import shape_class
from hetero.profiler.measured_rows import MeasuredTimes
from hetero.profiler.predict import Floats
from hetero.profiler.preparation_times import PreparationTimes
from hetero.profiler.records import (
    DeviceProfile,
    DeviceRecord,
    DeviceSync,
    Kind,
    MatMulPredictor,
    NonMatmulPredictor,
    Phase,
    typical,
)
from hetero.profiler.substitutes import SUBSTITUTES, proxy_predictor, with_file_formats

Sizes: TypeAlias = int | npt.ArrayLike
Kernel: TypeAlias = tuple[DeviceKind, WeightFormat, OperandOrder]
LONGEST_S: Final = 1e9  # of a kernel: longer than any
IdleCurve: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]  # gaps, and their costs
NO_IDLE_COSTS: Final[IdleCurve] = ((), ())
WaitMethod: TypeAlias = Literal["fast", "flag", "event", "finish"]


class Cost(NamedTuple):
    """Seconds, and whether the shape is outside the measured range. Arrays of one shape."""

    seconds: Floats
    extrapolated: npt.NDArray[np.bool_]


class Allowed(NamedTuple):
    """Answer to whether the solver may use a kernel; `reason` is empty when it may."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def predicted_alone(profile: DeviceProfile) -> CostModel:
    """Return the costs by the predictors, also of shapes that were measured."""
    return CostModel(profile.model_copy(update={"matmuls": ()}))


class CostModel:
    """Answers from one profile. Cheap to make; immutable but for what it remembers."""

    def __init__(self, profile: DeviceProfile) -> None:
        profile = with_file_formats(profile)
        self.profile = profile
        self._matmuls: dict[Kernel, MatMulPredictor] = {
            (p.device, p.weight_format, p.order): p for p in profile.predictors
        }
        self._others: dict[tuple[DeviceKind, str], NonMatmulPredictor] = {
            (p.device, p.op): p for p in profile.other_predictors
        }
        self._measured: dict[Kernel, MeasuredTimes] = {}
        self.preparation = PreparationTimes(profile)
        self._spreads: dict[Kind, float] | None = None
        self._contention = {
            (entry.phase, entry.weight_format): entry for entry in profile.contention
        }

    def with_profile(self, profile: DeviceProfile) -> CostModel:
        """Return the same for another profile, such as one with other graphs."""
        return CostModel(profile)

    def device(self, device: DeviceKind) -> DeviceRecord:
        """Return the device's record.

        Raises `ProfileError` if the profile has none of that kind.
        """
        try:
            return self.profile.devices[device]
        except KeyError:
            raise ProfileError(
                f"profile {self.profile.name} has no {device}: measure one with `hetero profile`"
            ) from None

    def matmul_s(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        m: Sizes,
        n: Sizes,
        k: Sizes,
        order: OperandOrder = "plain",
    ) -> Cost:
        """Return the seconds of matmul kernels: as measured, where they were, else predicted.

        M, n, k broadcast. Raises `ProfileError` if the profile has no predictor for the format and
        order.
        """
        predictor = self._predictor(device, weight_format, order)
        record = self.device(device)
        sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k)))
        shape = sizes[0].shape
        flat = [size.ravel() for size in sizes]
        factors = self._measured_times(predictor).factors(*flat)
        seconds = self._sound(predict.predict(predictor, record, *flat) * factors)
        outside = predict.outside(predictor.measured, record, *flat)
        return Cost(seconds.reshape(shape), outside.reshape(shape))

    def table_s(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        ms: Floats,
        ns: Floats,
        k: int,
        order: OperandOrder = "plain",
    ) -> Floats:
        """Return the [M, N] seconds of all pairs of token counts ms [M] and rows ns [N].

        They are those of `matmul_s`. Raises `ProfileError` as it does.
        """
        predictor, record = self._predictor(device, weight_format, order), self.device(device)
        factors = self._measured_times(predictor).factor_table(ms, ns, float(k))
        return self._sound(predict.predict_table(predictor, record, ms, ns, float(k)) * factors)

    def uncertainty(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        ms: Floats,
        ns: Floats,
        k: int,
        order: OperandOrder = "plain",
    ) -> Floats:
        """Return [M, N] by which fraction the answers of `table_s` may be off.

        The spread of the predictor's trees; nothing for what was measured and without trees.
        """
        predictor, record = self._predictor(device, weight_format, order), self.device(device)
        known = self._measured_times(predictor).known_table(ms, ns, float(k))
        return predict.spread_table(predictor, record, ms, ns, float(k)) * (1.0 - known)

    def _measured_times(self, predictor: MatMulPredictor) -> MeasuredTimes:
        kernel = predictor.device, predictor.weight_format, predictor.order
        if kernel not in self._measured:
            rows = [row for row in self.profile.matmuls if row.key[:3] == kernel]
            self._measured[kernel] = MeasuredTimes(predictor, self.device(kernel[0]), rows)
        return self._measured[kernel]

    def other_s(self, device: DeviceKind, op: Op, m: int, context: int = 0) -> Cost:
        """Return the predicted seconds of an operation that is not a matmul.

        Its cache has `context` tokens. A device with static shapes is charged for the graph size.
        """
        if isinstance(op, Router | Experts):
            return _routed_s(self, device, op, m)
        predictor = self.other(device, op)
        tokens = padded_count(self.device(device), m)
        seconds = np.asarray(predict.other_s(predictor, op, tokens, context))
        outside = tokens > predictor.max_m or context > predictor.max_context
        return Cost(self._sound(seconds), np.asarray(outside))

    def _sound(self, seconds: Floats) -> Floats:
        """Return the seconds.

        Raises `ProfileError` where a damaged profile predicts what no kernel takes, which no sum
        could hold.
        """
        if seconds.size and not seconds.max() <= LONGEST_S:
            raise ProfileError(
                f"profile {self.profile.name} predicts {seconds.max():.3g} s for a kernel: it is "
                "damaged; take it again with `hetero profile`"
            )
        return seconds

    def other(self, device: DeviceKind, op: Op) -> NonMatmulPredictor:
        """Return the predictor of an operation that is not a matmul.

        It has its own times, or those of a similar one by its bytes. Raises `ProfileError` without
        either.
        """
        name = predict.op_name(op)
        source = self._others.get((device, self.measured_as(device, name) or name))
        if source is None:
            raise ProfileError(
                f"profile {self.profile.name} has no times of {name} on {device}: "
                "measure them with `hetero profile`"
            )
        return source if source.op == name else proxy_predictor(source, name)

    def measured_as(self, device: DeviceKind, name: str) -> str | None:
        """Return the operation whose times predict one by that name (`predict.op_name`).

        Itself, or its proxy (`substitutes`); None if the profile has neither.
        """
        names = (name, *SUBSTITUTES.get(name, ()))
        return next((source for source in names if (device, source) in self._others), None)

    def allowed(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        m: int,
        n: int,
        k: int,
        order: OperandOrder = "plain",
    ) -> Allowed:
        """Return whether a matmul kernel exists here and computes correctly."""
        if device not in self.profile.devices:
            return Allowed(False, f"the profile has no {device}")
        if (device, weight_format, order) not in self._matmuls:
            return Allowed(False, f"{weight_format.value} ({order}) was not measured on {device}")
        wanted = shape_class(m, n, k)
        for entry in self.profile.quarantined:
            same = (entry.device, entry.op, entry.order) == (device, "MatMul", order)
            formats = entry.weight_format in (None, weight_format)
            if same and formats and entry.shape_class in ("", wanted):
                return Allowed(False, f"quarantined: {entry.detail}")
        return Allowed(True)

    def allowed_op(self, device: DeviceKind, op: Op, m: int) -> Allowed:
        """Return whether an operation that is not a matmul was measured and is correct.

        Where it was not, its proxy counts.
        """
        if isinstance(op, Router | Experts):
            return _routed_allowed(self, device, op, m)
        name = predict.op_name(op)
        source = self.measured_as(device, name)
        if source is None:
            return Allowed(False, f"{name} was not measured on {device}")
        for entry in self.profile.quarantined:
            if entry.device == device and entry.op in (name, source):
                return Allowed(False, f"quarantined: {entry.detail}")
        return Allowed(True)

    def submit_s(self, device: DeviceKind, queue: Literal["busy", "empty"] = "busy") -> float:
        """Return the cost of submitting a kernel after others, or to an empty queue.

        0 if calls block.
        """
        sync = self._sync(device)
        return sync.submit_busy_s if queue == "busy" else sync.submit_empty_s

    def idle_costs(self, device: DeviceKind) -> IdleCurve:
        """Return idle gaps, rising, and how much longer what follows takes after each, in seconds.

        Longer gaps never cost less. Both empty where gaps cost no more than a submission to an
        empty queue.
        """
        costs = self._sync(device).idle
        slower_s = itertools.accumulate((x.slower_s for x in costs), max)
        return tuple(x.gap_s for x in costs), tuple(slower_s)

    def ring_s(self, device: DeviceKind) -> float | None:
        """Return the cost of a stream signal, which starts queued calls; None without signals."""
        return self._sync(device).ring_s

    def chain_s(self, device: DeviceKind) -> float:
        """Return what a launch saves in a fused launch; 0 if the device has none."""
        return self._sync(device).chain_s or 0.0

    def wait_s(self, device: DeviceKind, method: WaitMethod = "fast") -> float:
        """Return the seconds from the kernel's end until the host knows.

        0 where calls block or it is unknown.
        """
        waits = self._sync(device).wait_s
        return waits.get(method, min(waits.values(), default=0.0))

    def restart_s(self) -> float:
        """Return how much longer an NPU call takes after other work than after a call.

        The work is its thread's.
        """
        sync = self.profile.sync.get("npu")
        return 0.0 if sync is None else sync.restart_s

    def copy_s(self, device: DeviceKind, nbytes: int) -> float:
        """Return handing activations over to or from the device; 0 where memory is coherent."""
        able = self.device(device).capabilities
        if able.unified_memory and able.coherent:
            return 0.0
        sync = self._sync(device)
        return sync.copy_fixed_s + sync.copy_s_per_byte * nbytes

    def contention(
        self, device: DeviceKind, phase: Phase, weight_format: WeightFormat | None = None
    ) -> float:
        """Return by how much (>= 1) kernels of a format are slower while both devices work.

        1 where it was not measured. Profiles may have one factor for all formats.
        """
        known = self._contention
        entry = known.get((phase, weight_format)) or known.get((phase, None))
        return 1.0 if entry is None else max(1.0, entry.gpu if device == "gpu" else entry.npu)

    def spread(self, device: DeviceKind, phase: Phase, weight_format: WeightFormat) -> float:
        """Return relative standard deviation of a matmul kernel's time.

        It varies from run to run (the median over the sizes that were measured) and as its device
        drifts, which the rows do not show because they are compared with reference kernels of their
        moment. 0 where nothing is known.
        """
        if self._spreads is None:
            drifts = self._drifts()
            self._spreads = {
                kind: math.hypot(spread, drifts.get(kind[:2], 0.0))
                for kind, spread in typical(self.profile.matmuls, lambda row: row.spread).items()
            }
        return self._spreads.get((device, phase, weight_format), 0.0)

    def _drifts(self) -> dict[tuple[DeviceKind, Phase], float]:
        """Return relative standard deviation of each reference kernel over the run."""
        series: dict[tuple[DeviceKind, Phase], list[tuple[float, float]]] = {}
        for point in self.profile.references:
            series.setdefault((point.device, point.phase), []).append((point.at_s, point.seconds))
        return {key: stats.drift(*zip(*points, strict=True)) for key, points in series.items()}

    def bandwidth(self, who: Literal["gpu", "npu", "both"]) -> float | None:
        """Return weight bytes per second in decode; None if it was not measured."""
        speeds = self.profile.bandwidth
        match who:
            case "gpu":
                return speeds.gpu_alone_bytes_per_s
            case "npu":
                return speeds.npu_alone_bytes_per_s
            case "both":
                return speeds.together_bytes_per_s

    def power_w(self, who: DeviceKind | Literal["both", "idle"]) -> float | None:
        """Return the mean power while these devices work; None if the platform has no meter."""
        watts: float | None = getattr(self.profile.power, f"{who}_w", None)
        return watts

    def _predictor(
        self, device: DeviceKind, weight_format: WeightFormat, order: OperandOrder
    ) -> MatMulPredictor:
        try:
            return self._matmuls[device, weight_format, order]
        except KeyError:
            known = sorted({f"{d} {f.value} {o}" for d, f, o in self._matmuls}) or ["nothing"]
            raise ProfileError(
                f"profile {self.profile.name} has no times of {weight_format.value} ({order}) on "
                f"{device}, only of {', '.join(known)}: measure it with `hetero profile --weights`"
            ) from None

    def _sync(self, device: DeviceKind) -> DeviceSync:
        return self.profile.sync.get(device, DeviceSync())


def _routed_allowed(cost: CostModel, device: DeviceKind, op: Router | Experts, m: int) -> Allowed:
    for entry in cost.profile.quarantined:
        if (entry.device, entry.op) == (device, predict.op_name(op)):
            return Allowed(False, f"quarantined: {entry.detail}")
    answers = (
        cost.allowed(device, x.weight_format, tokens, x.n, x.k)
        for tokens, x in _routed(cost, device, op, m)
    )
    return next((x for x in answers if not x), Allowed(True))


def _routed_s(cost: CostModel, device: DeviceKind, op: Router | Experts, m: int) -> Cost:
    matmuls = _routed(cost, device, op, m)
    if not isinstance(op, Experts):
        return _matmuls_s(cost, device, matmuls)
    return _experts_s(cost, device, op, op.distinct(m), matmuls[0][0])


def experts_s(
    cost: CostModel, device: DeviceKind, op: Experts, distinct: float, tokens_each: float
) -> float:
    """Return the predicted seconds of so many of the experts, each with so many tokens."""
    return float(_experts_s(cost, device, op, distinct, tokens_each).seconds)


def _experts_s(
    cost: CostModel, device: DeviceKind, op: Experts, distinct: float, tokens_each: float
) -> Cost:
    """Return the seconds by measured experts in this format, else by those of their matmuls."""
    if (measured := measured_experts(cost, device, op)) is not None:
        seconds = predict.experts_s(measured, op, distinct, tokens_each)
        outside = distinct * tokens_each > measured.max_m * op.chosen
        return Cost(np.asarray(seconds), np.asarray(outside))
    matmuls, calls = predict.expert_matmuls(op, distinct, tokens_each), 1.0
    able = cost.device(device).capabilities
    if able.static_shapes:
        # Each expert is a call of its own there, elsewhere all are one launch.
        tokens = matmuls[0][0]
        if able.per_graph_size != "nothing":  # in the smallest graph that holds them
            tokens = min((x for x in able.graph_sizes if x >= tokens), default=tokens)
        calls, matmuls = distinct, [(tokens, x) for x in op.matmuls.values()]
    whole = _matmuls_s(cost, device, matmuls)
    return Cost(calls * whole.seconds, whole.extrapolated)


def measured_experts(cost: CostModel, device: DeviceKind, op: Experts) -> NonMatmulPredictor | None:
    """Return the predictor of routed experts in this format; None where none was measured."""
    return cost._others.get((device, predict.op_name(op)))


def _matmuls_s(cost: CostModel, device: DeviceKind, matmuls: Sequence[tuple[int, MatMul]]) -> Cost:
    """Return the seconds of matmuls, each with its tokens, one after the other."""
    costs = [cost.matmul_s(device, x.weight_format, tokens, x.n, x.k) for tokens, x in matmuls]
    outside = np.any([x.extrapolated for x in costs])
    return Cost(np.sum([x.seconds for x in costs], axis=0), np.asarray(outside))


def _routed(
    cost: CostModel, device: DeviceKind, op: Router | Experts, m: int
) -> list[tuple[int, MatMul]]:
    """Return `predict.as_matmuls`; the router's is in the widest format that was measured."""
    matmuls = predict.as_matmuls(op, m)
    known = {x.weight_format for x in cost.profile.predictors if x.device == device}
    if isinstance(op, Experts) or WeightFormat.F32 in known:
        return matmuls
    widest = max(known, key=lambda x: x.storage.bytes_per_weight, default=WeightFormat.F32)
    return [(tokens, replace(x, weight_format=widest)) for tokens, x in matmuls]

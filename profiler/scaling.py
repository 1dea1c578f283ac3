"""A profile for a machine that is slower or faster than the one it was taken on.

The profile's reference kernels are timed here for a second or so, in one weight format with
floating-point activations and one with integers: every other format has kernels of its own to
compile. What each took, over what the profile says, is a *factor* of its device, phase and format,
and `scaled` multiplies the profile's times by the factors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.factors import MAX_FACTOR
from hetero.profiler.grid import Task
from hetero.profiler.measure import REFERENCE_SIZES, MeasureSettings
from hetero.profiler.records import (
    Bandwidth,
    DeviceProfile,
    EveryCore,
    Kind,
    MatMulPredictor,
    NonMatmulPredictor,
    Phase,
    Regimes,
    phase_of,
    typical,
)
from hetero.profiler.workload import TaskRunner, Workload

# Seconds here over a profile's, by device, phase and weight format; 1 where nothing is known.
Factors: TypeAlias = Mapping[Kind, float]

PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class ReferencePolicy:
    """Policy of timing a profile's reference kernels on another machine, within seconds.

    min_samples  undisturbed ones of a kernel
    warm_s         launches of a kernel before it is timed take so long at most
    repeats        timings that a batch's length is chosen by; an interrupted one does not
    batch_s        a batch in a queue: the shorter, the fewer are disturbed
    shorter        part of a batch where time is up and samples are missing
    """

    min_samples: int = 3
    warm_s: float = 0.2
    repeats: int = 4
    batch_s: float = 2e-3
    shorter: int = 4


DEFAULT: Final = ReferencePolicy()


def scaled(profile: DeviceProfile, factors: Factors) -> DeviceProfile:
    """Return the profile with the times of every device and phase multiplied.

    A matmul's factor is that of its format, or else of one with the same kind of activations. What
    has no format (the other operators, bandwidths, the reference kernels) has that of the format in
    which the profile's reference kernels ran, which is its first. Times on every core are the
    GPU's: they follow it, and so does what they cost besides. Preparation, synchronisation, and how
    much the devices disturb each other (a ratio) stay as they are.
    """
    own = _Own(profile, factors)
    return profile.model_copy(
        update={
            "predictors": tuple(_predictor(p, own) for p in profile.predictors),
            "matmuls": tuple(
                row.model_copy(update={"seconds": row.seconds * own.matmul(*row.kind)})
                for row in profile.matmuls
            ),
            "other_predictors": tuple(_other(p, own) for p in profile.other_predictors),
            "others": tuple(
                row.model_copy(
                    update={"seconds": row.seconds * own.non_matmul(row.device, phase_of(row.m))}
                )
                for row in profile.others
            ),
            "references": tuple(
                point.model_copy(
                    update={"seconds": point.seconds * own.non_matmul(point.device, point.phase)}
                )
                for point in profile.references
            ),
            "bandwidth": _bandwidth(profile.bandwidth, own),
            "every_core": tuple(_every_core(entry, own) for entry in profile.every_core),
        }
    )


class _Own:
    """Factors of one profile's times."""

    def __init__(self, profile: DeviceProfile, factors: Factors) -> None:
        self._factors = factors
        self._first = {p.device: p.weight_format for p in reversed(profile.predictors)}
        self._measured = {row.kind for row in profile.matmuls}
        self._known: dict[Kind, float] = {}

    def matmul(self, device: DeviceKind, phase: Phase, weight_format: WeightFormat) -> float:
        """Return the factor of a format; one derived from others may have that of the first."""
        kind = (device, phase, weight_format)
        if kind not in self._known:
            floats = weight_format.activations.are_floats
            like = [x for x in WeightFormat if x.activations.are_floats == floats]
            if kind not in self._measured:
                like.append(self._first.get(device, weight_format))
            kinds = [kind, *((device, phase, x) for x in like)]
            self._known[kind] = next((self._factors[x] for x in kinds if x in self._factors), 1.0)
        return self._known[kind]

    def non_matmul(self, device: DeviceKind, phase: Phase) -> float:
        """Return the factor of what has no format."""
        first = self._first.get(device)
        return 1.0 if first is None else self.matmul(device, phase, first)


def _predictor(predictor: MatMulPredictor, own: _Own) -> MatMulPredictor:
    of = {phase: own.matmul(predictor.device, phase, predictor.weight_format) for phase in PHASES}
    if set(of.values()) == {1.0}:
        return predictor
    before = predictor.scale
    regimes = predictor.regimes
    return predictor.model_copy(
        update={
            "scale": {phase: before.get(phase, 1.0) * of[phase] for phase in PHASES},
            "regimes": Regimes(
                bytes_per_s=_times(regimes.bytes_per_s, 1 / of["decode"]),
                flops_per_s=_times(regimes.flops_per_s, 1 / of["prefill"]),
                knee_m=_times(regimes.knee_m, of["decode"] / of["prefill"]),
            ),
        }
    )


def _other(predictor: NonMatmulPredictor, own: _Own) -> NonMatmulPredictor:
    prefill, decode = (own.non_matmul(predictor.device, phase) for phase in PHASES)
    if prefill == decode == 1.0:
        return predictor
    few = predictor.coefficients if predictor.decode is None else predictor.decode
    return predictor.model_copy(
        update={
            "coefficients": {
                name: value * prefill for name, value in predictor.coefficients.items()
            },
            "decode": {name: value * decode for name, value in few.items()},
        }
    )


def _bandwidth(bandwidth: Bandwidth, own: _Own) -> Bandwidth:
    gpu, npu = (1 / own.non_matmul(kind, "decode") for kind in KINDS)
    return Bandwidth(
        gpu_alone_bytes_per_s=_times(bandwidth.gpu_alone_bytes_per_s, gpu),
        npu_alone_bytes_per_s=_times(bandwidth.npu_alone_bytes_per_s, npu),
        gpu_together_bytes_per_s=_times(bandwidth.gpu_together_bytes_per_s, gpu),
        npu_together_bytes_per_s=_times(bandwidth.npu_together_bytes_per_s, npu),
    )


def _every_core(entry: EveryCore, own: _Own) -> EveryCore:
    factor = own.matmul("gpu", entry.phase, entry.weight_format)
    return entry.model_copy(update={"layer_s": entry.layer_s * factor})


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def reference_tasks(profile: DeviceProfile) -> tuple[Task, ...]:
    """Return the reference kernels of every device and phase, of floats and of integers.

    Of the profile's formats those that come first in `WeightFormat` are taken. Raises
    `ProfileError` for a profile that measured no kernels (of a simulated chip).
    """
    measured = {row.kind for row in profile.matmuls if row.order == "plain"}
    kinds: dict[tuple[DeviceKind, Phase, bool], WeightFormat] = {}
    for weight_format in WeightFormat:
        floats = weight_format.activations.are_floats
        for device, phase, _ in sorted(x for x in measured if x[2] is weight_format):
            kinds.setdefault((device, phase, floats), weight_format)
    tasks = [_reference(profile, *kind[:2], weight_format) for kind, weight_format in kinds.items()]
    if not tasks:
        raise ProfileError(f"profile {profile.name} has no times of kernels that ran")
    return tuple(tasks)


def _reference(
    profile: DeviceProfile, device: DeviceKind, phase: Phase, weight_format: WeightFormat
) -> Task:
    m, n, k = REFERENCE_SIZES[phase]
    record = profile.devices[device].capabilities
    if record.static_shapes and record.graph_sizes:
        m = min(record.graph_sizes, key=lambda size: abs(size - m))
    return Task(device, weight_format, "plain", m, n, k)


def prepare_references(
    workload: Workload, tasks: Sequence[Task], policy: ReferencePolicy = DEFAULT
) -> list[TaskRunner]:
    """Return each kernel with cold weights, warmed up. Raises what the devices raise."""
    runners = [workload.runner(task) for task in tasks]
    for runner in runners:
        seconds = workload.warm_up(runner, policy.repeats, policy.warm_s)
        runner.batch = min(runner.batch, math.ceil(policy.batch_s / seconds))
    return runners


def time_references(
    workload: Workload,
    runners: Sequence[TaskRunner],
    for_s: float,
    max_s: float,
    policy: ReferencePolicy = DEFAULT,
) -> list[float]:
    """Return the median seconds of each kernel, out of cache, from samples in turns for `for_s`.

    As in a profile, samples during which a thread of ours waited for a core do not count. The next
    sample is of a kernel that has the fewest which do, so that other programs, which take one core
    more than the other, leave some of each. A kernel that has too few by then is timed on until
    `max_s`, in shorter batches, which are seldom disturbed but a few per cent too long. Raises
    `ProfileError` if that is not enough.
    """
    now, order = workload.clock.now, np.random.default_rng(0)
    clean: list[list[float]] = [[] for _ in runners]
    full = [runner.batch for runner in runners]
    start_s, taken = now(), 0
    while now() < start_s + for_s or min(map(len, clean)) < policy.min_samples:
        if now() >= start_s + max_s:
            busy = taken > 2 * sum(map(len, clean))
            why = "other programs keep the cores busy" if busy else "its reference kernels are slow"
            raise ProfileError(f"{why} (too few timings in {max_s:g} s)")
        index = min(range(len(runners)), key=lambda i: (len(clean[i]), order.random()))
        if now() >= start_s + for_s:
            shorter = max(full[index] // policy.shorter, 1)
            runners[index].batch = min(runners[index].batch, shorter)
        seconds, waited_s = workload.timed(runners[index])
        taken += 1
        if waited_s <= MeasureSettings().disturbed * seconds:
            clean[index].append(seconds)
    return [statistics.median(seconds) for seconds in clean]


def factors_of(
    profile: DeviceProfile, tasks: Sequence[Task], seconds: Sequence[float]
) -> dict[Kind, float]:
    """Return factors from the medians of the reference kernels.

    A profile's seconds are means, so medians are first multiplied by what is typical of their kind;
    and they are those that plans are made from: of the same kernel, where its row is certain.
    Raises `ProfileError` for times that cannot be.
    """
    cost = CostModel(profile)
    skews = typical(profile.matmuls, lambda row: row.skew)
    factors: dict[Kind, float] = {}
    for task, median_s in zip(tasks, seconds, strict=True):
        kind = (task.device, phase_of(task.m), task.weight_format)
        predicted = cost.matmul_s(task.device, task.weight_format, task.m, task.n, task.k)
        factor = median_s * skews.get(kind, 1.0) / float(predicted.seconds)
        if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:  # NaN is not either
            raise ProfileError(f"a reference kernel of the {task.device} took {median_s:g} s")
        factors[kind] = factor
    return factors

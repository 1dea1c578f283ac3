"""The devices that compute a prompt and its answer fastest, the gain, and the certainty.

Compared are each device alone, the plan that shares the matmuls, and the processor's cores: of a
measured profile by what OpenCL on every core was measured to gain, of a fitted one by its `cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

from hetero.backends.ops import Experts, has_sinks, has_state
from hetero.backends.protocol import KINDS
from hetero.placement.three_devices import third_device_note
from hetero.profiler.fitted_units import ModelWork, unit_s
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.predict import op_name
from hetero.profiler.records import DeviceProfile, EveryCore, Validation
from hetero.solver.build import make_plan
from hetero.solver.decode_bands import LONGEST, STEP, may_move, switches
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.options import INF
from hetero.solver.plan import FastestAnswers, FastestDevices, Phase, PredictedRun, Total
from hetero.solver.request import PlanRequest
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario

DEPTHS: Final = (512, 4096, 16384)
NORMAL: Final = math.sqrt(math.pi / 2)  # of a normal error, its standard deviation over its mean
BOTH: Final = ("gpu", "npu")


def with_fastest(
    plan: ExecutionPlan, spec: ModelGraph, profile: DeviceProfile, request: PlanRequest
) -> ExecutionPlan:
    """Return the plan with the fastest devices at the depths that the model's context holds.

    It also says at which depths answers are fastest elsewhere, what a third device would give, and
    where it is not known how sure that is. The NPU has the graphs of the plan
    there: budgets to prepare them were for its own lengths.
    """
    depths = [x for x in DEPTHS if x <= spec.max_position] or [spec.max_position]
    sizes = plan.graph_sizes or None
    request = replace(
        request, graph_sizes=sizes, graph_memory_bytes=None, preparation_budget_s=None
    )
    fastest = tuple(fastest_of(spec, profile, depths, request))
    answers = fastest_answers(spec, profile, request)
    notes = [*plan.notes, *_certainty_notes(spec, profile)]
    error = error_of(profile, "cpu", "prefill", spec)
    if note := third_device_note(plan, spec, profile, request, error):
        notes.append(note)
    update = {"fastest": fastest, "fastest_answers": answers, "notes": tuple(notes)}
    return plan.model_copy(update=update)


def _certainty_notes(spec: ModelGraph, profile: DeviceProfile) -> Iterator[str]:
    """Yield why no probability is given, and why decoding never moves."""
    if why := not_sure_because(spec, profile):
        depths = ", and from which depth on it is another," if _has_errors(profile) else ""
        yield f"how sure the order of the devices is{depths} is not known: {why}"
    if not may_move(spec):
        yield (
            "answers stay on the devices of this plan at any depth: operators of this model "
            "(states, sinks, routed experts or another layer's caches) are the GPU's"
        )


def not_sure_because(spec: ModelGraph, profile: DeviceProfile) -> str:
    """Return why a profile's errors say nothing of a model; nothing where they hold for it.

    Fits know no routed experts and no sinks; of a state's operator an error must have been
    measured.
    """
    ops = [node.op for node in spec.nodes]
    if not _has_errors(profile):
        return f"profile {profile.name} does not say how well it predicts"
    if profile.numbers == "fitted":
        experts = any(isinstance(op, Experts) for op in ops)
        what = "routed experts" if experts else "sinks of attention"
        unknown = experts or any(map(has_sinks, ops))
        return f"profile {profile.name} is fitted to models without {what}" if unknown else ""
    known = {x.op for x in profile.other_predictors if x.mape}
    missing = sorted({op_name(op) for op in ops if has_state(op)} - known)
    return f"profile {profile.name} has no error of {', '.join(missing)}" if missing else ""


def fastest_of(
    spec: ModelGraph,
    profile: DeviceProfile,
    depths: Iterable[int],
    request: PlanRequest,
) -> Iterator[FastestDevices]:
    """Yield where a prompt of each depth is fastest, and a token after it.

    Raises `PlanError` or `ProfileError`.
    """
    work, checked = ModelWork(spec), not not_sure_because(spec, profile)
    for depth in depths:
        asked = replace(request, seq_lens=(depth,), length_weights=(), context=depth)
        fastest = replace(asked, objective="latency", curves=False, explain=False)
        totals = make_plan(spec, profile, fastest).totals
        for total in totals:
            runs = _runs(total, depth, spec, profile, work)
            if not checked:
                runs = (run.model_copy(update={"error": None}) for run in runs)
            yield choose_fastest(total.phase, depth, runs)


def fastest_answers(
    spec: ModelGraph, profile: DeviceProfile, request: PlanRequest
) -> tuple[FastestAnswers, ...]:
    """Return the devices on which decode steps are fastest, from the first token to `LONGEST`.

    Others take over at the depth from which they are faster by more than the error of either
    prediction, and GPU and NPU together where they are faster than one by the margin. Empty for
    models of which the profile's errors do not hold. Raises `PlanError` or `ProfileError`.
    """
    if not_sure_because(spec, profile) and _has_errors(profile):
        return ()
    graphs = replace(request, graph_sizes=None) if request.graph_sizes == "auto" else request
    graphs = replace(graphs, third=False)
    planner, _ = planner_for(spec, profile, graphs)
    work, units = ModelWork(spec), [x for x in profile.units if x.device == "cpu"]
    cores = _every_core(profile, spec, "decode")

    @cache
    def runs(depth: int) -> dict[tuple[str, ...], tuple[float, float]]:
        """Return seconds and mean error of each candidate that can decode."""
        step = Scenario("decode", 1, depth)
        times: dict[tuple[str, ...], tuple[float, float]] = {}
        errors = {kind: error_of(profile, kind, "decode", spec) or 0.0 for kind in BOTH}
        alone = {kind: planner.whole_rows.single(step, kind) for kind in KINDS}
        for kind, solved in alone.items():
            if solved is not None:
                times[(kind,)] = (solved.seconds, errors[kind])
        times[BOTH] = (planner.solve(step).seconds, max(errors.values()))
        if cores is not None and (gpu := alone.get("gpu")) is not None:
            times[("cpu",)] = (cores.seconds(gpu.seconds, spec.layers), errors["gpu"])
        for unit in units:
            error = _mean_error(unit.validation, "decode") or 0.0
            times[("cpu",)] = (unit_s(unit, work, "decode", 1, depth), error)
        return times

    def needed(before: tuple[str, ...], after: tuple[str, ...], depth: int) -> float:
        sure = max(request.margin, runs(depth)[before][1], runs(depth)[after][1])
        if after != BOTH:
            return sure
        alone_s = min((seconds(x, depth) for x in (("gpu",), ("npu",)) if x in names), default=INF)
        return max(sure, 1 - alone_s * (1 - request.margin) / seconds(before, depth))

    def seconds(devices: tuple[str, ...], depth: int) -> float:
        return runs(depth)[devices][0]

    def careful_s(devices: tuple[str, ...]) -> float:
        """Return the seconds at first, with the margin of GPU and NPU together."""
        return seconds(devices, STEP) / (1 - request.margin if devices == BOTH else 1)

    names = list(runs(STEP))
    first = min(names, key=lambda x: (careful_s(x), len(x)))
    longest = min(spec.max_position, LONGEST)
    answers = [FastestAnswers(depth_from=0, devices=first, predicted_s=seconds(first, STEP))]
    for depth, devices in switches(first, names, seconds, needed, longest):
        own_s, before_s = (seconds(x, depth) for x in (devices, answers[-1].devices))
        later: dict[str, Any] = {"depth_from": depth, "devices": devices, "predicted_s": own_s}
        answers.append(FastestAnswers(**later, gain=before_s / own_s))
    return tuple(answers)


def _has_errors(profile: DeviceProfile) -> bool:
    return any(x.validation for x in profile.predictors)


def choose_fastest(phase: Phase, depth: int, runs: Iterable[PredictedRun]) -> FastestDevices:
    """Return the first of all candidates, and by how much."""
    first, *others = ordered = sorted(runs, key=lambda run: run.predicted_s)
    fastest = FastestDevices(
        phase=phase,
        depth=depth,
        devices=first.devices,
        predicted_s=first.predicted_s,
        tokens_per_s=first.tokens_per_s,
        candidates=tuple(ordered),
    )
    if not others:
        return fastest
    gain = others[0].predicted_s / first.predicted_s
    sure = confidence(gain, first.error, others[0].error)
    more = {"over": others[0].devices, "gain": gain, "confidence": sure}
    return fastest.model_copy(update=more)


def confidence(gain: float, error: float | None, next_error: float | None) -> float | None:
    """Return the probability that what is `gain` times as fast by predictions is faster.

    The logarithms of the predictions are off normally, with these mean errors.
    """
    if error is None or next_error is None:
        return None
    spread = NORMAL * math.hypot(error, next_error)
    if not spread:
        return 1.0
    return 0.5 * (1 + math.erf(math.log(gain) / spread / math.sqrt(2)))


def _runs(
    total: Total, depth: int, spec: ModelGraph, profile: DeviceProfile, work: ModelWork
) -> Iterator[PredictedRun]:
    """Yield the candidates of a step that was planned."""
    phase, tokens = total.phase, total.m
    for kind, seconds in total.single_devices.items():
        yield _run((kind,), seconds, tokens, error_of(profile, kind, phase, spec))
    if total.predicted_s not in total.single_devices.values():
        kinds = total.devices if "cpu" in total.devices else BOTH
        errors = [error_of(profile, kind, phase, spec) for kind in kinds]
        known = [x for x in errors if x is not None]
        yield _run(kinds, total.predicted_s, tokens, max(known, default=None))
    for unit in profile.units:
        if unit.device == "cpu":
            seconds = unit_s(unit, work, phase, tokens, depth if phase == "decode" else 0)
            yield _run(("cpu",), seconds, tokens, _mean_error(unit.validation, phase))
    gpu_s = total.single_devices.get("gpu")
    if gpu_s is not None and (cores := _every_core(profile, spec, phase)) is not None:
        layers = spec.layers * max(len(total.steps), 1)
        error = error_of(profile, "gpu", phase, spec)
        yield _run(("cpu",), cores.seconds(gpu_s, layers), tokens, error)


def _run(
    devices: tuple[str, ...], seconds: float, tokens: int, error: float | None
) -> PredictedRun:
    rate = tokens / seconds
    return PredictedRun(devices=devices, predicted_s=seconds, tokens_per_s=rate, error=error)


def _every_core(profile: DeviceProfile, spec: ModelGraph, phase: Phase) -> EveryCore | None:
    """Return what OpenCL on every core gains over one; None where that was not measured."""
    known = (x for x in profile.every_core if x.weight_format == spec.weight_format)
    return next((x for x in known if x.phase == phase), None)


def error_of(profile: DeviceProfile, device: str, phase: Phase, spec: ModelGraph) -> float | None:
    """Return the mean error of predicting a device: in the model's format, else its worst one."""
    of_device = [x for x in profile.predictors if x.device == device]
    own = [x for x in of_device if x.weight_format is (spec.base or spec.weight_format)]
    errors = (_mean_error(x.validation, phase) for x in own or of_device)
    return max((x for x in errors if x is not None), default=None)


def _mean_error(validation: Iterable[Validation], phase: Phase) -> float | None:
    return next((x.mape for x in validation if x.phase == phase), None)

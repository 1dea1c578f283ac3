"""Tensor level against single devices and layer level, with the ideal and the prediction beside it.

    python bench/tensor_level.py --profile host.json [--weights w4a8] [-p 256,1024] [-n 32] [-r 5]

All engines are in one process and take turns round by round. `ideal` is
(T_single + T_rest) / (T_joint + T_rest): T_single the best device's matmul time, T_joint what both
need together at their own measured speeds (1 / (1/T_gpu + 1/T_npu)), T_rest everything that is not
split, from the driver's clock. `predicted` is the plan's own time. The machine drifts: the
profile's reference kernels are timed again before and after every engine's turn, and `at today's
speed` divides by how much slower they are now than in the profile (the median over the engine's
turns; the mean of the devices that the plan uses).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from hetero.backends.affinity import pinned
from hetero.backends.clock import SystemClock
from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.benchmark import environment
from hetero.device_set import open_devices
from hetero.models import LoadedModel, open_model
from hetero.profiler.interference import find_interference
from hetero.profiler.measure import Meter, Settings
from hetero.profiler.records import DeviceProfile, Phase
from hetero.profiler.workload import Workload
from hetero.runtime.engine import Engine
from hetero.solver.plan import ExecutionPlan
from hetero.solver.strategy_plans import strategy_plan

Times = dict[str, list[float]]
KINDS: tuple[DeviceKind, ...] = ("gpu", "npu")
PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Drift:
    """How much slower the profile's reference kernels are now, by device and phase."""

    def __init__(self, profile: DeviceProfile) -> None:
        opened = open_devices("hetero")
        times: dict[tuple[DeviceKind, Phase], list[float]] = {}
        for point in profile.references:
            times.setdefault((point.device, point.phase), []).append(point.seconds)
        workload = Workload(opened.devices, clock=SystemClock(), interference=find_interference())
        self.meter = Meter(
            workload,
            settings=Settings(),
            reference_format=reference_format(profile),
            base={key: statistics.median(values) for key, values in times.items()},
        )
        self.core = opened.control_core
        self.ratios: dict[str, dict[tuple[DeviceKind, Phase], list[float]]] = {}

    def measure(self, *names: str) -> None:
        """One look at every reference kernel, for these engines."""
        with pinned(self.core):
            for key in [(kind, phase) for kind in KINDS for phase in PHASES]:
                ratio = self.meter.reference_ratio(key)
                for name in names:
                    self.ratios.setdefault(name, {}).setdefault(key, []).append(ratio)

    def of(self, name: str, plan: ExecutionPlan, phase: Phase) -> float:
        """Around an engine's turns, mean over the devices of its plan."""
        looks = self.ratios[name]
        return statistics.mean(statistics.median(looks[kind, phase]) for kind in plan.devices())

    def all(self) -> dict[tuple[DeviceKind, Phase], float]:
        """Medians over all looks."""
        return {
            (kind, phase): statistics.median(
                ratio for looks in self.ratios.values() for ratio in looks[kind, phase]
            )
            for kind in KINDS
            for phase in PHASES
        }


def reference_format(profile: DeviceProfile) -> WeightFormat:
    """The format of a profile's reference kernels: the first that was asked for (contention is
    measured in that order), W4A16 by default.
    """
    found = [c.weight_format for c in profile.contention if c.weight_format is not None]
    return found[0] if found else WeightFormat.W4A16


@dataclass
class Contender:
    """An engine with its plan; seconds of each test."""

    name: str
    plan: ExecutionPlan
    engine: Engine
    times: Times = field(default_factory=dict)

    def median(self, test: str) -> float:
        """Seconds."""
        return statistics.median(self.times[test])


def contender(
    name: str, loaded: LoadedModel, profile: DeviceProfile, strategy: str, lengths: list[int]
) -> Contender:
    """Open devices and an engine on a plan of a named strategy."""
    plan = strategy_plan(loaded.spec(), profile, strategy, lengths)  # type: ignore[arg-type]
    kinds = plan.devices()
    mode = "hetero" if len(kinds) == 2 else next(iter(kinds))
    opened = open_devices(mode)  # type: ignore[arg-type]
    engine = Engine(
        loaded.weights,
        plan,
        opened.devices,
        max_seq_len=max(lengths) + 128,
        control_core=opened.control_core,
    )
    return Contender(name, plan, engine)


def measure(one: Contender, lengths: list[int], tokens: int, context: int) -> None:
    """One round: every prompt length, then decoding after `context` tokens."""
    rng = np.random.default_rng(0)
    engine = one.engine
    for m in lengths:
        engine.truncate(0)
        prompt = rng.integers(3, engine.config.vocab_size, m).tolist()
        start_s = time.perf_counter()
        engine.prefill(prompt)
        one.times.setdefault(f"pp{m}", []).append(time.perf_counter() - start_s)
    engine.truncate(min(context, engine.position))
    start_s = time.perf_counter()
    for token in rng.integers(3, engine.config.vocab_size, tokens):
        engine.decode(int(token))
    one.times.setdefault("tg", []).append((time.perf_counter() - start_s) / tokens)


def rest_s(one: Contender, phase: str, m: int) -> float:
    """Seconds of everything but the matmuls in a step on the GPU, by the driver's clock."""
    engine = one.engine
    gpu = engine.devices["gpu"]
    gpu.set_timing(True)
    sums = []
    for _ in range(3):
        engine.truncate(0 if phase == "prefill" else min(256, engine.position))
        if phase == "prefill":
            engine.prefill([5] * m)
        else:
            engine.decode(5)
        step = engine.last_step
        spans = [
            c.span()
            for launch, c in zip(step.launches, step.completions, strict=True)
            if c is not None and launch.rows is None
        ]
        sums.append(sum(end - start for start, end in filter(None, spans)))
    gpu.set_timing(False)
    return statistics.median(sums)


def report(found: dict[str, Contender], lengths: list[int], drift: Drift) -> list[str]:
    """Markdown rows: every contender and test, then the ideal."""
    lines = [
        "| test | engine | ms (median) | min | max | × best single | predicted ms | measured / "
        "predicted | at today's speed |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    ideals = []
    tests: list[tuple[str, Phase, int]] = [(f"pp{m}", "prefill", m) for m in lengths]
    for test, phase, m in [*tests, ("tg", "decode", 1)]:
        single = min(found["gpu"].median(test), found["npu"].median(test))
        for one in found.values():
            seconds = one.median(test)
            predicted = next(
                (t.predicted_s for t in one.plan.totals if (t.phase, t.m) == (phase, m)), None
            )
            ratio = f"{seconds / predicted:.3f}" if predicted else ""
            now = drift.of(one.name, one.plan, phase)
            scaled = f"{seconds / predicted / now:.3f}" if predicted else ""
            lines.append(
                f"| {test} | {one.name} | {1e3 * seconds:.2f} | {1e3 * min(one.times[test]):.2f} | "
                f"{1e3 * max(one.times[test]):.2f} | {single / seconds:.3f} | "
                f"{1e3 * predicted if predicted else 0:.2f} | {ratio} | {scaled} |"
            )
        rest = rest_s(found["gpu"], phase, m)
        gpu_s = found["gpu"].median(test) - rest
        npu_s = (
            found["layer-npu"].median(test) - rest
            if "layer-npu" in found
            else (found["npu"].median(test) - rest)
        )
        joint = 1 / (1 / gpu_s + 1 / npu_s)
        ideal = (min(gpu_s, npu_s) + rest) / (joint + rest)
        reached = single / found["tensor"].median(test)
        ideals.append(
            f"| {test} | {1e3 * gpu_s:.1f} | {1e3 * npu_s:.1f} | {1e3 * rest:.1f} | {ideal:.3f} | "
            f"{reached:.3f} | {reached / ideal:.1%} |"
        )
    head = [
        "",
        "| test | T_gpu ms | T_npu ms | T_rest ms | ideal × | reached × | of ideal |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    return [*lines, *head, *ideals]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument("-p", default="256,1024")
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("-r", type=int, default=5)
    parser.add_argument("--strategies", default="", help="others, such as layer,pipe,padding")
    parser.add_argument("--save-plan")
    arguments = parser.parse_args()
    lengths = [int(m) for m in arguments.p.split(",")]
    profile = DeviceProfile.load(arguments.profile)
    loaded = open_model(arguments.model, weights=arguments.weights)
    assert WeightFormat(arguments.weights)
    strategies = {"gpu": "gpu-only", "npu": "npu-only", "tensor": "auto"}
    strategies |= {name: name for name in arguments.strategies.split(",") if name}
    found = {n: contender(n, loaded, profile, s, lengths) for n, s in strategies.items()}
    if arguments.save_plan:
        found["tensor"].plan.save(arguments.save_plan)
    drift = Drift(profile)
    for i in range(arguments.r + 1):
        before: tuple[str, ...] = ()
        for one in found.values():
            drift.measure(*before, one.name)
            measure(one, lengths, arguments.n, 256)
            before = (one.name,)
            if i == 0:
                one.times.clear()  # warm-up
        drift.measure(*before)
    print(f"measured; {arguments.model} {arguments.weights}, medians of {arguments.r} rounds")
    print("\n".join(report(found, lengths, drift)))
    for (kind, phase), ratio in drift.all().items():
        print(f"reference kernel, {kind} {phase}: {ratio:.3f} x the profile's")
    print(json.dumps(environment()))
    for one in found.values():
        one.engine.close()


if __name__ == "__main__":
    main()

"""Tensor level against single devices and layer level, with the ideal and the prediction beside it.

    python bench/tensor_level.py --profile host.json [--weights w4a8] [-p 256,1024] [-n 32] [-r 5]
        [--strategies layer] [--choices auto,opencl-cores]

All engines take turns test by test, round by round, in one process; but those of `--choices` have
one each: what `--device auto` chooses for these lengths, and OpenCL on every core, which it must
not run on one of before. A prompt may be longer than a call; `tg2000` decodes behind one of 2000
tokens. `ideal`, of prompts in one call, is
(T_single + T_rest) / (T_joint + T_rest): T_single the best device's matmul time, T_joint what both
need together at their own measured speeds (1 / (1/T_gpu + 1/T_npu)), T_rest everything that is not
split, from the driver's clock. `predicted` is the plan's own time.

A shared machine is disturbed in bursts of a tenth of a second to seconds, which a prediction knows
nothing of. So beside the median of the rounds, `undisturbed` is the median layer times the layers
(plus what is outside of them): all layers are alike, and a burst hits some. Of decoding it is the
median step. `of it` is over the prediction, for both. And the profile's reference kernels are timed
again, a quarter of a second each, before and after every engine's turn: `at today's speed` is the
mean of the rounds over the prediction and over how much slower they are now than in the profile (in
the mean of those looks and of the devices that the plan uses).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from context_of import context_of
from undisturbed import Layers, layers_of
from undisturbed import seconds as undisturbed_s

from hetero.backends.host.affinity import pinned
from hetero.backends.host.clock import SystemClock
from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.generation.llm import LLM
from hetero.measuring.benchmark import environment
from hetero.models import LoadedModel, open_model
from hetero.placement.device_set import open_devices
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
CHOICES: dict[str, dict[str, str]] = {
    "auto": {"device": "auto"},
    "opencl-cores": {"device": "gpu", "gpu": "opencl-cores"},
}
LOOK_S = 0.25  # that a reference kernel is timed for
CONTEXT = 256  # of decoding
SPACE = 128  # tokens, for decoding behind prompts


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
                ratio = self.meter.mean_ratio(key, LOOK_S)
                for name in names:
                    self.ratios.setdefault(name, {}).setdefault(key, []).append(ratio)

    def of(self, name: str, plan: ExecutionPlan, phase: Phase) -> float:
        """Around an engine's turns, mean over the devices of its plan."""
        looks = self.ratios[name]
        return statistics.mean(statistics.mean(looks[kind, phase]) for kind in plan.devices())

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


class Worker:
    """An `LLM` in a process of its own."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, __file__, "--worker", json.dumps(options), "--profile", ""]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()

    def ask(self, *what: int) -> Any:
        """Seconds of a prompt of m tokens (m), or of steps behind a context (tokens, context)."""
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def be_worker(options: dict[str, Any]) -> None:
    """Answer a `Worker` until it closes its end."""
    with LLM(**options) as llm:
        runs = [llm.plan.plan_id, *(llm.devices.name(kind) for kind in KINDS)]
        plan = json.loads(llm.plan.model_dump_json())
        print(json.dumps({"plan": plan, "choice": llm.choice.reason, "runs": runs}), flush=True)
        one = Contender("", llm.plan, llm.engine)
        for line in sys.stdin:
            what = json.loads(line)
            found = run_prompt(one, *what) if len(what) == 1 else run_steps(one, *what)
            print(json.dumps(found), flush=True)


@dataclass
class Contender:
    """An engine with its plan; seconds of each test (of decoding the median and the mean step of
    every round), and layers of prompts.
    """

    name: str
    plan: ExecutionPlan
    engine: Engine | Worker
    times: Times = field(default_factory=dict)
    means: Times = field(default_factory=dict)
    layers: dict[str, list[Layers]] = field(default_factory=dict)

    def median(self, test: str) -> float:
        """Seconds; of decoding a step's."""
        return statistics.median(self.times[test])

    def undisturbed(self, test: str) -> float:
        """Seconds, see above."""
        known = self.layers.get(test)
        return undisturbed_s(known) if known else self.median(test)

    def forget(self) -> None:
        """What was measured so far was the warm-up."""
        self.times.clear()
        self.means.clear()
        self.layers.clear()


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
        max_seq_len=max(*lengths, CONTEXT) + SPACE,
        control_core=opened.control_core,
    )
    return Contender(name, plan, engine)


def chosen(name: str, known: dict[str, Contender], lengths: list[int], **options: str) -> Contender:
    """What a user gets who names no plan, in a process of its own. Two that run the same share what
    is measured of either.
    """
    context = max(*lengths, CONTEXT) + SPACE
    worker = Worker(**options, prompt_lengths=lengths, max_seq_len=context, **CHOICES[name])
    print(f"{name}: {worker.about['choice']}", flush=True)
    one = Contender(name, ExecutionPlan.model_validate(worker.about["plan"]), worker)
    for other in known.values():
        runs = other.engine.about["runs"] if isinstance(other.engine, Worker) else ()
        if runs == worker.about["runs"]:
            one.times, one.means = other.times, other.means
    return one


def run_prompt(one: Contender, m: int) -> float:
    """Seconds of a prompt of m tokens."""
    engine = one.engine
    if isinstance(engine, Worker):
        return float(engine.ask(m))
    prompt = np.random.default_rng(0).integers(3, engine.config.vocab_size, m).tolist()
    where = context_of(engine)
    where.truncate(0)
    start_s = time.perf_counter()
    engine.prefill(where, prompt)
    return time.perf_counter() - start_s


def measure_prompt(one: Contender, m: int) -> None:
    """One prompt of m tokens."""
    seconds = run_prompt(one, m)
    for found in (one.times, one.means):
        found.setdefault(f"pp{m}", []).append(seconds)


def measure_layers(one: Contender, m: int) -> None:
    """The layers of one more, by the devices' own clocks, which take some time themselves."""
    engine = one.engine
    if isinstance(engine, Worker) or engine.plan.steps(m) != (m,):
        return
    for device in engine.devices.values():
        device.set_timing(True)
    run_prompt(one, m)
    for device in engine.devices.values():
        device.set_timing(False)
    one.layers.setdefault(f"pp{m}", []).append(layers_of(engine))


def measure_decoding(one: Contender, tokens: int, context: int, test: str = "tg") -> None:
    """The median step of some after `context` tokens."""
    steps = run_steps(one, tokens, context)
    one.times.setdefault(test, []).append(statistics.median(steps))
    one.means.setdefault(test, []).append(statistics.mean(steps))


def run_steps(one: Contender, tokens: int, context: int) -> list[float]:
    """Seconds of each of so many steps after `context` tokens."""
    engine = one.engine
    if isinstance(engine, Worker):
        return list(engine.ask(tokens, context))
    where = context_of(engine)
    where.truncate(min(context, len(where)))
    if len(where) < context:
        engine.prefill(where, [5] * (context - len(where)))
    steps = []
    for token in np.random.default_rng(0).integers(3, engine.config.vocab_size, tokens):
        start_s = time.perf_counter()
        engine.decode(where, int(token))
        steps.append(time.perf_counter() - start_s)
    return steps


def rest_s(one: Contender, phase: str, m: int) -> float:
    """Seconds of everything but the matmuls in a step on the GPU, by the driver's clock."""
    engine = one.engine
    assert isinstance(engine, Engine)
    gpu, where = engine.devices["gpu"], context_of(engine)
    gpu.set_timing(True)
    sums = []
    for _ in range(3):
        where.truncate(0 if phase == "prefill" else min(CONTEXT, len(where)))
        if phase == "prefill":
            engine.prefill(where, [5] * m)
        else:
            engine.decode(where, 5)
        step = engine.last_step
        spans = [
            c.span()
            for launch, c in zip(step.launches, step.completions, strict=True)
            if c is not None and launch.rows is None
        ]
        sums.append(sum(end - start for start, end in filter(None, spans)))
    gpu.set_timing(False)
    return statistics.median(sums)


HEAD = (
    "| test | engine | ms (median) | min | max | undisturbed | × best single | predicted ms | "
    "measured of it | undisturbed of it | at today's speed |",
    "|---|---|" + "---:|" * 9,
)
IDEAL_HEAD = (
    "",
    "| test | T_gpu ms | T_npu ms | T_rest ms | ideal × | reached × | of ideal | undisturbed |",
    "|---|" + "---:|" * 7,
)


def report(found: dict[str, Contender], lengths: list[int], drift: Drift) -> list[str]:
    """Markdown rows: every contender and test, then the ideal."""
    tests: list[tuple[str, Phase, int]] = [(f"pp{m}", "prefill", m) for m in lengths]
    tests += [(test, "decode", 1) for test in decode_tests(lengths)]
    lines = [row(found, one, test, drift) for test in tests for one in found.values()]
    whole = [t for t in tests if t[0] == "tg" or found["gpu"].plan.steps(t[2]) == (t[2],)]
    ideals = [ideal_row(found, *test) for test in whole if test[0] == "tg" or test[1] == "prefill"]
    return [*HEAD, *lines, *IDEAL_HEAD, *ideals]


def decode_tests(lengths: list[int]) -> dict[str, int]:
    """Tests of decoding, with the context of each."""
    return {f"tg{m}": m for m in lengths if m > CONTEXT} | {"tg": CONTEXT}


def row(
    found: dict[str, Contender], one: Contender, of: tuple[str, Phase, int], drift: Drift
) -> str:
    """One contender in one test."""
    test, phase, m = of
    seconds, times, calm_s = one.median(test), one.times[test], one.undisturbed(test)
    single = min(found["gpu"].median(test), found["npu"].median(test))
    told = one.plan.totals if test in ("tg", f"pp{m}") else ()
    wanted = next((t.predicted_s for t in told if (t.phase, t.m) == (phase, m)), 0.0)
    shown = [1e3 * s for s in (seconds, min(times), max(times), calm_s)]
    ratios = ("", "", "")
    if wanted:
        today = statistics.mean(one.means[test]) / wanted / drift.of(one.name, one.plan, phase)
        ratios = (f"{seconds / wanted:.3f}", f"{calm_s / wanted:.3f}", f"{today:.3f}")
    cells = [*(f"{x:.2f}" for x in shown), f"{single / seconds:.3f}", f"{1e3 * wanted:.2f}"]
    return f"| {test} | {one.name} | " + " | ".join([*cells, *ratios]) + " |"


def ideal_row(found: dict[str, Contender], test: str, phase: Phase, m: int) -> str:
    """What both devices could reach at the speeds that they have alone."""
    rest = rest_s(found["gpu"], phase, m)
    npu = found.get("layer-npu", found["npu"])

    def share(median: Callable[[Contender], float]) -> tuple[float, ...]:
        gpu_s, npu_s = median(found["gpu"]) - rest, median(npu) - rest
        joint = 1 / (1 / gpu_s + 1 / npu_s)
        ideal = (min(gpu_s, npu_s) + rest) / (joint + rest)
        single = min(median(found["gpu"]), median(found["npu"]))
        return gpu_s, npu_s, ideal, single / median(found["tensor"])

    gpu_s, npu_s, ideal, reached = share(lambda one: one.median(test))
    *_, calm_ideal, calm = share(lambda one: one.undisturbed(test))
    return (
        f"| {test} | {1e3 * gpu_s:.1f} | {1e3 * npu_s:.1f} | {1e3 * rest:.1f} | {ideal:.3f} | "
        f"{reached:.3f} | {reached / ideal:.1%} | {calm:.3f}, {calm / calm_ideal:.1%} |"
    )


def against_the_best(found: dict[str, Contender], lengths: list[int]) -> list[str]:
    """What `auto` reaches of the best choice: in prompts, decoding, and both as it compares."""
    if "auto" not in found:
        return []
    lines = ["", "| test | auto s | best | s | auto reaches |", "|---|---:|---|---:|---:|"]
    for m in lengths:
        prompt, step = f"pp{m}", f"tg{m}" if m > CONTEXT else "tg"
        for counts in ({prompt: 1}, {step: 1}, {prompt: 1, step: 64}):
            seconds = {
                name: sum(count * one.median(test) for test, count in counts.items())
                for name, one in found.items()
            }
            best = min(seconds, key=lambda name, of=seconds: of[name])
            test = " + ".join(f"{n} {x}" if n > 1 else x for x, n in counts.items())
            lines.append(
                f"| {test} | {seconds['auto']:.4f} | {best} | {seconds[best]:.4f} | "
                f"{seconds[best] / seconds['auto']:.3f} |"
            )
    return lines


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
    parser.add_argument("--choices", default="", help=", ".join(CHOICES))
    parser.add_argument("--save-plan")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        be_worker(json.loads(arguments.worker))
        return
    lengths = [int(m) for m in arguments.p.split(",")]
    profile = DeviceProfile.load(arguments.profile)
    loaded = open_model(arguments.model, weights=arguments.weights)
    assert WeightFormat(arguments.weights)
    strategies = {"gpu": "gpu-only", "npu": "npu-only", "tensor": "auto"}
    strategies |= {name: name for name in arguments.strategies.split(",") if name}
    found = {n: contender(n, loaded, profile, s, lengths) for n, s in strategies.items()}
    for name in filter(None, arguments.choices.split(",")):
        given = {x: getattr(arguments, x) for x in ("model", "profile", "weights")}
        found[name] = chosen(name, found, lengths, **given)
    if arguments.save_plan:
        found["tensor"].plan.save(arguments.save_plan)
    drift = Drift(profile)
    for i in range(arguments.r + 1):
        before: tuple[str, ...] = ()
        for one in found.values():
            drift.measure(*before, one.name)
            for m in lengths:
                measure_prompt(one, m)
                if f"tg{m}" in decode_tests(lengths):
                    measure_decoding(one, arguments.n, m, f"tg{m}")
                measure_layers(one, m)
            measure_decoding(one, arguments.n, CONTEXT)
            before = (one.name,)
            if i == 0:
                one.forget()
        drift.measure(*before)
    print(f"measured; {arguments.model} {arguments.weights}, medians of {arguments.r} rounds")
    print("\n".join(report(found, lengths, drift)))
    print("\n".join(against_the_best(found, lengths)))
    for (kind, phase), ratio in drift.all().items():
        print(f"reference kernel, {kind} {phase}: {ratio:.3f} x the profile's")
    print(json.dumps(environment()))
    for one in found.values():
        one.engine.close()


if __name__ == "__main__":
    main()

"""Tensor level against single devices, other strategies and what `--device auto` chooses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer
from common import (
    LLAMA,
    Lengths,
    Rounds,
    Tokens,
    Worker,
    context_of,
    finish,
    integers,
    run_prompt,
    run_steps,
    spread,
    table,
    timeline,
)

from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import pinned
from hetero.backends.host.clock import SystemClock
from hetero.backends.protocol import DeviceKind
from hetero.generation.llm import LLM
from hetero.models import LoadedModel, open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.interference import find_interference
from hetero.profiler.measure import Meter, Settings
from hetero.profiler.records import DeviceProfile, Phase
from hetero.profiler.workload import Workload
from hetero.runtime.engine import Engine
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.strategy_plans import strategy_plan

KINDS: tuple[DeviceKind, ...] = ("gpu", "npu")
PHASES: tuple[Phase, ...] = ("prefill", "decode")
CHOICES: dict[str, dict[str, str]] = {
    "auto": {"device": "auto"},
    "opencl-cores": {"device": "gpu", "gpu": "opencl-cores"},
}
LOOK_S = 0.25  # that a reference kernel is timed for
CONTEXT = 256  # of decoding
SPACE = 128  # tokens, for decoding behind prompts
Reference = tuple[DeviceKind, Phase]


def reference_times(profile: DeviceProfile) -> dict[Reference, float]:
    """Median seconds of each reference kernel over a profile's run."""
    times: dict[Reference, list[float]] = {}
    for point in profile.references:
        times.setdefault((point.device, point.phase), []).append(point.seconds)
    return {key: statistics.median(values) for key, values in times.items()}


class Drift:
    """How much slower the profile's reference kernels are now, by device and phase."""

    def __init__(self, profile: DeviceProfile) -> None:
        opened = open_devices("hetero")
        formats = [c.weight_format for c in profile.contention if c.weight_format is not None]
        self.meter = Meter(
            Workload(opened.devices, clock=SystemClock(), interference=find_interference()),
            settings=Settings(),
            reference_format=formats[0] if formats else WeightFormat.W4A16,  # as it was taken
            base=reference_times(profile),
        )
        self.core = opened.control_core
        self.ratios: dict[str, dict[Reference, list[float]]] = {}

    def measure(self, *names: str) -> None:
        """One look at every reference kernel, for these engines."""
        with pinned(self.core):
            for key in ((kind, phase) for kind in KINDS for phase in PHASES):
                ratio = self.meter.mean_ratio(key, LOOK_S)
                for name in names:
                    self.ratios.setdefault(name, {}).setdefault(key, []).append(ratio)

    def of(self, one: Contender, phase: Phase) -> float:
        """Around an engine's turns, mean over the devices of its plan."""
        looks = self.ratios[one.name]
        return statistics.mean(statistics.mean(looks[d, phase]) for d in one.plan.devices())

    def notes(self) -> Iterator[str]:
        """Medians over all looks, a line each."""
        for kind, phase in ((kind, phase) for kind in KINDS for phase in PHASES):
            ratios = (ratio for looks in self.ratios.values() for ratio in looks[kind, phase])
            median = statistics.median(ratios)
            yield f"reference kernel, {kind} {phase}: {median:.3f} x the profile's"


class Chosen:
    """What a user gets who names no plan; lives in a worker."""

    def __init__(self, **options: Any) -> None:
        self._llm = LLM(**options)

    def about(self) -> tuple[str, str, list[str | None]]:
        """The choice and its reason, the plan, and what is the same for two that run the same."""
        llm = self._llm
        runs = [llm.plan.plan_id, *(llm.devices.name(kind) for kind in KINDS)]
        return llm.choice.reason, llm.plan.model_dump_json(), runs

    def prompt(self, m: int) -> float:
        """Seconds of a prompt."""
        return run_prompt(self._llm.engine, m)

    def steps(self, tokens: int, context: int) -> list[float]:
        """Seconds of decoding steps."""
        return run_steps(self._llm.engine, tokens, context)


@dataclass
class Contender:
    """A plan that runs in an engine here, or in a worker; seconds of each test (of decoding the
    median and the mean step of every round), and layers of prompts (see `layers_of`).
    """

    name: str
    plan: ExecutionPlan
    runner: Engine | Worker
    runs: list[str | None] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    means: dict[str, list[float]] = field(default_factory=dict)
    layers: dict[str, list[tuple[list[float], float]]] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The engine, where it is in this process."""
        assert isinstance(self.runner, Engine)
        return self.runner

    def median(self, test: str) -> float:
        """Seconds; of decoding a step's."""
        return statistics.median(self.times[test])

    def undisturbed(self, test: str) -> float:
        """The median layer times the layers, plus what is outside of them: a burst of a shared
        machine hits some layers, and all layers are alike. Of decoding the median step.
        """
        if not (known := self.layers.get(test)):
            return self.median(test)
        each = statistics.median(s for layers, _ in known for s in layers)
        outside = statistics.median(outside_s for _, outside_s in known)
        return (1 + len(known[0][0])) * each + outside

    def forget(self) -> None:
        """What was measured so far was the warm-up."""
        for found in (self.times, self.means, self.layers):
            found.clear()

    def measure_prompt(self, m: int) -> None:
        """One prompt of m tokens."""
        runner = self.runner
        seconds = run_prompt(runner, m) if isinstance(runner, Engine) else runner.ask("prompt", m)
        for found in (self.times, self.means):
            found.setdefault(f"pp{m}", []).append(seconds)

    def measure_layers(self, m: int) -> None:
        """The layers of one more, by the devices' own clocks, which take some time themselves."""
        if not isinstance(self.runner, Engine) or self.plan.steps(m) != (m,):
            return
        with timing(self.runner):
            run_prompt(self.runner, m)
            self.layers.setdefault(f"pp{m}", []).append(layers_of(self.runner))

    def measure_decoding(self, tokens: int, context: int, test: str = "tg") -> None:
        """Some steps after `context` tokens."""
        runner = self.runner
        if isinstance(runner, Engine):
            steps = run_steps(runner, tokens, context)
        else:
            steps = runner.ask("steps", tokens, context)
        self.times.setdefault(test, []).append(statistics.median(steps))
        self.means.setdefault(test, []).append(statistics.mean(steps))

    def close(self) -> None:
        """Release devices, or end the process."""
        self.runner.close() if isinstance(self.runner, Engine) else self.runner.stop()


class timing:  # noqa: N801 - a context manager, used as a function
    """The devices of an engine keep their calls' times."""

    def __init__(self, engine: Engine) -> None:
        self._devices = engine.devices.values()

    def __enter__(self) -> None:
        for device in self._devices:
            device.set_timing(True)

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            device.set_timing(False)


def layers_of(engine: Engine) -> tuple[list[float], float]:
    """Seconds of every layer of the last step but the first, whose start is not seen, and of what
    is outside of them all (the first counts as the median one).
    """
    ends: dict[int, float] = {}
    for span in timeline(engine):
        layer, _, _ = span.node.partition(".")
        if layer.startswith("layer") and span.what in KINDS:
            number = int(layer.removeprefix("layer"))
            ends[number] = max(ends.get(number, 0.0), span.end_s)
    layers = np.diff([ends[i] for i in sorted(ends)])
    stamps = engine.last_run.stamps
    return layers.tolist(), float(stamps[-1] - stamps[0] - layers.sum() - np.median(layers))


def contender(
    name: str, loaded: LoadedModel, profile: DeviceProfile, strategy: str, lengths: list[int]
) -> Contender:
    """An engine on a plan of a named strategy."""
    plan = strategy_plan(loaded.spec(), profile, strategy, lengths)  # type: ignore[arg-type]
    return Contender(name, plan, open_engine(plan, loaded, max(*lengths, CONTEXT) + SPACE))


def open_engine(plan: ExecutionPlan, loaded: LoadedModel, longest: int) -> Engine:
    """An engine on the devices that the plan names."""
    kinds = plan.devices()
    opened = open_devices("hetero" if len(kinds) == 2 else next(iter(kinds)))
    core = opened.control_core
    return Engine(loaded.weights, plan, opened.devices, max_seq_len=longest, control_core=core)


def chosen(name: str, known: list[Contender], lengths: list[int], **options: str) -> Contender:
    """One of `CHOICES`, in a process of its own. Two that run the same share what is measured of
    either.
    """
    context = max(*lengths, CONTEXT) + SPACE
    worker = Worker(
        name, Chosen, **options, prompt_lengths=lengths, max_seq_len=context, **CHOICES[name]
    )
    worker.start()
    choice, plan, runs = worker.ask("about")
    print(f"{name}: {choice}", flush=True)
    one = Contender(name, ExecutionPlan.model_validate_json(plan), worker, runs)
    for other in known:
        if other.runs == runs:
            one.times, one.means = other.times, other.means
    return one


def rest_s(engine: Engine, phase: str, m: int) -> float:
    """Seconds of everything but the matmuls in a step on the GPU, by the driver's clock."""
    sums = []
    with timing(engine):
        for _ in range(3):
            context = context_of(engine)
            context.truncate(0 if phase == "prefill" else min(CONTEXT, len(context)))
            if phase == "prefill":
                engine.prefill(context, [5] * m)
            else:
                engine.decode(context, 5)
            spans = (s for s in timeline(engine) if s.what == "gpu" and not s.is_matmul)
            sums.append(sum(span.seconds for span in spans))
    return statistics.median(sums)


HEAD = (
    "test|engine|ms (median)|min|max|undisturbed|× best single|predicted ms|measured of it|"
    "undisturbed of it|at today's speed"
)
IDEAL_HEAD = "test|T_gpu ms|T_npu ms|T_rest ms|ideal ×|reached ×|of ideal|undisturbed"
BEST_HEAD = "test|auto s|best|s|auto reaches"


def decode_tests(lengths: list[int]) -> dict[str, int]:
    """Tests of decoding, with the context of each."""
    return {f"tg{m}": m for m in lengths if m > CONTEXT} | {"tg": CONTEXT}


def line_of(
    found: dict[str, Contender], one: Contender, test: str, phase: Phase, m: int, drift: Drift
) -> list[str]:
    """One contender in one test."""
    seconds, calm_s = one.median(test), one.undisturbed(test)
    single = min(found["gpu"].median(test), found["npu"].median(test))
    told = one.plan.totals if test in ("tg", f"pp{m}") else ()
    wanted = next((t.predicted_s for t in told if (t.phase, t.m) == (phase, m)), 0.0)
    ratios = ["", "", ""]
    if wanted:
        today = statistics.mean(one.means[test]) / wanted / drift.of(one, phase)
        ratios = [f"{x:.3f}" for x in (seconds / wanted, calm_s / wanted, today)]
    shown = [*spread(one.times[test], 1e3), f"{1e3 * calm_s:.2f}"]
    return [test, one.name, *shown, f"{single / seconds:.3f}", f"{1e3 * wanted:.2f}", *ratios]


def ideal_row(found: dict[str, Contender], test: str, phase: Phase, m: int) -> list[str]:
    """What both devices could reach at the speeds that they have alone:
    (T_single + T_rest) / (T_joint + T_rest) with T_joint = 1 / (1 / T_gpu + 1 / T_npu).
    """
    rest = rest_s(found["gpu"].engine, phase, m)
    npu = found.get("layer-npu", found["npu"])

    def share(median: Callable[[Contender], float]) -> tuple[float, ...]:
        gpu_s, npu_s = median(found["gpu"]) - rest, median(npu) - rest
        ideal = (min(gpu_s, npu_s) + rest) / (1 / (1 / gpu_s + 1 / npu_s) + rest)
        single = min(median(found["gpu"]), median(found["npu"]))
        return gpu_s, npu_s, ideal, single / median(found["tensor"])

    gpu_s, npu_s, ideal, reached = share(lambda one: one.median(test))
    *_, calm_ideal, calm = share(lambda one: one.undisturbed(test))
    times = [f"{1e3 * s:.1f}" for s in (gpu_s, npu_s, rest)]
    ratios = [f"{ideal:.3f}", f"{reached:.3f}", f"{reached / ideal:.1%}"]
    return [test, *times, *ratios, f"{calm:.3f}, {calm / calm_ideal:.1%}"]


def against_the_best(found: dict[str, Contender], lengths: list[int]) -> Iterator[list[str]]:
    """What `auto` reaches of the best choice: in prompts, decoding, and both as it compares."""
    for m in lengths:
        prompt, step = f"pp{m}", f"tg{m}" if m > CONTEXT else "tg"
        for counts in ({prompt: 1}, {step: 1}, {prompt: 1, step: 64}):
            seconds = {
                name: sum(count * one.median(test) for test, count in counts.items())
                for name, one in found.items()
            }
            best = min(seconds, key=lambda name, of=seconds: of[name])  # type: ignore[misc]
            test = " + ".join(f"{n} {x}" if n > 1 else x for x, n in counts.items())
            shown = [f"{seconds['auto']:.4f}", best, f"{seconds[best]:.4f}"]
            yield [test, *shown, f"{seconds[best] / seconds['auto']:.3f}"]


def measure(found: dict[str, Contender], lengths: list[int], n: int, r: int, drift: Drift) -> None:
    """All contenders in turns, test by test, and the reference kernels between them."""
    for turn in range(r + 1):
        before: tuple[str, ...] = ()
        for one in found.values():
            drift.measure(*before, one.name)
            for m in lengths:
                one.measure_prompt(m)
                if f"tg{m}" in decode_tests(lengths):
                    one.measure_decoding(n, m, f"tg{m}")
                one.measure_layers(m)
            one.measure_decoding(n, CONTEXT)
            before = (one.name,)
            if turn == 0:
                one.forget()
        drift.measure(*before)


def levels(
    profile: Annotated[str, typer.Option(help="a file, or the name of a shipped profile")],
    model: str = LLAMA,
    weights: str = "w4a8",
    p: Lengths = "256,1024",
    n: Tokens = 32,
    r: Rounds = 5,
    strategies: Annotated[str, typer.Option(help="others, such as layer,pipe,padding")] = "",
    choices: Annotated[str, typer.Option(help=", ".join(CHOICES))] = "",
    save_plan: Annotated[str | None, typer.Option(help="where to write tensor level's")] = None,
) -> None:
    """Tensor level against single devices and other strategies, with the ideal and the prediction.

    All engines take turns in one process; those of `--choices` have one each, because OpenCL on
    every core must not run where it ran on one. A prompt may be longer than a call; `tg2000`
    decodes behind one of 2000 tokens. `ideal` is what both devices could do at the speeds that they
    have alone, `undisturbed` the median layer times the layers, `at today's speed` the mean over
    the prediction and over how much slower the profile's reference kernels are now.
    """
    lengths, taken = integers(p), DeviceProfile.load(profile)
    loaded = open_model(model, weights=weights)
    wanted = {"gpu": "gpu-only", "npu": "npu-only", "tensor": "auto"}
    wanted |= {name: name for name in strategies.split(",") if name}
    found = {name: contender(name, loaded, taken, s, lengths) for name, s in wanted.items()}
    for name in filter(None, choices.split(",")):
        given = {"model": model, "profile": profile, "weights": weights}
        found[name] = chosen(name, [one for one in found.values() if one.runs], lengths, **given)
    if save_plan:
        found["tensor"].plan.save(save_plan)
    drift = Drift(taken)
    measure(found, lengths, n, r, drift)
    tests: list[tuple[str, Phase, int]] = [(f"pp{m}", "prefill", m) for m in lengths]
    tests += [(test, "decode", 1) for test in decode_tests(lengths)]
    print(f"measured; {model} {weights}, medians of {r} rounds")
    table(HEAD, [line_of(found, one, *test, drift) for test in tests for one in found.values()])
    print()
    whole = [t for t in tests if t[0] == "tg" or found["gpu"].plan.steps(t[2]) == (t[2],)]
    ideals = [ideal_row(found, *t) for t in whole if t[0] == "tg" or t[1] == "prefill"]
    table(IDEAL_HEAD, ideals)
    if "auto" in found:
        print()
        table(BEST_HEAD, against_the_best(found, lengths))
    finish(*drift.notes())
    for one in found.values():
        one.close()

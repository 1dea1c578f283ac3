"""Predicted against measured steps, with the profile taken in turns with the measurement.

    python bench/predicted.py [--model random:llama-3.2-1b] [--weights w4a8] [-p 64,256] [-r 10]
        [--strategies gpu-only,npu-only,auto,row-cut,...]

On a shared machine the same plan takes up to 1.5 times as long half an hour later, so a profile of
then says nothing of now. Here every round first takes a profile of the model's shapes (`--budget`)
and then runs every plan, each test for some seconds; both so see the same hours of the machine.
The plans are made from the first profile. What they are predicted to take is the mean over all
profiles of what each says of those very tiles (`hetero.solver.repredict`); what they took is the
median and the mean of all prompts, and of the median and mean steps of `-n` tokens in a row. A
prompt that runs in several calls (chunks) is predicted as their sum, each behind the tokens before
it. The second table is `tensor_level.py`'s: what both devices reach of the ideal.

One profile and one round each differ by some 8 % from the next where neighbours share the machine:
with four rounds a row of nine is out of bounds by chance in every other run, with ten in few.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

from tensor_level import (
    CONTEXT,
    IDEAL_HEAD,
    Contender,
    contender,
    ideal_row,
    measure_decoding,
    measure_prompt,
)

from hetero.backends.affinity import assign_cores, pinned
from hetero.backends.ops import WeightFormat
from hetero.benchmark import environment
from hetero.device_set import open_devices
from hetero.models import LoadedModel, open_model
from hetero.profiler.options import Options
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile
from hetero.profiler.session import profile_devices
from hetero.profiling import model_shapes
from hetero.solver.model_spec import ModelSpec
from hetero.solver.planner import Scenario
from hetero.solver.repredict import repredict

GOAL = 0.10
NAMES = {"gpu-only": "gpu", "npu-only": "npu", "auto": "tensor"}  # as `tensor_level.py` has them
HEAD = (
    "| test | plan | predicted ms (mean) | of the profiles | measured ms (median) | min | max | "
    "measured / predicted | mean / predicted |",
    "|---|---|" + "---:|" * 7,
)


class Profiler:
    """Takes profiles of one model's shapes, one after the other, on devices of its own."""

    def __init__(self, loaded: LoadedModel, lengths: list[int], budget_s: float) -> None:
        self.opened = open_devices("hetero")
        npu = self.opened.devices["npu"].capabilities
        graphs = {g for g in npu.graph_sizes if DECODE_TOKENS < g <= max(lengths)}
        self.options = Options(
            budget_s=budget_s,
            shapes=model_shapes(loaded.spec()),
            weight_formats=(loaded.spec().weight_format,),
            tokens=tuple(sorted({1, *graphs, *lengths})),
            power=False,
            gpu_core=assign_cores().gpu,
            control_core=assign_cores().control,
        )

    def take(self) -> DeviceProfile:
        """A profile of now."""
        with pinned(self.opened.control_core):
            return profile_devices(self.opened.devices, self.options)


def measure_for(seconds: float, measure: Callable[[], None]) -> None:
    """Once, and again until so many seconds have passed: a short test sees as much of a round's
    noise as a long one.
    """
    end_s = time.perf_counter() + seconds
    measure()
    while time.perf_counter() < end_s:
        measure()


def steps_of(one: Contender, test: str) -> list[Scenario]:
    """The calls of a test."""
    if test == "tg":
        return [Scenario("decode", 1, CONTEXT)]
    counts = one.engine.pieces(int(test.removeprefix("pp")))
    return [Scenario("prefill", m, sum(counts[:i])) for i, m in enumerate(counts)]


def predicted_s(
    one: Contender, spec: ModelSpec, profile: DeviceProfile, tests: list[str]
) -> dict[str, float]:
    """Seconds of every test by a profile."""
    steps = {test: steps_of(one, test) for test in tests}
    told = repredict(one.plan, spec, profile, {s for found in steps.values() for s in found})
    return {test: sum(told[s] for s in found) for test, found in steps.items()}


def row(one: Contender, test: str, predicted: list[float]) -> tuple[str, float]:
    """A line of the table, and measured over predicted."""
    times, expected = one.times[test], statistics.mean(predicted)
    ratio = statistics.median(times) / expected
    shown = [statistics.median(times), min(times), max(times)]
    cells = [
        f"{1e3 * expected:.2f}",
        f"{1e3 * min(predicted):.2f} to {1e3 * max(predicted):.2f}",
        *(f"{1e3 * s:.2f}" for s in shown),
        f"{ratio:.3f}",
        f"{statistics.mean(one.means[test]) / expected:.3f}",
    ]
    return f"| {test} | {one.name} | " + " | ".join(cells) + " |", ratio


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--weights", default="w4a8", choices=[f.value for f in WeightFormat])
    parser.add_argument("-p", default="64,256")
    parser.add_argument("--strategies", default=",".join(NAMES))
    parser.add_argument("-n", type=int, default=48)
    parser.add_argument("-r", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="of every test in a round")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds of each profile")
    arguments = parser.parse_args()
    lengths = [int(m) for m in arguments.p.split(",")]
    tests = [*(f"pp{m}" for m in lengths), "tg"]
    loaded = open_model(arguments.model, weights=arguments.weights)
    profiler = Profiler(loaded, lengths, arguments.budget)
    profiles = [profiler.take()]
    strategies = {NAMES.get(s, s): s for s in arguments.strategies.split(",")}
    contenders = {n: contender(n, loaded, profiles[0], s, lengths) for n, s in strategies.items()}
    found = list(contenders.values())
    for i in range(arguments.r + 1):
        if i > 1:
            profiles.append(profiler.take())
        for one in found:
            seconds = arguments.seconds if i else 0.0
            for m in lengths:
                measure_for(seconds, partial(measure_prompt, one, m))
            measure_for(seconds, partial(measure_decoding, one, arguments.n, CONTEXT))
            if i == 0:
                one.forget()
    spec = loaded.spec()
    told = {one.name: [predicted_s(one, spec, p, tests) for p in profiles] for one in found}
    print(
        f"measured; {arguments.model} {arguments.weights}, {len(profiles)} profiles of "
        f"{statistics.median(p.coverage.spent_s for p in profiles):.0f} s "
        f"({min(p.coverage.measured_tasks / p.coverage.grid_tasks for p in profiles):.0%} of the "
        f"grid and more) in turns with {arguments.r} rounds"
    )
    lines = [row(o, test, [t[test] for t in told[o.name]]) for test in tests for o in found]
    print("\n".join([*HEAD, *(line for line, _ in lines)]))
    within = sum(abs(ratio - 1) <= GOAL for _, ratio in lines)
    print(f"within {GOAL:.0%}: {within} of {len(lines)}")
    if contenders.keys() >= set(NAMES.values()):
        ideals = [ideal_row(contenders, f"pp{m}", "prefill", m) for m in lengths]
        print("\n".join([*IDEAL_HEAD, *ideals, ideal_row(contenders, "tg", "decode", 1)]))
    print(json.dumps(environment()))
    for one in found:
        one.engine.close()
    profiler.opened.close()


if __name__ == "__main__":
    main()

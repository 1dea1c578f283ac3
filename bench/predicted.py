"""Predicted against measured steps, with the profile taken in turns with the measurement.

    python bench/predicted.py [--model random:llama-3.2-1b] [--weights w4a8] [-p 64,256] [-r 10]
        [--strategies gpu-only,npu-only,auto,row-cut,...]

On a shared machine the same plan takes up to 1.5 times as long half an hour later, so a profile of
then says nothing of now. Here every round first takes a profile of the model's shapes (`--budget`)
and then runs every plan, each test for some seconds: a prompt or some tokens at a time, in turns
and in random order, so that a slow moment does not meet one plan alone. Both so see the same hours
of the machine. Plans that compute a test with the same tiles are one row. The plans are made from
the first profile. Every profile says of those very tiles (`hetero.solver.repredict`) what they are
to take; all prompts, and the median and mean steps of `-n` tokens in a row, say what they took.
Medians are held against medians and means against means: one slow minute of eight, in profiles as
in steps, moves a mean only. A prompt that runs in several calls (chunks) is predicted as their sum,
each behind the tokens before it. The second table is `tensor_level.py`'s: what both devices reach
of the ideal.

One profile and one round each differ by some 8 % from the next where neighbours share the machine:
with four rounds a row of nine is out of bounds by chance in every other run, with ten in few.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
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
from hetero.profiling import model_options
from hetero.solver.model_spec import ModelSpec
from hetero.solver.planner import Scenario
from hetero.solver.repredict import repredict

GOAL = 0.10
NAMES = {"gpu-only": "gpu", "npu-only": "npu", "auto": "tensor"}  # as `tensor_level.py` has them
HEAD = (
    "| test | plan | predicted ms (median) | of the profiles | measured ms (median) | min | max | "
    "measured / predicted | of the means |",
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
            weight_formats=(loaded.spec().weight_format,),
            tokens=tuple(sorted({1, *graphs, *lengths})),
            power=False,
            gpu_core=assign_cores().gpu,
            control_core=assign_cores().control,
            **model_options(loaded.spec(), (loaded.spec().weight_format,)),
        )

    def take(self) -> DeviceProfile:
        """A profile of now."""
        with pinned(self.opened.control_core):
            return profile_devices(self.opened.devices, self.options)


@dataclass
class Row:
    """A test of contenders whose plans for it are equal; the first one is measured."""

    test: str
    alike: list[Contender]

    def measure(self, tokens: int) -> None:
        """A prompt, or so many tokens."""
        if self.test == "tg":
            measure_decoding(self.alike[0], tokens, CONTEXT)
        else:
            measure_prompt(self.alike[0], int(self.test.removeprefix("pp")))

    def share(self) -> None:
        """What was measured of the first holds for all."""
        first = self.alike[0]
        for one in self.alike[1:]:
            one.times[self.test] = first.times[self.test]
            one.means[self.test] = first.means[self.test]
            one.layers[self.test] = first.layers.get(self.test, [])


def rows_of(found: list[Contender], tests: list[str]) -> list[Row]:
    """Contenders by what they compute in each test."""
    rows = []
    for test in tests:
        alike: dict[str, list[Contender]] = {}
        for one in found:
            steps = {(step.phase, step.m) for step in steps_of(one, test)}
            used = [op for op in one.plan.ops if (op.phase, op.m) in steps or op.op == "lm_head"]
            what = (sorted(steps), [op.tiles for op in used])
            alike.setdefault(repr(what), []).append(one)
        rows += [Row(test, same) for same in alike.values()]
    return rows


def measure_in_turns(
    rows: list[Row], tokens: int, seconds: float, rng: np.random.Generator
) -> None:
    """Each row once, and again in turns until it has had so many seconds: a short test sees as
    much of a round's noise as a long one.
    """
    left = [seconds] * len(rows)
    waiting = list(range(len(rows)))
    while waiting:
        for i in rng.permutation(waiting):
            start_s = time.perf_counter()
            rows[i].measure(tokens)
            left[i] -= time.perf_counter() - start_s
        waiting = [i for i in waiting if left[i] > 0]


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


def line_of(row: Row, predicted: list[float]) -> tuple[str, float]:
    """A line of the table, and measured over predicted."""
    one, test = row.alike[0], row.test
    times, expected = one.times[test], statistics.median(predicted)
    ratio = statistics.median(times) / expected
    shown = [statistics.median(times), min(times), max(times)]
    cells = [
        f"{1e3 * expected:.2f}",
        f"{1e3 * min(predicted):.2f} to {1e3 * max(predicted):.2f}",
        *(f"{1e3 * s:.2f}" for s in shown),
        f"{ratio:.3f}",
        f"{statistics.mean(one.means[test]) / statistics.mean(predicted):.3f}",
    ]
    names = ", ".join(same.name for same in row.alike)
    return f"| {test} | {names} | " + " | ".join(cells) + " |", ratio


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
    rows, rng = rows_of(found, tests), np.random.default_rng(0)
    measure_in_turns(rows, arguments.n, 0.0, rng)
    for one in found:
        one.forget()
    for i in range(arguments.r):
        if i > 0:
            profiles.append(profiler.take())
        measure_in_turns(rows, arguments.n, arguments.seconds, rng)
    for row in rows:
        row.share()
    spec = loaded.spec()
    told = {one.name: [predicted_s(one, spec, p, tests) for p in profiles] for one in found}
    print(
        f"measured; {arguments.model} {arguments.weights}, {len(profiles)} profiles of "
        f"{statistics.median(p.coverage.spent_s for p in profiles):.0f} s "
        f"({min(p.coverage.measured_tasks / p.coverage.grid_tasks for p in profiles):.0%} of the "
        f"grid and more) in turns with {arguments.r} rounds"
    )
    lines = [line_of(row, [t[row.test] for t in told[row.alike[0].name]]) for row in rows]
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

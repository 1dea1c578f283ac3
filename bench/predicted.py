"""Predicted against measured steps, with the profile taken in turns with the measurement.

    python bench/predicted.py [--model random:llama-3.2-1b] [--weights w4a8] [-p 64,256] [-r 6]
        [--strategies gpu-only,npu-only,auto,row-cut,...]

On a shared machine the same plan takes up to 1.5 times as long half an hour later, or a minute, so
a profile of then says nothing of now. Here the two are taken in turns of a few seconds: a profile
of the model's shapes stops again and again, for as long as it ran, and each time one plan runs, in
random order: a prompt, or `-n` tokens, until it has had `--seconds`. Both so see the same moments
of the machine (one after the other, of a minute each, left rows of 28 up to 17 % off where their
means over six rounds agreed). Plans that compute a test with the same tiles are one row. They are
made from a first profile, which does not count. Each of `-r` others says of those very tiles
(`hetero.solver.repredict`) what they are to take; all prompts, and the median and mean steps of
`-n` tokens in a row, say what they took. Medians are held against medians and means against means.
A prompt that runs in several calls (chunks) is predicted as their sum, each behind the tokens
before it. The second table is `tensor_level.py`'s: what both devices reach of the ideal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tensor_level import (
    CONTEXT,
    IDEAL_HEAD,
    Contender,
    contender,
    ideal_row,
    measure_decoding,
    measure_layers,
    measure_prompt,
)

from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.ops import WeightFormat
from hetero.measuring.benchmark import environment
from hetero.measuring.profiling import model_options
from hetero.measuring.step_cost import measure_step_s
from hetero.models import LoadedModel, open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.measure import Reference
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.options import Options
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile
from hetero.profiler.session import Session
from hetero.solver.planner import Scenario
from hetero.solver.prompts import call_scenarios
from hetero.solver.repredict import repredict

GOAL = 0.10
NAMES = {"gpu-only": "gpu", "npu-only": "npu", "auto": "tensor"}  # as `tensor_level.py` has them
HEAD = (
    "| test | plan | predicted ms (median) | of the profiles | measured ms (median) | min | max | "
    "measured / predicted | of the means |",
    "|---|---|" + "---:|" * 7,
)


class Interrupted(Session):
    """A profile that lets something else run between its parts and its rounds of samples."""

    between: Callable[[], None]

    def _open_workload(self) -> None:
        super()._open_workload()
        compare = self.meter.reference_ratio

        def pause(key: Reference) -> float:
            self.between()
            return compare(key)

        self.meter.reference_ratio = pause  # type: ignore[method-assign]


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

    def take(self, between: Callable[[], None] | None = None) -> DeviceProfile:
        """A profile of now; `between` is called often, and may take half of the time."""
        options = self.options
        if between is not None:
            options = replace(options, budget_s=2 * options.budget_s)
        look = between or (lambda: None)
        session = Interrupted(
            self.opened.devices,
            options,
            out=None,
            clock=None,
            progress=lambda _: look(),
            step_s=measure_step_s(model_bytes=options.cold_bytes),
        )
        session.between = look
        with pinned(self.opened.control_core):
            return session.run(resume=False)


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
            measure_prompt(self.alike[0], prompt_tokens(self.test))

    def finish(self) -> None:
        """Where a prompt's time went, after a turn."""
        if self.test != "tg":
            measure_layers(self.alike[0], prompt_tokens(self.test))

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


class Turns:
    """Runs rows, each once in random order and then again, for half of the time."""

    def __init__(self, rows: list[Row], tokens: int, seconds: float) -> None:
        self.rows, self.tokens, self.seconds = rows, tokens, seconds
        self._rng = np.random.default_rng(0)
        self._waiting: list[Row] = []
        self._next_s = 0.0

    def run(self, row: Row, seconds: float) -> None:
        """A row until it has had so many seconds."""
        start_s = time.perf_counter()
        while True:
            row.measure(self.tokens)
            if time.perf_counter() - start_s >= seconds:
                break
        row.finish()

    def look(self) -> None:
        """The next row, if what else runs has had as long as the last one took."""
        start_s = time.perf_counter()
        if start_s < self._next_s:
            return
        if not self._waiting:
            self._waiting = [self.rows[i] for i in self._rng.permutation(len(self.rows))]
        self.run(self._waiting.pop(), self.seconds)
        end_s = time.perf_counter()
        self._next_s = end_s + (end_s - start_s)

    def finish(self) -> None:
        """The rows of this turn that are left, so that each has run as often as the others."""
        while self._waiting:
            self.run(self._waiting.pop(), self.seconds)


def prompt_tokens(test: str) -> int:
    """Of a test's name: 135 of pp135."""
    return int(test.removeprefix("pp"))


def steps_of(one: Contender, test: str) -> list[Scenario]:
    """The calls of a test."""
    if test == "tg":
        return [Scenario("decode", 1, CONTEXT)]
    return call_scenarios(one.engine.plan.steps(prompt_tokens(test)))


def predicted_s(
    one: Contender, spec: ModelGraph, profile: DeviceProfile, tests: list[str]
) -> dict[str, float]:
    """Seconds of every test by a profile."""
    wanted = {
        test: Scenario("decode", 1, CONTEXT)
        if test == "tg"
        else Scenario("prefill", prompt_tokens(test))
        for test in tests
    }
    told = repredict(one.engine.plan, spec, profile, wanted.values())
    return {test: told[scenario] for test, scenario in wanted.items()}


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
    parser.add_argument("-n", type=int, default=16)
    parser.add_argument("-r", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a test's turn, at least")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each profile")
    arguments = parser.parse_args()
    lengths = [int(m) for m in arguments.p.split(",")]
    tests = [*(f"pp{m}" for m in lengths), "tg"]
    loaded = open_model(arguments.model, weights=arguments.weights)
    profiler = Profiler(loaded, lengths, arguments.budget)
    first = profiler.take()
    strategies = {NAMES.get(s, s): s for s in arguments.strategies.split(",")}
    contenders = {n: contender(n, loaded, first, s, lengths) for n, s in strategies.items()}
    found = list(contenders.values())
    rows = rows_of(found, tests)
    turns = Turns(rows, arguments.n, arguments.seconds)
    for row in rows:
        turns.run(row, 0.0)
    for one in found:
        one.forget()
    profiles = [profiler.take(turns.look) for _ in range(arguments.r)]
    turns.finish()
    for row in rows:
        row.share()
    spec = loaded.spec()
    told = {one.name: [predicted_s(one, spec, p, tests) for p in profiles] for one in found}
    spent_s = statistics.median(p.coverage.spent_s for p in profiles) / 2
    covered = min(p.coverage.measured_tasks / p.coverage.grid_tasks for p in profiles)
    least = min(len(row.alike[0].times[row.test]) for row in rows)
    print(
        f"measured; {arguments.model} {arguments.weights}, {len(profiles)} profiles of "
        f"{spent_s:.0f} s ({covered:.0%} of the grid and more), in turns with each test {least} "
        "times and more"
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

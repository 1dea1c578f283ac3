"""Predicted against measured steps, with the profile taken in turns with the measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer
from common import CONTEXT, LLAMA, Lengths, Tokens, finish, integers, spread, table
from lab.repredict import repredict

from hetero.backends.host.affinity import assign_cores, pinned
from hetero.measuring.profiling import model_options
from hetero.measuring.step_cost import measure_step_s
from hetero.models import LoadedModel, open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.options import Options
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile
from hetero.profiler.session import profile_devices
from hetero.solver.prompts import call_scenarios
from hetero.solver.solution import Scenario
from parts.levels import Contender, contender

GOAL = 0.10
NAMES = {"gpu-only": "gpu", "npu-only": "npu", "auto": "tensor"}  # as `levels` has them
HEAD = (
    "test|plan|predicted ms (median)|of the profiles|measured ms (median)|min|max|"
    "measured / predicted"
)


class Profiler:
    """Takes profiles of one model's shapes, one after the other, on devices of its own."""

    def __init__(self, loaded: LoadedModel, lengths: list[int], budget_s: float) -> None:
        self.opened = open_devices("hetero")
        npu = self.opened.devices["npu"].capabilities
        graphs = {g for g in npu.graph_sizes if DECODE_TOKENS < g <= max(lengths)}
        formats = (loaded.spec().weight_format,)
        self.options = Options(
            budget_s=budget_s,
            weight_formats=formats,
            tokens=tuple(sorted({1, *graphs, *lengths})),
            power=False,
            gpu_core=assign_cores().gpu,
            control_core=assign_cores().control,
            **model_options(loaded.spec(), formats),
        )

    def take(self, between: Callable[[], None] | None = None) -> DeviceProfile:
        """A profile of now; `between` is called often, and may take half of the time."""
        options, look = self.options, between or (lambda: None)
        if between is not None:
            options = replace(options, budget_s=2 * options.budget_s, between=between)
        step_s = measure_step_s(model_bytes=options.cold_bytes)
        with pinned(self.opened.control_core):
            return profile_devices(
                self.opened.devices, options, step_s=step_s, progress=lambda _: look()
            )


@dataclass
class Row:
    """A test of contenders whose plans for it are equal; the first one is measured."""

    test: str
    alike: list[Contender]

    @property
    def tokens(self) -> int:
        """Of the prompt; 0 for decoding."""
        return int(self.test.removeprefix("pp")) if self.test != "tg" else 0

    def run(self, decode: int, seconds: float) -> None:
        """Prompts, or so many tokens at a time, until it has had so many seconds."""
        one, m, start_s = self.alike[0], self.tokens, time.perf_counter()
        while True:
            one.measure_prompt(m) if m else one.measure_decoding(decode, CONTEXT)
            if time.perf_counter() - start_s >= seconds:
                break


def rows_of(found: list[Contender], lengths: list[int]) -> list[Row]:
    """Contenders by what they compute in each test."""
    rows = []
    for test, m in [*((f"pp{m}", m) for m in lengths), ("tg", 0)]:
        alike: dict[str, list[Contender]] = {}
        for one in found:
            calls = call_scenarios(one.engine.plan.steps(m)) if m else [scenario(0)]
            steps = sorted({(call.phase, call.m) for call in calls})
            used = (o for o in one.plan.ops if (o.phase, o.m) in steps or o.op == "lm_head")
            alike.setdefault(repr((steps, [op.tiles for op in used])), []).append(one)
        rows += [Row(test, same) for same in alike.values()]
    return rows


def scenario(m: int) -> Scenario:
    """Of a test: a prompt of m tokens, or decoding (0)."""
    return Scenario("prefill", m) if m else Scenario("decode", 1, CONTEXT)


class Turns:
    """Runs rows, each once in random order and then again, for half of the time."""

    def __init__(self, rows: list[Row], decode: int, seconds: float) -> None:
        self.rows, self.decode, self.seconds = rows, decode, seconds
        self._rng = np.random.default_rng(0)
        self._waiting: list[Row] = []
        self._next_s = 0.0

    def look(self) -> None:
        """The next row, if what else runs has had as long as the last one took."""
        start_s = time.perf_counter()
        if start_s < self._next_s:
            return
        if not self._waiting:
            self._waiting = [self.rows[i] for i in self._rng.permutation(len(self.rows))]
        self._waiting.pop().run(self.decode, self.seconds)
        end_s = time.perf_counter()
        self._next_s = end_s + (end_s - start_s)

    def finish(self) -> None:
        """The rows of this turn that are left, so that each has run as often as the others."""
        while self._waiting:
            self._waiting.pop().run(self.decode, self.seconds)


def line_of(row: Row, predicted: list[float]) -> tuple[list[str], float]:
    """A line of the table, and measured over predicted."""
    one, expected = row.alike[0], statistics.median(predicted)
    times = one.times[row.test]
    ratio = statistics.median(times) / expected
    told = f"{1e3 * min(predicted):.2f} to {1e3 * max(predicted):.2f}"
    names = ", ".join(same.name for same in row.alike)
    cells = [f"{1e3 * expected:.2f}", told, *spread(times, 1e3), f"{ratio:.3f}"]
    return [row.test, names, *cells], ratio


def plans(
    model: str = LLAMA,
    weights: str = "w4a8",
    p: Lengths = "64,256",
    n: Tokens = 16,
    r: Annotated[int, typer.Option("-r", help="profiles")] = 6,
    strategies: Annotated[str, typer.Option(help="such as gpu-only,row-cut")] = ",".join(NAMES),
    seconds: Annotated[float, typer.Option(help="of a test's turn, at least")] = 1.0,
    budget: Annotated[float, typer.Option(help="seconds of each profile")] = 60.0,
) -> None:
    """Predicted against measured steps, with the profile taken in turns with the measurement.

    A profile of the model's shapes stops again and again, for as long as it ran, and each time one
    plan runs, in random order: both see the same moments of the machine. Plans that compute a test
    with the same tiles are one row. They are made from a first profile, which does not count; each
    of `-r` others says of those very tiles what they are to take.
    """
    lengths, loaded = integers(p), open_model(model, weights=weights)
    profiler = Profiler(loaded, lengths, budget)
    first = profiler.take()
    wanted = {NAMES.get(s, s): s for s in strategies.split(",")}
    found = {name: contender(name, loaded, first, s, lengths) for name, s in wanted.items()}
    rows = rows_of(list(found.values()), lengths)
    for row in rows:
        row.run(n, 0.0)
    for one in found.values():
        one.times.clear()  # the warm-up
    turns = Turns(rows, n, seconds)
    profiles = [profiler.take(turns.look) for _ in range(r)]
    turns.finish()
    lines = []
    for row in rows:
        plan, test = row.alike[0].engine.plan, scenario(row.tokens)
        told = [repredict(plan, loaded.spec(), profile, [test])[test] for profile in profiles]
        lines.append(line_of(row, told))
    spent_s = statistics.median(x.coverage.spent_s for x in profiles) / 2
    covered = min(x.coverage.measured_tasks / x.coverage.grid_tasks for x in profiles)
    least = min(len(row.alike[0].times[row.test]) for row in rows)
    print(
        f"predicted and measured; {model} {weights}, {r} profiles of {spent_s:.0f} s "
        f"({covered:.0%} of the grid and more), in turns with each test {least} times and more"
    )
    table(HEAD, [line for line, _ in lines])
    print(f"within {GOAL:.0%}: {sum(abs(ratio - 1) <= GOAL for _, ratio in lines)} of {len(lines)}")
    finish()
    for one in found.values():
        one.close()
    profiler.opened.close()

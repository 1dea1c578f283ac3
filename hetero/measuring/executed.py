"""Plans executed on a profile's simulated chip: by the engine, launch by launch, in virtual time.

Lowering, executor and waits are those of every model; the devices take the time that the profile's
models say of each launch, and compute nothing, so that a model of eight billion weights runs in a
second and needs no memory for them. Times are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.backends.simulated import Rendering
from hetero.models.random_models import known_config, limited
from hetero.models.shape_weights import ShapeWeights
from hetero.profiler.records import DeviceProfile
from hetero.profiler.simulated_chip import VirtualChip
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.program import RUN
from hetero.runtime.waits import SyncMethod
from hetero.solver.baselines import force
from hetero.solver.build import assemble
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.options import PowerModel
from hetero.solver.planner import Planner
from hetero.solver.request import DECODE, PlanRequest
from hetero.solver.solution import Scenario

LEARNED: Final = 3  # steps after which waits are predicted well


class Executed(NamedTuple):
    """One step or prompt: its seconds, joules (None: of unknown power), and seconds by matmul."""

    seconds: float
    joules: float | None
    matmul_s: dict[str, float]


def plan_of(planner: Planner, scenario: Scenario, strategy: NamedStrategy) -> ExecutionPlan:
    """Return the plan of one scenario under a strategy; the other phase is the GPU's alone.

    So its cuts are its own: those of another phase would divide its calls.
    """
    chosen = force(planner, scenario, strategy)
    decodes = scenario.phase == "decode"
    m = planner.settings.context if decodes else scenario.m
    other = force(planner, Scenario("prefill", m) if decodes else DECODE, "gpu-only")
    request = PlanRequest(seq_lens=(m,), explain=False)
    solutions = [other, chosen] if decodes else [chosen, other]
    return assemble(planner, solutions, request, strategy=strategy, longest=m)


def execute(
    planner: Planner,
    model: str,
    scenario: Scenario,
    strategy: NamedStrategy = "auto",
    sync: SyncMethod = "fast",
) -> Executed:
    """Run a prompt, or a decode step after the context of the planner, of a known model.

    Its waits have been predicted from a few before. Preparation of graphs that are not prepared
    ahead is in the time of a prompt.
    """
    plan = plan_of(planner, scenario, strategy)
    with opened(planner.profile, model, plan, sync) as (chip, engine, context):
        prompt = [1] * (plan.step_tokens or scenario.m)
        engine.prefill(context, prompt)
        for _ in range(LEARNED if scenario.phase == "decode" else 0):
            engine.decode(context, 1)
            context.truncate(len(prompt))
        start_s = chip.clock.now()
        if scenario.phase == "decode":
            engine.decode(context, 1)
        else:
            context.truncate(0)
            engine.prefill(context, prompt)
        seconds = chip.clock.now() - start_s
        return Executed(seconds, _joules(planner, chip, start_s, seconds), _matmul_s(engine))


@contextmanager
def opened(
    profile: DeviceProfile,
    model: str,
    plan: ExecutionPlan,
    sync: SyncMethod = "fast",
    rendering: Rendering | None = None,
    max_seq_len: int | None = None,
) -> Iterator[tuple[VirtualChip, Engine, Context]]:
    """Open a known model on the profile's chip, with an empty context.

    It holds `max_seq_len` tokens, by default two of the plan's longest calls.
    """
    chip = VirtualChip(profile, rendering=rendering)
    tokens = max_seq_len or 2 * (plan.step_tokens or 1)
    weight_format = plan.weight_format or WeightFormat.W4A16
    weights = ShapeWeights(limited(known_config(model)), weight_format)
    with Engine(
        weights, plan, chip.devices, max_seq_len=tokens, sync=sync, adapt=False, warm=False,
        clock=chip.clock,
    ) as engine:  # fmt: skip
        yield chip, engine, engine.new_context()


def _joules(planner: Planner, chip: VirtualChip, start_s: float, seconds: float) -> float | None:
    """Return the energy since `start_s` by the time that each device has worked."""
    power = PowerModel.of(planner.cost)
    if power is None:
        return None
    busy_s = chip.busy_s(start_s)
    return power.joules(busy_s["gpu"], busy_s["npu"], busy_s["both"], seconds)


def _matmul_s(engine: Engine) -> dict[str, float]:
    """Return the seconds of the last step in which a device worked on each matmul of all layers."""
    step, stamps = engine.runner.last_step, engine.runner.last_run.stamps
    busy_s: dict[tuple[str, DeviceKind], float] = {}
    for at, action in enumerate(step.program):
        launch = step.launches[action.launch]
        if launch.rows is not None and action.code == RUN:
            key = (launch.node.rpartition(".")[2], launch.kind)
            busy_s[key] = busy_s.get(key, 0.0) + stamps[at + 1] - stamps[at]
    for launch, completion in zip(step.launches, step.completions, strict=True):
        span = None if completion is None or launch.rows is None else completion.span()
        if span is not None:
            key = (launch.node.rpartition(".")[2], launch.kind)
            busy_s[key] = busy_s.get(key, 0.0) + span[1] - span[0]
    longest: dict[str, float] = {}
    for (name, _), seconds in busy_s.items():
        longest[name] = max(longest.get(name, 0.0), seconds)
    return longest

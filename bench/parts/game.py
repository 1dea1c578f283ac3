"""A game next to the model on the GPU of the simulated chip (HeteroLLM's figure 18)."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer
from common import Prompt, finish, table

from hetero.backends.simulated import Rendering
from hetero.measuring.executed import opened, plan_of
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.chooser import Rules
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.solution import Scenario

FPS = 60
SYSTEMS: dict[str, NamedStrategy] = {
    "PPL-OpenCL": "gpu-only", "Hetero-layer": "layer", "Hetero-tensor": "auto",
}  # fmt: skip


def game(
    model: str = "llama-3-8b",
    profile: Annotated[
        str, typer.Option(help="a shipped profile of a chip")
    ] = "snapdragon-8-gen-3",
    p: Prompt = 256,
    frame_ms: Annotated[float, typer.Option(help="GPU time of a frame, at 60 a second")] = 4.0,
    prompts: Annotated[int, typer.Option(help="one after another")] = 5,
) -> None:
    """Prompts by the GPU alone, at layer and at tensor level, with and without a game's frames."""
    free = Planner(model_spec(model), DeviceProfile.load(profile))
    half = Planner(free.spec, free.profile, PlannerSettings(rules=Rules(max_gpu_share=0.5)))
    systems = [(name, free, strategy) for name, strategy in SYSTEMS.items()]
    systems.append(("Hetero-tensor, --max-gpu-share 0.5", half, "auto"))
    rendering, rows = Rendering(1 / FPS, frame_ms * 1e-3), []
    for name, planner, strategy in systems:
        plan = plan_of(planner, Scenario("prefill", p), strategy)
        alone, _ = run(planner, model, plan, p, prompts, None)
        both, frames = run(planner, model, plan, p, prompts, rendering)
        rows.append([name, f"{alone:.1f}", f"{both:.1f}", f"{both / alone - 1:+.1%}", *frames])
    print(f"simulated; {model}, {p} tokens, {profile}, frames of {frame_ms:g} ms on the GPU\n")
    table("system|tokens/s alone|with the game|change|frames/s|frame ms (median)|longest", rows)
    finish(
        "paper, figure 18, Llama-8B, 256 tokens, League of Legends: Hetero-layer 9.57 % and "
        "Hetero-tensor 7.26 % slower at 60 frames/s; with PPL-OpenCL the game drops to 0",
        "how long a frame of that game takes the GPU is not in the paper",
    )


def run(
    planner: Planner,
    model: str,
    plan: ExecutionPlan,
    p: int,
    prompts: int,
    rendering: Rendering | None,
) -> tuple[float, list[str]]:
    """Return tokens per second, and the game's frames: how many a second, milliseconds of one."""
    with opened(planner.profile, model, plan, rendering=rendering) as (chip, engine, context):
        tokens = [1] * p
        engine.prefill(context, tokens)
        begin_s, before = chip.clock.now(), len(chip.chip.frames)
        for _ in range(prompts):
            context.truncate(0)
            engine.prefill(context, tokens)
        seconds = chip.clock.now() - begin_s
        drawn = [x for x in chip.chip.frames[before:] if x.end_s is not None]
    took_ms = [1e3 * (x.end_s - x.ready_s) for x in drawn if x.end_s is not None]
    shown = [f"{len(drawn) / seconds:.1f}"]
    shown += [f"{f(took_ms):.1f}" if took_ms else "-" for f in (statistics.median, max)]
    return prompts * p / seconds, shown

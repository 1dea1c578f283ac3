"""A prompt over GPU, NPU and CPU of a fitted chip: planned, executed in virtual time, and ideal.

python bench/three_devices.py                                  # Qwen3-4B, X2 Elite, 512 tokens
python bench/three_devices.py --model qwen3-4b --profile snapdragon-x-elite -m 1024

The prompt is planned by itself, with weights laid out for it alone. Ideal is the plan for three
with every matmul of a layer at the added rates of the three devices, and with what the plan says of
synchronisation and of all other operations. Times are simulated: of a chip that is fitted to
published rates of whole models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from common import one_command, table

from hetero.measuring.executed import execute
from hetero.models import model_spec
from hetero.placement.three_devices import ideal_s
from hetero.profiler.records import DeviceProfile
from hetero.solver.planner import Planner, PlannerSettings, for_two
from hetero.solver.solution import Scenario


def main(
    model: Annotated[str, typer.Option(help="a known model")] = "qwen3-4b",
    profile: Annotated[str, typer.Option(help="a profile with a CPU")] = "snapdragon-x2-elite",
    tokens: Annotated[int, typer.Option("-m", help="of the prompt")] = 512,
) -> None:
    """Plan and execute a prompt on one, two and three devices."""
    known, scenario = DeviceProfile.load(profile), Scenario("prefill", tokens)
    settings = PlannerSettings()
    rules = replace(settings.rules, third=True)
    planner = Planner(model_spec(model), known, replace(settings, rules=rules))
    three, two = planner.solve(scenario), for_two(planner).solve(scenario)
    ideal = ideal_s(planner, three)
    steps = {"NPU": planner.single(scenario, "npu"), "GPU, NPU": two, "GPU, NPU, CPU": three}
    lines = []
    for name, solution in steps.items():
        if solution is None:
            continue
        own = planner if solution is three else for_two(planner)
        strategy = "npu-only" if name == "NPU" else "auto"
        executed = execute(own, model, scenario, strategy).seconds
        lines.append([
            name, f"{1e3 * solution.seconds:.1f}", f"{1e3 * executed:.1f}",
            f"{tokens / executed:.0f}", f"{executed / ideal:.3f}",
        ])  # fmt: skip
    lines.append(["ideal of three", f"{1e3 * ideal:.1f}", "", f"{tokens / ideal:.0f}", "1"])
    print(f"{model}, a prompt of {tokens} tokens on {profile} (fitted, simulated)\n")
    table("devices|planned, ms|executed, ms|tokens/s|over the ideal", lines)
    shares = {"npu": 0.0, "cpu": 0.0, "gpu": 0.0}
    for name, option in three.options.items():
        n, k = planner.shape(name)
        work = k * planner.spec.counts[name] * (name not in planner.spec.sampled)
        rows = {"npu": option.rows, "cpu": option.cpu_rows, "gpu": n - option.row_cuts[-1]}
        for kind, count in rows.items():
            shares[kind] += work * count
    total = sum(shares.values())
    print("of the layers' matmuls: " + ", ".join(f"{k} {x / total:.0%}" for k, x in shares.items()))


app = one_command(main)

if __name__ == "__main__":
    app()

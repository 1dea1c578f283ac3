"""Figures 15 and 16 of mllm-NPU on a simulated chip: energy and memory of prompts."""

from __future__ import annotations

from typing import Annotated

import typer
from common import Lengths, finish, integers, table

from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan

CHIP = "snapdragon-8-gen-3"
Models = Annotated[str, typer.Option(help="known models, comma-separated")]
PROFILE = Annotated[str, typer.Option(help="a shipped profile of a chip")]


def energy(
    models: Models = "qwen1.5-1.8b,gemma-2b,phi-2",
    profile: PROFILE = CHIP,
    lengths: Lengths = "64,256,1024",
    weights: str = "w8a8",
) -> None:
    """Figure 15: joules of a prompt on the GPU alone, as mllm-NPU has it, and by our plans."""
    chip, prompts = DeviceProfile.load(profile), integers(lengths)
    rows = []
    for model in models.split(","):
        spec = model_spec(model, weights)
        least = PlanRequest(seq_lens=tuple(prompts), objective="energy", explain=False)
        request = PlanRequest(seq_lens=tuple(prompts), explain=False)
        plans = {
            "GPU alone": strategy_plan(spec, chip, "gpu-only", prompts),
            "mllm-NPU": strategy_plan(spec, chip, "chunked", prompts),
            "fastest": make_plan(spec, chip, request),
            "least energy": make_plan(spec, chip, least),
        }
        for p in prompts:
            joules = {name: _joules(plan, p) for name, plan in plans.items()}
            ratio = joules["GPU alone"] / joules["mllm-NPU"]
            rows.append([model, p, *(f"{x:.2f}" for x in joules.values()), f"{ratio:.2f}"])
    print(f"simulated, joules of a prompt; {profile}, {weights}\n")
    names = "GPU alone|as mllm-NPU|our fastest|our least energy"
    table(f"model|tokens|{names}|GPU alone / as mllm-NPU", rows)
    finish(
        "powers of the chip are fitted to HeteroLLM's three (figure 19), not measured here",
        "paper, figure 15, Redmi K60 Pro (8 Gen 2), TFLite on the GPU over mllm-NPU: 1.85 to 4.32 "
        "at 1024 tokens, 3.22 to 3.67 at 64; no absolute joules are given",
    )


def memory(
    models: Models = "qwen1.5-1.8b,gemma-2b,phi-2,llama-2-7b",
    profile: PROFILE = CHIP,
    p: Annotated[int, typer.Option("-p", help="tokens of the prompt")] = 512,
    weights: str = "w8a8",
) -> None:
    """Figure 16: weights of a plan, on the GPU, on the NPU and on both, over the model's own."""
    chip = DeviceProfile.load(profile)
    rows = []
    for model in models.split(","):
        spec = model_spec(model, weights)
        own = spec.matmul_weight_bytes
        plans = {
            "as mllm-NPU": strategy_plan(spec, chip, "chunked", [p]),
            "ours": make_plan(spec, chip, PlanRequest(seq_lens=(p,), explain=False)),
        }
        for name, plan in plans.items():
            needed = plan.memory
            assert needed is not None
            sizes = (needed.gpu_bytes, needed.npu_bytes, needed.twice_bytes, needed.total_bytes)
            shown = (f"{x / 2**30:.2f}" for x in sizes)
            rows.append([model, name, *shown, f"{needed.total_bytes / own:.2f}"])
    print(f"planned; {profile}, {weights}, a prompt of {p} tokens; GiB of weights\n")
    table("model|plan|GPU|NPU|on both|together|over the model's", rows)
    finish(
        "paper, section 4.5 (figure 16): at most 1.32 times llama.cpp's memory, of which outliers "
        "take 0.6 to 1 %"
    )


def _joules(plan: ExecutionPlan, tokens: int) -> float:
    total = next(x for x in plan.totals if x.phase == "prefill" and x.m == tokens)
    if total.energy_j is None:
        raise typer.BadParameter(f"profile {plan.profile} has no power figures: choose another")
    return total.energy_j

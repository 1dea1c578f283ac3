"""What meeting costs: waits, the control thread, and where a step's time goes.

    python bench/sync.py methods -n 64 -r 9
    python bench/sync.py control-plane --weights w4a8 --profile host
    python bench/sync.py breakdown --profile host --strategy gpu-only

`hetero sync-bench` times single waits by method and length.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from common import (
    LLAMA,
    Rounds,
    Tokens,
    context_of,
    finish,
    in_turns,
    new_app,
    run_prompt,
    run_steps,
    spread,
    table,
    timed,
    timeline,
)
from parts.levels import Drift, open_engine

from hetero.generation.llm import LLM
from hetero.models import open_model
from hetero.models.config import ModelConfig
from hetero.models.quantized import save
from hetero.models.random_models import KNOWN_MODELS
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile, Phase
from hetero.runtime.engine import Engine
from hetero.runtime.waits import SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level
from hetero.solver.plan import OpPlan, Rest, Tile
from hetero.solver.strategy_plans import strategy_plan

app = new_app(__doc__)
METHODS: tuple[SyncMethod, ...] = ("fast", "event", "finish", "copy")
SHORT = "llama-512"  # kernels so short that waits matter
ALIGNMENT = 32
CONTEXT = 256
COLUMNS = ("gpu predicted", "gpu", "npu predicted", "npu", "waits", "submits")
FIRST_TOKEN = """
import sys, time
start = time.perf_counter()
import hetero
with hetero.LLM(sys.argv[1], device=sys.argv[2], weights=sys.argv[3]) as llm:
    llm.generate([1] * 32, max_tokens=1)
    print(time.perf_counter() - start)
"""


def cut_plan(spec: ModelGraph, share: float) -> ExecutionPlan:
    """The NPU has this share of the rows of every matmul in decoding, all of them in prompts."""
    entries = []
    for matmul in spec.matmuls:
        cut = max(ALIGNMENT, int(matmul.n * share) // ALIGNMENT * ALIGNMENT)
        whole = Tile(device="npu", tokens=(0, None), rows=(0, matmul.n))
        halves = (
            Tile(device="npu", tokens=(0, 1), rows=(0, cut)),
            Tile(device="gpu", tokens=(0, 1), rows=(cut, matmul.n)),
        )
        shape: dict[str, Any] = {"op": matmul.name, "n": matmul.n, "k": matmul.k}
        entries += [
            OpPlan(phase="prefill", m=None, strategy="npu-only", tiles=(whole,), **shape),
            OpPlan(phase="decode", m=1, strategy="row-cut", tiles=halves, **shape),
        ]
    return ExecutionPlan(
        model=spec.name, ops=tuple(entries), rest=Rest(prefill="gpu", decode="gpu")
    )


def decode(llm: LLM, tokens: int) -> float:
    """Tokens/s after a short prompt."""
    run_prompt(llm.engine, 32)
    return tokens / sum(run_steps(llm.engine, tokens, 32))


@app.command("methods")
def methods(
    weights: str = "w4a16",
    share: Annotated[float, typer.Option(help="of the rows, on the NPU")] = 0.4,
    n: Tokens = 64,
    r: Rounds = 9,
) -> None:
    """What synchronisation costs a small model: decoding with each method, in turns.

    Tensor level cuts every matmul between both devices, layer level meets after every operation.
    Ratios are medians of the rounds' ratios.
    """
    KNOWN_MODELS[SHORT] = ModelConfig(
        architecture="llama", hidden_size=512, intermediate_size=1408, num_layers=16, heads=8,
        kv_heads=4, head_dim=64, vocab_size=32000, max_position=2048, rope_theta=1e4,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    model, common = f"random:{SHORT}", {"weights": weights, "max_seq_len": 256}
    spec, rows = open_model(model, weights=weights).spec(), []
    plans = {
        "tensor": cut_plan(spec, share),
        "layer": layer_level(spec, prefill="npu", decode="npu", rest="gpu"),
    }
    for level, plan in plans.items():
        models: dict[str, LLM] = {x: LLM(model, plan=plan, sync=x, **common) for x in METHODS}  # type: ignore[arg-type]
        waits = {x: partial(decode, llm, n) for x, llm in models.items()}
        speeds = in_turns(waits, r, warm=2)
        for sync, values in speeds.items():
            ratio = statistics.median(np.divide(speeds["fast"], values).tolist())
            copied = models[sync].engine.step("decode", 1).copied_bytes
            rows.append([level, sync, *spread(values, digits=1), f"{ratio:.3f}", copied])
            models[sync].close()
    print(f"measured; {model} {weights}, {n} tokens, {r} rounds\n")
    table("level|sync|tokens/s (median)|min|max|fast is ×|copied B/token", rows)
    finish()


def computing_s(engine: Engine) -> float:
    """Seconds of the last step in which any device computed; where both did it counts once."""
    total = end = 0.0
    for span in sorted(timeline(engine), key=lambda span: span.start_s):
        if span.what in ("gpu", "npu"):
            total += max(0.0, span.end_s - max(span.start_s, end))
            end = max(end, span.end_s)
    return total


def decode_overhead(llm: LLM, tokens: int) -> tuple[float, float]:
    """Median wall and computing seconds of a decoding step behind 256 tokens."""
    engine = llm.engine
    for device in llm.devices.devices.values():
        device.set_timing(True)
    run_prompt(engine, CONTEXT)
    steps = range(tokens + 4)
    found = [
        (timed(lambda: engine.decode(context_of(engine), 5)), computing_s(engine)) for _ in steps
    ]
    walls, computes = zip(*found[4:], strict=True)
    return statistics.median(walls), statistics.median(computes)


def first_token(model: str, weights: str, rounds: int) -> list[float]:
    """Seconds from start of the import to the first token of a saved model, in fresh processes.

    Modules are compiled once, as in an installation, whatever this shell's variables say.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        loaded, path = open_model(model, weights=weights), Path(folder) / "model"
        save(loaded.weights, path, name=loaded.name)
        command = [sys.executable, "-P", "-c", FIRST_TOKEN, str(path), "hetero", weights]
        options: dict[str, Any] = {"capture_output": True, "text": True, "env": environ}
        runs = [subprocess.run(command, check=True, **options) for _ in range(rounds)]
    return [float(done.stdout.split()[-1]) for done in runs]


@app.command("control-plane")
def control_plane(
    model: str = LLAMA,
    weights: str = "w4a8",
    profile: Annotated[str | None, typer.Option(help="for tensor level")] = None,
    n: Tokens = 32,
) -> None:
    """What a decoding step costs beyond its kernels, and a saved model to its first token.

    Control plane: the part of a step in which no device computes. A device computes from OpenCL's
    own start to its end of every kernel, and while a call of ONNX Runtime blocks.
    """
    modes: dict[str, dict[str, Any]] = {
        "gpu": {"device": "gpu"},
        "npu": {"device": "npu"},
        "layer level": {"device": "hetero", "strategy": "layer", "profile": profile},
        "tensor level": {"device": "hetero", "profile": profile},
    }

    def rows() -> Iterator[list[str]]:
        for name, options in modes.items():
            with LLM(model, weights=weights, adapt=False, **options) as llm:
                wall, compute = decode_overhead(llm, n)
            shown = f"{1e3 * wall:.2f}", f"{1e3 * compute:.2f}", f"{(wall - compute) / wall:.1%}"
            yield [name, *shown]

    print(f"{model}, {weights}, measured\n")
    table("device|decode step ms|of it computing ms|control plane", rows())
    shown = ", ".join(f"{value:.2f}" for value in first_token(model, weights, 3))
    finish(f"saved model to its first token, fresh process, 1st to 3rd: {shown} s\n")


Cells = dict[tuple[str, str], float]  # (operator, column) -> seconds of a step


def predicted(engine: Engine, profile: DeviceProfile, phase: Phase, m: int, context: int) -> Cells:
    """The plan's seconds of every operator, all layers together."""
    cost, found = CostModel(profile), Cells()
    kind = engine.plan.rest.prefill if phase == "prefill" else engine.plan.rest.decode
    times = {op.op: op for op in engine.plan.ops if op.phase == phase and op.m in (m, None)}

    def add(node: str, column: str, seconds: float | None) -> None:
        key = node.rsplit(".", maxsplit=1)[-1], f"{column} predicted"
        found[key] = found.get(key, 0.0) + (seconds or 0.0)

    for node in engine.nodes:
        if node.plan_op is None:
            add(node.name, kind, float(cost.other_s(kind, node.op, m, context).seconds))
            continue
        for name in [node.plan_op] if node.plan_op in times else [x for x, _ in node.members]:
            add(node.name, "gpu", times[name].gpu_s)
            add(node.name, "npu", times[name].npu_s)
    return found


def cells_of(engine: Engine, *, timing: bool) -> Cells:
    """The last step: of the GPU by its own clock if `timing`, all else by the host's."""
    found, stamps, gpu = Cells(), engine.last_run.stamps, []
    for span in timeline(engine):
        if (span.what == "gpu") == timing:
            found[span.role, span.what] = found.get((span.role, span.what), 0.0) + span.seconds
            gpu += [span] if timing else []
    if gpu:
        busy_s = sum(span.seconds for span in gpu)
        whole_s = max(s.end_s for s in gpu) - min(s.start_s for s in gpu)
        found["between", "gpu"] = whole_s - busy_s
    if not timing:
        found["step", ""] = stamps[-1] - stamps[0]
    return found


def measure(engine: Engine, phase: Phase, m: int, context: int, steps: int) -> Cells:
    """Medians of every cell, and of the whole step as ("step", "")."""
    cells: dict[tuple[str, str], list[float]] = {}
    engine.prefill(context_of(engine), [5] * max(context, 1))
    for timing in (False, True):
        for device in engine.devices.values():
            device.set_timing(timing)
        for i in range(steps + 2):
            run_prompt(engine, m) if phase == "prefill" else run_steps(engine, 1, context)
            for key, seconds in cells_of(engine, timing=timing).items() if i >= 2 else ():
                cells.setdefault(key, []).append(seconds)
    return {key: statistics.median(values) for key, values in cells.items()}


@app.command("breakdown")
def breakdown(
    profile: Annotated[str, typer.Option(help="a file, or the name of a shipped profile")],
    model: str = LLAMA,
    weights: str = "w4a16",
    strategy: str = "auto",
    plan: Annotated[Path | None, typer.Option(help="a plan, instead of a strategy")] = None,
    p: Annotated[int, typer.Option("-p", help="tokens of a prompt; 0: decoding")] = 0,
    n: Annotated[int, typer.Option("-n", help="steps")] = 40,
    context: int = 256,
) -> None:
    """Where a step's time goes, operator by operator, beside what the plan predicted.

    Milliseconds of one step, all layers, medians: the NPU's times by the host around each call,
    `waits` and `submits` the control thread's, then in N more steps the GPU's by its own clock,
    which costs some time. A gate's time on the GPU is the GPU waiting; `between` is what no kernel
    accounts for. The profile's reference kernels are timed before and after.
    """
    phase: Phase = "prefill" if p else "decode"
    m, context = max(p, 1), 0 if p else context
    taken, loaded = DeviceProfile.load(profile), open_model(model, weights=weights)
    if plan is not None:
        chosen = ExecutionPlan.load(plan)
    else:
        chosen = strategy_plan(loaded.spec(), taken, strategy, [p or 256])  # type: ignore[arg-type]
    drift = Drift(taken)
    drift.measure("plan")
    with open_engine(chosen, loaded, max(m, context) + 128) as engine:
        cells = measure(engine, phase, m, context, n)
        total_s = cells.pop(("step", ""))
        cells |= predicted(engine, taken, phase, m, context)
    drift.measure("plan")
    wanted_s = next((t.predicted_s for t in chosen.totals if (t.phase, t.m) == (phase, m)), 0.0)
    print(f"predicted and measured; {model} {weights} {phase} {m}, {n} steps")
    sums = [sum(s for (_, c), s in cells.items() if c == column) for column in COLUMNS]
    rows = []
    for name in dict.fromkeys(name for name, _ in cells):
        times = (cells.get((name, column)) for column in COLUMNS)
        rows.append([name, *("" if s is None else f"{1e3 * s:.2f}" for s in times)])
    rows.append(["**sum**", *(f"{1e3 * s:.2f}" for s in sums)])
    table("operator|" + "|".join(COLUMNS), rows)
    step = f"step: measured {1e3 * total_s:.2f} ms, predicted {1e3 * wanted_s:.2f} ms"
    finish(step, *drift.notes())


if __name__ == "__main__":
    app()

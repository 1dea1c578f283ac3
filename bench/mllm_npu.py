"""What "Fast On-device LLM Inference with NPUs" (mllm-NPU) adds to a prefill at layer level.

python bench/mllm_npu.py order      # its section 3.4: chunks of a prompt out of order
python bench/mllm_npu.py modes      # that, cut matmuls, and both, in the plan of a solver
python bench/mllm_npu.py ablation --profile MINE    # figure 17: each technique on top of the last
python bench/mllm_npu.py formats --profile MINE     # w8a8 and w4a8, shadows, every core, llama.cpp
python bench/mllm_npu.py chunks     # figure 8: the length of a chunk
python bench/mllm_npu.py simulated  # the same on the simulated chip, and table 4 end to end
python bench/mllm_npu.py pruning    # by how many matmuls keep outliers
python bench/mllm_npu.py drift      # static orders and dispatch by completion
python bench/mllm_npu.py energy     # figure 15; `memory`: figure 16

A command makes `Variant`s of one prompt's prefill, `compare` runs them in turns and prints them
beside what the paper says of that step (`data/mllm_npu.toml`).
"""

from __future__ import annotations

import itertools
import os
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args

import numpy as np
import typer
from common import (
    DATA,
    LLAMA,
    Lengths,
    Prompt,
    Worker,
    context_of,
    finish,
    in_turns,
    integers,
    new_app,
    open_engine,
    spread,
    table,
    timed,
    token_ids,
)
from parts.engines import LlamaCpp
from parts.gguf_files import write_random
from parts.npu_figures import energy, memory

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Outliers
from hetero.backends.protocol import KINDS
from hetero.models import RANDOM_PREFIX, LoadedModel, model_spec, open_model
from hetero.models.model_weights import BlockWeights, Shadow
from hetero.models.random_models import RandomWeights, known_config, limited
from hetero.placement.device_set import open_devices
from hetero.placement.planning import planned
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.launch_graph import LaunchGraph
from hetero.runtime.prefill_mode import WINDOW, PrefillModes, capabilities_of
from hetero.runtime.schedule import (
    ListScheduler,
    Order,
    out_of_order,
    schedule_rules,
    seconds_of,
    windows,
)
from hetero.solver.handmade import single_device
from hetero.solver.placement import Placement
from hetero.solver.plan import PrefillMode
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver
from hetero.solver.prompt_calls import split
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan

app = new_app(__doc__)
app.command("energy")(energy)
app.command("memory")(memory)
CHIP = "snapdragon-8-gen-3"
RULES = ("equation 6", "critical path", "oldest chunk")
OTHER_LENGTHS = 5  # that are planned anew
CLAIMS = tomllib.loads((DATA / "mllm_npu.toml").read_text(encoding="utf-8"))
HEAD = (
    "prefill|s (median)|min|max|time × {}|NPU idle|same logits|"
    "ms to plan another length (median)|max"
)


class Variant:
    """One way to run a prompt: an engine, its logits, the NPU's idle shares."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self.engine, self.prompt = engine, prompt
        self.idle: list[float] = []
        self.logits: Any = None
        self.planned_s: list[float] = []

    def run(self) -> float:
        """Seconds of one prefill from the context's start."""
        context = context_of(self.engine)
        context.truncate(0)
        before, found = context.work.copy(), []
        seconds = timed(lambda: found.append(self.engine.prefill(context, self.prompt)))
        self.idle.append(context.work.since(before).idle_share("npu") or 0.0)
        self.logits = found[0].copy()
        return seconds

    def plan(self, tokens: int) -> None:
        """Lower what a prompt of another length runs that no prompt ran before."""
        engine, context = self.engine, context_of(self.engine)
        *_, last = windows(engine.plan.steps(tokens), engine.deployment.window)
        context.truncate(tokens - sum(last))
        if len(last) > 1:
            self.planned_s.append(timed(lambda: engine.steps.window(context, last)))
        else:
            self.planned_s.append(timed(lambda: engine.steps.step(context, "prefill", *last)))


class Shadowed(RandomWeights):
    """Random w8a8 weights; `kept` of the matmuls, one of layers evenly spread, have a shadow of
    `hot` of their channels.
    """

    def __init__(self, model: str, kept: float, hot: float, matmul: OpName = "down") -> None:
        super().__init__(
            limited(known_config(model.removeprefix(RANDOM_PREFIX))), WeightFormat.W8A8
        )
        n, k = model_spec(model, weights="w8a8").shapes[matmul]
        layers = self.config.num_layers
        count = min(round(4 * layers * kept), layers)
        places = np.linspace(0, layers - 1, count).round().astype(int).tolist()
        op = Outliers(n=n, k=k, hot=max(round(k * hot), 1))
        self._matmul = matmul
        self._shadows = {f"blocks.{at}.{matmul}": op for at in places}

    def outliers(self) -> dict[str, Outliers]:
        return self._shadows

    def _load_block(self, index: int) -> BlockWeights:
        block = super()._load_block(index)
        op = self._shadows.get(f"blocks.{index}.{self._matmul}")
        if op is None:
            return block
        channels = np.linspace(0, op.k - 1, op.hot).astype(np.int32)
        slab = np.full((op.n, op.hot), 1e-3, np.float16)
        return replace(block, shadows={self._matmul: Shadow(channels, slab)})


def compare(variants: dict[str, Variant], tokens: int, rounds: int, claims: Sequence[str]) -> bool:
    """Run all in turns, print them over the first one, and the paper's words; whether all have the
    same logits, bit for bit.
    """
    found = in_turns({name: one.run for name, one in variants.items()}, rounds)
    for less in range(1, OTHER_LENGTHS + 1):
        for one in variants.values():
            one.plan(tokens - less)
    (base, first), *_ = variants.items()
    rows = []
    same = {name: np.array_equal(one.logits, first.logits) for name, one in variants.items()}
    for name, one in variants.items():
        ratio = statistics.median(np.divide(found[name], found[base]).tolist())
        shown = [f"{ratio:.3f}", f"{statistics.median(one.idle[1:]):.1%}"]
        planned, _, longest = spread(one.planned_s, 1e3, 1)
        answer = "yes" if same[name] else "NO"
        rows.append([name, *spread(found[name], digits=3), *shown, answer, planned, longest])
    table(HEAD.format(base), rows)
    finish(*claims)
    return all(same.values())


@app.callback()
def about() -> None:
    """Layer-level prefill as in mllm-NPU, step by step."""


@app.command("order")
def order(
    profile: Annotated[str, typer.Option(help="a file, or the name of a shipped profile")] = "host",
    model: str = LLAMA,
    weights: str = "w4a8",
    p: Prompt = 1024,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk")] = 256,
    rounds: Annotated[int, typer.Option("-r", "--rounds", help="all take turns in each")] = 5,
) -> None:
    """Orders of a prompt's chunks: one after another (`fifo`), by the paper's eq. 6 (`paper`), by
    the best of three rules (`best`). Matmuls on the NPU, all else on the GPU (`chunked`).

    `NPU idle` is the part of the prefill in which it had nothing to do. Another length has another
    last chunk: what is planned is its steps, an order among them. Exits with 1 if logits differ.
    """
    loaded, taken = open_model(model, weights=weights), DeviceProfile.load(profile)
    request = PlanRequest(graph_sizes=(chunk,))
    plan = strategy_plan(loaded.spec(), taken, "chunked", [p], request)
    prompt, cost = token_ids(p, loaded.config.vocab_size), CostModel(taken)
    orders: dict[str, Order] = {name: name for name in get_args(Order)}
    variants = {
        name: Variant(open_engine(plan, loaded, p + chunk, order=name, cost=cost), prompt)
        for name in orders
    }
    windowed = variants["best"].engine.deployment.window
    print(f"measured; {model} {weights}, {p} tokens in calls of {chunk}, {windowed} in flight\n")
    same = compare(variants, p, rounds, CLAIMS["order"])
    for one in variants.values():
        one.engine.close()
    raise typer.Exit(not same)


class Formed(Variant):
    """A prompt in one mode, on an engine that has all."""

    def __init__(self, engine: Engine, prompt: Sequence[int], mode: PrefillMode) -> None:
        super().__init__(engine, prompt)
        self.mode: PrefillMode = mode

    def run(self) -> float:
        """As `Variant.run`."""
        self.engine.deployment.prefill_modes.take = self.mode
        return super().run()

    def plan(self, tokens: int) -> None:
        """As `Variant.plan`, the choice of a mode included."""
        engine, context = self.engine, context_of(self.engine)
        engine.deployment.prefill_modes.take = self.mode
        *_, last = windows(
            engine.deployment.prefill_modes.of(tokens).calls, engine.deployment.window
        )
        context.truncate(tokens - sum(last))
        step = partial(engine.steps.window, context, last, mode=self.mode)
        if len(last) == 1:
            step = partial(engine.steps.step, context, "prefill", *last)
        self.planned_s.append(timed(step))


@app.command("modes")
def modes(
    profile: Annotated[str, typer.Option(help="a file, or the name of a shipped profile")] = "host",
    model: str = LLAMA,
    weights: str = "w4a8",
    p: Prompt = 1024,
    rounds: Annotated[int, typer.Option("-r", "--rounds", help="all take turns in each")] = 5,
) -> None:
    """The solver's plan cut in order, whole matmuls out of order, and both, with what is predicted.
    Logits differ in their last bits: matmuls are cut elsewhere.
    """
    loaded, taken = open_model(model, weights=weights), DeviceProfile.load(profile)
    request = PlanRequest(seq_lens=(p,), step_tokens=512, explain=False, shared=True)
    solver, cost = prepare_solver(loaded.spec(), taken, request), CostModel(taken)
    engine = open_engine(
        solver.plan, loaded, p + 256, order="best", cost=cost, solver=solver, adapt=False
    )
    print(f"measured; {model} {weights}, {p} tokens; {engine.deployment.prefill_modes.of(p)}\n")
    prompt = token_ids(p, loaded.config.vocab_size)
    names: list[PrefillMode] = ["cut", *(flight.mode for flight in engine.plan.in_flight)]
    compare({mode: Formed(engine, prompt, mode) for mode in names}, p, rounds, ())
    engine.close()


@app.command("ablation")
def ablation(
    profile: Annotated[str, typer.Option(help="a file of `hetero profile --weights w4a8,w8a8`")],
    model: str = LLAMA,
    p: Prompt = 512,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk")] = 256,
    kept: Annotated[float, typer.Option(help="part of the matmuls that keep a shadow")] = 0.15,
    hot: Annotated[float, typer.Option(help="part of its channels that are hot")] = 0.003,
    rounds: Annotated[int, typer.Option("-r", "--rounds", help="all take turns in each")] = 3,
) -> None:
    """Scales of groups in one call, in chunks, one scale a tensor with outliers beside it, chunks
    out of order: each on top of the last. Random weights. A PC builds no graphs for a prompt.
    """
    taken, grouped = DeviceProfile.load(profile), open_model(model, weights="w4a8")
    shadowed = Shadowed(model, kept, hot)
    static = replace(open_model(model, weights="w8a8"), weights=shadowed)

    def engine(loaded: LoadedModel, size: int, order: Order) -> Engine:
        request = PlanRequest(graph_sizes=(size,))
        plan = strategy_plan(loaded.spec(), taken, "chunked", [p], request)
        return open_engine(plan, loaded, p + size, order=order, cost=CostModel(taken))

    variants = {
        "naive": engine(grouped, p, "fifo"),
        "+ chunks": engine(grouped, chunk, "fifo"),
        "+ outliers": engine(static, chunk, "fifo"),
        "+ order": engine(static, chunk, "best"),
    }
    prompt = token_ids(p, grouped.config.vocab_size)
    print(
        f"measured; {model}, {p} tokens in calls of {chunk}, {len(shadowed.outliers())} shadows\n"
    )
    found = {name: Variant(one, prompt) for name, one in variants.items()}
    compare(found, p, rounds, CLAIMS["ablation"])


class Prefill:
    """Prefills of one format at tensor level, or on every core of one engine; lives in a worker."""

    def __init__(self, *, model: str, weights: str, where: str, profile: str, p: int) -> None:
        stored, _, kept = weights.partition("+")
        loaded, taken = open_model(model, weights=stored), DeviceProfile.load(profile)
        if kept:
            loaded = replace(loaded, weights=Shadowed(model, 0.15, 0.003))
        self._prompt = token_ids(p, loaded.config.vocab_size)
        if where == "opencl-cores":
            plan, opened = single_device(loaded.spec(), "gpu"), open_devices("gpu", gpu=where)
            self._engine = Engine(loaded.weights, plan, opened.devices, max_seq_len=p + 64)
            return
        request = PlanRequest(seq_lens=(p,), step_tokens=min(p, 512), explain=False, shared=True)
        solver = prepare_solver(loaded.spec(), taken, request)
        cost = CostModel(taken)
        self._engine = open_engine(
            solver.plan, loaded, p + 256, order="best", cost=cost, solver=solver
        )

    def round(self) -> float:
        """Seconds of one prompt."""
        context = context_of(self._engine)
        context.truncate(0)
        return timed(lambda: self._engine.prefill(context, self._prompt))


@app.command("formats")
def formats(
    profile: Annotated[str, typer.Option(help="a file of `hetero profile --weights w4a8,w8a8`")],
    model: str = "llama-3.2-1b",
    p: Prompt = 256,
    rounds: Annotated[int, typer.Option("-r", "--rounds", help="all take turns in each")] = 3,
    only: Annotated[str, typer.Option(help="parts of names: 'tensor level,Q8_0'")] = "",
) -> None:
    """One prompt at tensor level in w8a8, with shadows beside 15 % of the matmuls, and in w4a8;
    every core of one engine in both; llama.cpp with Q8_0 and Q4_0. Random weights.
    """
    given = {"model": f"{RANDOM_PREFIX}{model}", "profile": profile, "p": p}
    runs = [("tensor level", w) for w in ("w8a8", "w8a8+", "w4a8")]
    runs += [("opencl-cores", w) for w in ("w8a8", "w4a8")]
    wanted = [x for x in runs if any(part in ", ".join(x) for part in only.split(","))]
    workers = [Worker(f"{x}, {w}", Prefill, weights=w, where=x, **given) for x, w in wanted]
    with TemporaryDirectory() as folder:
        turns: dict[str, Callable[[], float]] = {}
        for worker in workers:
            worker.start()
            turns[worker.name] = partial(worker.ask, "round")
        asked = [
            x
            for x in ("Q8_0", "Q4_0")
            if any(part in f"llama.cpp, {x}" for part in only.split(","))
        ]
        for kind in asked:
            path = Path(folder) / f"{kind}.gguf"
            write_random(model_spec(model, WeightFormat.W4A8), path, p + 64, kind)
            cores = sorted(os.sched_getaffinity(0))[-2:]
            options = {
                "path": str(path),
                "threads": 2,
                "cores": cores,
                "kv": "f16",
                "context": p + 64,
            }
            worker = Worker(f"llama.cpp, {kind}", LlamaCpp, **options)
            worker.start()
            workers.append(worker)
            turns[worker.name] = lambda w=worker: p / w.ask("round", p, 1)["prefill"]  # type: ignore[misc]
        found = in_turns(turns, rounds)
    for worker in workers:
        worker.stop()
    print(f"measured; {model}, {p} tokens, {rounds} rounds; `+`: shadows beside 15 %\n")
    (first, _), *_ = found.items()
    rows = []
    for name, seconds in found.items():
        ratio = statistics.median(np.divide(seconds, found[first]).tolist())
        rows.append([name, *spread(seconds, digits=3), f"{ratio:.3f}"])
    table(f"prefill|s (median)|min|max|time × {first}", rows)
    finish()


@app.command("simulated")
def simulated(
    profile: Annotated[str, typer.Option(help="a shipped profile of a chip")] = CHIP,
    model: str = "random:qwen1.5-1.8b",
    p: Prompt = 512,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk")] = 256,
    n: Annotated[int, typer.Option("-n", help="tokens of table 4's answers")] = 8,
) -> None:
    """Figure 17's steps and table 4 by makespans of a simulated chip's profile: matmuls on the NPU,
    all else on the GPU, as `ablation` has them; then this project's own plan. The naive step builds
    graphs of the prompt's own length, those of chunks are there.
    """
    taken = DeviceProfile.load(profile)
    grouped = open_model(model, weights="w4a16").spec()
    shadowed = replace(open_model(model, weights="w8a8"), weights=Shadowed(model, 0.15, 0.003))
    static = shadowed.spec()
    steps: dict[str, tuple[ModelGraph, int, Order]] = {
        "naive": (grouped, p, "fifo"),
        "+ chunks": (grouped, chunk, "fifo"),
        "+ outliers": (static, chunk, "fifo"),
        "+ order": (static, chunk, "best"),
    }
    found = {name: _makespan(*how, taken, p) for name, how in steps.items()}
    print(f"simulated; {model}, {p} tokens, {profile}\n")
    built = dict.fromkeys(found, 0.0) | {"naive": Planner(grouped, taken).preparation_s(p)}
    all_s = {name: s + built[name] for name, s in found.items()}
    pairs = zip(all_s.items(), [all_s["naive"], *all_s.values()], strict=False)
    rows = [
        [name, f"{found[name]:.3f}", f"{built[name]:.3f}", f"{p / s:.0f}", f"{s / last:.2f}"]
        for (name, s), last in pairs
    ]
    table("prefill|s|s to build its graphs|tokens/s with them|time × the step before", rows)
    cells = []
    for tokens, theirs, llama_cpp in CLAIMS["table4"].get(model.removeprefix(RANDOM_PREFIX), []):
        request = PlanRequest(seq_lens=(tokens,), explain=False)
        plan = planned(open_model(model, weights="w8a8").spec(), taken, request)
        total, step = (x for x in plan.totals if x.phase == "decode" or x.m == tokens)
        seconds, answer = min([total.predicted_s, *total.modes.values()]), n * step.predicted_s
        layer = _makespan(static, chunk, "best", taken, tokens)
        own = [f"{layer:.2f}", f"{seconds:.2f}", f"{answer:.2f}", f"{seconds + answer:.2f}"]
        cells.append([str(tokens), *own, theirs, llama_cpp])
    print(f"\nsimulated, {n} tokens decoded; table 4 of the paper, end to end on a Xiaomi 14\n")
    head = "prompt|s, as mllm-NPU|s, our plan|s, its answer|s, both|s, paper|s, llama.cpp there"
    table(head, cells)
    finish(*CLAIMS["ablation"], *CLAIMS["contradictions"])


@app.command("chunks")
def chunks(
    profile: Annotated[str, typer.Option(help="a shipped profile of a chip")] = CHIP,
    model: str = "random:qwen1.5-1.8b",
    lengths: Lengths = "100,300,700,1000",
) -> None:
    """Figure 8: a prompt by the length of its chunks, the last one padded, on a simulated chip."""
    taken = DeviceProfile.load(profile)
    spec = open_model(model, weights="w8a8").spec()
    sizes = [g for g in taken.devices["npu"].capabilities.graph_sizes if g > 1]
    prompts = integers(lengths)
    rows = []
    for size in sizes:
        seconds = [_makespan(spec, size, "best", taken, p) for p in prompts]
        padded = sum(-(-p // size) * size for p in prompts) / sum(prompts) - 1
        rows.append([size, *(f"{s:.3f}" for s in seconds), f"{sum(seconds):.3f}", f"{padded:.0%}"])
    print(f"simulated, seconds; {model}, w8a8, {profile}; the paper chose 256\n")
    table(f"tokens of a chunk|{'|'.join(map(str, prompts))}|all|padding", rows)
    finish()


@app.command("pruning")
def pruning(
    profile: Annotated[str, typer.Option(help="a shipped profile of a chip")] = CHIP,
    model: str = "random:qwen1.5-1.8b",
    p: Prompt = 512,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk")] = 256,
    hot: Annotated[float, typer.Option(help="part of a shadow's channels that are hot")] = 0.003,
) -> None:
    """The prompt by the matmuls that keep a shadow, on a simulated chip: parts of FFN-down, then
    one matmul of every layer; what each part is worth in quality: `quality.py forms`.
    """
    taken, rows = DeviceProfile.load(profile), []
    cases = [(kept, "down") for kept in (0.0, 0.15, 0.5, 1.0)]
    for kept, matmul in [*cases, (1.0, "o"), (1.0, "qkv"), (1.0, "gate_up")]:
        weights = Shadowed(model, kept, hot, matmul)
        static = replace(open_model(model, weights="w8a8"), weights=weights)
        seconds = _makespan(static.spec(), chunk, "best", taken, p)
        shown = [f"{seconds:.3f}", f"{seconds / float(rows[0][-2]) - 1:+.1%}" if rows else "0 %"]
        rows.append([f"{1 - kept:.0%}", matmul, len(weights.outliers()), *shown])
    print(f"simulated; {model}, w8a8, {p} tokens, {profile}\n")
    table("pruned|of|with a shadow|s|more", rows)
    finish("paper, section 3.3: shadows of 85 % of the layers are pruned by default")


@app.command("drift")
def drift(
    profile: Annotated[str, typer.Option(help="a shipped profile of a chip")] = CHIP,
    model: str = "random:qwen1.5-1.8b",
    chunk: Annotated[int, typer.Option(help="tokens of a chunk")] = 256,
    layers: Annotated[int, typer.Option(help="that are scheduled")] = 6,
    noise: Annotated[str, typer.Option(help="of a launch, relative")] = "0,0.1,0.3",
    slower: Annotated[str, typer.Option(help="NPU over predicted")] = "0.5,1,2",
    draws: int = 20,
) -> None:
    """A window of chunks in flight whose launches take other times than predicted: orders computed
    before by predicted times, dispatch by completion, and the order of one who knew the times.

    Dispatch has a thread for the NPU (so has a second static row), knows when running launches will
    end, and pays nothing for deciding: more than a real one could have.
    """
    taken = DeviceProfile.load(profile)
    static = replace(open_model(model, weights="w8a8"), weights=Shadowed(model, 0.15, 0.003))
    modes = _modes(static.spec(), chunk, "best", taken, WINDOW * chunk)
    calls = [chunk] * WINDOW
    launches, expected = modes.launches("cut", calls, 0, 1, layers)
    threads = [replace(launch, asynchronous=True) for launch in launches]
    submit_s = modes.submit_s
    graph, apart = LaunchGraph.of(launches), LaunchGraph.of(threads)
    orders: dict[str, tuple[Any, Any]] = {
        order: (launches, out_of_order(graph, expected, submit_s, order))
        for order in get_args(Order)
    }
    orders["best, NPU on a thread"] = threads, out_of_order(apart, expected, submit_s, "best")
    dispatched = dict(zip(RULES, schedule_rules(apart, expected, "best"), strict=True))
    rng, rows = np.random.default_rng(0), []
    for spread_of, factor in itertools.product(
        *(map(float, x.split(",")) for x in (noise, slower))
    ):
        times: dict[str, list[float]] = {}
        for _ in range(draws if spread_of else 1):
            scale = [factor if launch.kind == "npu" else 1.0 for launch in launches]
            drawn = np.exp(spread_of * rng.standard_normal(len(launches)))
            real = (np.asarray(expected) * scale * drawn).tolist()
            for name, (specs, schedule) in orders.items():
                times.setdefault(name, []).append(seconds_of(specs, schedule, real, submit_s))
            for name, rule in dispatched.items():
                listed = ListScheduler(apart, real, submit_s, rule).schedule()
                own = seconds_of(threads, listed, real, submit_s)
                times.setdefault(f"dispatched: {name}", []).append(own)
            known = out_of_order(apart, real, submit_s, "best")
            times.setdefault("known times", []).append(seconds_of(threads, known, real, submit_s))
            busy = [
                sum(s for s, launch in zip(real, launches, strict=True) if launch.kind == kind)
                for kind in KINDS
            ]
            times.setdefault("bound: the busier device", []).append(max(busy))
        base = np.asarray(times["best"])
        for name, seconds in times.items():
            ratio = float(np.median(np.asarray(seconds) / base))
            cells = [f"{spread_of:g}", f"{factor:g}", name, f"{1e3 * np.median(seconds):.2f}"]
            rows.append([*cells, f"{ratio:.3f}"])
    print(f"virtual time; {model}, w8a8, {WINDOW} chunks of {chunk} tokens, {layers} layers\n")
    table("noise|NPU × predicted|order|ms|× best", rows)
    finish()


def _makespan(
    spec: ModelGraph, size: int, order: Order, profile: DeviceProfile, tokens: int
) -> float:
    """Seconds of a prompt in calls of `size` tokens, all matmuls on the NPU."""
    calls = split(tokens, (), size)
    return _modes(spec, size, order, profile, tokens).seconds("cut", calls)


def _modes(
    spec: ModelGraph, size: int, order: Order, profile: DeviceProfile, tokens: int
) -> PrefillModes:
    """Prompts in calls of `size` tokens, all matmuls on the NPU."""
    request = PlanRequest(graph_sizes=(size,), explain=False)
    plan = strategy_plan(spec, profile, "chunked", [tokens], request)
    able = capabilities_of(plan, profile)
    placement = Placement(plan, spec, able)
    costs, window = LaunchCosts(CostModel(profile), placement), 1 if order == "fifo" else WINDOW
    return PrefillModes(placement, costs, order, able, window=window)


if __name__ == "__main__":
    app()

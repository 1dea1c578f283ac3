"""Tensor level against single devices, other strategies and what `--device auto` chooses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from common import (
    CONTEXT,
    LLAMA,
    Lengths,
    Rounds,
    Tokens,
    Worker,
    finish,
    integers,
    open_engine,
    run_prompt,
    run_steps,
    spread,
    table,
    timeline,
    timing,
)

from hetero.backends.protocol import KINDS
from hetero.generation.llm import LLM
from hetero.models import LoadedModel, open_model
from hetero.profiler.records import DeviceProfile, Phase
from hetero.runtime.engine import Engine
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.strategy_plans import strategy_plan

CHOICES: dict[str, dict[str, str]] = {
    "auto": {"device": "auto"},
    "opencl-cores": {"device": "gpu", "gpu": "opencl-cores"},
    "intel": {"device": "gpu", "gpu": "opencl:intel"},  # beside `gpu`, which is PoCL's driver
    "intel-cores": {"device": "gpu", "gpu": "opencl-cores:intel"},
}
SPACE = 128  # tokens, for decoding behind prompts
HEAD = "test|engine|ms (median)|min|max|× best single|predicted ms"
IDEAL_HEAD = "test|T_gpu ms|T_npu ms|T_rest ms|ideal ×|reached ×|of ideal"
BEST_HEAD = "test|auto s|best|s|auto reaches"


class Chosen:
    """What a user gets who names no plan; lives in a worker."""

    def __init__(self, **options: Any) -> None:
        self._llm = LLM(**options)

    def about(self) -> tuple[str, str, list[str | None]]:
        """The choice and its reason, the plan, and what is the same for two that run the same."""
        llm = self._llm
        runs = [llm.plan.plan_id, *(llm.devices.name(kind) for kind in KINDS)]
        return llm.choice.reason, llm.plan.model_dump_json(), runs

    def prompt(self, m: int) -> float:
        """Seconds of a prompt."""
        return run_prompt(self._llm.engine, m)

    def steps(self, tokens: int, context: int) -> list[float]:
        """Seconds of decoding steps."""
        return run_steps(self._llm.engine, tokens, context)


@dataclass
class Contender:
    """A plan that runs in an engine here, or in a worker; seconds of each test in every round (of
    decoding the median step's).
    """

    name: str
    plan: ExecutionPlan
    runner: Engine | Worker
    runs: list[str | None] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The engine, where it is in this process."""
        assert isinstance(self.runner, Engine)
        return self.runner

    def median(self, test: str) -> float:
        """Seconds; of decoding a step's."""
        return statistics.median(self.times[test])

    def measure_prompt(self, m: int) -> None:
        """One prompt of m tokens."""
        runner = self.runner
        seconds = run_prompt(runner, m) if isinstance(runner, Engine) else runner.ask("prompt", m)
        self.times.setdefault(f"pp{m}", []).append(seconds)

    def measure_decoding(self, tokens: int, context: int, test: str = "tg") -> None:
        """Some steps after `context` tokens."""
        runner = self.runner
        if isinstance(runner, Engine):
            steps = run_steps(runner, tokens, context)
        else:
            steps = runner.ask("steps", tokens, context)
        self.times.setdefault(test, []).append(statistics.median(steps))

    def close(self) -> None:
        """Release devices, or end the process."""
        self.runner.close() if isinstance(self.runner, Engine) else self.runner.stop()


def contender(
    name: str, loaded: LoadedModel, profile: DeviceProfile, strategy: str, lengths: list[int]
) -> Contender:
    """An engine on a plan of a named strategy; `whole-attention` is the solver's own plan for
    devices that share no attention.
    """
    if strategy == "whole-attention":
        strategy, profile = "auto", sharing_no_attention(profile)
    plan = strategy_plan(loaded.spec(), profile, strategy, lengths)  # type: ignore[arg-type]
    return Contender(name, plan, open_engine(plan, loaded, max(*lengths, CONTEXT) + SPACE))


def sharing_no_attention(profile: DeviceProfile) -> DeviceProfile:
    """The profile of devices that compute all heads of an attention or none."""
    devices = {}
    for kind, record in profile.devices.items():
        able = record.capabilities.model_copy(update={"attention_heads": False})
        devices[kind] = record.model_copy(update={"capabilities": able})
    return profile.model_copy(update={"devices": devices})


def chosen(name: str, known: list[Contender], lengths: list[int], **options: str) -> Contender:
    """One of `CHOICES`, in a process of its own. Two that run the same share what is measured of
    either.
    """
    context = max(*lengths, CONTEXT) + SPACE
    worker = Worker(
        name, Chosen, **options, prompt_lengths=lengths, max_seq_len=context, **CHOICES[name]
    )
    worker.start()
    choice, plan, runs = worker.ask("about")
    print(f"{name}: {choice}", flush=True)
    one = Contender(name, ExecutionPlan.model_validate_json(plan), worker, runs)
    for other in known:
        if other.runs == runs:
            one.times = other.times
    return one


def rest_s(engine: Engine, m: int) -> float:
    """Seconds of everything but the matmuls in a step on the GPU, by the driver's clock: of a
    prompt of m tokens, or of decoding (0).
    """
    sums = []
    with timing(engine):
        for _ in range(3):
            run_prompt(engine, m) if m else run_steps(engine, 1, CONTEXT)
            spans = (s for s in timeline(engine) if s.what == "gpu" and not s.is_matmul)
            sums.append(sum(span.seconds for span in spans))
    return statistics.median(sums)


def decode_tests(lengths: list[int]) -> dict[str, int]:
    """Tests of decoding, with the context of each."""
    return {f"tg{m}": m for m in lengths if m > CONTEXT} | {"tg": CONTEXT}


def line_of(
    found: dict[str, Contender], one: Contender, test: str, phase: Phase, m: int
) -> list[str]:
    """One contender in one test."""
    single = min(found["gpu"].median(test), found["npu"].median(test))
    told = one.plan.totals if test in ("tg", f"pp{m}") else ()
    wanted = next((f"{1e3 * t.predicted_s:.2f}" for t in told if (t.phase, t.m) == (phase, m)), "")
    return [test, one.name, *spread(one.times[test], 1e3), f"{single / one.median(test):.3f}",
            wanted]  # fmt: skip


def ideal_row(found: dict[str, Contender], test: str, m: int) -> list[str]:
    """What both devices could reach at the speeds that they have alone:
    (T_single + T_rest) / (T_joint + T_rest) with T_joint = 1 / (1 / T_gpu + 1 / T_npu).
    """
    rest = rest_s(found["gpu"].engine, m)
    npu = found.get("layer-npu", found["npu"])
    gpu_s, npu_s = found["gpu"].median(test) - rest, npu.median(test) - rest
    ideal = (min(gpu_s, npu_s) + rest) / (1 / (1 / gpu_s + 1 / npu_s) + rest)
    single = min(found["gpu"].median(test), found["npu"].median(test))
    reached = single / found["tensor"].median(test)
    times = [f"{1e3 * s:.1f}" for s in (gpu_s, npu_s, rest)]
    return [test, *times, f"{ideal:.3f}", f"{reached:.3f}", f"{reached / ideal:.1%}"]


def against_the_best(found: dict[str, Contender], lengths: list[int]) -> Iterator[list[str]]:
    """What `auto` reaches of the best choice: in prompts, decoding, and both as it compares."""
    for m in lengths:
        prompt, step = f"pp{m}", f"tg{m}" if m > CONTEXT else "tg"
        for counts in ({prompt: 1}, {step: 1}, {prompt: 1, step: 64}):
            seconds = {
                name: sum(count * one.median(test) for test, count in counts.items())
                for name, one in found.items()
            }
            best = min(seconds, key=lambda name, of=seconds: of[name])  # type: ignore[misc]
            test = " + ".join(f"{n} {x}" if n > 1 else x for x, n in counts.items())
            shown = [f"{seconds['auto']:.4f}", best, f"{seconds[best]:.4f}"]
            yield [test, *shown, f"{seconds[best] / seconds['auto']:.3f}"]


def measure(found: dict[str, Contender], lengths: list[int], n: int, r: int) -> None:
    """All contenders in turns, test by test, after a round that warms up."""
    for turn in range(r + 1):
        for one in found.values() if turn == 1 else ():
            one.times.clear()
        for one in found.values():
            for m in lengths:
                one.measure_prompt(m)
                if f"tg{m}" in decode_tests(lengths):
                    one.measure_decoding(n, m, f"tg{m}")
            one.measure_decoding(n, CONTEXT)


def levels(
    profile: Annotated[str, typer.Option(help="a file, or the name of a shipped profile")],
    model: str = LLAMA,
    weights: str = "w4a8",
    p: Lengths = "256,1024",
    n: Tokens = 32,
    r: Rounds = 5,
    strategies: Annotated[
        str, typer.Option(help="others, such as layer,pipe,padding,whole-attention")
    ] = "",
    choices: Annotated[str, typer.Option(help=", ".join(CHOICES))] = "",
) -> None:
    """Tensor level against single devices and other strategies, with the ideal and the prediction.

    All engines take turns in one process; those of `--choices` have one each, because OpenCL on
    every core must not run where it ran on one. A prompt may be longer than a call; `tg2000`
    decodes behind one of 2000 tokens. `ideal` is what both devices could do at the speeds that they
    have alone.
    """
    lengths, taken = integers(p), DeviceProfile.load(profile)
    loaded = open_model(model, weights=weights)
    wanted = {"gpu": "gpu-only", "npu": "npu-only", "tensor": "auto"}
    wanted |= {name: name for name in strategies.split(",") if name}
    found = {name: contender(name, loaded, taken, s, lengths) for name, s in wanted.items()}
    for name in filter(None, choices.split(",")):
        given = {"model": model, "profile": profile, "weights": weights}
        found[name] = chosen(name, [one for one in found.values() if one.runs], lengths, **given)
    measure(found, lengths, n, r)
    tests: list[tuple[str, Phase, int]] = [(f"pp{m}", "prefill", m) for m in lengths]
    tests += [(test, "decode", 1) for test in decode_tests(lengths)]
    print(f"measured; {model} {weights}, medians of {r} rounds")
    table(HEAD, [line_of(found, one, *test) for test in tests for one in found.values()])
    print()
    whole = [m for m in lengths if found["gpu"].plan.steps(m) == (m,)]
    table(IDEAL_HEAD, [ideal_row(found, f"pp{m}", m) for m in whole] + [ideal_row(found, "tg", 0)])
    if "auto" in found:
        print()
        table(BEST_HEAD, against_the_best(found, lengths))
    finish()
    for one in found.values():
        one.close()

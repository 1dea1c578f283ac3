"""Processors that are fitted to rates of whole models: tokens per second of prompts and answers.

A processor is seven numbers (`UnitRates`, of which `FittedUnit` is the record). A fit is the least
squares of relative errors, drawn a little towards a typical processor, which decides what no row
shows. What it is worth is measured by predicting each model from a fit to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.predict import as_matmuls, op_name, work
from hetero.profiler.records import FittedUnit, Phase, UnitKind, Validation

Floats: TypeAlias = npt.NDArray[np.float64]
Engine: TypeAlias = Literal["llama.cpp", "qairt"]
CALL_TOKENS: Final[dict[str, int]] = {"llama.cpp": 512, "qairt": 128}  # of one call of a prompt
CACHE_BYTES: Final = 2  # an fp16 key or value
MAX_M, MAX_CONTEXT = 1024, 4096


class UnitRates(NamedTuple):
    """The seven numbers of a processor (`FittedUnit` says of what)."""

    bandwidth_bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float
    cache_bytes_per_s: float
    call_s: float
    state_flops_per_s: float
    state_call_s: float


PRIOR_WEIGHT: Final = 0.02  # of a factor e from `START`: decides what no row shows
OF_STATES: Final = 5  # the first number that only models with states show
START: Final = UnitRates(5e10, 5e12, 2e12, 3e10, 2e-5, 1e12, 1e-5)
LEAST: Final = UnitRates(1e9, 1e10, 1e9, 1e8, 1e-8, 1e8, 1e-8)
MOST: Final = UnitRates(1e12, 3e14, 1e15, 1e13, 1e-2, 1e15, 1e-1)


class ModelWork:
    """The work of a model's steps, each computed once."""

    def __init__(self, graph: ModelGraph) -> None:
        self.name, self._graph = graph.name, graph
        self._steps: dict[tuple[int, int], tuple[Floats, Counter[str]]] = {}

    def step(self, m: int, context: int) -> tuple[Floats, Counter[str]]:
        """Return the matmuls [4, …] (tokens, n, k, count) of a step, and all other work by kind.

        The kinds are those of `predict.work`, and of gated delta rules `state`, their pairs, and
        `state_calls`.
        """
        if (m, context) not in self._steps:
            self._steps[m, context] = self._work(m, context)
        return self._steps[m, context]

    def _work(self, m: int, context: int) -> tuple[Floats, Counter[str]]:
        matmuls: Counter[tuple[int, int, int]] = Counter()
        rest: Counter[str] = Counter()
        for node in self._graph.nodes:
            if isinstance(node.op, ops.MatMul):
                matmuls[1 if node.name == "lm_head" else m, node.op.n, node.op.k] += 1
                continue
            if isinstance(node.op, ops.Router | ops.Experts):
                matmuls.update((tokens, x.n, x.k) for tokens, x in as_matmuls(node.op, m))
                continue
            of_state = isinstance(node.op, ops.GatedDelta)
            for kind, amount in work(node.op, m, context).items():
                rest["state" if kind == "pairs" and of_state else kind] += amount  # type: ignore[assignment]
            rest["state_calls"] += of_state
        rows = [(*key, count) for key, count in matmuls.items()]
        return np.asarray(rows, np.float64).T, rest


class Rate(NamedTuple):
    """One row: tokens per second of `tokens` in `phase` after `depth` others."""

    model: ModelWork
    phase: Phase
    tokens: int
    depth: int
    tokens_per_s: float


class Stack(NamedTuple):
    """An engine's bytes of a weight, and tokens of a call."""

    bytes_per_weight: float
    call_tokens: int


def stack_of(engine: Engine) -> Stack:
    """Return an engine's: blocks of 32 weights in 4 bits with an fp16 scale; QNN's of 64."""
    return Stack(0.5 + 2 / (64 if engine == "qairt" else 32), CALL_TOKENS[engine])


def step_s(
    rates: UnitRates, bytes_per_weight: float, model: ModelWork, m: int, context: int
) -> float:
    """Return the seconds of m tokens after `context` others."""
    (tokens, n, k, count), rest = model.step(m, context)
    streams = n * k * bytes_per_weight / rates.bandwidth_bytes_per_s
    matmuls = np.maximum(streams, 2 * tokens * n * k / rates.flops_per_s)
    others = sum(cost * rest[kind] for kind, cost in coefficients(rates).items())
    return float((count * (matmuls + rates.call_s)).sum()) + others


def coefficients(rates: UnitRates) -> dict[str, float]:
    """Return the seconds of each kind of work but matmuls (`hetero.profiler.predict.work`).

    Cached elements are counted as float32 there: of the same bytes, half as many in fp16.
    """
    return {
        "calls": rates.call_s,
        "elements": 4 / rates.bandwidth_bytes_per_s,
        "pairs": 4 / rates.attention_flops_per_s,
        "cached": CACHE_BYTES / rates.cache_bytes_per_s,
        "state": 4 / rates.state_flops_per_s,
        "state_calls": rates.state_call_s,
    }


def run_s(
    rates: UnitRates, stack: Stack, model: ModelWork, phase: Phase, tokens: int, depth: int = 0
) -> float:
    """Return the seconds of a prompt of `tokens` after `depth` others, or of one decode step."""
    if phase == "decode":
        return step_s(rates, stack.bytes_per_weight, model, 1, depth)
    calls = range(0, tokens, stack.call_tokens)
    sizes = (min(stack.call_tokens, tokens - at) for at in calls)
    return sum(
        step_s(rates, stack.bytes_per_weight, model, m, depth + at)
        for at, m in zip(calls, sizes, strict=True)
    )


def predicted(rates: UnitRates, stack: Stack, rate: Rate) -> float:
    """Return the tokens per second of a row."""
    tokens = 1 if rate.phase == "decode" else rate.tokens
    return tokens / run_s(rates, stack, rate.model, rate.phase, tokens, rate.depth)


def fit(rows: Sequence[Rate], stack: Stack) -> UnitRates:
    """Fit a processor, with less weight for rows that are far off."""
    from scipy.optimize import least_squares

    centre = np.log(np.asarray(START))
    with_states = any(row.model.step(1, 0)[1]["state_calls"] for row in rows)
    free = np.arange(len(centre) if with_states else OF_STATES)  # the others stay

    def filled(x: Floats) -> Floats:
        return np.concatenate((x, centre[len(x) :]))

    def errors(x: Floats) -> Floats:
        rates = UnitRates(*map(float, np.exp(filled(x))))
        off = [np.log(predicted(rates, stack, row) / row.tokens_per_s) for row in rows]
        return np.asarray([*off, *(PRIOR_WEIGHT * (x - centre[free]))], np.float64)

    bounds = tuple(np.log(np.asarray(x))[free] for x in (LEAST, MOST))
    start = np.clip(centre[free], *bounds)
    # To the minimum, and rounded: processors differ in the last bits of logarithms and sums, and by
    # default the search ends where they have moved the rates by up to 0.3 %.
    ends = {"ftol": 1e-14, "xtol": 1e-12, "gtol": 1e-12}
    solved = least_squares(errors, start, loss="soft_l1", f_scale=0.1, bounds=bounds, **ends)
    return UnitRates(*(float(f"{x:.4g}") for x in np.exp(filled(solved.x))))


class LeftOut(NamedTuple):
    """A row that was predicted by a fit to the other models: relative error of the prediction."""

    row: Rate
    error: float


def left_out(rows: Sequence[Rate], stack: Stack) -> list[LeftOut]:
    """Return every row, its model predicted by a fit to the others; nothing of a single model."""
    names = sorted({row.model.name for row in rows})
    errors: list[LeftOut] = []
    for name in names if len(names) > 1 else ():
        rates = fit([x for x in rows if x.model.name != name], stack)
        own = (row for row in rows if row.model.name == name)
        errors += [LeftOut(x, predicted(rates, stack, x) / x.tokens_per_s - 1) for x in own]
    return errors


def validations(errors: Sequence[LeftOut]) -> tuple[Validation, ...]:
    """Return how well models were predicted that a fit had not seen."""
    phases: tuple[Phase, ...] = ("prefill", "decode")
    by_phase = {phase: [x for x in errors if x.row.phase == phase] for phase in phases}
    return tuple(
        Validation(
            phase=phase,
            mape=round(float(np.mean(sizes)), 4),
            p95=round(float(np.quantile(sizes, 0.95)), 4),
            folds=len({x.row.model.name for x in of_phase}),
            rows=len(of_phase),
        )
        for phase, of_phase in by_phase.items()
        if (sizes := np.abs([x.error for x in of_phase])).size
    )


def unit_of(
    device: UnitKind, engine: str, stack: Stack, rates: UnitRates, errors: Sequence[LeftOut]
) -> FittedUnit:
    """Return the record of a fit."""
    own = stack._asdict() | rates._asdict()
    return FittedUnit(device=device, engine=engine, validation=validations(errors), **own)


def rates_of(unit: FittedUnit) -> tuple[UnitRates, Stack]:
    """Return what a record was made of."""
    rates = UnitRates(*(getattr(unit, name) for name in UnitRates._fields))
    return rates, Stack(unit.bytes_per_weight, unit.call_tokens)


def unit_s(unit: FittedUnit, model: ModelWork, phase: Phase, tokens: int, depth: int = 0) -> float:
    """Return the seconds of a prompt or a decode step on a processor alone (`run_s`)."""
    return run_s(*rates_of(unit), model, phase, tokens, depth)


def knots(rates: UnitRates, bytes_per_weight: float) -> dict[str, Any]:
    """Return a matmul's seconds: the stream of the weights up to some tokens, then arithmetic."""
    stream = bytes_per_weight / rates.bandwidth_bytes_per_s
    equal = max(2, round(stream * rates.flops_per_s / 2))
    tokens = [1, equal, max(2 * equal, MAX_M)]
    costs = [stream, stream, 2 * tokens[-1] / rates.flops_per_s]
    return {"tokens": tokens, "coefficients": [[rates.call_s, 0.0, 0.0, x] for x in costs]}


def other_predictors(device: str, rates: UnitRates, plain: Iterable[str]) -> list[dict[str, Any]]:
    """Return predictors of all operations but matmuls, `plain` ones by their elements alone."""
    costs = coefficients(rates)
    state, state_call_s = costs.pop("state"), costs.pop("state_calls")
    common = {key: costs[key] for key in ("calls", "elements")}
    attention = costs | {"cached": 2 * costs["cached"]}  # the bytes that its format has
    by_op = dict.fromkeys(plain, common)
    by_op |= {f"Attention{kv}": attention for kv in ("", "+f16", "+q8")}
    by_op["GatedDelta"] = costs | {"pairs": state, "calls": costs["calls"] + state_call_s}
    shape = {"device": device, "max_m": MAX_M, "max_context": MAX_CONTEXT}
    return [shape | {"op": op, "coefficients": by_op[op]} for op in sorted(by_op)]


def plain_ops(graphs: Iterable[ModelGraph]) -> tuple[str, ...]:
    """Return the names of operations that take no more than a look at their elements."""
    names = {op_name(node.op) for graph in graphs for node in graph.nodes}
    return tuple(sorted(x for x in names if not x.startswith(("MatMul", "Attention", "GatedD"))))


def by_kind(units: Iterable[FittedUnit]) -> Mapping[UnitKind, FittedUnit]:
    """Return the unit of each kind that plans are made from: the first of its kind."""
    return {unit.device: unit for unit in reversed(tuple(units))}

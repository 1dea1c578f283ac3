"""The request of `hetero plan` to the solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from hetero.solver.errors import PlanError
from hetero.solver.expert_shares import Routing
from hetero.solver.kernel_times import Precision
from hetero.solver.names import MAX_TOKENS
from hetero.solver.options import INF
from hetero.solver.prompt_calls import split
from hetero.solver.solution import Scenario

GraphSizes: TypeAlias = Sequence[int] | Literal["auto"] | None
DEFAULT_LENGTHS = (64, 256, 1024)
DECODE = Scenario("decode", 1)
MAX_LENGTHS = 128  # solved in ten seconds
MAX_LENGTHS_AUTO = 12  # for which graph sizes are chosen in half a minute
MAX_SIZES = 64


@dataclass(frozen=True)
class PlanRequest:
    """The request of `hetero plan`; its help has the meaning of each option.

    `step_tokens`: the longest call, which longer prompts run in several of (None: as many tokens
    as two NPU graphs hold).
    `length_weights`: how often prompts of each of `seq_lens` come, in any unit (empty: all alike).
    `shared`: both devices work in every prompt (`Rules`); a memory budget comes first.
    `third`: a CPU that the profile has may take rows of matmuls, too.
    `preparation_budget_s` and `graph_memory_bytes` bound what `graph_sizes="auto"` may choose.
    `longest`: most tokens of a context in which decoding may move to other devices (None: never).
    `routing`: how often each routed expert is chosen (None: all alike).
    `decode_tokens_per_prompt` weighs decoding against prompts where both share a memory budget;
    `curves` adds what a report draws: times by length and the latency-energy front.
    """

    seq_lens: tuple[int, ...] = DEFAULT_LENGTHS
    step_tokens: int | None = None
    length_weights: tuple[float, ...] = ()
    graph_sizes: GraphSizes = None
    objective: Literal["latency", "energy"] = "latency"
    precision: Precision = "auto"
    max_gpu_share: float = 1.0
    shared: bool = False
    third: bool = False
    memory_budget_bytes: int | None = None
    preparation_budget_s: float | None = None
    graph_memory_bytes: int | None = None
    context: int = 256
    longest: int | None = None
    margin: float = 0.03
    routing: Routing | None = None
    decode_tokens_per_prompt: int = 64
    explain: bool = True
    curves: bool = False

    @property
    def weights(self) -> tuple[float, float]:
        """Return the weights of seconds and of joules in the objective."""
        return (0.0, 1.0) if self.objective == "energy" else (1.0, 0.0)

    @property
    def distribution(self) -> dict[int, float]:
        """Return how often a prompt of each length comes; 1 on average."""
        weights = self.length_weights or (1.0,) * len(self.seq_lens)
        weight_of = dict.fromkeys(sorted(self.seq_lens), 0.0)
        for m, weight in zip(self.seq_lens, weights, strict=True):
            weight_of[m] += weight
        return {m: weight * len(weight_of) / sum(weights) for m, weight in weight_of.items()}

    def in_calls(self, longest: int | None) -> PlanRequest:
        """Return the same for the calls of at most `longest` tokens that the prompts run in.

        `seq_lens` are their lengths, and each comes as often as the prompts have it.
        """
        if longest is None or max(self.seq_lens) <= longest:
            return self
        counts: dict[int, float] = {}
        weights = self.length_weights or (1.0,) * len(self.seq_lens)
        for tokens, weight in zip(self.seq_lens, weights, strict=True):
            for m in split(tokens, (), longest):
                counts[m] = counts.get(m, 0.0) + weight
        lengths = tuple(sorted(counts))
        return replace(self, seq_lens=lengths, length_weights=tuple(counts[m] for m in lengths))

    def weight(self, scenario: Scenario) -> float:
        """Return how much a step counts where several share something."""
        if scenario.phase == "decode":
            return float(self.decode_tokens_per_prompt)
        return self.distribution[scenario.m]

    def check(self) -> None:
        """Raise `PlanError` for a value that means nothing, or takes too long."""
        auto = self.graph_sizes == "auto"
        most = MAX_LENGTHS_AUTO if auto else MAX_LENGTHS
        where = " with --graph-sizes auto" if auto else ""
        _check_tokens(self.seq_lens, "prompt lengths", "--seq-lens", most, where)
        if self.graph_sizes is not None and not auto:
            _check_tokens(self.graph_sizes, "graph sizes", "--graph-sizes", MAX_SIZES)
        if self.step_tokens is not None and self.step_tokens < 1:
            raise PlanError(f"a call has at least one token, got step_tokens={self.step_tokens}")
        if self.length_weights and (
            len(self.length_weights) != len(self.seq_lens)
            or not all(0 < weight < INF for weight in self.length_weights)
        ):
            raise PlanError(
                f"each of {len(self.seq_lens)} prompt lengths has a weight above 0, got "
                f"{list(self.length_weights)}: give --seq-lens such as 64:3,256:1"
            )
        bounds = (self.preparation_budget_s, self.graph_memory_bytes)
        if not auto and any(bound is not None for bound in bounds):
            raise PlanError(
                "--preparation-budget and --graph-memory are for choosing graph sizes: add "
                "--graph-sizes auto"
            )
        if any(bound is not None and not 0 < bound < INF for bound in bounds):
            raise PlanError("--preparation-budget and --graph-memory are above 0")
        if not 0 <= self.max_gpu_share <= 1:
            raise PlanError(f"--max-gpu-share is between 0 and 1, got {self.max_gpu_share:g}")
        if not 0 <= self.margin < 1:
            raise PlanError(f"the margin is a fraction from 0 to 1, got {self.margin:g}")
        if not 0 <= self.context <= MAX_TOKENS:
            raise PlanError(f"--context is from 0 to {MAX_TOKENS} tokens, got {self.context}")
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 1:
            raise PlanError(
                f"--memory-budget is at least a byte, got {self.memory_budget_bytes}: give one "
                "such as 4GiB"
            )


def _check_tokens(
    values: Sequence[object], what: str, option: str, most: int, where: str = ""
) -> None:
    """Raise `PlanError` unless all are token counts, and not too many of them."""
    if len(set(values)) > most:
        raise PlanError(f"at most {most} {what} are solved{where}, got {len(set(values))}")
    whole = (isinstance(x, int | np.integer) and not isinstance(x, bool) for x in values)
    if not values or not all(whole) or not all(1 <= x <= MAX_TOKENS for x in values):  # type: ignore[operator]
        raise PlanError(
            f"{what} are token counts from 1 to {MAX_TOKENS}, got {list(values)}: give {option} "
            "such as 64,256,1024"
        )


DEFAULT_REQUEST = PlanRequest()


def scenarios_of(lengths: Iterable[int]) -> list[Scenario]:
    """Return the prompts of these lengths, each once and rising, and decoding."""
    return [*(Scenario("prefill", m) for m in sorted(set(lengths))), DECODE]

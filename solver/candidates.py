"""Every strategy of one matmul with its time, and why it lost."""

from __future__ import annotations

from hetero.profiler.model_graph import OpName
from hetero.solver.chooser import Chooser
from hetero.solver.options import INF, Option
from hetero.solver.plan import Candidate, Strategy
from hetero.solver.planner import Planner
from hetero.solver.report import units
from hetero.solver.solution import Solution

ALL: tuple[Strategy, ...] = (
    "gpu-only", "npu-only", "row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut",
)  # fmt: skip


class Reasons:
    """Explains matmuls of solved steps; with a `budget` of memory that may be a reason."""

    def __init__(self, *, budget: bool = False) -> None:
        self._budget = budget

    def explain(
        self, planner: Planner, solution: Solution, name: OpName, m: int
    ) -> tuple[Candidate, ...]:
        """Return a matmul's candidates by time: the best tiling of each strategy.

        Each is entered after a GPU kernel.
        """
        chosen = solution.options[name]
        space = planner.whole.space(name)
        rules = planner.settings.rules
        chooser = Chooser(planner.overheads, rules, planner.objective())
        best = {o.strategy: o for o in chooser.named(space, m) if o.elapsed_s < INF}
        if (
            chosen.strategy not in best
            or chosen.seconds_alone() < best[chosen.strategy].seconds_alone()
        ):
            best[chosen.strategy] = chosen
        single = min((o.seconds_alone() for o in best.values() if not o.is_cut), default=INF)
        candidates = []
        for strategy in ALL:
            option = chosen if strategy == chosen.strategy else best.get(strategy)
            if option is None:
                reason = _impossible(planner, strategy, m)
            elif strategy == chosen.strategy:
                reason = "chosen"
            else:
                reason = self._why(planner, option, solution, name, single)
            candidates.append(
                Candidate(
                    strategy=strategy,
                    predicted_s=None if option is None else option.seconds_alone(),
                    reason=reason,
                    detail="" if option is None else describe(option, m, space.n),
                )
            )
        return tuple(
            sorted(candidates, key=lambda c: INF if c.predicted_s is None else c.predicted_s)
        )

    def _why(
        self, planner: Planner, option: Option, solution: Solution, name: OpName, single: float
    ) -> str:
        slower = option.seconds_alone() / solution.options[name].seconds_alone() - 1
        rules = planner.settings.rules
        if abs(slower) < 1e-6:
            return "as fast; the simpler one was kept"
        if slower > 0:
            return f"{100 * slower:.1f} % slower; {_limit(option)}"
        least = rules.least_gain(option)
        if option.is_cut and option.seconds_alone() > (1 - least) * single:
            if least > rules.margin:
                return f"gains less than the {100 * least:.0f} % that its NPU time may be off"
            return f"gains less than the margin of {100 * rules.margin:.0f} % over one device"
        if option.gpu_s > rules.max_gpu_share * option.elapsed_s:
            return "over the GPU's share"
        return self._in_the_step(planner, option, solution, name)

    def _in_the_step(
        self, planner: Planner, option: Option, solution: Solution, name: OpName
    ) -> str:
        """Return why a tiling that is faster alone was not chosen.

        It is tried with the step's other matmuls and with the row cuts that are prepared.
        """
        before, after = (
            planner.whole.evaluate(solution.scenario, options, solution.non_matmul.device).seconds
            for options in (solution.options, {**solution.options, name: option})
        )
        if after > before:
            return (
                f"faster alone, but the step is {100 * (after / before - 1):.2g} % slower with it"
            )
        chooser = Chooser(planner.overheads, planner.settings.rules, planner.objective())
        m = planner.spec.tokens_of(name, solution.scenario.m)
        prepared = [
            o.seconds_alone()
            for o in chooser.named(planner.space(name), m)
            if o.strategy == option.strategy and o.elapsed_s < INF
        ]
        if not prepared:
            return "faster alone, but its row cut is not one that all lengths share"
        if min(prepared) >= solution.options[name].seconds_alone():
            return (
                "faster with graphs of its own; with the row cuts that all lengths share it takes "
                f"{units.duration(min(prepared))}"
            )
        if self._budget:
            return "faster alone, but its weights do not fit the memory budget where it needs them"
        return "faster alone, but less than a change of the other lengths' cuts would cost"


def _limit(option: Option) -> str:
    if not option.is_cut:
        return f"the {option.mode.upper()} alone takes {units.duration(option.elapsed_s)}"
    if option.cpu_s > max(option.gpu_s, option.npu_s):
        return f"waits for the CPU ({units.duration(option.cpu_s)})"
    if option.gpu_s > option.npu_s:
        return f"waits for the GPU ({units.duration(option.gpu_s)})"
    return f"waits for the NPU ({units.duration(option.npu_s)})"


def _impossible(planner: Planner, strategy: Strategy, m: int) -> str:
    if strategy == "gpu-only":
        return "no GPU kernel"
    if not planner.kernels.has("npu"):
        return "no NPU kernel of this format"
    return _no_cut(planner, strategy, m)


def _no_cut(planner: Planner, strategy: Strategy, m: int) -> str:
    if strategy in ("sequence-cut", "multi-sequence-cut") and planner.sizes:
        if not any(g < m for g in planner.sizes):
            return f"no graph is shorter than the call ({m} token{'s' if m > 1 else ''})"
        return "no such cut of these tokens"
    if strategy == "row-cut" and planner.sizes and m not in planner.sizes:
        return f"no graph of exactly {m} tokens (padded: hybrid-cut)"
    if strategy == "hybrid-cut" and m in planner.sizes:
        return "nothing to pad"
    return "no allowed kernel or cut"


def describe(option: Option, m: int, n: int) -> str:
    """Return the tiling in words."""
    if option.npu_tiles is None:
        return f"GPU {m} × {n}"
    graphs = "+".join(str(g) if g else str(m) for g in option.npu_tiles.sizes)
    npu = f"NPU {option.npu_tiles.tokens} × {option.rows} (graph {graphs})"
    if not option.is_cut:
        return npu
    share = 1 - option.npu_tiles.tokens * option.rows / (m * n) - option.cpu_rows / n
    cpu = f", CPU {100 * option.cpu_rows / n:.0f} %" if option.cpu_rows else ""
    return f"{npu}{cpu}, GPU {100 * share:.0f} % of the outputs"

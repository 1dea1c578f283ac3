"""Attention whose key/value heads both devices share: what each number of heads takes.

As the rows of a matmul, the heads of an attention are independent: each device appends its own keys
and values to the caches, which are one memory, and computes its own columns of the output. The NPU
has the first heads. The operators before attention (the rotary embedding) and the ones after it
stay whole on the GPU, which has all others.

K: numbers of the NPU's heads, from 1 to all but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from hetero.backends.ops import Attention, AttentionHeads, has_sinks
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.features import padded_count
from hetero.profiler.model_graph import ModelGraph, OpName, Share, Stage
from hetero.profiler.records import phase_of
from hetero.solver.kernel_times import Floats, KernelTimes
from hetero.solver.non_matmul import Timer, timer_of
from hetero.solver.options import GPU, HOST, Objective, Option
from hetero.solver.overheads import CutTimes, Overheads

MAX_CACHED: Final = 1024  # calls whose options are remembered
# How many heads the NPU has: exactly so many (0: attention is whole), one of these, or any number.
Heads: TypeAlias = int | tuple[int, ...] | None


class _Attending(NamedTuple):
    """A matmul's name, and how often a layer has each operator after it.

    These are the GPU's, and attention.
    """

    name: OpName
    whole: tuple[tuple[float, Timer], ...]
    attentions: tuple[tuple[float, Attention], ...]


class HeadShares:
    """Options of attention shared by both devices, besides those of one (`NonMatmulCosts`)."""

    def __init__(
        self, cost: CostModel, graph: ModelGraph, kernels: KernelTimes, overheads: Overheads
    ) -> None:
        self._cost, self._kernels, self._overheads = cost, kernels, overheads
        self._known: dict[tuple[int, int], Mapping[OpName, tuple[Option, ...]]] = {}
        self._heads, self._longest = 0, None
        self._stages: list[_Attending] = []
        operations = {share.op for stage in graph.block for share in stage.after}
        attentions = [op for op in operations if isinstance(op, Attention)]
        counts = {op.kv_heads for op in attentions}
        stages = [stage for stage in graph.block if stage.attends]  # a plan has one number of heads
        one = len(stages) == len(counts) == 1 and not any(map(has_sinks, attentions))
        if one and all(self._able(kind, attentions) for kind in KINDS):
            self._heads = counts.pop()
            self._stages = [self._attending(stage) for stage in stages]
            sizes = cost.device("npu").capabilities.graph_sizes
            self._longest = max(sizes, default=None)

    def _able(self, kind: DeviceKind, attentions: Iterable[Attention]) -> bool:
        """Return whether a device computes some of these heads, in memory shared in place."""
        record = self._cost.profile.devices.get(kind)
        if record is None or not record.capabilities.attention_heads:
            return False
        measured = all(self._cost.allowed_op(kind, op, 1) for op in attentions)
        return measured and record.capabilities.unified_memory

    def _attending(self, stage: Stage) -> _Attending:
        def timed(share: Share) -> tuple[float, Timer]:
            return share.times, timer_of(self._cost, "gpu", share.op)

        after = [(share, isinstance(share.op, Attention)) for share in stage.after]
        return _Attending(
            stage.name,
            tuple(timed(share) for share, attends in after if not attends),
            tuple((x.times, x.op) for x, _ in after if isinstance(x.op, Attention)),
        )

    def at(self, m: int, context: int) -> Mapping[OpName, tuple[Option, ...]]:
        """Return the options [K] of the operators after a matmul, with attention shared.

        They are for a prompt's call of m tokens after `context` others, where the GPU has the other
        operators; none where attention cannot be shared. `Option.rows` is the number of the NPU's
        heads.
        """
        if self._heads < 2 or phase_of(m) == "decode":
            return {}
        if self._longest is not None and m > self._longest:
            return {}
        if (m, context) not in self._known:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            self._known[m, context] = {
                stage.name: tuple(self._options(stage, m, context)) for stage in self._stages
            }
        return self._known[m, context]

    def _options(self, stage: _Attending, m: int, context: int) -> Iterable[Option]:
        overheads = self._overheads.at(m)
        around_s = sum(times * timer(m, context) for times, timer in stage.whole)
        gpu_s, npu_s = (self._seconds(kind, stage, m, context) for kind in KINDS)
        # The NPU waits for what is before attention; the GPU's heads are queued after that.
        times = overheads.cut(self._kernels, m, gpu_s, npu_s + overheads.wait_s)
        for i in range(self._heads - 1):
            yield _option(i, around_s, gpu_s, npu_s, times, overheads)

    def _seconds(self, kind: DeviceKind, stage: _Attending, m: int, context: int) -> Floats:
        """Return [K] seconds of a device's heads while the other has the others."""
        tokens = padded_count(self._cost.device(kind), m)
        key = (phase_of(m), self._kernels.weight_format)
        factor = self._cost.contention(kind, *key)
        totals = np.zeros(self._heads - 1)
        for i in range(self._heads - 1):
            count = i + 1 if kind == "npu" else self._heads - 1 - i
            for times, op in stage.attentions:
                part = AttentionHeads(attention=op, first=0, count=count)
                seconds = float(self._cost.other_s(kind, part, tokens, context).seconds)
                totals[i] += factor * times * seconds
        return totals


def _option(
    i: int,
    around_s: float,
    gpu_s: Floats,
    npu_s: Floats,
    times: CutTimes,
    overheads: Overheads,
) -> Option:
    dominant = bool(times.npu_dominant[i])
    both = overheads.join_s + float(np.broadcast_to(times.restarts_s, gpu_s.shape)[i])
    return Option(
        "row-cut",
        "npu-dominant" if dominant else "gpu-dominant",
        elapsed_s=around_s + float(times.elapsed_s[i]),
        gpu_s=around_s + float(gpu_s[i]),
        npu_s=float(npu_s[i]),
        enter_s=(both, overheads.submit_s + both),
        leaves=HOST if dominant else GPU,
        back_s=overheads.submit_s if dominant else 0.0,
        rows=i + 1,
    )


def allowed(
    whole: Option, shared: Iterable[Option], heads: Heads, margin: float, objective: Objective
) -> list[Option]:
    """Return the options of attention on a path: whole, and shared as `heads` says.

    A free choice is closed from each state where it is not faster than the whole by a margin.
    """
    if isinstance(heads, int):
        return [o for o in shared if o.rows == heads] or [whole]
    options = [whole]
    for option in shared:
        if heads is not None and option.rows not in heads:
            continue
        closed = [
            state
            for state in (GPU, HOST)
            if objective.cost_alone(option, state)
            > (1 - margin) * objective.cost_alone(whole, state)
        ]
        if len(closed) < 2:
            options.append(option.forbid(*closed) if closed else option)
    return options

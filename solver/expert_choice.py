"""The device of routed experts: of all layers and in both phases one, so each is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hetero.backends.ops import Experts
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.features import weight_bytes
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.overheads import Overheads

TOKENS: Final = (1, 256)  # of a decode step and of a usual call of a prompt


@dataclass(frozen=True)
class ExpertsChoice:
    """The chosen device, `None` for the one without a choice, and why in words."""

    device: DeviceKind | None = None
    note: str = ""


def choose_experts(cost: CostModel, graph: ModelGraph, overheads: Overheads) -> ExpertsChoice:
    """Return the NPU where the GPU cannot have the experts or is slower in both phases.

    On the NPU each layer waits for the GPU and submits to it again, which counts.
    """
    ops = [x.op for x in graph.nodes if isinstance(x.op, Experts)]
    if not ops or not set(KINDS) <= set(cost.profile.devices):
        return ExpertsChoice()
    if why := _refusal(cost, graph, "npu", ops):
        return ExpertsChoice(None, f"routed experts: on the GPU ({why})")
    if why := _refusal(cost, graph, "gpu", ops):
        return ExpertsChoice("npu", f"routed experts: on the NPU ({why})")
    crossing_s = len(ops) * (overheads.wait_s + overheads.submit_s)
    gpu, npu = ([_seconds(cost, kind, ops, m) for m in TOKENS] for kind in KINDS)
    npu = [x + crossing_s for x in npu]
    faster = all(x < y for x, y in zip(npu, gpu, strict=True))
    times = "; ".join(
        f"{m} tokens: {1e3 * x:.3g} ms on the GPU, {1e3 * y:.3g} ms on the NPU"
        for m, x, y in zip(TOKENS, gpu, npu, strict=True)
    ).replace("1 tokens:", "1 token:", 1)
    where = "NPU" if faster else "GPU"
    return ExpertsChoice("npu" if faster else None, f"routed experts: on the {where} ({times})")


def bytes_of_experts(graph: ModelGraph, profile: DeviceProfile, device: DeviceKind) -> float:
    """Return the bytes of all routed experts in a device's own layout."""
    own = profile.devices[device].capabilities.weight_bytes
    total = 0.0
    for op in (x.op for x in graph.nodes if isinstance(x.op, Experts)):
        for x in op.matmuls.values():
            once = own.get(x.weight_format)
            stored = weight_bytes(x.weight_format, x.n, x.k)
            total += op.experts * (stored if once is None else once * x.n * x.k)
    return total


def _refusal(cost: CostModel, graph: ModelGraph, kind: DeviceKind, ops: Sequence[Experts]) -> str:
    """Return why a device cannot have the experts, in words; empty if it can."""
    known, name = cost.profile.devices[kind].capabilities, kind.upper()
    if kind == "npu" and not known.experts:
        return "the profile's NPU has no kernels of them"
    for op in set(ops):
        if not (allowed := cost.allowed_op(kind, op, 1)):
            return allowed.reason
    needed, limit = bytes_of_experts(graph, cost.profile, kind), known.memory_limit_bytes
    if limit is not None and needed > limit:
        return f"they take {needed / 2**30:.2f} GiB, and the {name} holds {limit / 2**30:.2f} GiB"
    return ""


def _seconds(cost: CostModel, kind: DeviceKind, ops: Sequence[Experts], m: int) -> float:
    """Return the seconds of all layers' experts for m tokens."""
    once = {op: float(cost.other_s(kind, op, m).seconds) for op in set(ops)}
    return sum(once[op] for op in ops)

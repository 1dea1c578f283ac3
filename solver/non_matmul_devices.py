"""The device of an operation that is no matmul of a plan."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from hetero.backends.ops import (
    Attention,
    Experts,
    GatedAdd,
    GatedDelta,
    Op,
    Outliers,
    Rope,
    Router,
    ShortConv,
    has_sinks,
    has_state,
)
from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import ModelGraph

ON_THE_GPU: Final = (Outliers, Router, Experts, GatedAdd)
LACKING: Final[dict[type[Op], str]] = {  # in NPUs' graphs, in words
    GatedDelta: "the states of gated delta rules",
    ShortConv: "the states of convolutions",
    Router: "routing to experts",
    GatedAdd: "gates of shared experts",
}


def device_of_other(
    op: Op,
    non_matmul: DeviceKind,
    devices: Container[DeviceKind],
    experts: DeviceKind | None = None,
) -> DeviceKind:
    """Return the device of an operation that is no matmul of the plan, as a rule `non_matmul`.

    Outliers are there to be computed while the NPU computes their matmul, graphs of NPUs keep no
    states, have no sinks of attention and do not attend to another layer's caches, and which
    experts a token needs is not known before it is routed: the GPU has these if there is one. But
    routed experts are on the device that a plan names (`experts`).
    """
    if experts is not None and isinstance(op, Experts):
        return experts
    return "gpu" if of_the_gpu(op) and "gpu" in devices else non_matmul


def of_the_gpu(op: Op) -> bool:
    """Return whether an operation is the GPU's if there is one (`device_of_other`)."""
    reads = isinstance(op, Attention) and op.reads
    queries_alone = reads or (isinstance(op, Rope) and not op.kv_heads)
    return isinstance(op, ON_THE_GPU) or has_state(op) or has_sinks(op) or queries_alone


def what_npus_lack(graph: ModelGraph) -> str:
    """Return a sentence about the layers whose operations a plan for both devices gives to the GPU.

    "" where there are none. Matmuls of these layers, and experts, are planned.
    """
    layers: dict[str, set[int | None]] = {}
    for node in graph.nodes:
        if words := _lacking(node.op):
            layers.setdefault(words, set()).add(node.layer)
    if not layers:
        return ""
    parts = [f"{words} ({len(x)} layer{'s' * (len(x) > 1)})" for words, x in layers.items()]
    return f"on the GPU, because graphs of NPUs do not have them: {', '.join(parts)}"


def _lacking(op: Op) -> str:
    """Return what an operation is called that NPUs have no graphs of; "" for others."""
    if isinstance(op, Attention) and op.reads:
        return "attention to another layer's keys and values"
    return "attention with sinks" if has_sinks(op) else LACKING.get(type(op), "")

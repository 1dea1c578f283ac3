"""The ONNX graph of every operation, for a fixed token count m, as QNN's HTP compiler takes it.

Inputs and outputs are float32, the pool's type; the Hexagon computes in fp16, so every graph begins
and ends with a conversion and values beyond ±65504 saturate (`kernels` guards against that). A
matmul's weight is a constant: the compiler lays it out for the matrix unit; as an input it would be
repacked on every run (measured: 25 times the traffic). Weights of norms are inputs, so that all
layers share a graph.

What an operation does is in `nodes`; here it gets its inputs and outputs. `group` makes one graph
of several operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hetero.backends import checks, ops
from hetero.backends.groups import Group
from hetero.backends.onnx_common.builder import GraphBuilder
from hetero.backends.ops import OUTPUT_PORTS, Op, weight_names
from hetero.backends.protocol import FIXED_PORTS, WeightValue, port_dtype, port_shape
from hetero.backends.qnn import nodes
from hetero.backends.qnn.nodes import NodeRef

OPSET = 23  # the first with RMSNormalization
F32 = np.float32
EXPERT_PEAK = "peak"  # the second output of an expert's graph


def single(op: Op, m: int, weights: Mapping[str, WeightValue], context: int = 0) -> bytes:
    """Return the graph of one operation.

    Inputs and outputs have the ports' names, and the ones that `nodes` declares.

    `context` is the number of cache positions that attention reads.
    """
    graph = GraphBuilder()
    inputs = {
        port: graph.input(port, port_dtype(op, port), port_shape(op, port, m))
        for port in op.ports
        if port not in OUTPUT_PORTS and port not in FIXED_PORTS
    }
    outputs = {
        port: graph.output(port, F32, port_shape(op, port, m))
        for port in op.ports
        if port in OUTPUT_PORTS
    }
    nodes.emit(op, weights, Inputs(graph, m, inputs, outputs, context))
    return graph.model(OPSET)


def expert(op: ops.Experts, m: int, weights: Mapping[str, WeightValue]) -> bytes:
    """Return the graph of one expert, whose weights are constants, for m tokens that chose it.

    Input `x` and output `y` are [m, d]. Nothing is scaled inside, so a second output has the
    largest magnitude between its matmuls (`peak`), which shows where fp16 was left.
    """
    graph = GraphBuilder()
    x = graph.input("x", F32, (m, op.d))
    graph.output("y", F32, (m, op.d))
    graph.output(EXPERT_PEAK, F32, (1, 1))

    def product(name: str, x: str, out: str = "") -> str:
        own = {"weight": weights[name]}
        if op.bias:
            own["bias"] = weights[f"{name}_bias"]
        site = Inside(graph, m, {"x": x}, {"y": out}, scaled=False)
        return nodes.emit(op.matmuls[name], own, site)["y"]

    gate, up = product("experts_gate", x), product("experts_up", x)
    hidden = nodes.expert_activation(graph, op.activation, gate, up)
    values = graph.node("Abs", graph.node("Concat", gate, up, hidden, axis=1))
    graph.node("ReduceMax", values, graph.ints(0, 1), keepdims=1, out=EXPERT_PEAK)
    product("experts_down", hidden, "y")
    return graph.model(OPSET)


class Inputs(NodeRef):
    """A place of its own: what the caller gives for each call is a graph input by its own name."""

    def feed(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> str:
        return self.graph.input(name, dtype, shape)

    def vector(self, name: str, value: WeightValue | None, width: int) -> str:  # noqa: ARG002
        return self.graph.input(name, F32, (width,))


class Inside(NodeRef):
    """A place in a group: vectors are constants, and what the caller gives is shared by name."""

    def feed(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> str:
        if name not in self.graph.input_names:
            self.graph.input(name, dtype, shape)
        return name

    def vector(self, name: str, value: WeightValue | None, width: int) -> str:  # noqa: ARG002
        assert isinstance(value, np.ndarray), name
        return self.graph.constant(value)


def group(
    fused: Group, m: int, weights: Sequence[Mapping[str, WeightValue]], context: int = 0
) -> bytes:
    """Return several operations as one graph: inputs and outputs are the group's slots.

    Outputs are named by `result`, since a slot may be both. Nothing is scaled inside, so every
    value must be in fp16's range. Attention takes the keys and values of this call from inside the
    graph; its slot of them is an output, for the caller to append to the caches.
    """
    graph = GraphBuilder()
    result_slots = results(fused)
    slots = {
        slot: graph.input(slot, F32, (m, *shape)) for slot, shape in fused.shapes(fused.inputs)
    }
    for slot, shape in fused.shapes(result_slots):
        graph.output(result(slot), F32, (m, *shape))
    last = {slot: i for i, step in enumerate(fused.steps) for slot in step.written}
    for i, (step, values) in enumerate(zip(fused.steps, weights, strict=True)):
        inputs = {port: slots[slot] for port, slot in step.read.items()}
        outputs = {
            port: result(slot) if slot in result_slots and last[slot] == i else ""
            for port, slot in step.slots
            if port in OUTPUT_PORTS
        }
        watched = peak(i) if is_static(step.op) else ""
        site = Inside(graph, m, inputs, outputs, context, scaled=False, appends=True, peak=watched)
        for port, name in nodes.emit(step.op, values, site).items():
            slots[dict(step.slots)[port]] = name
    return graph.model(OPSET)


def results(fused: Group) -> tuple[str, ...]:
    """Return the slots that the graph of a group gives."""
    own = fused.own_keys
    return fused.outputs if own in ("", *fused.outputs) else (*fused.outputs, own)


def peaks(fused: Group) -> tuple[str, ...]:
    """Return the outputs of a group's graph that have the largest codes of its matmuls of codes."""
    return tuple(peak(i) for i, step in enumerate(fused.steps) if is_static(step.op))


def peak(step: int) -> str:
    """Name of the output for the largest code of a step."""
    return f"step{step}.peak"


def is_static(op: Op) -> bool:
    """Return whether the operation is a matmul of 8-bit codes on any device.

    Whatever the device's own activations are: its format says so. Alone it has the scale of x from
    the host (`integer`), in a group it is a constant of the graph.
    """
    return isinstance(op, ops.MatMul) and op.weight_format.activations.static


def result(slot: str) -> str:
    """Name of the output for a slot."""
    return f"{slot}.result"


def vectors_of(op: Op, weights: Mapping[str, WeightValue]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the vectors that `single` takes as inputs."""
    if isinstance(op, ops.MatMul | ops.Embed | ops.AddPositions):
        return {}
    return {name: np.ascontiguousarray(checks.vector(weights, name)) for name in weight_names(op)}

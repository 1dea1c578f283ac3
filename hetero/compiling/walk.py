"""A decoder on a text, node by node, in the arithmetic of `hetero.backends.reference`.

Calibration looks at what every matmul sees, and may give it other weights to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul
from hetero.backends.protocol import WeightValue, port_dtype, port_shape
from hetero.backends.reference.compute import Program, program
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.models.graph import model_graph
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.profiler.model_graph import Node
from hetero.runtime.kernels import node_weights

Slots: TypeAlias = dict[str, npt.NDArray[Any]]
Progress: TypeAlias = Callable[[int, int], None]


class CalibrationPoint(NamedTuple):
    """A matmul that the walk has come to: its weights, and its input [m, k] of every sequence."""

    node: Node
    values: Mapping[str, WeightValue]
    inputs: list[Float32Array]

    @property
    def role(self) -> str:
        """Return its name within the layer."""
        return role_of(self.node)

    def dense(self) -> Float32Array:
        """Return the weight [n, k]."""
        weight = self.values["weight"]
        assert isinstance(weight, PackedWeight)
        return weight.dequantize()


AtMatMul: TypeAlias = Callable[[CalibrationPoint], Mapping[str, WeightValue]]
AfterBlock: TypeAlias = Callable[[BlockWeights], None]


def walk(
    weights: ModelWeights,
    sequences: Sequence[Sequence[int]],
    at_matmul: AtMatMul,
    *,
    after_block: AfterBlock = lambda _: None,
    progress: Progress | None = None,
) -> None:
    """Run the decoder of f32 `weights` on token sequences, each from position 0.

    `at_matmul` gives the (f32) weights that the matmul runs with; it is called for the output head
    too, which then does not run. A block is released after its last node and `after_block`.
    """
    nodes = model_graph(
        weights.config, WeightFormat.F32, capacity=max(len(x) for x in sequences)
    ).nodes
    states = [fresh_slots(x) for x in sequences]
    last = {node.layer: node for node in nodes}
    for done, (node, live) in enumerate(zip(nodes, live_slots(nodes), strict=True)):
        block = None if node.layer is None else weights.block(node.layer)
        values: Mapping[str, WeightValue] = node_weights(node, block, weights)
        if isinstance(node.op, MatMul):
            values = at_matmul(CalibrationPoint(node, values, [x[node.slots["x"]] for x in states]))
        if role_of(node) != "lm_head":
            run, _ = program(node.op, values)
            for state in states:
                run_node(node, run, state)
                drop_slots(state, live)
        if node is last[node.layer] and node.layer is not None and block is not None:
            after_block(block)
            weights.release(node.layer)
        if progress is not None:
            progress(done + 1, len(nodes))


def role_of(node: Node) -> str:
    """Return the last part of a node's name, by which its weights are found."""
    return node.name.rsplit(".", maxsplit=1)[-1]


def fresh_slots(tokens: Sequence[int]) -> Slots:
    """Return the slots before the first node."""
    return {"tokens": np.asarray(tokens, np.int32), "position": np.zeros(1, np.int32)}


def run_node(node: Node, run: Program, state: Slots) -> None:
    """One node on one sequence; slots that are not there yet are made."""
    m = len(state["tokens"])
    arrays = {}
    for port, slot in node.slots.items():
        shape = port_shape(node.op, port, m)
        if slot not in state or state[slot].shape != shape:
            state[slot] = np.zeros(shape, dtype=port_dtype(node.op, port))
        arrays[port] = state[slot]
    run(arrays)


def live_slots(nodes: Sequence[Node]) -> list[set[str]]:
    """Return the slots that are read behind each node before they are written.

    Caches are among them until the last layer that reads them.
    """
    live: set[str] = set()
    behind = []
    for node in reversed(nodes):
        behind.append(live)
        live = (live - node.writes) | (set(node.slots.values()) - node.writes)
    return behind[::-1]


def drop_slots(state: Slots, live: set[str]) -> None:
    """Drop what no later node reads; how many tokens there are is known from `tokens`."""
    for slot in state.keys() - live - {"tokens"}:
        del state[slot]

"""The launches of a placed plan: parts of matmuls, heads of attention, and what runs each node."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Attention, AttentionHeads, MatMul, OperandOrder
from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import Node
from hetero.solver.node_groups import NodeGroup

Span: TypeAlias = tuple[int, int]


class Segment(NamedTuple):
    """Rows of a weight that a device computes with one kernel.

    Rows that tiles compute in several orders or precisions are a segment for each.
    """

    rows: Span
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None

    def op(self, whole: MatMul) -> MatMul:
        """Return the operation on these rows."""
        start, stop = self.rows
        weight_format = self.precision or whole.weight_format
        return dataclasses.replace(
            whole, n=stop - start, order=self.order, weight_format=weight_format
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One launch of a matmul: tokens × rows of its output on one device.

    `graph` is the token count that the call is bound with, padding included. `rows` are rows of the
    node's weight. `precision` is None for the model's own format. `online`: the graph is prepared
    while the prompt waits.
    """

    kind: DeviceKind
    tokens: Span
    rows: Span
    graph: int
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None
    online: bool = False

    @property
    def stop(self) -> int:
        """End of the tokens that are written, padding included."""
        return self.tokens[0] + self.graph

    @property
    def segment(self) -> Segment:
        """Return the kernel of all its rows."""
        return Segment(self.rows, self.order, self.precision)


class Heads(NamedTuple):
    """One launch of an attention that both devices share.

    Key/value heads first … stop - 1, bound with `graph` tokens, padding included.
    """

    kind: DeviceKind
    first: int
    stop: int
    graph: int

    def op(self, whole: Attention) -> AttentionHeads:
        """Return the operation on these heads."""
        return AttentionHeads(attention=whole, first=self.first, count=self.stop - self.first)


class Assignment(NamedTuple):
    """The device of a node in a call, or as one graph the `group` of nodes that begins with it.

    A matmul's `parts` are its launches. Everything else is one launch on `kind`, bound with `graph`
    tokens, padding included; of an attention whose `heads` both devices share one on each.
    """

    node: Node
    kind: DeviceKind | None = None
    graph: int = 0
    parts: tuple[Part, ...] = ()
    group: NodeGroup | None = None
    heads: tuple[Heads, ...] = ()

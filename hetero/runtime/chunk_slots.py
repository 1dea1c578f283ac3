"""The slots of one chunk, as the nodes that are bound to them read and write them."""

from __future__ import annotations

from dataclasses import replace

from hetero.backends.memory import Tensor
from hetero.backends.protocol import Operand
from hetero.models.graph import OF_THE_POOL
from hetero.profiler.model_graph import Node
from hetero.runtime.pool import ActivationPool
from hetero.runtime.slot_refs import SlotRef, sampled_position_of, slot_of


class ChunkSlots:
    """The pool's slots of a chunk of m tokens.

    `layout` has the panels in which a cut matmul stored what is in a slot. `span` are the tokens
    that the node being bound computes; it sees every slot from the first of these rows on.
    """

    def __init__(self, pool: ActivationPool, chunk: int, m: int) -> None:
        self.pool, self.chunk, self.m = pool, chunk, m
        self.layout: dict[str, Operand] = {}
        self.span = 0, m

    def begin(self, node: Node, rows: int) -> Node:
        """Begin to bind a node to the last `rows` rows; return it with the position of these."""
        self.span = self.m - rows, self.m
        if rows == self.m or "position" not in node.slots:
            return node
        at = sampled_position_of(node.slots["position"])
        return replace(node, slots=node.slots | {"position": at})

    def ref(self, slot: str) -> SlotRef:
        """Return the identity of this chunk's slot."""
        return slot_of(slot, self.chunk)

    def whole(self, slot: str) -> Operand:
        """Return a slot with the rows of all tokens."""
        return self.layout.get(slot, self.pool[self.ref(slot)])

    def first_row(self, slot: str) -> int:
        """Return the first row of a slot that the node reads or writes."""
        return 0 if slot.partition(".")[0] in OF_THE_POOL else self.span[0]

    def tensor(self, slot: str) -> Tensor:
        """Return a slot in one piece, from the node's first row on."""
        whole, first = self.pool[self.ref(slot)], self.first_row(slot)
        return whole.rows(first, whole.shape[0]) if first else whole

    def operand(self, slot: str) -> Operand:
        """Return a slot as it is stored, from the node's first row on."""
        whole, first = self.whole(slot), self.first_row(slot)
        return whole.rows(first, whole.shape[0]) if first else whole

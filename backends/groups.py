"""Groups: operations that a device may take as one kernel (`SupportsGroups`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.backends import ops
from hetero.backends.ops import OUTPUT_PORTS, Op
from hetero.backends.protocol import FIXED_PORTS, port_shape


@dataclass(frozen=True)
class GroupStep:
    """One operation of a group; `slots` are (port, slot) pairs. Slots are the caller's names."""

    op: Op
    slots: tuple[tuple[str, str], ...]

    @property
    def read(self) -> dict[str, str]:
        """Return the slots of activations that it reads, by port."""
        return {p: s for p, s in self.slots if p not in OUTPUT_PORTS and p not in FIXED_PORTS}

    @property
    def written(self) -> tuple[str, ...]:
        """Return the slots of activations that it writes."""
        return tuple(slot for port, slot in self.slots if port in OUTPUT_PORTS)


@dataclass(frozen=True)
class Group:
    """Operations in order of execution, with at most one attention among them.

    Its tensors are `inputs` and `outputs` (activations [m, …] float32) and, with attention or
    rotation, `position`, `k_cache` and `v_cache` as those operations take them; where attention has
    a position of its own, that is `cache_row`.
    """

    name: str
    steps: tuple[GroupStep, ...]
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the slots that are read before the group writes them, in order."""
        written: set[str] = set()
        slots: dict[str, None] = {}
        for step in self.steps:
            slots.update((slot, None) for slot in step.read.values() if slot not in written)
            written.update(step.written)
        return tuple(slots)

    @property
    def attention(self) -> ops.Attention | None:
        """Return the attention among the steps."""
        return next((s.op for s in self.steps if isinstance(s.op, ops.Attention)), None)

    @property
    def own_keys(self) -> str:
        """Return the slot of the queries, keys and values that attention reads.

        "" without attention.
        """
        for step in self.steps:
            if isinstance(step.op, ops.Attention):
                return dict(step.slots)["qkv"]
        return ""

    @property
    def fixed(self) -> dict[str, tuple[str, str]]:
        """Return the tensors of `FIXED_PORTS`, rising: the slot of each, and its port."""
        fixed: dict[str, tuple[str, str]] = {}
        for step in self.steps:
            for port, slot in step.slots:
                if port in FIXED_PORTS:
                    differs = fixed.get(port, (slot, port))[0] != slot
                    fixed["cache_row" if differs else port] = (slot, port)
        return dict(sorted(fixed.items()))

    def shapes(self, slots: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (slot, its shape without the tokens)."""
        for slot in slots:
            uses = ((s.op, port) for s in self.steps for port, at in s.slots if at == slot)
            op, port = next(uses)
            yield slot, port_shape(op, port, 1)[1:]

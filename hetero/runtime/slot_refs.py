"""The identity of a slot: the activation's name, its memory, and its chunk."""

from __future__ import annotations

from typing import Final, NamedTuple

from hetero.backends.protocol import CONTEXT_PORTS, DeviceKind

SHARED: Final = frozenset({"logits", *CONTEXT_PORTS})  # one for all chunks of a prompt


class SlotRef(NamedTuple):
    """One slot. Two launches can only be in each other's way where they use equal ones.

    `name` is the decoder's (`qkv`, `k_cache.3`). `gathered`: the room where its panels are
    gathered. `owner`: the device that has a copy in its own memory (`hetero.runtime.handover`),
    None in the pool that all share. `chunk`: of the chunks of a prompt that are in flight together.
    """

    name: str
    gathered: bool = False
    owner: DeviceKind | None = None
    chunk: int = 0

    def __str__(self) -> str:
        """Return the slot for people."""
        words = [self.name]
        words += ["gathered"] if self.gathered else []
        words += [f"of the {self.owner}"] if self.owner else []
        words += [f"of chunk {self.chunk}"] if self.chunk else []
        return " ".join(words)


def sampled_position_of(name: str = "position") -> str:
    """Return the slot of the position (or `cache_row`) of the first sampled row of a prompt."""
    return f"{name}.sampled"


def position_of(row: int, name: str = "position") -> SlotRef:
    """Return the slot of a row's position (or `cache_row`) in a step of several contexts."""
    return SlotRef(f"{name}.{row}" if row else name)


def slot_of(name: str, chunk: int = 0) -> SlotRef:
    """Return the pool's slot of a chunk; caches and logits are one for all."""
    return SlotRef(name, chunk=0 if name.partition(".")[0] in SHARED else chunk)

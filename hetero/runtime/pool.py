"""Activation slots: one pool that every device of the model maps.

Slots are reused by all layers (paper section 4.2), and by all contexts: a step leaves nothing in
them that a later one reads. They are in huge pages, since a prompt goes through them as a whole: a
matmul writes some rows of every token, each on a page of its own otherwise (525 tokens cut between
the devices take 6 % less). Keys and values lie elsewhere (`hetero.contexts.kv_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor
from hetero.backends.protocol import Device
from hetero.errors import memory_for
from hetero.models.config import ModelConfig
from hetero.models.graph import slot_widths

Shape = tuple[tuple[int, ...], np.dtype[Any]]
FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)


def slot_shapes(
    config: ModelConfig,
    *,
    tokens: int,
    logit_rows: int,
    gathered: Mapping[str, int] | None = None,
) -> dict[str, Shape]:
    """Every slot of a pool: `slot_widths` of the decoder, `tokens`, `position` [1], `logits`
    [logit_rows, vocab]; and room to gather panels in, for the slots in `gathered` with their
    widths.
    """
    widths = slot_widths(config) | {gathered_name(k): n for k, n in (gathered or {}).items()}
    found: dict[str, Shape] = {name: ((tokens, n), FLOAT32) for name, n in widths.items()}
    found["tokens"] = ((tokens,), INT32)
    found["position"] = ((1,), INT32)
    found["logits"] = ((logit_rows, config.vocab_size), FLOAT32)
    return found


def nbytes_of(shape: Shape) -> int:
    """Bytes that a slot takes: whole pages."""
    size = int(np.prod(shape[0], dtype=np.int64)) * shape[1].itemsize
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def gathered_name(slot: str) -> str:
    """The slot that the panels of another are gathered in."""
    return f"{slot} gathered"


class ActivationPool:
    """Named tensors for pieces of up to `tokens` tokens.

    Owned by the control thread. `slots` are those of `slot_shapes`; nothing is added later.
    """

    def __init__(self, slots: Mapping[str, Shape], owner: Device) -> None:
        self.tokens: int = slots["tokens"][0][0]
        self._slots: dict[str, Tensor] = {
            name: _allocate(owner, name, shape) for name, shape in slots.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._slots[name]

    def names(self) -> list[str]:
        """All slots."""
        return list(self._slots)

    def name_of(self, buffer: HostBuffer) -> str:
        """The slot that a buffer holds."""
        return next(name for name, tensor in self._slots.items() if tensor.buffer is buffer)

    @property
    def nbytes(self) -> int:
        """Address space of all slots; what is resident depends on use."""
        return sum(tensor.buffer.nbytes for tensor in self._slots.values())

    def map_to(self, devices: Iterable[Device]) -> None:
        """Map every slot into every device, once for the life of the model."""
        for device in devices:
            for tensor in self._slots.values():
                device.map(tensor.buffer)

    def gathered(self, slot: str) -> Tensor:
        """Room [tokens, width] to gather the panels of a slot in."""
        return self._slots[gathered_name(slot)]


def _allocate(owner: Device, name: str, shape: Shape) -> Tensor:
    """Raises `UserError` where the system refuses the memory."""
    nbytes = nbytes_of(shape)
    with memory_for(f"the {nbytes / 2**20:.1f} MiB of {name}"):
        return Tensor(owner.allocate(nbytes, huge=True), *shape)

"""Activation slots and KV caches: one pool that every device of the model maps.

Slots are reused by all layers (paper section 4.2). Memory is taken from the system when it is first
touched, so a cache for a long context costs nothing until the context is long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.protocol import Device
from hetero.models.config import ModelConfig
from hetero.runtime.decoder import slot_widths


class ActivationPool:
    """Named tensors for pieces of up to `tokens` tokens and a context of `capacity` tokens.

    Owned by the control thread. Slots: `slot_widths` of the decoder, `tokens` int32, `position`
    int32 [1], `logits` [logit_rows, vocab], `k_cache.i` and `v_cache.i` [G, capacity, D].
    """

    def __init__(
        self, config: ModelConfig, *, tokens: int, capacity: int, owner: Device, logit_rows: int = 1
    ) -> None:
        self.tokens = tokens
        self.capacity = capacity
        self._owner = owner
        self._devices: list[Device] = []
        self._slots: dict[str, Tensor] = {
            name: _allocate(owner, (tokens, width)) for name, width in slot_widths(config).items()
        }
        self._slots["tokens"] = _allocate(owner, (tokens,), np.int32)
        self._slots["position"] = _allocate(owner, (1,), np.int32)
        self._slots["logits"] = _allocate(owner, (logit_rows, config.vocab_size))
        shape = (config.kv_heads, capacity, config.head_dim)
        for layer in range(config.num_layers):
            for kind in ("k_cache", "v_cache"):
                self._slots[f"{kind}.{layer}"] = _allocate(owner, shape)

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
        self._devices = list(devices)
        for device in self._devices:
            for tensor in self._slots.values():
                device.map(tensor.buffer)

    def copy_caches(self, other: ActivationPool, tokens: int) -> None:
        """Keys and values of the first tokens of another pool of the same model."""
        for name, tensor in self._slots.items():
            if "_cache." in name:
                tensor.array[:, :tokens] = other[name].array[:, :tokens]

    def gathered(self, slot: str, width: int) -> Tensor:
        """A tensor [tokens, width] to gather the panels of a slot in, made when first asked for."""
        name = f"{slot} gathered"
        if name not in self._slots:
            tensor = self._slots[name] = _allocate(self._owner, (self.tokens, width))
            for device in self._devices:
                device.map(tensor.buffer)
        return self._slots[name]


def _allocate(
    owner: Device, shape: tuple[int, ...], dtype: type[np.generic] = np.float32
) -> Tensor:
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return Tensor(owner.allocate(nbytes), shape, kind)

"""Activation slots and KV caches: one pool that every device of the model maps.

Slots are reused by all layers (paper section 4.2). Memory is taken from the system when it is first
touched, so a cache for a long context costs nothing until the context is long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hetero.backends.memory import Tensor
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

    @property
    def nbytes(self) -> int:
        """Address space of all slots; what is resident depends on use."""
        return sum(tensor.buffer.nbytes for tensor in self._slots.values())

    def map_to(self, devices: Iterable[Device]) -> None:
        """Map every slot into every device, once for the life of the model."""
        for device in devices:
            for tensor in self._slots.values():
                device.map(tensor.buffer)


def _allocate(
    owner: Device, shape: tuple[int, ...], dtype: type[np.generic] = np.float32
) -> Tensor:
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return Tensor(owner.allocate(nbytes), shape, kind)

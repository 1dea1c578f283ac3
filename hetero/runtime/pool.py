"""Activation slots: one pool that every device of the model maps.

Slots are reused by all layers (paper section 4.2), and by all contexts: a step leaves nothing in
them that a later one reads. They are in huge pages, since a prompt goes through them as a whole: a
matmul writes some rows of every token, each on a page of its own otherwise (525 tokens cut between
the devices take 6 % less). Keys and values are stored elsewhere (`hetero.runtime.kv.kv_cache`).

Chunks of a prompt that are in flight together have a set of slots each; they share the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor
from hetero.backends.protocol import Device
from hetero.errors import memory_for
from hetero.models.config import ModelConfig
from hetero.models.graph import Shadows, slot_widths
from hetero.models.row_tables import RowTable
from hetero.runtime.slot_refs import SlotRef, position_of, sampled_position_of, slot_of

Shape = tuple[tuple[int, ...], np.dtype[Any]]
FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)


def slot_shapes(
    config: ModelConfig,
    *,
    tokens: int,
    logit_rows: int,
    gathered: Mapping[str, int] | None = None,
    chunks: int = 1,
    shadows: Shadows | None = None,
    rows: int = 1,
    slides: bool = False,
    parts: Mapping[str, int] | None = None,
) -> dict[SlotRef, Shape]:
    """Return the shapes of all slots of a pool.

    Each of `chunks` chunks in flight has `slot_widths` of the decoder, `tokens`, `position` [1],
    and room to gather panels in, for the slots in `gathered` with their widths. All of them share
    `logits` [logit_rows, vocab], and a `position` for each of `rows` contexts that decode together.
    Where caches slide there is a `cache_row` for each position. With attention that prompts compute
    for sampled rows alone each chunk has a position of these, too. `parts` are slots of a plan's
    own, with their widths.
    """
    positions: tuple[str, ...] = ("position", "cache_row") if slides else ("position",)
    widths = {SlotRef(name): n for name, n in slot_widths(config, shadows).items()}
    widths |= {SlotRef(name): n for name, n in (parts or {}).items()}
    widths |= {SlotRef(name, gathered=True): n for name, n in (gathered or {}).items()}
    each: dict[SlotRef, Shape] = {slot: ((tokens, n), FLOAT32) for slot, n in widths.items()}
    each |= {SlotRef("tokens"): ((tokens,), INT32)}
    each |= {SlotRef(name): ((1,), INT32) for name in positions}
    if config.reads(config.num_layers - 1):
        each |= {SlotRef(sampled_position_of(x)): ((1,), INT32) for x in positions}
    shapes = {
        slot._replace(chunk=chunk): shape for chunk in range(chunks) for slot, shape in each.items()
    }
    shapes[SlotRef("logits")] = ((logit_rows, config.vocab_size), FLOAT32)
    shapes |= {position_of(x, name): ((1,), INT32) for x in range(1, rows) for name in positions}
    return shapes


def nbytes_of(shape: Shape) -> int:
    """Return the bytes of a slot: whole pages."""
    size = int(np.prod(shape[0], dtype=np.int64)) * shape[1].itemsize
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class ActivationPool:
    """The tensors of the slots, for calls of up to `tokens` tokens, `chunks` of them in flight.

    Owned by the control thread. `slots` are those of `slot_shapes`; nothing is added later. A plain
    name is the slot of the first chunk. `tables` are what `feed` looks tokens up in, by slot.
    """

    def __init__(
        self,
        slots: Mapping[SlotRef, Shape],
        owner: Device,
        tables: Mapping[str, RowTable] | None = None,
    ) -> None:
        self.tables = dict(tables or {})
        self.tokens: int = slots[SlotRef("tokens")][0][0]
        self.chunks = 1 + max(slot.chunk for slot in slots)
        self.fed = [0] * self.chunks  # tokens of each chunk
        self._slides = SlotRef("cache_row") in slots
        self._slots: dict[SlotRef, Tensor] = {
            slot: _allocate(owner, slot, shape) for slot, shape in slots.items()
        }
        places = map(position_of, itertools.count())
        self._rows = [self[slot] for slot in itertools.takewhile(self._slots.__contains__, places)]

    def __getitem__(self, slot: SlotRef | str) -> Tensor:
        return self._slots[slot if isinstance(slot, SlotRef) else SlotRef(slot)]

    def slots(self) -> list[SlotRef]:
        """Return all slots."""
        return list(self._slots)

    def slot_of(self, buffer: HostBuffer) -> SlotRef | None:
        """Return the slot that a buffer holds, if it is one of the pool's."""
        slots = (slot for slot, tensor in self._slots.items() if tensor.buffer is buffer)
        return next(slots, None)

    def inputs(self, chunks: Sequence[int]) -> list[Tensor]:
        """Return what the host writes before a step of so many tokens (`feed`, `feed_rows`)."""
        tokens = [self[slot_of("tokens", i)].rows(0, m) for i, m in enumerate(chunks)]
        names = ("position", "cache_row")
        tokens += [x for slot, x in self._slots.items() if slot.name.startswith(names)]
        return tokens + self.looked_up(chunks)

    def looked_up(self, chunks: Sequence[int]) -> list[Tensor]:
        """Return the rows that the host looks up in `tables` before a step of so many tokens."""
        every = ((name, i, m) for name in self.tables for i, m in enumerate(chunks))
        return [self[slot_of(name, i)].rows(0, m) for name, i, m in every]

    def feed(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        chunk: int = 0,
        base: int = 0,
        logit_rows: int = 1,
    ) -> None:
        """Write the inputs of a chunk: its tokens, the first of them at `position`.

        Caches that slide have the token `base` in their first row. The last `logit_rows` rows are
        sampled.
        """
        ids = self[slot_of("tokens", chunk)].array
        ids[: len(tokens)] = tokens
        ids[len(tokens) :] = 0
        for name, table in self.tables.items():
            self[slot_of(name, chunk)].array[: len(tokens)] = table(ids[: len(tokens)])
        self.fed[chunk] = len(tokens)
        first = {"position": position} | ({"cache_row": position - base} if self._slides else {})
        for name, value in first.items():
            self[slot_of(name, chunk)].array[0] = value
            sampled = self._slots.get(slot_of(sampled_position_of(name), chunk))
            if sampled is not None:
                sampled.array[0] = value + len(tokens) - logit_rows

    def feed_rows(
        self, tokens: Sequence[int], positions: Sequence[int], bases: Sequence[int]
    ) -> None:
        """Write the inputs of rows of several contexts: a token each, at its own position.

        `base` is as in `feed`.
        """
        self.feed(tokens, positions[0])
        for row, (position, base) in enumerate(zip(positions, bases, strict=True)):
            self._rows[row].array[0] = position
            if self._slides:
                self[position_of(row, "cache_row")].array[0] = position - base

    @property
    def nbytes(self) -> int:
        """Return the address space of all slots; what is resident depends on use."""
        return sum(tensor.buffer.nbytes for tensor in self._slots.values())

    def map_to(self, devices: Iterable[Device]) -> None:
        """Map every slot into every device, once for the life of the model."""
        for device in devices:
            for tensor in self._slots.values():
                device.map(tensor.buffer)


def _allocate(owner: Device, slot: SlotRef, shape: Shape) -> Tensor:
    """Allocate; raise `UserError` where the system refuses the memory."""
    nbytes = nbytes_of(shape)
    with memory_for(f"the {nbytes / 2**20:.1f} MiB of {slot}"):
        return Tensor(owner.allocate(nbytes, huge=True), *shape)

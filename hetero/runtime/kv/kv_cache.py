"""The memory of one context: keys and values, and states, which layers work on in place.

Each layer has two tensors in buffers of their own, the slots `k_cache.i` and `v_cache.i` of a step:
[kv_heads, capacity, head_dim] of floats, or codes with their scales (`hetero.backends.kv_rows`). A
token is one row of every head, so a run of tokens can be taken out and put back, whole (`read`,
`write`), layer by layer, or as stored (`rows`), whatever precedes and follows it. Pages are
taken from the system when tokens first reach them, and are small: each head would take a huge page
for the first token.

Layers that attend through a window keep room for a run of tokens (`Sliding`), whose first one,
`KvCache.base`, moves up as the text grows: kernels see one run of rows and get the row at which a
call begins. Keys were turned to their positions before, so that moving them changes nothing.

Other layers have a state of a fixed size instead, which is that after the last token
(`hetero.runtime.kv.layer_states`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import CHANNEL_ROWS, CacheFormat
from hetero.backends.kv_rows import CacheRows
from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor
from hetero.backends.optional import SupportsHandovers
from hetero.backends.protocol import CACHE_PORTS
from hetero.errors import memory_for
from hetero.models.sliding import Sliding
from hetero.runtime.kv.cache_sync import CacheSync, Side
from hetero.runtime.kv.layer_states import States, copies_of

Allocate: TypeAlias = Callable[[int], HostBuffer]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The shape of every cache of a model.

    `capacity` is in tokens, padding of calls included; layers that `sliding` names have room for
    its `rows`. `layers` have keys and values, in `kv_heads` heads of `head_dim`, or where they
    differ from layer to layer in those of `heads_of`; `states` are the slots of all others, with
    their shapes (float32).
    """

    layers: int
    kv_heads: int
    capacity: int
    head_dim: int
    kv: CacheFormat = CacheFormat.F32
    sliding: Sliding | None = None
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()
    heads_of: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if {*self.heads_of} <= {(self.kv_heads, self.head_dim)}:
            object.__setattr__(self, "heads_of", ())

    @property
    def alike(self) -> bool:
        """Return whether all layers have equally many heads of one size."""
        return not self.heads_of

    def heads(self, layer: int) -> tuple[int, int]:
        """Return a layer's heads, and their size."""
        return self.heads_of[layer] if self.heads_of else (self.kv_heads, self.head_dim)

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the tensors, as the decoder's nodes have them."""
        return (
            *(f"{port}.{layer}" for layer in range(self.layers) for port in CACHE_PORTS),
            *dict(self.states),
        )

    @property
    def state_bytes(self) -> int:
        """Return the address space of the states."""
        return sum(_in_pages(4 * math.prod(shape)) for _, shape in self.states)

    @property
    def state_copies(self) -> int:
        """Return how many copies of the states a context keeps."""
        return copies_of(self.state_bytes)

    @property
    def state_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the layers' states, which follow those of keys and values."""
        return tuple(sorted({number_of(slot) for slot, _ in self.states}))

    @property
    def slides(self) -> bool:
        """Return whether some layers have no room for all tokens."""
        return self.sliding is not None and self.sliding.rows < self.capacity

    def windowed(self, layer: int) -> bool:
        """Return whether a layer has a window."""
        return self.sliding is not None and layer in self.sliding.layers

    def rows(self, layer: int) -> int:
        """Return how many tokens a layer has room for."""
        sliding = self.sliding
        return sliding.rows if sliding is not None and layer in sliding.layers else self.capacity

    def shape(self, layer: int) -> tuple[int, int, int]:
        """Return the shape of a layer's tensors."""
        heads, size = self.heads(layer)
        return self.kv.shape(heads, self.rows(layer), size)

    def slot_bytes(self, layer: int) -> int:
        """Return the address space of one of a layer's tensors: whole pages."""
        return _in_pages(math.prod(self.shape(layer)) * self.kv.dtype.itemsize)

    @property
    def largest_bytes(self) -> int:
        """Return the address space of the largest tensor."""
        states = (4 * math.prod(shape) for _, shape in self.states)
        return max([*(self.slot_bytes(layer) for layer in range(self.layers)), *states])

    @property
    def nbytes(self) -> int:
        """Return the address space of a context's cache; what is resident depends on its length."""
        rows = len(CACHE_PORTS) * sum(self.slot_bytes(layer) for layer in range(self.layers))
        return rows + (1 + self.state_copies) * self.state_bytes

    def base(self, position: int) -> int:
        """Return the first token that has a row (`Sliding.base`); 0 where all have one."""
        return self.sliding.base(position) if self.sliding is not None and self.slides else 0


class KvCache:
    """Keys and values of up to `layout.capacity` tokens.

    `allocate` gives the memory (`Device.allocate` of the device with the stricter needs). Steps
    that were bound to a cache die with it. Raises `UserError` where the system refuses the memory.

    In layers with a window the row of token t is t - `base`, and tokens before `low` have none any
    more (`base` or later). Everyone else counts tokens.

    `gpu` is one whose memory is not coherent with the host's: steps call `enter` before they use
    the rows and `leave` after it, the host reads through `rows` and `layer`, and says what it has
    written of them (`wrote`).
    """

    def __init__(
        self, layout: CacheLayout, allocate: Allocate, gpu: SupportsHandovers | None = None
    ) -> None:
        self.layout = layout
        self.base = self.low = 0
        with memory_for(f"a context of {layout.nbytes / 2**20:.1f} MiB"):
            self._slots = {
                f"{port}.{layer}": Tensor(
                    allocate(layout.slot_bytes(layer)), layout.shape(layer), layout.kv.dtype
                )
                for layer in range(layout.layers)
                for port in CACHE_PORTS
            }
            self.states = States(layout.states, allocate, layout.state_copies)
        tensors = [
            [self._slots[f"{port}.{index}"] for port in CACHE_PORTS]
            for index in range(layout.layers)
        ]
        self._slots |= self.states.tensors
        tensors += [
            [_row(self._slots[slot]) for slot in dict(layout.states) if number_of(slot) == number]
            for number in layout.state_numbers
        ]
        self._sync = None if gpu is None else CacheSync(gpu, tensors)
        for index in range(layout.layers) if layout.kv.coded else ():
            for rows in self.rows(index):
                rows.channels[:] = 1
            self.wrote_channels(index)

    def __getitem__(self, slot: str) -> Tensor:
        return self._slots[slot]

    @property
    def nbytes(self) -> int:
        """Return the address space of all tensors."""
        return sum(tensor.buffer.nbytes for tensor in self._slots.values())

    def layer(self, index: int) -> tuple[Array, Array]:
        """Return views of the keys and values of a layer as stored.

        Raises `DeviceError` where the host does not see them and cannot be shown.
        """
        if self._sync is not None:
            self._sync.share("host", index)
        keys, values = (self._slots[f"{port}.{index}"].array for port in CACHE_PORTS)
        return keys, values

    def rows(self, index: int) -> tuple[CacheRows, CacheRows]:
        """Return the keys and values of a layer as `CacheRows`. Raises as `layer` does."""
        keys, values = (
            CacheRows(x, self.layout.kv, self.layout.heads(index)[1]) for x in self.layer(index)
        )
        return keys, values

    def resident(self, index: int) -> tuple[int, int]:
        """Return a layer's first token that is present, and the one of its first row."""
        return (self.low, self.base) if self.layout.windowed(index) else (0, 0)

    # --- where memory is not coherent ---------------------------------------------------------

    def wrote(self, index: int, start: int, stop: int) -> None:
        """Record that the host has written tokens [start, stop) of a layer."""
        if self._sync is not None:
            _, base = self.resident(index)
            self._sync.wrote("host", index, start - base, stop - base)

    def enter(self, sides: Mapping[int, Side]) -> None:
        """Let the side that computes a layer see its rows. Raises `DeviceError`."""
        if self._sync is not None:
            for index, side in sides.items():
                self._sync.share(side, index)

    def leave(self, sides: Mapping[int, Side], start: int, stop: int) -> None:
        """Record that each side has written tokens [start, stop) of its layers."""
        if self._sync is not None:
            for index, side in sides.items():
                _, base = self.resident(index)
                rows = (start - base, stop - base) if index < self.layout.layers else (0, 1)
                self._sync.wrote(side, index, *rows)

    @property
    def handed_over(self) -> bool:
        """Return whether rows are handed over between the host and a GPU."""
        return self._sync is not None

    def wrote_channels(self, index: int) -> None:
        """Record that the host has written the scales of a layer's channels."""
        if self._sync is not None:
            rows = self.layout.shape(index)[1]
            self._sync.wrote("host", index, rows - CHANNEL_ROWS, rows)

    def reaches(self, position: int) -> bool:
        """Return whether a call may begin at `position`: all that its tokens see is there."""
        return self.layout.sliding is None or self.low <= self.layout.sliding.seen(position)

    # --- states ------------------------------------------------------------------------------

    def keep_state(self) -> None:
        """Keep a copy of the states, to which the text can be cut (`States.keep`)."""
        if self.layout.states:
            self._share_states()
            self.states.keep()

    def ended(self, position: int, *, keep_state: bool) -> None:
        """Record that a step has ended after so many tokens; with `keep_state` keep the states."""
        self.states.at = position
        if keep_state:
            self.keep_state()

    def continued(self, position: int) -> int:
        """Return the last position up to `position` that a call may begin at.

        Its states are restored.
        """
        reached = self._restored(position) if self.reaches(position) else 0
        return reached if self.reaches(reached) else 0

    def _restored(self, position: int) -> int:
        if not self.layout.states or self.states.at == position:
            return position
        self._share_states()
        restored = self.states.restore(position)
        self._wrote_states()
        return restored

    def state_arrays(self) -> list[Array]:
        """Return views of the states, in their order."""
        self._share_states()
        return [x.array for x in self.states.tensors.values()]

    def load_states(self, states: Sequence[Array], position: int) -> None:
        """Set the states after so many tokens."""
        self._share_states()
        for tensor, state in zip(self.states.tensors.values(), states, strict=True):
            tensor.array[...] = state
        self.states.at = position
        self._wrote_states()

    def _share_states(self) -> None:
        for index in self.layout.state_numbers if self._sync is not None else ():
            assert self._sync is not None
            self._sync.share("host", index)

    def _wrote_states(self) -> None:
        for index in self.layout.state_numbers if self._sync is not None else ():
            assert self._sync is not None
            self._sync.wrote("host", index, 0, 1)

    # --- where windows slide ----------------------------------------------------------------

    def slide(self, position: int) -> None:
        """Move rows so that a call may begin at `position`, which it `reaches`."""
        base = self.layout.base(position)
        low = min(max(self.low, base), position)
        if base != self.base and low < position:
            for index in self._windowed():
                for rows in self.rows(index):
                    rows.copy(low - base, rows, low - self.base, position - self.base)
                if self._sync is not None:
                    self._sync.wrote("host", index, low - base, position - base)
        if (base, low) != (self.base, self.low):
            self._hold(base, low)

    def begin(self, low: int, position: int) -> None:
        """Prepare to write rows of tokens [low, position), as many as have room.

        None of them is there yet.
        """
        base = self.layout.base(position)
        self.states.forget(0)
        self._hold(base, min(max(low, base), position))

    def _hold(self, base: int, low: int) -> None:
        """Zero the rows of no token: no query sees them, and they are multiplied by zero."""
        self.base, self.low = base, low
        for index in self._windowed() if low > base else ():
            for rows in self.rows(index):
                rows.array[:, : low - base] = 0
            self.wrote(index, base, low)

    def _windowed(self) -> list[int]:
        sliding = self.layout.sliding
        return sorted(sliding.layers) if sliding is not None else []

    # --- channels and tokens ----------------------------------------------------------------

    @property
    def channels(self) -> list[Array] | None:
        """Return the scales of coded keys' channels, [kv_heads, head_dim] of each layer."""
        if not self.layout.kv.coded:
            return None
        return [self.rows(i)[0].channels for i in range(self.layout.layers)]

    def scale_by(self, channels: Sequence[Array] | Array | None) -> None:
        """Set the scales for coming tokens; there are none yet. None: unchanged."""
        if channels is not None and self.layout.kv.coded:
            for index in range(self.layout.layers):
                self.rows(index)[0].channels[:] = channels[index]
                self.wrote_channels(index)

    def read(self, start: int, stop: int) -> Array:
        """Return a copy of tokens [start, stop) where layers are alike.

        float32 [layers, 2 (k and v), kv_heads, tokens, dim].
        """
        return np.stack(self.read_layers(start, stop))

    def read_layers(self, start: int, stop: int) -> list[Array]:
        """Return a copy of tokens [start, stop), float32 [2, kv_heads, tokens, dim] by layer."""
        self._check(start, stop)
        layers = []
        for index in range(self.layout.layers):
            _, base = self.resident(index)
            part = [rows.read(start - base, stop - base) for rows in self.rows(index)]
            layers.append(np.array(part, np.float32))
        return layers

    def write(self, start: int, values: Sequence[Array] | Array) -> None:
        """Write what `read` or `read_layers` returned, from token `start` on.

        Raises `ValueError` for another shape.
        """
        shapes = [x.shape for x in values]
        tokens = shapes[0][2] if shapes and len(shapes[0]) == 4 else 0
        heads = map(self.layout.heads, range(self.layout.layers))
        wanted = [(2, count, tokens, size) for count, size in heads]
        if shapes != wanted:
            raise ValueError(f"a part of this cache has the shapes {wanted}, got {shapes}")
        self._check(start, start + tokens)
        for index in range(self.layout.layers):
            _, base = self.resident(index)
            for rows, part in zip(self.rows(index), values[index], strict=True):
                rows.write(start - base, part)
            self.wrote(index, start, start + tokens)

    def copy_from(self, other: KvCache, tokens: int) -> None:
        """Copy only the first tokens of another cache of the same model, whatever its capacity.

        They are copied as stored, with their channels, where both have the same format.
        """
        self.scale_by(other.channels)
        self.begin(other.low, tokens)
        for index in range(self.layout.layers):
            low, base = self.resident(index)
            _, start = other.resident(index)
            for rows, source in zip(self.rows(index), other.rows(index), strict=True):
                rows.copy(low - base, source, low - start, tokens - start)
            self.wrote(index, low, tokens)
        other._share_states()
        self.states.copy_from(other.states)
        self._wrote_states()

    def _check(self, start: int, stop: int) -> None:
        """Raise `ValueError` for tokens that have no room, or no rows any more."""
        if not 0 <= start <= stop <= self.layout.capacity:
            raise ValueError(
                f"tokens [{start}, {stop}) are outside a cache of {self.layout.capacity}"
            )
        sliding = self.layout.sliding
        if sliding is not None and not self.low <= start <= stop <= self.base + sliding.rows:
            raise ValueError(
                f"tokens [{start}, {stop}) are not all in a cache whose windows hold "
                f"[{self.low}, {self.base + sliding.rows})"
            )


def number_of(slot: str) -> int:
    """Return the number of the keys and values, or of the state, that a slot is of."""
    return int(slot.rpartition(".")[2])


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _row(state: Tensor) -> Tensor:
    """Return a state as [1, 1, size]: one row, which is handed over whole."""
    return Tensor(state.buffer, (1, 1, math.prod(state.shape)), state.dtype)

"""Hand-overs of keys and values between a GPU whose memory is not coherent and the host's side.

A layer's attention runs on one side, which sees its own writes, so nothing is handed over while
that stays so: no step of a GPU that has all of attention moves a row. When the other side is about
to use rows (the host to save, compress or copy a context, an NPU to go on with it), those that were
written since are handed over, once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, TypeAlias

from hetero.backends.memory import Tensor
from hetero.backends.optional import SupportsHandovers

Side: TypeAlias = Literal["gpu", "host"]
Rows: TypeAlias = tuple[int, int]


class CacheSync:
    """Rows of one cache that one side has written and the other does not see yet.

    `tensors` are the keys and values of each layer, [kv_heads, rows, width]. Only one side's rows
    are pending at a time: a side sees the other's before it writes (`share`, then `wrote`). Any
    thread; those that use the same rows at the same time are the caller's to order.
    """

    def __init__(self, gpu: SupportsHandovers, tensors: Sequence[Sequence[Tensor]]) -> None:
        self._gpu, self._tensors = gpu, tensors
        self._lock = threading.Lock()
        self._pending: list[dict[Side, list[Rows]]] = [{} for _ in tensors]

    def wrote(self, side: Side, layer: int, start: int, stop: int) -> None:
        """Record that a side has written rows [start, stop) of a layer."""
        with self._lock:
            pending = self._pending[layer]
            pending[side] = joined([*pending.get(side, ()), (start, stop)])

    def share(self, side: Side, layer: int) -> None:
        """Let a side see the rows of a layer that the other has written. Raises `DeviceError`."""
        other: Side = "gpu" if side == "host" else "host"
        with self._lock:
            spans = self._pending[layer].get(other)
            if not spans:
                return
            calls = [
                self._gpu.transfer(part, part, to_device=side == "gpu")
                for tensor in self._tensors[layer]
                for span in spans
                for part in _parts(tensor, *span)
            ]
            *_, last = [call.submit() for call in calls]
            last.wait()
            self._pending[layer][other] = []


def joined(spans: Sequence[Rows]) -> list[Rows]:
    """Return the same rows in as few spans as there are, rising."""
    result: list[Rows] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def _parts(tensor: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return rows [start, stop) of every head: each contiguous, all together where whole."""
    heads, rows, width = tensor.shape
    if (start, stop) == (0, rows):
        return [tensor]
    size = width * tensor.dtype.itemsize
    return [
        Tensor(
            tensor.buffer, (stop - start, width), tensor.dtype,
            tensor.offset_bytes + (head * rows + start) * size,
        )
        for head in range(heads)
    ]  # fmt: skip

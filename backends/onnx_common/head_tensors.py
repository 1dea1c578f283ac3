"""Some heads of an attention on tensors of their own, for graphs that have no others.

Of a cache these heads are a run of memory; of the queries, keys and values, and of the output, they
are columns, which are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.onnx_common.binding import Array
from hetero.backends.ops import AttentionHeads
from hetero.backends.protocol import CACHE_PORTS


class Rooms:
    """Tensors [m, width] to work in, one for all layers of a device while some call has it."""

    def __init__(self) -> None:
        self._rooms: weakref.WeakValueDictionary[tuple[int, int], Tensor] = (
            weakref.WeakValueDictionary()
        )

    def room(self, m: int, width: int) -> Tensor:
        """Return the tensor of a size, made unless it is in use already."""
        room = self._rooms.get((m, width))
        if room is None:
            room = self._rooms[m, width] = new_tensor((m, width))
        return room


class HeadTensors(NamedTuple):
    """`own`: the tensors of `AttentionHeads.alone`; `wanted`: the columns of the output."""

    own: dict[str, Tensor]
    columns: list[tuple[Array, Array]]
    wanted: Array

    @classmethod
    def of(
        cls,
        op: AttentionHeads,
        tensors: Mapping[str, Tensor],
        m: int,
        rooms: Rooms,
    ) -> HeadTensors:
        """Return them for m tokens."""
        of = op.attention
        qkv = rooms.room(m, op.alone.width)
        out = rooms.room(m, op.alone.heads * of.head_dim)
        own = {"position": tensors["position"], "qkv": qkv, "out": out}
        own |= {port: tensors[port].rows(op.first, op.first + op.count) for port in CACHE_PORTS}
        start, stop = op.columns
        taken = [(start, stop)] + [
            (first * of.head_dim, (first + op.count) * of.head_dim)
            for first in (of.heads + op.first, of.heads + of.kv_heads + op.first)
            if not of.reads
        ]
        given = tensors["qkv"].array[:m]
        at = np.cumsum([0, *(b - a for a, b in taken)]).tolist()
        columns = [
            (qkv.array[:, i:j], given[:, a:b])
            for (a, b), (i, j) in zip(taken, pairwise(at), strict=True)
        ]
        return cls(own, columns, tensors["out"].array[:m, start:stop])

    def gather(self) -> None:
        """Copy the queries, keys and values of these heads (queries alone where it `reads`)."""
        for target, source in self.columns:
            np.copyto(target, source)

"""Hand-overs by copying, for comparison: the GPU works in memory of its own (`--sync copy`).

This is how engines without a unified pool exchange data (paper section 2, characteristic 2): before
the GPU reads what another processor wrote it is copied into the GPU's buffers, and before another
reads what the GPU wrote it is copied out. Only what was written since is copied, and only when it
is needed. Caches, token ids and the position stay shared: one device uses them for good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from hetero.backends.memory import HostBuffer, Panels, Tensor
from hetero.backends.ops import OUTPUT_PORTS
from hetero.backends.protocol import (
    FIXED_PORTS,
    BoundCall,
    Device,
    DeviceKind,
    Operand,
    parts_of,
)
from hetero.errors import UserError

Side: TypeAlias = Literal["gpu", "host"]
SHARED_PORTS = FIXED_PORTS | {"tokens"}


class Transfer(NamedTuple):
    """A copy to place before a launch: its call, and the buffer of the pool it reads or writes."""

    call: BoundCall
    buffer: HostBuffer
    to_gpu: bool
    nbytes: int


class Handover:
    """The last writer of every buffer since its last copy; one for each lowered step.

    `mirrors` are the GPU's buffers by the pool's, shared by all steps of a model. Buffers of the
    pool stand for the host's side, which every device but the GPU works in.
    """

    def __init__(self, gpu: Device, mirrors: dict[HostBuffer, HostBuffer]) -> None:
        self._gpu, self._mirrors = gpu, mirrors
        self._written: dict[HostBuffer, list[tuple[Side, Tensor]]] = {}

    def own(self, kind: DeviceKind | None, operands: Mapping[str, Operand]) -> dict[str, Operand]:
        """Return the operands as a device sees them: the GPU's are in its own buffers."""
        if kind != "gpu":
            return dict(operands)
        return {
            port: operand if port in SHARED_PORTS else self._mirrored(operand)
            for port, operand in operands.items()
        }

    def before(self, kind: DeviceKind | None, operands: Mapping[str, Operand]) -> list[Transfer]:
        """Return the copies that must precede a launch that reads `operands` of the pool."""
        side: Side = "gpu" if kind == "gpu" else "host"
        copies = []
        for port, operand in operands.items():
            if port in SHARED_PORTS or port in OUTPUT_PORTS:
                continue
            buffer = parts_of(operand)[0].buffer
            written = self._written.get(buffer, [])
            copies += [self._transfer(tensor, side) for by, tensor in written if by != side]
            self._written[buffer] = [(by, tensor) for by, tensor in written if by == side]
        return copies

    def after(
        self, launches: Iterable[tuple[DeviceKind | None, Mapping[str, Operand]]], m: int
    ) -> None:
        """Record the writes of one node's launches."""
        fresh: dict[HostBuffer, list[tuple[Side, Tensor]]] = {}
        for kind, operands in launches:
            side: Side = "gpu" if kind == "gpu" else "host"
            for port, operand in operands.items():
                if port in OUTPUT_PORTS and port not in SHARED_PORTS:
                    for part in parts_of(operand):
                        rows = part.rows(0, min(m, part.shape[0]))
                        fresh.setdefault(part.buffer, []).append((side, rows))
        self._written |= fresh

    def _transfer(self, tensor: Tensor, to: Side) -> Transfer:
        mirror = self._mirror_of(tensor)
        call = self._gpu.transfer(tensor, mirror, to_device=to == "gpu")
        if call is None:
            raise UserError(
                f"--sync copy needs a device that copies, {self._gpu.info.backend} does not: "
                "choose another --sync"
            )
        return Transfer(call, tensor.buffer, to == "gpu", tensor.nbytes)

    def _mirrored(self, operand: Operand) -> Operand:
        if isinstance(operand, Panels):
            return Panels(tuple(self._mirror_of(part) for part in operand.parts))
        return self._mirror_of(operand)

    def _mirror_of(self, tensor: Tensor) -> Tensor:
        buffer = tensor.buffer
        if buffer not in self._mirrors:
            mirror = self._mirrors[buffer] = self._gpu.allocate(buffer.nbytes)
            self._gpu.map(mirror)
        return dataclasses.replace(tensor, buffer=self._mirrors[buffer])

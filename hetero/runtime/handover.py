"""Hand-overs of activations between the GPU and the host's side, which every other device works on.

On coherent memory there are none. Where the GPU's memory is not coherent with the host's, or is not
the host's at all, a step hands over what one side has written and the other reads: the rows that
were written, once, right before they are read (`Device.transfer`). `--sync copy` does the same
through buffers of the GPU's own, for comparison: this is how engines without a unified pool
exchange data (paper section 2, characteristic 2).

Keys and values are not handed over within a step: one side uses those of a layer
(`hetero.runtime.kv.cache_sync`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from hetero.backends.memory import HostBuffer, Panels, Tensor
from hetero.backends.ops import ADDED_PORTS, OUTPUT_PORTS
from hetero.backends.optional import SupportsHandovers, SupportsTransfer
from hetero.backends.protocol import (
    CONTEXT_PORTS,
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
WRITTEN_PORTS = OUTPUT_PORTS | ADDED_PORTS


class Transfer(NamedTuple):
    """A hand-over to place before a launch: its call, and the buffer that it reads or writes."""

    call: BoundCall
    buffer: HostBuffer
    to_gpu: bool
    nbytes: int


class Handover:
    """The last writer of every buffer since its last hand-over; one for each lowered step.

    `mirrors` are the GPU's buffers by the pool's, shared by all steps of a model; None where the
    GPU works on the pool's (`in_place`). Buffers of the pool stand for the host's side.
    """

    def __init__(self, gpu: Device, mirrors: dict[HostBuffer, HostBuffer] | None = None) -> None:
        self._gpu, self._mirrors = gpu, mirrors
        self._written: dict[HostBuffer, list[tuple[Side, Tensor]]] = {}
        self.in_place = mirrors is None
        # Inputs and caches of a step are in coherent memory where the GPU has mirrors.
        self._shared = frozenset(CONTEXT_PORTS) if self.in_place else SHARED_PORTS

    def own(self, kind: DeviceKind | None, operands: Mapping[str, Operand]) -> dict[str, Operand]:
        """Return the operands as a device sees them: the GPU's are in its own buffers."""
        if kind != "gpu" or self._mirrors is None:
            return dict(operands)
        return {
            port: operand if port in SHARED_PORTS else self._mirrored(operand)
            for port, operand in operands.items()
        }

    def feed(self, inputs: Iterable[Tensor], looked_up: Iterable[Tensor] = ()) -> None:
        """Record that the host writes these before the step begins.

        The GPU has mirrors of activations that were `looked_up`, but not of other inputs.
        """
        for tensor in inputs if self.in_place else looked_up:
            self._written.setdefault(tensor.buffer, [("host", tensor)])

    def before(self, kind: DeviceKind | None, operands: Mapping[str, Operand]) -> list[Transfer]:
        """Return the hand-overs that must precede a launch that reads `operands` of the pool."""
        side: Side = "gpu" if kind == "gpu" else "host"
        transfers = []
        for port, operand in operands.items():
            if port in self._shared or port in OUTPUT_PORTS:
                continue
            buffer = parts_of(operand)[0].buffer
            written = self._written.get(buffer, [])
            transfers += [self._transfer(tensor, side) for by, tensor in written if by != side]
            self._written[buffer] = [(by, tensor) for by, tensor in written if by == side]
        return transfers

    def after(
        self, launches: Iterable[tuple[DeviceKind | None, Mapping[str, Operand]]], m: int
    ) -> None:
        """Record the writes of one node's launches."""
        fresh: dict[HostBuffer, list[tuple[Side, Tensor]]] = {}
        for kind, operands in launches:
            side: Side = "gpu" if kind == "gpu" else "host"
            for port, operand in operands.items():
                if port in WRITTEN_PORTS and port not in self._shared:
                    for part in parts_of(operand):
                        whole = port in FIXED_PORTS
                        rows = part if whole else part.rows(0, min(m, part.shape[0]))
                        fresh.setdefault(part.buffer, []).append((side, rows))
        self._written |= fresh

    def _transfer(self, tensor: Tensor, to: Side) -> Transfer:
        mirror = tensor if self._mirrors is None else self._mirror_of(tensor, self._mirrors)
        if not isinstance(self._gpu, SupportsTransfer):
            raise UserError(
                f"--sync copy needs a device that copies, {self._gpu.info.backend} does not: "
                "choose another --sync"
            )
        call = self._gpu.transfer(tensor, mirror, to_device=to == "gpu")
        return Transfer(call, tensor.buffer, to == "gpu", tensor.nbytes)

    def _mirrored(self, operand: Operand) -> Operand:
        assert self._mirrors is not None
        if isinstance(operand, Panels):
            return Panels(tuple(self._mirror_of(part, self._mirrors) for part in operand.parts))
        return self._mirror_of(operand, self._mirrors)

    def _mirror_of(self, tensor: Tensor, mirrors: dict[HostBuffer, HostBuffer]) -> Tensor:
        buffer = tensor.buffer
        if buffer not in mirrors:
            mirror = mirrors[buffer] = self._gpu.allocate(buffer.nbytes)
            self._gpu.map(mirror)
        return dataclasses.replace(tensor, buffer=mirrors[buffer])


def incoherent(devices: Mapping[DeviceKind, Device]) -> SupportsHandovers | None:
    """Return the GPU where its memory is not coherent with the host's."""
    gpu = devices.get("gpu")
    if gpu is None or gpu.capabilities.coherent:
        return None
    assert isinstance(gpu, SupportsHandovers)
    return gpu


def fetch(device: Device, tensors: Iterable[Tensor]) -> None:
    """Let the host see what a device has written, if it does not already; return when it does."""
    _hand_over(device, tensors, to_device=False)


def publish(device: Device, tensors: Iterable[Tensor]) -> None:
    """Let a device see what the host has written, if it does not already; return when it does."""
    _hand_over(device, tensors, to_device=True)


def _hand_over(device: Device, tensors: Iterable[Tensor], *, to_device: bool) -> None:
    if device.capabilities.coherent:
        return
    assert isinstance(device, SupportsHandovers)
    for tensor in tensors:
        device.transfer(tensor, tensor, to_device=to_device).run()

"""A small call for probes of who sees whose writes when: x + residual = y, in host memory."""

from __future__ import annotations

from typing import NamedTuple, cast

from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.opencl.calls import OpenCLCall
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.transfer import TransferCall
from hetero.backends.ops import Add


class ProbeCall(NamedTuple):
    """The call and its rows of floats, which the host writes and reads."""

    call: OpenCLCall
    x: Tensor
    residual: Tensor
    y: Tensor

    @classmethod
    def of(cls, device: Resources, floats: int, buffer: HostBuffer | None = None) -> ProbeCall:
        """Return the call, bound to rows of so many floats, at the start of a buffer if given."""
        size = 4 * floats
        buffer = buffer or device.allocate(3 * size)
        x, residual, y = (Tensor(buffer, (1, floats), offset_bytes=size * i) for i in range(3))
        kernel = device.prepare(Add(d=floats), {})
        call = kernel.bind({"x": x, "residual": residual, "y": y}, 1)
        return cls(cast("OpenCLCall", call), x, residual, y)

    def handed_over(self) -> list[OpenCLCall]:
        """Return the call between the hand-overs that it does not make itself, if it needs some."""
        device = self.call.device
        if device.coherent or not device.explicit_handovers:
            return [self.call]
        rows = self.x, self.residual, self.y  # that of y poisons what the device has
        before = [TransferCall(device, row, row, to_device=True) for row in rows]
        return [*before, self.call, TransferCall(device, self.y, self.y, to_device=False)]

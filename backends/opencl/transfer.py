"""Hand-overs of tensors between host and device, in queue order (`SupportsTransfer`)."""

from __future__ import annotations

import pyopencl as cl

from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import OpenCLCall, OpenCLCompletion, Region
from hetero.backends.opencl.resources import Resources


class TransferCall(OpenCLCall):
    """One tensor copied to or from an equal one of the device's own.

    A tensor that is handed over to itself (`host` and `own` share a buffer) is mapped and unmapped
    on unified memory, and copied between the host's memory and the device's copy elsewhere.
    """

    fusible = False

    def __init__(self, device: Resources, host: Tensor, own: Tensor, to_device: bool) -> None:
        self._region = region = Region.of(device, own, host)
        verb = "copy" if region.copied else "map"
        name = f"{verb} of {host.nbytes} bytes {'to' if to_device else 'from'} the GPU"
        super().__init__(device, name, host.shape[0], [], {"host": host, "own": own})
        self._to_device = to_device

    def enqueue(self) -> OpenCLCompletion:
        """Enqueue the copy, or the mapping."""
        device = self.device
        device.check()
        try:
            region = self._region
            event = region.publish(device) if self._to_device else region.fetch(device)
        except cl.Error as error:
            raise device.failed(f"launching the {self.name}", error.code) from error
        return OpenCLCompletion(self, event, event)

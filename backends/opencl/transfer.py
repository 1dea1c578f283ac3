"""Copies between host memory and a buffer of the device, in queue order (`SupportsTransfer`)."""

from __future__ import annotations

import pyopencl as cl

from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import OpenCLCall, OpenCLCompletion
from hetero.backends.opencl.resources import Resources


class TransferCall(OpenCLCall):
    """`clEnqueueWriteBuffer` or `clEnqueueReadBuffer` of one tensor."""

    fusible = False

    def __init__(self, device: Resources, host: Tensor, own: Tensor, to_device: bool) -> None:
        name = f"copy of {host.nbytes} bytes {'to' if to_device else 'from'} the GPU"
        super().__init__(device, name, host.shape[0], [], {"host": host, "own": own})
        self._buffer = device.map(own.buffer)
        self._offset = own.offset_bytes
        self._bytes = host.buffer.bytes[host.offset_bytes : host.offset_bytes + host.nbytes]
        self._to_device = to_device

    def enqueue(self) -> OpenCLCompletion:
        """Enqueue the copy."""
        device, at = self.device, self._offset
        device.check()
        device.copies += 1
        try:
            if self._to_device:
                event = cl.enqueue_copy(
                    device.queue, self._buffer, self._bytes, dst_offset=at, is_blocking=False
                )
            else:
                event = cl.enqueue_copy(
                    device.queue, self._bytes, self._buffer, src_offset=at, is_blocking=False
                )
        except cl.Error as error:
            raise device.failed(f"launching the {self.name}", error.code) from error
        return OpenCLCompletion(self, event, event)

"""Shared memory: page-aligned host buffers that every device of a model maps.

The pool belongs to the backend with the stricter needs (the NPU's); on a PC that is plain pages.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.host import hugepages

LINUX = sys.platform.startswith("linux")
POSIX = hasattr(mmap, "MAP_PRIVATE")
PAGE_BYTES = mmap.PAGESIZE
FLOAT32 = np.dtype(np.float32)
CHUNK_BYTES = 1 << 25


def private_pages(nbytes: int) -> mmap.mmap:
    """Return the anonymous memory of this process alone: a forked child has its own copy.

    On Linux only private pages can be huge or be given back in place.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if POSIX else {}
    return mmap.mmap(-1, nbytes, **private)


class HostBuffer:
    """Page-aligned, zero-filled host memory. Pages are taken from the system when first touched.

    `huge`: in pages of 2 MiB where the system has them, for what is streamed as a whole; a buffer
    of one or more begins with one. The memory lives as long as any array, tensor or device mapping
    that refers to this object. `dma_buf` is the descriptor by which other drivers may import the
    memory, None without one.
    """

    dma_buf: int | None = None

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        if nbytes < 1:
            raise ValueError(f"a buffer needs at least one byte, got {nbytes}")
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        room = hugepages.HUGE_BYTES if huge and self.nbytes >= hugepages.HUGE_BYTES else 0
        memory = private_pages(self.nbytes + room)
        if huge:
            hugepages.advise(memory, self.nbytes + room)
        else:
            hugepages.advise_against(memory)
        start = -np.frombuffer(memory, np.uint8, 1).ctypes.data % room if room else 0
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, self.nbytes, start)
        self.address: int = self.bytes.ctypes.data

    def array(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of `shape` that starts `offset_bytes` into the buffer."""
        count = math.prod(shape) * np.dtype(dtype).itemsize
        if offset_bytes < 0 or offset_bytes + count > self.nbytes:
            raise ValueError(
                f"a view of {count} bytes at {offset_bytes} does not fit a buffer of {self.nbytes}"
            )
        return self.bytes[offset_bytes : offset_bytes + count].view(dtype).reshape(shape)


class Arena:
    """Zero-filled parts of huge buffers, page-aligned, one after the other.

    What has no room for pages of 2 MiB of its own shares them with its neighbours.

    A buffer lives as long as any part of it, so what is taken together should die together; a part
    of more than half a buffer gets its own. Any thread may take.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._chunk: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None
        self._used = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes."""
        if 2 * nbytes > self._chunk_bytes:
            return HostBuffer(nbytes, huge=True).bytes[:nbytes]
        with self._lock:
            chunk = self._chunk()
            if chunk is None or self._used + nbytes > len(chunk):
                chunk = HostBuffer(self._chunk_bytes, huge=True).bytes
                self._chunk, self._used = weakref.ref(chunk), 0
            part = chunk[self._used : self._used + nbytes]  # its base is the chunk
            self._used += -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            return part


@dataclass(frozen=True, eq=False)
class Tensor:
    """A contiguous row-major array inside a `HostBuffer`; what `Kernel.bind` takes."""

    buffer: HostBuffer
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = FLOAT32
    offset_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Return the host address of the first element."""
        return self.buffer.address + self.offset_bytes

    @cached_property
    def array(self) -> npt.NDArray[Any]:
        """Return the elements as a numpy view (no copy).

        Made once: every step reads some, and numpy's code is out of all caches by then.
        """
        return self.buffer.array(self.dtype, self.shape, self.offset_bytes)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return tokens [start, stop) of the same memory."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows [{start}, {stop}) are outside a tensor of shape {self.shape}")
        row_bytes = self.nbytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return Tensor(self.buffer, shape, self.dtype, self.offset_bytes + start * row_bytes)


@dataclass(frozen=True, eq=False)
class Panels:
    """A [tokens, features] tensor whose columns are in panels, like the parts of a cut matmul.

    Each part is a contiguous `Tensor` [at least m tokens, its columns] and all are float32; side by
    side they are the whole. A device writes its own part, and the next operation reads all of them
    in place (`Capabilities.reads_panels`).
    """

    parts: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.parts or any(len(part.shape) != 2 for part in self.parts):
            raise ValueError("panels are one or more tensors of two dimensions")

    @property
    def shape(self) -> tuple[int, int]:
        """Return the tokens that every part has, and the columns of all."""
        return min(p.shape[0] for p in self.parts), sum(p.shape[1] for p in self.parts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the element type of the parts."""
        return self.parts[0].dtype

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first column of every part."""
        widths = [0, *(part.shape[1] for part in self.parts)]
        return tuple(int(start) for start in np.cumsum(widths)[:-1])

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        return sum(part.nbytes for part in self.parts)

    def gather(self, m: int) -> npt.NDArray[Any]:
        """Return the first m tokens in one array [m, features]: a copy."""
        return np.concatenate([part.array[:m] for part in self.parts], axis=1)

    def rows(self, start: int, stop: int) -> Panels:
        """Return tokens [start, stop) of the same memory."""
        return Panels(tuple(part.rows(start, stop) for part in self.parts))


def new_tensor(
    shape: tuple[int, ...],
    dtype: npt.DTypeLike = np.float32,
    allocate: Callable[[int], HostBuffer] = HostBuffer,
) -> Tensor:
    """Return a tensor in a buffer of its own, as `allocate` (of a device that uses it) makes it."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return Tensor(allocate(count), shape, kind)

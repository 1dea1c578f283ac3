"""Shared memory: none without FastRPC; with one, the provider's allocator up to the Hexagon itself.

The emulator cannot register shared memory (its error 1000), so that the probe says no is all that
can be seen here; that the provider found the tensor by an address inside its allocation is in the
error: elsewhere it is "Failed to look up tracked allocation".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
from hetero.backends.qnn.library import fastrpc  # noqa: E402
from hetero.backends.qnn.shared_memory import SharedBuffer  # noqa: E402

# FastRPC's functions for memory, on anonymous files instead of DMA buffers.
RPCMEM = """
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
static void *places[64];
static int files[64], used;
void *rpcmem_alloc(int heap, uint32_t flags, int size) {
    int file = memfd_create("rpcmem", 0);
    if (used == 64 || file < 0 || ftruncate(file, size)) return 0;
    files[used] = file;
    places[used] = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    for (int i = 0; i < size; i++) ((char *)places[used])[i] = 7;
    return places[used++];
}
int rpcmem_to_fd(void *place) {
    for (int i = 0; i < used; i++) if (places[i] == place) return files[i];
    return -1;
}
void rpcmem_free(void *place) { }
void remote_register_buf_attr2(void *place, size_t size, int file, int attributes) { }
"""
PROGRAM = """
from dataclasses import replace
import numpy as np
from hetero.backends import ops
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.onnx_common.binding import argument
from hetero.backends.qnn import graphs, opening, session, shared_memory
with opening.open(cache=None) as device:
    assert "memRegister() failed" in device.shared_memory, device.shared_memory
    assert type(device.allocate(100)) is HostBuffer
    target = replace(device.store.target, shared_memory=True)
    opened = session.new_session(target, graphs.single(ops.Add(d=64), 4, {}), "opening")
    buffer = shared_memory.SharedBuffer(shared_memory.SharedPages(opened, 5000))
    assert (buffer.nbytes, buffer.address % 4096) == (8192, 0)
    assert buffer.dma_buf is not None and buffer.dma_buf > 2
    assert not buffer.bytes.any()  # the allocator gives bytes of 7
    rows = Tensor(buffer, (8, 64)).rows(2, 6)
    rows.array[:] = 1
    assert buffer.bytes.any()
    assert shared_memory.is_shared(argument(rows.array))
    assert not shared_memory.is_shared(argument(np.zeros(4)))
    array = rows.array
    del buffer, rows, opened  # the array keeps its pages
    assert array.sum() == 256
print("all of it")
"""


@pytest.mark.skipif(fastrpc() is not None, reason="there is FastRPC here")
def test_without_fastrpc_memory_is_ordinary() -> None:
    with qnn.open(cache=None) as device:
        assert "FastRPC (libcdsprpc.so" in device.shared_memory
        assert not isinstance(device.allocate(100), SharedBuffer)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")
def test_the_provider_allocates_and_finds_addresses_inside(tmp_path: Path) -> None:
    source = tmp_path / "rpcmem.c"
    source.write_text(RPCMEM)
    library = tmp_path / "libcdsprpc.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert (found.returncode, found.stdout) == (0, "all of it\n"), found.stderr

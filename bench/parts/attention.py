"""Attention on caches of every format, at several lengths of context, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from common import Rounds, finish, integers, spread, table

from hetero.backends.formats import CacheFormat
from hetero.backends.kv_rows import cache_rows, random_rows
from hetero.backends.memory import Tensor
from hetero.backends.ops import Attention
from hetero.backends.optional import SupportsQueueControl
from hetero.backends.protocol import Device, port_dtype, port_shape
from hetero.backends.registry import open_device

STREAMED_BYTES = 1 << 29  # of layers whose caches take turns in decode: more than processors keep


def contender(device: Device, op: Attention, m: int, context: int) -> Callable[[], float]:
    """Seconds of a call of m tokens behind others."""
    rng, calls, kernel = np.random.default_rng(0), [], device.prepare(op, {})
    cache_bytes = int(np.prod(port_shape(op, "k_cache", m))) * port_dtype(op, "k_cache").itemsize
    first: dict[str, Tensor] = {}
    for _ in range(-(-STREAMED_BYTES // (2 * cache_bytes)) if m <= 8 else 1):
        tensors = {}
        for port in op.ports:
            shape, dtype = port_shape(op, port, m), port_dtype(op, port)
            nbytes = int(np.prod(shape)) * dtype.itemsize
            tensors[port] = tensor = Tensor(device.allocate(nbytes), shape, dtype)
            if port in first and port.endswith("cache"):
                tensor.array[:] = first[port].array
            elif port.endswith("cache"):
                random_rows(cache_rows(op, tensor.array), context, rng, keys=port == "k_cache")
        tensors["qkv"].array[:] = rng.standard_normal(tensors["qkv"].shape)
        tensors["position"].array[:] = context
        calls.append(kernel.bind(tensors, m))
        first = first or tensors

    def run() -> float:
        start_s = time.perf_counter()
        for call in calls:
            call.submit() if device.capabilities.asynchronous else call.run()
        if isinstance(device, SupportsQueueControl):
            device.finish()
        return (time.perf_counter() - start_s) / len(calls)

    return run


def attention(
    backend: str = "opencl",
    kv: str = ",".join(CacheFormat),
    contexts: str = "256,1024,4096",
    tokens: str = "1,256",
    r: Rounds = 9,
) -> None:
    """Attention of Llama-3.2-1B's shape: a layer's call, whose caches were last used long ago."""
    whole = Attention(heads=32, kv_heads=8, head_dim=64, capacity=max(integers(contexts)) + 512)
    with open_device(backend) as device:
        made = {
            (fmt, m, context): contender(device, replace(whole, kv=CacheFormat(fmt)), m, context)
            for fmt in kv.split(",")
            for m in integers(tokens)
            for context in integers(contexts)
        }
        found: dict[tuple[str, int, int], list[float]] = {key: [] for key in made}
        for turn in range(r + 1):
            for key, run in made.items():
                found[key] += [run()] * (turn > 0)
    base = next(iter(found))[0]
    rows = []
    for (fmt, m, context), times in found.items():
        ratio = statistics.median(np.divide(found[base, m, context], times).tolist())
        rows.append([fmt, m, context, *spread(times, 1e3, 3), f"{ratio:.2f}"])
    print(f"measured; {backend}, heads 32, key/value heads 8 of 64, {r} rounds\n")
    table(f"caches|tokens|behind|ms (median)|min|max|speed, x {base}", rows)
    finish()

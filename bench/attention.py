"""Attention of one token on both devices, its keys and values in memory and not in a cache.

    python bench/attention.py [--heads 32,8,64] [--contexts 64,256,1000] [-r 3]

As in a decode step: every layer has caches of its own, and between two calls more is read than any
cache holds. `GB/s` is keys and values over the median; compare `bench/memory_limit.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from hetero.backends.host.affinity import pinned
from hetero.backends.memory import Tensor
from hetero.backends.ops import Attention
from hetero.backends.protocol import BoundCall, Device
from hetero.measuring.benchmark import environment
from hetero.placement.device_set import open_devices

LAYERS = 16
FLUSH_BYTES = 96 << 20
DEADLINE_S = 10.0


def calls_of(device: Device, op: Attention) -> tuple[list[BoundCall], Tensor]:
    """A call for every layer, and the position that all read."""
    rng = np.random.default_rng(0)
    width, cache = (op.heads + 2 * op.kv_heads) * op.head_dim, (op.kv_heads, op.capacity)
    shapes = {"qkv": (1, width), "out": (1, op.heads * op.head_dim)}
    tensors = {port: Tensor(device.allocate(4 * s[1]), s) for port, s in shapes.items()}
    tensors["qkv"].array[:] = rng.standard_normal(shapes["qkv"])
    position = Tensor(device.allocate(4), (1,), np.dtype(np.int32))
    kernel, calls = device.prepare(op, {}), []
    for _ in range(LAYERS):
        for port in ("k_cache", "v_cache"):
            shape = (*cache, op.head_dim)
            tensors[port] = Tensor(device.allocate(4 * int(np.prod(shape))), shape)
            tensors[port].array[:] = rng.standard_normal(shape, dtype=np.float32)
        calls.append(kernel.bind({**tensors, "position": position}, 1))
    return calls, position


def timed(device: Device, call: BoundCall) -> float:
    """Seconds by the device's clock; by the host's where the device has none."""
    start_s = time.perf_counter()
    span = None
    if device.capabilities.asynchronous:
        completion = call.submit()
        completion.wait(DEADLINE_S)
        span = completion.span()
    else:
        call.run()
    return span[1] - span[0] if span else time.perf_counter() - start_s


def main() -> None:
    """Parse, measure in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="32,8,64", help="query heads, key/value heads, width")
    parser.add_argument("--contexts", default="64,256,1000")
    parser.add_argument("-r", type=int, default=3, help="rounds over all layers")
    arguments = parser.parse_args()
    contexts = [int(c) for c in arguments.contexts.split(",")]
    heads, kv_heads, width = (int(n) for n in arguments.heads.split(","))
    op = Attention(heads=heads, kv_heads=kv_heads, head_dim=width, capacity=max(contexts) + 1)
    opened = open_devices("hetero")
    flush = np.ones(FLUSH_BYTES // 4, dtype=np.float32)
    times: dict[tuple[int, str], list[float]] = {}
    with pinned(opened.control_core):
        found = {}
        for kind, device in opened.devices.items():
            device.set_timing(True)
            found[kind] = calls_of(device, op)
        for i in range(arguments.r + 1):
            for context in contexts:
                for kind, (calls, position) in found.items():
                    position.array[:] = context - 1
                    for call in calls:
                        float(flush.sum())
                        times.setdefault((context, kind), []).append(
                            timed(opened.devices[kind], call)
                        )
            if i == 0:
                times.clear()  # the warm-up
    print(f"measured; {heads} heads, {kv_heads} of keys, of {width}; {LAYERS} layers' caches")
    print("| context | device | us (median) | quarter | min | GB/s |")
    print("|---:|---|---:|---:|---:|---:|")
    for (context, kind), seconds in sorted(times.items()):
        median, nbytes = statistics.median(seconds), 8 * kv_heads * width * context
        shown = (1e6 * s for s in (median, float(np.quantile(seconds, 0.25)), min(seconds)))
        cells = " | ".join(f"{us:.1f}" for us in shown)
        print(f"| {context} | {kind} | {cells} | {nbytes / median / 1e9:.1f} |")
    print(json.dumps(environment()))
    opened.close()


if __name__ == "__main__":
    main()

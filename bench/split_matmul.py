"""A split matmul against its two tiles alone: max(GPU tile, NPU tile) is what it may take at best.

    python bench/split_matmul.py [--weights w4a8] [-m 256,1] [-r 15] [--share auto|0.6]

For each matmul of a model and token count: the row-cut that balances the devices' own speeds (or a
given GPU share), timed as both tiles at once, each tile alone, and each device with the whole, all
interleaved. Several weight copies keep decode kernels out of the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetero.backends.host.affinity import pinned
from hetero.backends.host.timers import timer_slack
from hetero.backends.memory import Tensor
from hetero.backends.ops import MatMul, WeightFormat
from hetero.backends.protocol import BoundCall, Device
from hetero.backends.weights import PackedWeight, pack
from hetero.measuring.benchmark import environment
from hetero.placement.device_set import open_devices
from hetero.runtime.waits import Synchroniser

SHAPES = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
COLD_BYTES = 160 << 20


@dataclass
class Row:
    """Median seconds of one matmul."""

    name: str
    m: int
    share: float
    gpu_s: float
    npu_s: float
    gpu_tile_s: float
    npu_tile_s: float
    both_s: float

    @property
    def overhead(self) -> float:
        """Time of the split over its longer tile's alone."""
        return self.both_s / max(self.gpu_tile_s, self.npu_tile_s)


class Split:
    """One weight: both devices' kernels for the whole and for their tiles."""

    def __init__(
        self, gpu: Device, npu: Device, weight: PackedWeight, fmt: WeightFormat, m: int, rows: int
    ) -> None:
        n, k = weight.n, weight.k
        buffer = npu.allocate(4 * m * (k + n))
        gpu.map(buffer)
        x = Tensor(buffer, (m, k))
        x.array[:] = np.random.default_rng(0).standard_normal((m, k))
        self.rows = rows

        def bind(device: Device, start: int, stop: int, at: int) -> BoundCall:
            op = MatMul(n=stop - start, k=k, weight_format=fmt)
            y = Tensor(buffer, (m, stop - start), offset_bytes=4 * m * (k + at))
            kernel = device.prepare(op, {"weight": weight.rows(start, stop)})
            return kernel.bind({"x": x, "y": y}, m)

        self.gpu, self.npu = bind(gpu, 0, n, 0), bind(npu, 0, n, 0)
        self.npu_tile, self.gpu_tile = bind(npu, 0, rows, 0), bind(gpu, rows, n, rows)


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def measure(
    name: str,
    m: int,
    fmt: WeightFormat,
    rounds: int,
    share: float | None,
    devices: dict[str, Device],
) -> Row:
    """All five times of one matmul, interleaved."""
    gpu, npu = devices["gpu"], devices["npu"]
    n, k = SHAPES[name]
    rng = np.random.default_rng(1)
    weight = pack(rng.standard_normal((n, k), dtype=np.float32), fmt.storage)
    copies = 1 if m > 8 else max(2, COLD_BYTES // weight.nbytes) | 1  # odd: 5 runs a round
    waits = Synchroniser(devices)  # type: ignore[arg-type]
    site = waits.site(("bench", (m,), name, name), "gpu", name)
    probe = Split(gpu, npu, weight, fmt, m, n // 64 * 32)
    if share is None:
        gpu_s = min(timed(lambda: probe.gpu.submit().wait()) for _ in range(4))
        npu_s = min(timed(probe.npu.run) for _ in range(4))
        share = npu_s / (gpu_s + npu_s)
    rows = max(32, round(n * (1 - share) / 32) * 32)
    splits = [Split(gpu, npu, weight, fmt, m, rows) for _ in range(copies)]

    def both(split: Split) -> None:
        completion = split.gpu_tile.submit()
        split.npu_tile.run()
        site.wait(completion)

    found: dict[str, list[float]] = {}
    runs: dict[str, Callable[[Split], None]] = {
        "both": both,
        "gpu_tile": lambda split: split.gpu_tile.submit().wait(),
        "npu_tile": lambda split: split.npu_tile.run(),
        "gpu": lambda split: split.gpu.submit().wait(),
        "npu": lambda split: split.npu.run(),
    }
    turn = 0
    for i in range(rounds * (1 if m > 8 else 4) + 2):
        for key, run in runs.items():
            turn += 1  # another copy each time: none finds its weights in a cache
            split = splits[turn % copies]
            seconds = timed(lambda run=run, split=split: run(split))
            if i >= 2:
                found.setdefault(key, []).append(seconds)
    median = {key: statistics.median(values) for key, values in found.items()}
    return Row(
        name, m, share, median["gpu"], median["npu"], median["gpu_tile"], median["npu_tile"],
        median["both"],
    )  # fmt: skip


def main() -> None:
    """Parse, measure, print a Markdown table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument("-m", default="256,1")
    parser.add_argument("-r", type=int, default=15)
    parser.add_argument("--share", default="auto")
    arguments = parser.parse_args()
    share = None if arguments.share == "auto" else float(arguments.share)
    opened = open_devices("hetero")
    print("| matmul | m | GPU share | GPU ms | NPU ms | GPU tile | NPU tile | both | × longer tile "
          "| × best device |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    with pinned(opened.control_core), timer_slack(1):
        for m in map(int, arguments.m.split(",")):
            for name in SHAPES:
                row = measure(
                    name,
                    m,
                    WeightFormat(arguments.weights),
                    arguments.r,
                    share,
                    opened.devices,  # type: ignore[arg-type]
                )
                times = (row.gpu_s, row.npu_s, row.gpu_tile_s, row.npu_tile_s, row.both_s)
                print(
                    f"| {name} | {m} | {row.share:.2f} | "
                    + " | ".join(f"{1e3 * t:.3f}" for t in times)
                    + f" | {row.overhead:.3f} | {min(row.gpu_s, row.npu_s) / row.both_s:.2f} |"
                )
    print(f"\nmeasured; {arguments.weights}; {json.dumps(environment())}")
    opened.close()


if __name__ == "__main__":
    main()

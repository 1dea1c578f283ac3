"""What bursts of a shared machine cost a cut that is fixed, beside one device alone.

    python bench/bursts.py [--weights w4a16] [-r 24]

Both devices compute one token of a feed-forward matrix's part each (rows of `--rows`, always
another copy of the weight), over and over and without waiting for each other: two series of times,
taken by the driver's clock and by ours. Over its own median, each says how slow its core is at a
moment. In a cut that was right for the medians each matmul takes as long as the slower device:

    alone    mean slowness of the GPU, which a plan for the GPU alone sees
    fixed    mean of the slower of the two, which a cut sees
    moved    the same if work moved at once to the device that is faster at the moment
    later    if the cut were made from the slowness so many milliseconds before

`fixed / alone` is the factor that bursts take from the gain of a cut over the GPU alone.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import numpy.typing as npt

from hetero.backends.host.affinity import pinned
from hetero.backends.host.clock import SystemClock
from hetero.backends.memory import Tensor
from hetero.backends.ops import MatMul, WeightFormat
from hetero.backends.protocol import BoundCall, Device
from hetero.measuring.benchmark import environment
from hetero.placement.device_set import open_devices
from hetero.profiler.workload import Workload

K = 2048
COPIES = 24
LAUNCHES = 900  # in the queue of a round
GRID_S = 4e-4  # moments at which the two are compared
LATER_S = (1e-3, 4e-3, 16e-3, 64e-3)
Floats = npt.NDArray[np.float64]


def calls(
    workload: Workload, device: Device, weight_format: WeightFormat, n: int
) -> list[BoundCall]:
    """The same matmul of one token with many weights."""
    op = MatMul(n=n, k=K, weight_format=weight_format)
    x, y = Tensor(device.allocate(4 * K), (1, K)), Tensor(device.allocate(4 * n), (1, n))
    x.array[:] = 0.1
    weights = [workload.pool.weight(weight_format.storage, n, K) for _ in range(COPIES)]
    kernels = [device.prepare(op, {"weight": weight}) for weight in weights]
    return [kernel.bind({"x": x, "y": y}, 1) for kernel in kernels]


def series(gpu: list[BoundCall], npu: list[BoundCall]) -> tuple[Floats, Floats]:
    """[S] slowness of both devices at the same moments (1: their medians)."""
    queue = [gpu[i % COPIES].submit() for i in range(LAUNCHES)]
    spans: list[tuple[float, float]] = []
    while not queue[-1].done():
        start_s = time.perf_counter()
        npu[len(spans) % COPIES].run()
        spans.append((start_s, time.perf_counter()))
    queue[-1].wait()
    of_gpu = np.array([completion.span() for completion in queue])
    of_npu = np.array(spans)
    of_gpu -= of_gpu[0, 0]  # two clocks: both series begin when the queue does
    of_npu -= of_npu[0, 0]
    moments = np.arange(0.01, min(of_gpu[-1, 0], of_npu[-1, 0]), GRID_S)
    slowness = []
    for found in (of_gpu, of_npu):
        seconds = found[:, 1] - found[:, 0]
        slowness.append(np.interp(moments, found[:, 0], seconds / np.median(seconds)))
    return slowness[0], slowness[1]


def judged(gpu: Floats, npu: Floats, share: float) -> dict[str, float]:
    """The module's numbers of one round; `share` of the work is the GPU's."""
    found = {
        "alone": gpu.mean(),
        "fixed": np.maximum(gpu, npu).mean(),
        "moved": (1 / (share / gpu + (1 - share) / npu)).mean(),
    }
    for late_s in LATER_S:
        late = round(late_s / GRID_S)
        known_gpu, known_npu = gpu[:-late], npu[:-late]
        speeds = share / known_gpu, (1 - share) / known_npu
        part = speeds[0] / (speeds[0] + speeds[1])  # the GPU's, by what was known
        times = part / share * gpu[late:], (1 - part) / (1 - share) * npu[late:]
        found[f"{1e3 * late_s:.0f} ms later"] = np.maximum(*times).mean()
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="w4a16", choices=[f.value for f in WeightFormat])
    parser.add_argument("--rows", default="10720,5664", help="of the GPU and of the NPU")
    parser.add_argument("-r", type=int, default=24)
    arguments = parser.parse_args()
    weight_format = WeightFormat(arguments.weights)
    rows = [int(n) for n in arguments.rows.split(",")]
    opened = open_devices("hetero")
    with pinned(opened.control_core):
        workload = Workload(opened.devices, clock=SystemClock())
        gpu, npu = (
            calls(workload, opened.devices[kind], weight_format, n)  # type: ignore[index]
            for kind, n in zip(("gpu", "npu"), rows, strict=True)
        )
        for device in opened.devices.values():
            device.settle()
        opened.devices["gpu"].set_timing(True)
        share = rows[0] / sum(rows)
        rounds = [judged(*series(gpu, npu), share) for _ in range(arguments.r)]
    print(f"measured; {weight_format}, rows {rows}, {arguments.r} rounds; 1 is undisturbed")
    print("| | mean of the rounds | least | most |\n|---|---:|---:|---:|")
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        print(f"| {name} | {np.mean(values):.3f} | {min(values):.3f} | {max(values):.3f} |")
    ratios = [found["fixed"] / found["alone"] for found in rounds]
    print(f"| fixed / alone | {np.mean(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")
    print(json.dumps(environment()))
    opened.close()


if __name__ == "__main__":
    main()

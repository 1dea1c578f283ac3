"""What pages of 2 MiB do for a matmul of one token that streams its weight, device by device.

    python bench/huge_pages.py [--model random:llama-3.2-1b] [--weights w4a8] [-r 40]

The output head of the model, its weight in pages of 4 KiB and in huge ones, in turns. The NPU's
packs are moved into huge pages afterwards (`Device.settle`), so its rows are one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import numpy as np

from hetero.backends.host.affinity import pinned
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.ops import MatMul, WeightFormat
from hetero.backends.protocol import BoundCall
from hetero.backends.weights import PackedWeight
from hetero.measuring.benchmark import environment
from hetero.models import open_model
from hetero.placement.device_set import open_devices


def copied(weight: PackedWeight, *, huge: bool) -> PackedWeight:
    """The same numbers in memory of their own."""

    def copy(array: Any) -> Any:
        target = HostBuffer(array.nbytes, huge=huge).array(array.dtype, array.shape)
        target[...] = array
        return target

    scales = None if weight.scales is None else copy(weight.scales)
    return dataclasses.replace(weight, data=copy(weight.data), scales=scales)


def main() -> None:
    """Parse, measure, print a Markdown table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--weights", default="w4a8")
    parser.add_argument("-r", type=int, default=40)
    arguments = parser.parse_args()
    weight = open_model(arguments.model, weights=arguments.weights).weights.lm_head()
    op = MatMul(n=weight.n, k=weight.k, weight_format=WeightFormat(arguments.weights))
    opened = open_devices("hetero")
    calls: dict[tuple[str, str], BoundCall] = {}
    times: dict[tuple[str, str], list[float]] = {}
    with pinned(opened.control_core):
        for kind, device in opened.devices.items():
            x = Tensor(device.allocate(4 * weight.k), (1, weight.k))
            y = Tensor(device.allocate(4 * weight.n), (1, weight.n))
            x.array[:] = np.random.default_rng(0).standard_normal(x.shape)
            for pages in ("4 KiB", "2 MiB"):
                value = copied(weight, huge=pages == "2 MiB")
                calls[kind, pages] = device.prepare(op, {"weight": value}).bind({"x": x, "y": y}, 1)
        for _ in range(arguments.r):
            for key in [key for key in calls if key != ("npu", "2 MiB")]:
                start_s = time.perf_counter()
                calls[key].run()
                times.setdefault(key, []).append(time.perf_counter() - start_s)
        opened.devices["npu"].settle()
        calls["npu", "2 MiB"].run()
        for _ in range(arguments.r):
            start_s = time.perf_counter()
            calls["npu", "2 MiB"].run()
            times.setdefault(("npu", "2 MiB"), []).append(time.perf_counter() - start_s)
    print("| device | pages | ms (median) | min | GB/s |\n|---|---|---:|---:|---:|")
    for (kind, pages), seconds in times.items():
        median = float(np.median(seconds))
        print(
            f"| {kind} | {pages} | {1e3 * median:.2f} | {1e3 * min(seconds):.2f} | "
            f"{1e-9 * weight.nbytes / median:.1f} |"
        )
    print(f"\nmeasured; {op.n} x {op.k} {arguments.weights}; {json.dumps(environment())}")


if __name__ == "__main__":
    main()

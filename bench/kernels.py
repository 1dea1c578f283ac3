"""Single kernels: cuts, OpenCL against ONNX Runtime, and what memory allows.

python bench/kernels.py split -m 256,1           # a cut matmul against its two tiles alone
python bench/kernels.py matmul --formats w4a8    # one core of OpenCL against ONNX Runtime
python bench/kernels.py attention                # on caches of every format
python bench/kernels.py ceiling                  # one core reads memory, the other, both
python bench/kernels.py unused-device            # mode hetero with a plan of the GPU alone
python bench/kernels.py growth                   # what a longer context costs
python bench/kernels.py chains                   # a step in one launch and in many
python bench/kernels.py lengths                  # prompts whose length is new, and fused launches
python bench/kernels.py rows                     # a step for several contexts
python bench/kernels.py memory-models            # hand-overs where memory is not coherent
python bench/kernels.py experts-times            # of routed experts, into a shipped profile
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

import numpy as np
import typer
from common import (
    Rounds,
    Worker,
    finish,
    in_turns,
    integers,
    new_app,
    random_weight,
    spread,
    table,
    timed,
)
from parts.attention import attention
from parts.chains import chains
from parts.experts_times import experts_times
from parts.growth import growth
from parts.lengths import lengths
from parts.matmul import matmul
from parts.memory_models import memory_models
from parts.rows import rows
from parts.unused_device import unused_device

from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.host.timers import timer_slack
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.ops import MatMul
from hetero.backends.protocol import BoundCall, Device, DeviceKind
from hetero.backends.weights import PackedWeight
from hetero.placement.device_set import open_devices
from hetero.runtime.waits import Synchroniser

app = new_app(__doc__)
app.command("matmul")(matmul)
app.command("attention")(attention)
app.command("unused-device")(unused_device)
app.command("experts-times")(experts_times)
app.command("growth")(growth)
app.command("chains")(chains)
app.command("lengths")(lengths)
app.command("rows")(rows)
app.command("memory-models")(memory_models)
SHAPES = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
COLD_BYTES = 160 << 20  # of weight copies, so that decode kernels find none in a cache
Devices = dict[DeviceKind, Device]


class Split:
    """One weight: both devices' kernels for the whole and for their tiles."""

    def __init__(
        self, devices: Devices, weight: PackedWeight, fmt: WeightFormat, m: int, rows: int
    ) -> None:
        n, k = weight.n, weight.k
        buffer = devices["npu"].allocate(4 * m * (k + n))
        devices["gpu"].map(buffer)
        x = Tensor(buffer, (m, k))
        x.array[:] = np.random.default_rng(0).standard_normal((m, k))

        def bind(device: Device, start: int, stop: int, at: int) -> BoundCall:
            op = MatMul(n=stop - start, k=k, weight_format=fmt)
            y = Tensor(buffer, (m, stop - start), offset_bytes=4 * m * (k + at))
            kernel = device.prepare(op, {"weight": weight.rows(start, stop)})
            return kernel.bind({"x": x, "y": y}, m)

        gpu, npu = devices["gpu"], devices["npu"]
        self.gpu, self.npu = bind(gpu, 0, n, 0), bind(npu, 0, n, 0)
        self.npu_tile, self.gpu_tile = bind(npu, 0, rows, 0), bind(gpu, rows, n, rows)


def split_row(
    devices: Devices, name: str, m: int, fmt: WeightFormat, rounds: int, share: float | None
) -> list[str]:
    """All five times of one matmul, interleaved; `share` of the GPU, None: by their speeds."""
    n, k = SHAPES[name]
    weight = random_weight(fmt.storage, n, k)
    waits = Synchroniser(devices)
    site = waits.wait_point(("bench", (m,), name, name), "gpu", name)
    if share is None:
        probe = Split(devices, weight, fmt, m, n // 64 * 32)
        gpu_s = min(timed(lambda: probe.gpu.submit().wait()) for _ in range(4))
        npu_s = min(timed(probe.npu.run) for _ in range(4))
        share = npu_s / (gpu_s + npu_s)
    rows = max(32, round(n * (1 - share) / 32) * 32)
    copies = 1 if m > 8 else max(2, COLD_BYTES // weight.nbytes) | 1  # odd: 5 runs a round
    splits = [Split(devices, weight, fmt, m, rows) for _ in range(copies)]
    turn = itertools.count()

    def both(split: Split) -> None:
        completion = split.gpu_tile.submit()
        split.npu_tile.run()
        site.wait(completion)

    def next_copy(run: Callable[[Split], object]) -> Callable[[], float]:
        return lambda: timed(partial(run, splits[next(turn) % copies]))

    runs: dict[str, Callable[[Split], object]] = {
        "gpu": lambda split: split.gpu.submit().wait(),
        "npu": lambda split: split.npu.run(),
        "gpu_tile": lambda split: split.gpu_tile.submit().wait(),
        "npu_tile": lambda split: split.npu_tile.run(),
        "both": both,
    }
    count = rounds * (1 if m > 8 else 4)
    found = in_turns({key: next_copy(run) for key, run in runs.items()}, count, warm=2)
    s = {key: statistics.median(times) for key, times in found.items()}
    longer = s["both"] / max(s["gpu_tile"], s["npu_tile"])
    ratios = f"{longer:.3f}", f"{min(s['gpu'], s['npu']) / s['both']:.2f}"
    return [name, str(m), f"{share:.2f}", *(f"{1e3 * s[key]:.3f}" for key in runs), *ratios]


@app.command("split")
def split(
    weights: str = "w4a8",
    m: Annotated[str, typer.Option("-m", help="token counts")] = "256,1",
    r: Rounds = 15,
    share: Annotated[float | None, typer.Option(help="of the GPU; default: by speeds")] = None,
) -> None:
    """A split matmul against its two tiles alone: the longer one is what it may take at best.

    For each matmul of Llama-3.2-1B: the row-cut that balances the devices' own speeds, as both
    tiles at once, each tile alone, and each device with the whole, interleaved.
    """
    opened = open_devices("hetero")
    print(f"measured; {weights}, {r} rounds; times in ms (medians)\n")
    head = "matmul|m|GPU share|GPU|NPU|GPU tile|NPU tile|both|× longer tile|× best device"
    with pinned(opened.control_core), timer_slack(1):
        fmt, devices = WeightFormat(weights), opened.devices
        rows = (split_row(devices, x, n, fmt, r, share) for n in integers(m) for x in SHAPES)
        table(head, rows)
    finish()
    opened.close()


class Reader:
    """Reads memory of its own in pages of 4 KiB or of 2 MiB, on one core; lives in a worker."""

    def __init__(self, *, core: int, mib: int) -> None:
        os.sched_setaffinity(0, {core})
        self._buffers = {huge: HostBuffer(mib << 20, huge=huge) for huge in (False, True)}
        for buffer in self._buffers.values():
            buffer.bytes[:] = 0

    def rate(self, huge: bool, start_s: float, seconds: float) -> float:
        """Bytes a second, from a moment on."""
        parts = np.split(self._buffers[huge].bytes.view(np.float64), 64)
        time.sleep(max(0.0, start_s - time.monotonic()))
        count, begun_s = 0, time.monotonic()
        while time.monotonic() < begun_s + seconds:
            part = parts[count % len(parts)]
            part.dot(part)
            count += 1
        return count * parts[0].nbytes / (time.monotonic() - begun_s)


@app.command("ceiling")
def ceiling(
    mib: Annotated[int, typer.Option(help="read over and over by each process")] = 512,
    seconds: Annotated[float, typer.Option(help="of each reading")] = 0.5,
    r: Rounds = 7,
) -> None:
    """How fast one core reads memory, and two at once: the most that splitting a step can gain.

    A decoding step reads every weight once, so no cut beats one device by more than what both cores
    read together over what one reads alone. What one reads here (a dot product with itself, one
    thread) is not all that its core can read, so the ratio is rather too high.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the workers
    cores = assign_cores()
    if cores.gpu is None or cores.control is None or cores.gpu == cores.control:
        raise SystemExit("this needs two cores that the process may be pinned to")
    one, other = (Worker(str(x), Reader, core=x, mib=mib) for x in (cores.gpu, cores.control))
    who = {"one": [one], "other": [other], "both": [one, other]}
    for worker in who["both"]:
        worker.start()
    with ThreadPoolExecutor(2) as pool:

        def reading(huge: bool, readers: list[Worker]) -> float:
            start_s = time.monotonic() + 0.05
            rates = pool.map(lambda x: x.ask("rate", huge, start_s, seconds), readers)
            return float(sum(rates) / 1e9)

        found = in_turns(
            {
                (pages, name): partial(reading, huge, readers)
                for pages, huge in (("4 KiB", False), ("2 MiB", True))
                for name, readers in who.items()
            },
            r,
        )
    for worker in who["both"]:
        worker.stop()
    print(f"measured; {mib} MiB each, {r} rounds\n")
    rows = [[*key, *spread(rates, digits=1)] for key, rates in found.items()]
    table("pages|who reads|GB/s (median)|min|max", rows)
    notes = []
    for pages in dict.fromkeys(pages for pages, _ in found):
        rounds = zip(*(found[pages, name] for name in ("both", "one", "other")), strict=True)
        most = statistics.median(both / max(one, other) for both, one, other in rounds)
        notes.append(f"{pages}: both over the better one {most:.2f} x (median of the rounds)")
    finish(*notes)


if __name__ == "__main__":
    app()

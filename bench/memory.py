"""How fast memory is, and what page sizes do: the limits of decoding.

python bench/memory.py ceiling      # one core, the other, both: what a split can gain
python bench/memory.py pages        # a streamed matmul in pages of 4 KiB and of 2 MiB
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Annotated, Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when numpy is loaded

import numpy as np
import typer
from common import LLAMA, Rounds, finish, in_turns, new_app, spread, table, timed

from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.ops import MatMul
from hetero.backends.protocol import BoundCall
from hetero.backends.weights import PackedWeight
from hetero.models import open_model
from hetero.placement.device_set import open_devices

app = new_app(__doc__)
PAGES = {"4 KiB": False, "2 MiB": True}
PARTS = 64


def read(core: int, mib: int, seconds: float, orders: Connection) -> None:
    """On `core`: reads pages of a kind from a moment on; answers bytes per second."""
    with pinned(core):
        buffers = {pages: HostBuffer(mib << 20, huge=huge) for pages, huge in PAGES.items()}
        for buffer in buffers.values():
            buffer.bytes[:] = 0
        orders.send(0.0)
        while (order := orders.recv()) is not None:
            pages, start_s = order
            parts = np.split(buffers[pages].bytes.view(np.float64), PARTS)
            time.sleep(max(0.0, start_s - time.monotonic()))
            count, begun_s = 0, time.monotonic()
            while time.monotonic() < begun_s + seconds:
                part = parts[count % PARTS]
                part.dot(part)
                count += 1
            orders.send(count * parts[0].nbytes / (time.monotonic() - begun_s))


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
    cores = assign_cores()
    if cores.gpu is None or cores.control is None or cores.gpu == cores.control:
        raise SystemExit("this needs two cores that the process may be pinned to")
    pipes, workers = [], []
    for core in (cores.gpu, cores.control):
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=read, args=(core, mib, seconds, theirs))
        process.start()
        pipes.append(mine)
        workers.append(process)
    for pipe in pipes:
        pipe.recv()

    def reading(pages: str, readers: list[Any]) -> Callable[[], float]:
        def run() -> float:
            start_s = time.monotonic() + 0.05
            for pipe in readers:
                pipe.send((pages, start_s))
            return float(sum(pipe.recv() for pipe in readers) / 1e9)

        return run

    who = {"one": pipes[:1], "other": pipes[1:], "both": pipes}
    cells = {f"{pages}|{name}": reading(pages, x) for pages in PAGES for name, x in who.items()}
    found = in_turns(cells, r)
    for pipe, process in zip(pipes, workers, strict=True):
        pipe.send(None)
        process.join()
    print(f"measured; {mib} MiB each, {r} rounds\n")
    rows = [[*key.split("|"), *spread(rates, digits=1)] for key, rates in found.items()]
    table("pages|who reads|GB/s (median)|min|max", rows)
    notes = []
    for pages in PAGES:
        rounds = zip(*(found[f"{pages}|{name}"] for name in ("both", "one", "other")), strict=True)
        most = statistics.median(both / max(one, other) for both, one, other in rounds)
        notes.append(f"{pages}: both over the better one {most:.2f} x (median of the rounds)")
    finish(*notes)


def copied(weight: PackedWeight, *, huge: bool) -> PackedWeight:
    """The same numbers in memory of their own."""

    def copy(array: Any) -> Any:
        target = HostBuffer(array.nbytes, huge=huge).array(array.dtype, array.shape)
        target[...] = array
        return target

    scales = None if weight.scales is None else copy(weight.scales)
    return dataclasses.replace(weight, data=copy(weight.data), scales=scales)


@app.command("pages")
def pages(model: str = LLAMA, weights: str = "w4a8", r: Rounds = 40) -> None:
    """What pages of 2 MiB do for a matmul of one token that streams its weight (the output head).

    The NPU's packs are moved into huge pages afterwards (`Device.settle`), so its rows are one
    after the other.
    """
    weight = open_model(model, weights=weights).weights.lm_head()
    op = MatMul(n=weight.n, k=weight.k, weight_format=WeightFormat(weights))
    opened = open_devices("hetero")
    calls: dict[tuple[str, str], BoundCall] = {}
    with pinned(opened.control_core):
        for kind, device in opened.devices.items():
            x = Tensor(device.allocate(4 * weight.k), (1, weight.k))
            y = Tensor(device.allocate(4 * weight.n), (1, weight.n))
            x.array[:] = np.random.default_rng(0).standard_normal(x.shape)
            for name, huge in PAGES.items():
                value = {"weight": copied(weight, huge=huge)}
                calls[kind, name] = device.prepare(op, value).bind({"x": x, "y": y}, 1)
        last = ("npu", "2 MiB")
        found: dict[Any, list[float]] = {}
        for keys in ([key for key in calls if key != last], [last]):
            if keys == [last]:
                opened.devices["npu"].settle()
            runs: Any = {key: (lambda call=calls[key]: timed(call.run)) for key in keys}
            found |= in_turns(runs, r)
    print(f"measured; {op.n} x {op.k} {weights}, {r} rounds\n")
    rows = [
        [*key, *spread(s, 1e3), f"{1e-9 * weight.nbytes / statistics.median(s):.1f}"]
        for key, s in found.items()
    ]
    table("device|pages|ms (median)|min|max|GB/s", rows)
    finish()
    opened.close()


if __name__ == "__main__":
    app()

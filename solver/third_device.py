"""A CPU as the third device of a matmul: rows [0, a) the NPU's, [a, b) its, [b, n) the GPU's.

The control thread submits the CPU's part before it calls the NPU, and knows that it is complete one
wait after its end. So NPU and CPU together are like an NPU that takes as long as the longer of the
two: for each b the best a is sought first, and what is left is a cut for two (`Overheads.cut`).
All tokens are cut alike. The GPU's and the NPU's own rows may be any two of the row cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import EVERY_KIND, KINDS
from hetero.profiler.cost import CostModel
from hetero.profiler.records import Phase, phase_of
from hetero.solver.kernel_times import Floats
from hetero.solver.npu_tiles import npu_choices
from hetero.solver.options import GPU, HOST, INF, Objective, Option
from hetero.solver.tilings import MatMulSpace

MODES: Final = (True, False)  # whether the GPU is done before the control thread
Spans: TypeAlias = AbstractSet[tuple[int, int]]  # runs of a CPU's rows


def takes_third(space: MatMulSpace) -> bool:
    """Return whether a matmul may be cut for three: the times of all are known, and no power is.

    Profiles have no power of CPUs, and memory that is not shared would have to be copied.
    """
    able = all(space.kernels.has(kind) for kind in EVERY_KIND) and len(space.rows) > 2
    return able and space.kernels.cost.profile.power is None and not space.overheads.copies


def crowding(cost: CostModel, phase: Phase, weight_format: WeightFormat | None = None) -> float:
    """Return by how much (>= 1) kernels are slower while GPU, NPU and CPU all work.

    In decoding by what they would read over what the memory gives; infinite where that is not
    known. Else by as much as two are.
    """
    two = max(cost.contention(kind, phase, weight_format) for kind in KINDS)
    if phase == "prefill":
        return two
    cpu = (x.bandwidth_bytes_per_s for x in cost.profile.units if x.device == "cpu")
    each = (cost.bandwidth("gpu"), cost.bandwidth("npu"), next(cpu, None))
    together, known = cost.bandwidth("both"), [x for x in each if x is not None]
    if together is None or len(known) < len(each):
        return INF
    return max(two, sum(known) / together)


def cuts_for_three(
    space: MatMulSpace,
    m: int,
    objective: Objective,
    max_gpu_share: float,
    spans: Spans | None = None,
) -> Iterator[Option]:
    """Yield the best cut for three of each mode, open to both states.

    The CPU's rows are one of the `spans`, which the NPU's precede (None: any). While all three work
    each is slower by `crowding`, which is charged until the last is done.
    """
    choices = npu_choices(m, space.sizes, space.alignment)
    if choices.cuts[-1] != m:
        return
    last, rows = len(choices.cuts) - 1, space.rows[:-1]
    npu, every = space.npu_times(choices)
    kernels, overheads = space.kernels, space.overheads.at(m)
    slower = crowding(kernels.cost, phase_of(m), kernels.weight_format)
    npu_s, cpu_s = slower * npu[last, :-1], slower * _cpu_times(space, m, spans)
    known_s = overheads.wait_s - overheads.npu_restart_s  # after its end; a cut adds the restart
    host_s = np.maximum(npu_s[:, None], cpu_s + known_s)
    gpu_s = slower * space.gpu_table(np.asarray([m]), space.n - rows)
    times = space.overheads.cut(kernels, m, gpu_s, host_s.min(axis=0)[None])
    fits = np.isfinite(times.elapsed_s) & (gpu_s <= max_gpu_share * (1 + 1e-12) * times.elapsed_s)
    restarts_s = np.broadcast_to(times.restarts_s, gpu_s.shape)
    cost = objective.seconds * times.elapsed_s + objective.idle * restarts_s
    for dominant in MODES:
        own = np.where(fits & (times.npu_dominant == dominant), cost, INF)[0]
        b = int(own.argmin())
        if not own[b] < INF:
            continue
        a = int(host_s[:, b].argmin())
        first, count = int(rows[a]), int(rows[b] - rows[a])
        choice = choices.group(last).start
        if space.sizes:
            choice += int(every[choices.group(last), a].argmin())
        tiles = choices.npu_tiles(choice)
        both = overheads.join_s + float(restarts_s[0, b])
        submit = overheads.submit_s if dominant and not overheads.eager else 0.0
        exact = len(tiles.spans) == 1 and tiles.sizes[0] in (None, m)
        yield Option(
            "row-cut" if exact else "hybrid-cut",
            "npu-dominant" if dominant else "gpu-dominant",
            elapsed_s=float(times.elapsed_s[0, b]),
            gpu_s=float(times.gpu_s[0, b]),
            npu_s=float(npu_s[a]),
            enter_s=(overheads.wait_s + submit + both, overheads.submit_s + both),
            leaves=HOST if dominant else GPU,
            back_s=overheads.submit_s if dominant else 0.0,
            rows=first,
            npu_tiles=tiles,
            cpu_rows=count,
            cpu_s=float(cpu_s[a, b]),
            uncertainty=max(
                space.uncertainty(tiles, first),
                float(kernels.uncertainty("cpu", [m], [count], space.k)[0, 0]),
            ),
        )


def _cpu_times(space: MatMulSpace, m: int, spans: Spans | None) -> Floats:
    """Return [A, B] seconds of the CPU's rows from each row cut to each other; infinite if none."""
    rows = space.rows[:-1]
    counts = rows[None, :] - rows[:, None]
    if spans is not None:
        prepared = [[(a, b) in spans for b in rows.tolist()] for a in rows.tolist()]
        counts = np.where(prepared, counts, 0)
    sizes, places = np.unique(np.maximum(counts, 0), return_inverse=True)
    seconds = space.kernels.table("cpu", [m], sizes, space.k).seconds[0]
    return np.where(counts > 0, seconds[places.reshape(counts.shape)], INF)

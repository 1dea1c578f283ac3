"""Contention as measured on a simulated chip whose contention is known."""

from __future__ import annotations

import pytest

from hetero.backends import simulated
from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.backends.simulated import Chip, ChipTimes
from hetero.profiler.bandwidth import measure_together
from hetero.profiler.workload import Workload
from tests.profiler.fakes import GRAPHS, W4, gpu_cost, npu_cost

FORMATS = (W4, WeightFormat.W4A8, WeightFormat.F32)


# In the last case the NPU, slowed down, would outlast the GPU: it is given less to do.
@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.3, 1.2), (1.0, 1.6)])
def test_contention_is_found_for_every_shared_format(factors: tuple[float, float]) -> None:
    chip = Chip(ChipTimes(gpu_slowdown=factors[0], npu_slowdown=factors[1]))
    opened = {}
    kinds: tuple[DeviceKind, ...] = ("gpu", "npu")
    for kind in kinds:
        capabilities = Capabilities(
            kind=kind,
            asynchronous=kind == "gpu",
            static_shapes=kind == "npu",
            graph_sizes=GRAPHS if kind == "npu" else (),
            weight_formats=FORMATS if kind == "gpu" else FORMATS[:2],
        )
        cost = gpu_cost if kind == "gpu" else npu_cost
        opened[kind] = simulated.open(
            capabilities=capabilities, cost=cost, chip=chip, compute=False
        )
    workload = Workload(opened, clock=chip.clock, cold=0)
    _, found = measure_together(workload, FORMATS, rounds=2)
    wanted = [(x, phase) for x in FORMATS[:2] for phase in ("decode", "prefill")]
    assert [(entry.weight_format, entry.phase) for entry in found] == wanted
    for entry in found:
        assert (entry.gpu, entry.npu) == pytest.approx(factors, rel=1e-6)

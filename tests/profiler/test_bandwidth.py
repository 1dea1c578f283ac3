"""Contention as measured on a simulated chip whose contention is known."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.backends import simulated
from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Capabilities, Device, DeviceKind
from hetero.backends.simulated import ChipTimes, Load, SimulatedChip
from hetero.backends.simulated.chip import ChipJob
from hetero.profiler.bandwidth import SIZES, decode_size, measure_concurrent, measure_restart
from hetero.profiler.grid import Shape, Task
from hetero.profiler.workload import TaskRunner, Workload
from tests.profiler.fakes import GRAPHS, W4, gpu_cost, npu_cost

FORMATS = (W4, WeightFormat.W4A8, WeightFormat.F32)


class Distracted(SimulatedChip):
    """A chip whose NPU calls take longer after something else was submitted."""

    submitted = False
    longer_s = 3e-5

    def submit(self, kind: DeviceKind, name: str, load: Load, compute: Any = None) -> ChipJob:
        self.submitted = True
        return super().submit(kind, name, load, compute)

    def run(self, kind: DeviceKind, name: str, load: Load, compute: Any = None) -> ChipJob:
        extra_s = self.longer_s * self.submitted
        job = super().run(kind, name, load._replace(seconds=load.seconds + extra_s), compute)
        self.submitted = False
        return job


def on(chip: SimulatedChip, *, asynchronous: bool = True) -> dict[DeviceKind, Device]:
    """A GPU and an NPU."""
    opened: dict[DeviceKind, Device] = {}
    kinds: tuple[DeviceKind, ...] = ("gpu", "npu")
    for kind in kinds:
        capabilities = Capabilities(
            kind=kind,
            asynchronous=kind == "gpu" and asynchronous,
            static_shapes=kind == "npu",
            graph_sizes=GRAPHS if kind == "npu" else (),
            weight_formats=FORMATS if kind == "gpu" else FORMATS[:2],
        )
        cost = gpu_cost if kind == "gpu" else npu_cost
        opened[kind] = simulated.open(
            capabilities=capabilities, cost=cost, chip=chip, compute=False
        )
    return opened


def test_what_an_npu_call_costs_more_after_other_work() -> None:
    chip = Distracted(ChipTimes())
    found = measure_restart(Workload(on(chip), clock=chip.clock, cold=0), W4, rounds=3)
    assert found == pytest.approx(Distracted.longer_s)
    calm = SimulatedChip(ChipTimes())
    assert measure_restart(Workload(on(calm), clock=calm.clock, cold=0), W4, rounds=3) == (
        pytest.approx(0.0, abs=1e-12)
    )
    blocking = Distracted(ChipTimes())
    workload = Workload(on(blocking, asynchronous=False), clock=blocking.clock, cold=0)
    assert measure_restart(workload, W4, rounds=3) == 0.0


# In the last case the NPU, slowed down, would outlast the GPU: it is given less to do.
@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.3, 1.2), (1.0, 1.6)])
def test_contention_is_found_for_every_shared_format(factors: tuple[float, float]) -> None:
    chip = SimulatedChip(ChipTimes(gpu_slowdown=factors[0], npu_slowdown=factors[1]))
    workload = Workload(on(chip), clock=chip.clock, cold=0)
    _, found = measure_concurrent(workload, FORMATS, rounds=2)
    wanted = [(x, phase) for x in FORMATS[:2] for phase in ("decode", "prefill")]
    assert [(entry.weight_format, entry.phase) for entry in found] == wanted
    for entry in found:
        assert (entry.gpu, entry.npu) == pytest.approx(factors, rel=1e-6)


def test_the_largest_matmul_of_a_models_blocks_stands_for_its_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [Shape("lm_head", 9000, 64), Shape("o", 64, 64), Shape("down", 64, 256)]
    made: list[tuple[int, int, int]] = []
    real = Workload.make_runner

    def make_runner(workload: Workload, task: Task, *, copies: int) -> TaskRunner:
        made.append((task.m, task.n, task.k))
        return real(workload, task, copies=copies)

    monkeypatch.setattr(Workload, "make_runner", make_runner)
    chip = SimulatedChip(ChipTimes(gpu_slowdown=1.3))
    workload = Workload(on(chip), clock=chip.clock, cold=0)
    _, found = measure_concurrent(workload, FORMATS[:1], shapes=shapes, rounds=2)
    assert made[:2] == [(1, 64, 256)] * 2
    assert found[0].gpu == pytest.approx(1.3)
    assert decode_size(()) == SIZES["decode"]
    huge = decode_size([Shape("gate_up", 100_000, 4096)])
    assert huge == (1, 4096, 4096)

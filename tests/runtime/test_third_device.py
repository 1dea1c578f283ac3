"""Matmuls cut for GPU, NPU and CPU on a simulated chip: the numbers and the time of each part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.backends import simulated
from hetero.backends.ops import MatMul, Op
from hetero.backends.protocol import DeviceKind
from hetero.backends.simulated import SimulatedChip, SimulatedDevice
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.profiler.model_graph import ModelGraph
from hetero.runtime.engine import Engine
from hetero.runtime.waits.wait_point import WaitPoint
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.plan import OpPlan, Tile
from tests.runtime.models import context_of, tiny_model
from tests.support.selection import examples

GRAPHS = (1, 8, 32)
STEP = 16  # rows
TOKENS = [3, 9, 14, 2, 7, 7, 11, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def cost(op: Op, m: int) -> float:
    """Longer for more rows, so that any device may be last."""
    return (op.n * m if isinstance(op, MatMul) else m) * 1e-6


def plan_of(spec: ModelGraph, cuts: list[float]) -> ExecutionPlan:
    """Every matmul with enough rows is cut for three at these shares, in turn."""
    base = single_device(spec, "gpu")
    entries = []
    for i, op in enumerate(base.ops):
        steps = op.n // STEP
        if steps < 3:
            entries.append(op)
            continue
        share, other = cuts[i % len(cuts)], cuts[(i + 1) % len(cuts)]
        a = STEP * (1 + round(share * (steps - 3)))
        b = a + STEP * (1 + round(other * ((op.n - a) // STEP - 2)))
        tiles = [
            Tile(device=kind, tokens=(0, None), rows=rows)
            for kind, rows in (("npu", (0, a)), ("gpu", (b, op.n)), ("cpu", (a, b)))
        ]
        entries.append(
            OpPlan(
                phase=op.phase,
                m=None,
                op=op.op,
                n=op.n,
                k=op.k,
                strategy="row-cut",
                tiles=tuple(tiles),
            )
        )
    return base.model_copy(update={"ops": tuple(entries)})


@contextmanager
def on_a_chip(
    folder: Path, cuts: list[float] | None, **options: Any
) -> Iterator[tuple[dict[DeviceKind, SimulatedDevice], Engine]]:
    """The model on three devices, or (without cuts) on one."""
    loaded = open_model(str(folder), weights="f32")
    spec = loaded.spec()
    plan = single_device(spec, "gpu") if cuts is None else plan_of(spec, cuts)
    chip = SimulatedChip()
    kinds: tuple[DeviceKind, ...] = ("gpu",) if cuts is None else ("gpu", "npu", "cpu")
    devices = {
        kind: simulated.open(
            kind=kind,
            asynchronous=kind != "npu",
            cost=cost,
            chip=chip,
            graph_sizes=GRAPHS if kind == "npu" else (),
        )
        for kind in kinds
    }
    with Engine(
        loaded.weights, plan, dict(devices), max_seq_len=64, clock=chip.clock, adapt=False,
        **options,
    ) as engine:  # fmt: skip
        yield devices, engine


def run(engine: Engine) -> list[Any]:
    context = context_of(engine)
    found = [engine.prefill(context, TOKENS[:-3]).copy()]
    return found + [engine.decode(context, token).copy() for token in TOKENS[-3:]]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    with on_a_chip(folder, None) as (_, engine):
        return run(engine)


@pytest.mark.full
@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cuts=st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_three_devices_compute_what_one_does(
    folder: Path, alone: list[Any], cuts: list[float]
) -> None:
    with on_a_chip(folder, cuts) as (devices, engine):
        for own, one in zip(run(engine), alone, strict=True):
            np.testing.assert_array_equal(own, one)
        assert set(engine.runner.last_run.counts) == set(devices)
        busy = engine.runner.last_run.usage
        assert all(use.busy_s > 0 for use in busy.values())


def test_parts_run_at_once(folder: Path) -> None:
    """The three of a matmul overlap: each device's parts add up to more than the time they take."""
    with on_a_chip(folder, [0.4]) as (devices, engine):
        run(engine)
        finished = devices["gpu"].chip.finished
        spans = {
            kind: [(x.start_s or 0.0, x.end_s or 0.0) for x in jobs if "MatMul" in x.name]
            for kind, jobs in finished.items()
        }
        assert len(spans["cpu"]) == len(spans["npu"])
        for (start, end), (first, last) in zip(spans["cpu"], spans["npu"], strict=True):
            assert start < last
            assert first < end


def test_what_a_cpu_writes_is_waited_for(
    folder: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = WaitPoint._fast
    monkeypatch.setattr(
        WaitPoint, "_fast",
        lambda self, completion: 0.0 if self.kind == "cpu" else wait(self, completion),
    )  # fmt: skip
    with on_a_chip(folder, [0.0, 1.0]) as (devices, engine):
        devices["cpu"].drift = 100.0  # the last one of all
        found = run(engine)
    assert not np.allclose(found[0], alone[0], rtol=1e-3)


def test_the_gpu_goes_on_alone_where_a_cpu_fails(folder: Path, alone: list[Any]) -> None:
    with on_a_chip(folder, [0.5], deadline_s=0.5) as (devices, engine):
        context = context_of(engine)
        engine.prefill(context, TOKENS[:-3])
        devices["cpu"].drift = 1e9
        with pytest.warns(FallbackWarning, match="alone because the cpu failed"):
            found = engine.decode(context, TOKENS[-3])
        np.testing.assert_allclose(found, alone[1], rtol=2e-5, atol=2e-5)
        assert set(engine.deployment.devices) == {"gpu"}

"""Calls in one launch, against the same calls one by one: bit by bit, from poisoned outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.memory import Tensor
from hetero.backends.opencl import megakernel
from hetero.backends.opencl.calls import OpenCLCall
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.kernel_files import source
from hetero.backends.opencl.program_source import OPTIONS, uncached
from hetero.backends.ops import OUTPUT_PORTS, Op
from hetero.backends.optional import Stages
from hetero.backends.protocol import BoundCall
from tests.backends.cases import make_tensors, make_weights

ATTENTION = ops.Attention(heads=4, kv_heads=2, head_dim=16, capacity=70)
OPS: tuple[Op, ...] = (
    ops.Embed(vocab=50, d=64, weight_format=WeightFormat.W4A8),
    ops.RMSNorm(d=64, eps=1e-5),
    ops.MatMul(n=131, k=64, weight_format=WeightFormat.W4A8),
    ops.MatMul(n=96, k=172, weight_format=WeightFormat.W8A8, bias=True),
    ops.Rope(heads=4, kv_heads=2, head_dim=16, theta=1e4, max_position=80),
    ATTENTION,
    replace(ATTENTION, kv=CacheFormat.Q8, window=9),
    ops.MatMul(n=40, k=96, weight_format=WeightFormat.W4A16),
    ops.RMSNorm(d=96, eps=1e-6, add=True),
    ops.LayerNorm(d=64, eps=1e-5),
    ops.MatMul(n=50, k=64, weight_format=WeightFormat.F32, softcap=3.0),
    ops.GatedAct(f=129),
    ops.SigmoidGate(d=70, first=0, width=75),
    ops.GatedInput(d=70, first=5, width=75),
    ops.Add(d=70, scaled=True),
    ops.Rope(heads=4, kv_heads=0, head_dim=16, theta=1e4, max_position=64, qk_norm_eps=1e-6),
    ops.Attention(heads=4, kv_heads=2, head_dim=16, capacity=64, reads=True),
    ops.GatedAdd(d=70),
    replace(ATTENTION, window=9, sinks=True),
    ops.Act(f=64, activation="gelu"),
    ops.AddPositions(d=64, rows=80, offset=2),
    ops.Add(d=37),
    ops.Router(experts=8, chosen=3, d=64),
    ops.Experts(experts=8, chosen=3, d=64, f=32, weight_format=WeightFormat.W4A16),
)


@pytest.fixture
def device(device: OpenCLDevice) -> OpenCLDevice:
    """Whose work-groups are of one work-item: not a processor's without AVX2."""
    if device.tuning.lanes > 1:
        pytest.skip(f"{device.tuning.family} has no fused launches")
    return device


class Calls:
    """Bound calls whose inputs are random; each works on tensors of its own."""

    def __init__(self, device: OpenCLDevice, operations: Sequence[Op], m: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.calls: list[BoundCall] = []
        self._outputs: list[Tensor] = []
        self._caches: list[tuple[Tensor, np.ndarray]] = []
        for op in operations:
            weights = make_weights(op, rng)
            tensors = make_tensors(op, m, rng, position=33, device=device)
            self.calls.append(device.prepare(op, weights).bind(tensors, m))
            for port, tensor in tensors.items():
                if port in OUTPUT_PORTS:
                    self._outputs.append(tensor)
                elif port.endswith(("cache", "state")):
                    self._caches.append((tensor, tensor.array.copy()))

    def after(self, calls: Sequence[BoundCall]) -> list[bytes]:
        """What they write, in order of submission."""
        for tensor in self._outputs:
            tensor.array[:] = np.nan
        for tensor, before in self._caches:
            tensor.array[:] = before
        for completion in [call.submit() for call in calls]:
            completion.wait()
        return [x.array.tobytes() for x in (*self._outputs, *(x for x, _ in self._caches))]


def fused(device: OpenCLDevice, stages: Stages) -> OpenCLCall:
    found = device.fuse([stages])
    assert found is not None
    return found[0]


STATES: tuple[Op, ...] = (
    ops.ShortConv(d=70, taps=3, gated=True),
    ops.GatedDelta(k_heads=2, v_heads=4, k_dim=16, v_dim=8, eps=1e-6),
    ops.Add(d=37),
)


@pytest.mark.full
@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.full), 7])
def test_a_fused_launch_replaces_states_once(device: OpenCLDevice, m: int) -> None:
    made = Calls(device, STATES, m, seed=m)
    wanted = made.after(made.calls)
    whole = fused(device, [[call] for call in made.calls])
    assert made.after([whole]) == wanted
    assert made.after([whole, whole]) == made.after([*made.calls, *made.calls]) != wanted


@pytest.mark.full
@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.full), 7])
def test_a_fused_launch_computes_the_same_as_its_calls(device: OpenCLDevice, m: int) -> None:
    made = Calls(device, OPS, m, seed=m)
    wanted = made.after(made.calls)
    whole = fused(device, [[call] for call in made.calls])
    for _ in range(3):  # it leaves its counters as it found them
        assert made.after([whole]) == wanted
    assert made.after([whole, whole]) == wanted
    assert not any(np.isnan(np.frombuffer(x, np.float32)).all() for x in wanted)


@pytest.mark.full
def test_several_runs(device: OpenCLDevice) -> None:
    """One program, a fused launch for each."""
    made = Calls(device, OPS, 1, seed=11)
    wanted = made.after(made.calls)
    found = device.fuse([[[x] for x in made.calls[:6]], [[x] for x in made.calls[6:]]])
    assert found is not None
    first, second = found
    assert first.launches[0][0].program is second.launches[0][0].program
    assert made.after([first, second]) == wanted


def test_calls_of_a_stage(device: OpenCLDevice) -> None:
    """Rows of several contexts: attention on caches of their own, between two other calls."""
    made = Calls(device, (OPS[1], ATTENTION, ATTENTION, ATTENTION, OPS[2]), 1, seed=5)
    wanted = made.after(made.calls)
    first, *rows, last = made.calls
    whole = fused(device, [[first], rows, [last]])
    assert made.after([whole]) == wanted


@pytest.mark.parametrize(("op", "apart"), [(1, True), (2, False), (7, False)])
def test_calls_of_a_stage_wait_where_they_may_share_memory(
    device: OpenCLDevice, op: int, apart: bool
) -> None:
    """Scratch, or the launches of one call: no race would show on one thread."""
    calls = Calls(device, (OPS[op],) * 3, 1, seed=3).calls
    waits = [entry.waits for entry in megakernel._entries([calls, calls[:1]])]
    assert (waits[0], waits[-1]) == (True, True)
    assert not any(waits[1:3]) if apart else all(waits)


@pytest.mark.full
@pytest.mark.parametrize("patience", [-(1 << 60), megakernel.PATIENCE])
def test_any_number_of_work_groups(
    device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    """The first one that runs does all the work; others find none, or leave at once."""
    made = Calls(device, OPS[:4], 1, seed=6)
    wanted = made.after(made.calls)
    monkeypatch.setattr(device, "threads", 5)
    monkeypatch.setattr(megakernel, "PATIENCE", patience)
    whole = fused(device, [[call] for call in made.calls])
    for _ in range(3):
        assert made.after([whole]) == wanted


@pytest.mark.few(2)
def test_devices_that_have_none(variant: OpenCLDevice) -> None:
    """Whose memory is not the host's, or whose work-groups are of several work-items."""
    plain = variant.unified_memory and variant.coherent and variant.tuning.lanes == 1
    made = Calls(variant, OPS[1:2], 1, seed=7)
    assert (variant.fuse([[made.calls]]) is not None) == plain


def test_calls_of_another_device_are_not_fused(
    device: OpenCLDevice, fresh_device: OpenCLDevice
) -> None:
    made = [*Calls(device, OPS[1:2], 1, seed=8).calls, *Calls(fresh_device, OPS[1:2], 1, 9).calls]
    assert device.fuse([[made]]) is None


THREADS = """
import sys
import numpy as np
from hetero.backends.opencl import megakernel
from hetero.backends.registry import open_device
from tests.backends.opencl.test_megakernel import OPS, Calls
megakernel.PATIENCE = int(sys.argv[1])
with open_device("opencl-cores") as device:
    assert device.threads > 1
    made = Calls(device, [op for op in OPS for _ in range(3)], 1, seed=10)
    wanted = made.after(made.calls)
    stages = [made.calls[i : i + 3] for i in range(0, len(made.calls), 3)]
    whole = device.fuse([stages])[0]
    for run in range(300):
        assert made.after([whole]) == wanted, run
"""


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    "patience",
    [*(pytest.param(x, marks=pytest.mark.full) for x in (-(1 << 60), 1000)), megakernel.PATIENCE],
)
@pytest.mark.usefixtures("device")
def test_threads_hand_over(patience: int) -> None:
    """On every core, whichever leaves: three hundred runs in a process of their own."""
    ran = subprocess.run(
        [sys.executable, "-c", THREADS, str(patience)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr


def test_fences_are_those_of_the_compiler(device: OpenCLDevice) -> None:
    """Not OpenCL's `mem_fence`, which PoCL implements as nothing: arm64 would reorder."""
    text = source("fences.cl") + (
        "#if !__has_builtin(__atomic_thread_fence)\n#error no fences\n#endif\n"
        "#undef mem_fence\n#define mem_fence(flags) no_fences\n"
        "__kernel void fenced(__global int *x) { RELEASE(); x[0] = 1; ACQUIRE(); }\n"
    )
    uncached(device.context, text).build(options=list(OPTIONS))

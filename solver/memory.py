"""Weight bytes that plans need on each device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hetero.backends.protocol import DeviceKind
from hetero.profiler.predict import weight_bytes
from hetero.solver.options import Option
from hetero.solver.plan import Memory, OpName
from hetero.solver.planner import Planner, Solution

PARTS: dict[str, tuple[OpName, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


class Held(NamedTuple):
    """Rows that live on each device: [0, npu) and [gpu, n)."""

    npu: int
    gpu: int


def rows_needed(option: Option, m: int, n: int) -> Held:
    """What one tiling needs."""
    if option.pieces is None or option.rows == 0:
        return Held(0, 0)
    if option.pieces.tokens < m:
        return Held(option.rows, 0)
    return Held(option.rows, option.rows if option.rows < n else n)


def union(held: Iterable[Held], n: int) -> Held:
    """Rows for all of several tilings."""
    npu, gpu = 0, n
    for rows in held:
        npu, gpu = max(npu, rows.npu), min(gpu, rows.gpu)
    return Held(npu, gpu)


def held_by_op(planner: Planner, solutions: Iterable[Solution]) -> dict[OpName, Held]:
    """Rows of every matmul; parts of a group that is apart somewhere count as themselves."""
    found: dict[OpName, list[Held]] = {}
    for solution in solutions:
        for name, option in solution.options.items():
            n, _ = planner.shape(name)
            m = 1 if name == "lm_head" else solution.scenario.m
            found.setdefault(name, []).append(rows_needed(option, m, n))
    return {name: union(held, planner.shape(name)[0]) for name, held in found.items()}


def weight_memory(planner: Planner, solutions: Iterable[Solution]) -> Memory:
    """Bytes by device; a row on both counts twice, on each as the device holds it."""
    gpu = npu = twice = 0.0
    for name, held in held_by_op(planner, solutions).items():
        n, _ = planner.shape(name)
        gpu += row_bytes(planner, "gpu", name) * (n - held.gpu)
        npu += row_bytes(planner, "npu", name) * held.npu
        twice += row_bytes(planner, "npu", name) * max(held.npu - held.gpu, 0)
    return Memory(gpu_bytes=round(gpu), npu_bytes=round(npu), twice_bytes=round(twice))


def held_bytes(planner: Planner, name: OpName, held: Held) -> float:
    """Bytes of a matmul in all layers on both devices."""
    n, _ = planner.shape(name)
    gpu, npu = row_bytes(planner, "gpu", name), row_bytes(planner, "npu", name)
    return npu * held.npu + gpu * (n - held.gpu)


def row_bytes(planner: Planner, device: DeviceKind, name: OpName) -> float:
    """Bytes of one row in all layers, in the device's own layout if it has one."""
    layers = 1 if name == "lm_head" else planner.spec.layers
    _, k = planner.shape(name)
    weight_format, record = planner.spec.weight_format, planner.profile.devices.get(device)
    own = None if record is None else record.capabilities.weight_bytes.get(weight_format)
    return layers * float(weight_bytes(weight_format, 1, k) if own is None else own * k)

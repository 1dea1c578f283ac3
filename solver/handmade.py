"""Plans made by rule, without a profile: one device, or layer level (paper section 4)."""

from __future__ import annotations

from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import ModelGraph
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import PHASES, NonMatmulDevices, OpPlan, Phase, Tile


def single_device(
    spec: ModelGraph, device: DeviceKind, graph_sizes: tuple[int, ...] = ()
) -> ExecutionPlan:
    """Return everything on one device, for any token count."""
    return layer_level(
        spec, prefill=device, decode=device, non_matmul=device, graph_sizes=graph_sizes
    )


def layer_level(
    spec: ModelGraph,
    *,
    prefill: DeviceKind = "npu",
    decode: DeviceKind = "gpu",
    non_matmul: DeviceKind = "gpu",
    graph_sizes: tuple[int, ...] = (),
) -> ExecutionPlan:
    """Return whole matmuls on one device per phase, everything else on `non_matmul`.

    The default is the paper's layer level: matmuls on the NPU and the rest on the GPU in prefill,
    the GPU alone in decode, because an NPU is slower at one token (section 5.3). The output head
    sees one token in both phases, so it follows `decode`, as all matmuls of sampled rows do.
    """
    devices: dict[Phase, DeviceKind] = {"prefill": prefill, "decode": decode}
    entries = [
        _whole(
            phase,
            matmul.name,
            matmul.n,
            matmul.k,
            decode if matmul.name in spec.sampled else devices[phase],
        )
        for phase in PHASES
        for matmul in spec.matmuls
    ]
    return ExecutionPlan(
        model=spec.name,
        ops=tuple(entries),
        non_matmul=NonMatmulDevices(prefill=non_matmul, decode=non_matmul),
        graph_sizes=graph_sizes,
    )


def _whole(phase: Phase, op: str, n: int, k: int, device: DeviceKind) -> OpPlan:
    return OpPlan.model_validate(
        {
            "phase": phase,
            "m": None,
            "op": op,
            "n": n,
            "k": k,
            "strategy": f"{device}-only",
            "tiles": (Tile(device=device, tokens=(0, None), rows=(0, n)),),
        }
    )

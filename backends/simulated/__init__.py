"""A chip that is not here, in virtual time.

`open(**options)` takes

    kind            "npu" (default) or "gpu"
    asynchronous    launches are submitted; default: for a GPU
    cost            seconds of a launch by (op, m) alone; default 1 ms
    model           what launches take, in place of `cost` (`LaunchModel`)
    chip            clock and costs shared with the chip's other device; default one of its own
    capabilities    as declared; default: those of the options below
    graph_sizes, row_alignment, token_alignment, weight_formats
    compute         whether results are computed (by `reference`, outside virtual time)

`hetero.profiler.simulated_chip` opens both devices of a chip from its profile.
"""

from __future__ import annotations

from hetero.backends import reference
from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Op
from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.backends.simulated.chip import ChipJob, ChipTimes, Load, Rendering, SimulatedChip
from hetero.backends.simulated.device import Cost, FixedCost, LaunchModel, SimulatedDevice


def one_millisecond(op: Op, m: int) -> float:  # noqa: ARG001
    """Return the default cost."""
    return 1e-3


def open(
    *,
    kind: DeviceKind = "npu",
    asynchronous: bool | None = None,
    cost: Cost = one_millisecond,
    model: LaunchModel | None = None,
    chip: SimulatedChip | None = None,
    capabilities: Capabilities | None = None,
    graph_sizes: tuple[int, ...] = (),
    row_alignment: int = 16,
    token_alignment: int = 1,
    weight_formats: tuple[WeightFormat, ...] = tuple(WeightFormat),
    compute: bool = True,
    name: str = "simulated",
) -> SimulatedDevice:
    """Open a simulated device; see the module's docstring for the options."""
    declared = capabilities or Capabilities(
        kind=kind,
        asynchronous=kind == "gpu" if asynchronous is None else asynchronous,
        static_shapes=bool(graph_sizes),
        graph_sizes=tuple(sorted(graph_sizes)),
        weight_formats=weight_formats,
        row_alignment=row_alignment,
        token_alignment=token_alignment,
        early_visibility=False,
        attention_heads=True,
        reads_panels=True,
    )
    inner = reference.open(kind=declared.kind) if compute else None
    return SimulatedDevice(
        name=name,
        capabilities=declared,
        model=model or FixedCost(cost),
        chip=chip or SimulatedChip(),
        inner=inner,
    )


__all__ = [
    "ChipJob", "ChipTimes", "Cost", "FixedCost", "LaunchModel", "Load", "Rendering",
    "SimulatedChip", "SimulatedDevice", "open",
]  # fmt: skip

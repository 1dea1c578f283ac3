"""A device that computes nothing in known times: planner, scheduler and CLI without hardware.

`open(**options)` takes

    kind            "npu" (default) or "gpu": the role it plays
    asynchronous    launches are submitted and run one after another on the device's own timeline
    graph_sizes     token counts it has graphs for; empty: any
    weight_formats  formats that it declares
    row_alignment, token_alignment    as declared in its capabilities
    cost            seconds of a launch by (op, m); default 1 ms for anything
    clock           whose time passes; default a `ManualClock` of its own (`device.clock`)
    poison          launches fill their outputs with NaN

Every launch is appended to `device.launches`.
"""

from __future__ import annotations

from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock, ManualClock
from hetero.backends.null.device import Cost, LaunchRecord, NullDevice
from hetero.backends.ops import Op
from hetero.backends.protocol import DeviceKind


def one_millisecond(op: Op, m: int) -> float:  # noqa: ARG001
    """Return the default cost."""
    return 1e-3


def open(
    *,
    kind: DeviceKind = "npu",
    asynchronous: bool = False,
    graph_sizes: tuple[int, ...] = (),
    weight_formats: tuple[WeightFormat, ...] = tuple(WeightFormat),
    row_alignment: int = 16,
    token_alignment: int = 1,
    cost: Cost = one_millisecond,
    clock: Clock | None = None,
    poison: bool = False,
) -> NullDevice:
    """Open a null device; see the module's docstring for the options."""
    return NullDevice(
        kind=kind,
        asynchronous=asynchronous,
        graph_sizes=graph_sizes,
        weight_formats=weight_formats,
        row_alignment=row_alignment,
        token_alignment=token_alignment,
        cost=cost,
        clock=clock or ManualClock(),
        poison=poison,
    )


__all__ = ["Cost", "LaunchRecord", "NullDevice", "open"]

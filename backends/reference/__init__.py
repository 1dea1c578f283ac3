"""The oracle: every operation in numpy float64, slow and plain. Also a device that fails on demand.

`open(**options)` takes

    kind            "npu" (default) or "gpu": the role it plays
    asynchronous    launches are submitted; the work is done no earlier than the host learns of it,
                    so that reading a result without waiting for it reads the old numbers
    graph_sizes     token counts it has graphs for; empty: any
    row_alignment, token_alignment    as declared in its capabilities
    delay_s         every launch takes at least this long (`math.inf`: it hangs)
    fail_launch     the launch with this number (from 0) fails, and with it the device
    clock           what delays are measured with
"""

from __future__ import annotations

from hetero.backends.host.clock import Clock, SystemClock
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.reference.device import Faults, ReferenceDevice


def open(
    *,
    kind: DeviceKind = "npu",
    asynchronous: bool = False,
    graph_sizes: tuple[int, ...] = (),
    row_alignment: int = 16,
    token_alignment: int = 1,
    delay_s: float = 0.0,
    fail_launch: int | None = None,
    clock: Clock | None = None,
) -> Device:
    """Open a reference device; see the module's docstring for the options."""
    return ReferenceDevice(
        kind=kind,
        asynchronous=asynchronous,
        graph_sizes=graph_sizes,
        row_alignment=row_alignment,
        token_alignment=token_alignment,
        faults=Faults(delay_s=delay_s, fail_launch=fail_launch),
        clock=clock or SystemClock(),
    )


__all__ = ["Faults", "ReferenceDevice", "open"]

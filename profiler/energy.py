"""Power, where the platform has a meter: RAPL, hwmon or the battery in sysfs.

Else absent, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetero.backends.host.clock import Clock
from hetero.profiler.records import Power

SYS = Path("/sys")
MICRO = 1e-6
ABSENT = "power is absent: no readable RAPL, hwmon or battery in /sys"


@dataclass(frozen=True)
class PowerMeter:
    """A source. Counters give joules (`is_energy`), the others watts at the moment."""

    source: str
    is_energy: bool
    read: Callable[[], float]
    wraps_at: float = 0.0


def find_meter(root: Path = SYS) -> PowerMeter | None:
    """Return the best source there is, or None."""
    for path in sorted(root.glob("class/powercap/*rapl:0/energy_uj")):
        if _number(path) is not None:
            wraps = _number(path.with_name("max_energy_range_uj")) or 0.0
            return PowerMeter("rapl", True, partial(_scaled, path), wraps * MICRO)
    for path in sorted(root.glob("class/hwmon/hwmon*/power1_input")):
        if _number(path) is not None:
            return PowerMeter("hwmon", False, partial(_scaled, path))
    for path in sorted(root.glob("class/power_supply/*/power_now")):
        if _number(path) is not None:
            return PowerMeter("battery", False, partial(_scaled, path))
    for path in sorted(root.glob("class/power_supply/*/current_now")):
        volts = path.with_name("voltage_now")
        if _number(path) is not None and _number(volts) is not None:
            return PowerMeter("battery", False, partial(_product, path, volts))
    return None


def mean_power_w(
    meter: PowerMeter, clock: Clock, load: Callable[[], None], duration_s: float
) -> float:
    """Mean power while `load` is repeated for `duration_s`."""
    start_s, before = clock.now(), meter.read()
    readings = []
    while clock.now() - start_s < duration_s:
        load()
        if not meter.is_energy:
            readings.append(abs(meter.read()))
    if not meter.is_energy:
        return sum(readings) / len(readings)
    used = meter.read() - before
    if used < 0:
        used += meter.wraps_at
    return max(used, 0.0) / (clock.now() - start_s)


def measure_power(
    clock: Clock,
    loads: dict[str, Callable[[], None]],
    *,
    duration_s: float = 1.0,
    meter: PowerMeter | None = None,
) -> Power | None:
    """Return power idle and under each load (`gpu`, `npu`, `both`); None where no source exists."""
    meter = meter or find_meter()
    if meter is None:
        return None
    idle_w = mean_power_w(meter, clock, lambda: clock.sleep(0.05), duration_s)
    busy = {
        f"{name}_w": mean_power_w(meter, clock, load, duration_s) for name, load in loads.items()
    }
    return Power(source=meter.source, idle_w=idle_w, **busy)


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _scaled(path: Path) -> float:
    return (_number(path) or 0.0) * MICRO


def _product(current: Path, voltage: Path) -> float:
    return _scaled(current) * _scaled(voltage)

"""State that all waits of one model share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hetero.backends.errors import WaitTimeoutError
from hetero.backends.host.clock import Clock
from hetero.backends.host.time_limits import time_limit
from hetero.backends.protocol import Device, DeviceKind
from hetero.runtime.waits.contention import CoreContention
from hetero.runtime.waits.policy import WaitPolicy
from hetero.runtime.waits.prediction import SleepTimes

SyncMethod: TypeAlias = Literal["fast", "event", "finish", "copy"]


@dataclass(slots=True)
class WaitTotals:
    """Cost of waiting: seconds asleep, seconds polling or blocked, number of waits."""

    waits: int = 0
    asleep_s: float = 0.0
    polling_s: float = 0.0

    def add(self, asleep_s: float, polling_s: float) -> None:
        """Add one wait."""
        self.waits += 1
        self.asleep_s += asleep_s
        self.polling_s += polling_s


class SharedWaits:
    """Devices, method, deadlines and clock of a model's waits, and their shared estimates.

    The deadline of a wait in a step of m tokens is `deadline_s` + m · `token_s`: a long prompt on a
    slow or busy machine is not a hung driver. HETERO_TIMEOUT_SCALE multiplies both.
    `unpolled` are devices that compute on the control thread's core as well.
    """

    def __init__(
        self,
        devices: Mapping[DeviceKind, Device],
        method: SyncMethod,
        *,
        deadline_s: float,
        token_s: float,
        sleep: SleepTimes | None,
        policy: WaitPolicy,
        clock: Clock,
        queued_s: Callable[[], float | None],
    ) -> None:
        self.devices = dict(devices)
        self.method = method
        self.deadline_s = time_limit(deadline_s)
        self.token_s = time_limit(token_s)
        self.policy = policy
        self.clock = clock
        self.sleep = sleep or SleepTimes.measure(clock, policy)
        self.totals = WaitTotals()
        self.contention = CoreContention(policy, queued_s)
        self.unpolled = {k for k, device in devices.items() if device.capabilities.every_core}

    def polls(self, kind: DeviceKind) -> bool:
        """Return whether the wait that begins now may poll; count those that may not."""
        return self.contention.polls() and kind not in self.unpolled

    def timeout(self, kernel: str, kind: DeviceKind, deadline_s: float) -> WaitTimeoutError:
        """Return the error of a wait past its deadline, with the state of each device."""
        states = "; ".join(f"{k}: {_state(d)}" for k, d in sorted(self.devices.items()))
        backend = self.devices[kind].info.backend
        return WaitTimeoutError(backend, f"{kernel} ({states})", deadline_s, kind)


def _state(device: Device) -> str:
    return f"{device.info.backend} {device.state()}"

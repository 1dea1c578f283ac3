"""Measures which way of starting a launch and of observing its end is faster on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hetero.backends.host.clock import Clock
from hetero.backends.host.time_limits import time_limit
from hetero.backends.memory import Tensor
from hetero.backends.ops import Add
from hetero.backends.optional import StreamSignal, flag_of, signal_of
from hetero.backends.protocol import DEFAULT_DEADLINE_S, BoundCall, Completion, Device, DeviceKind
from hetero.runtime.waits.policy import WaitPolicy

PORTS: Final = ("x", "residual", "y")


class Trials:
    """Times launches on the devices of one model, on the control thread."""

    def __init__(
        self, devices: Mapping[DeviceKind, Device], policy: WaitPolicy, clock: Clock
    ) -> None:
        self._policy, self._clock = policy, clock
        self._polled = {kind: device for kind, device in devices.items() if _is_polled(device)}

    def signals(self) -> dict[DeviceKind, StreamSignal]:
        """Return the signals of the devices on which ringing is faster than submitting."""
        signals: dict[DeviceKind, StreamSignal] = {}
        for kind, device in self._polled.items():
            flag = flag_of(device)
            signal = signal_of(device) if flag is not None else None
            if (
                flag is not None
                and signal is not None
                and self.signal_is_faster(device, flag, signal)
            ):
                signals[kind] = signal
        return signals

    def flags(self, signals: Mapping[DeviceKind, StreamSignal]) -> dict[DeviceKind, BoundCall]:
        """Return the flags of the devices on which polling one beats asking the driver."""
        flags: dict[DeviceKind, BoundCall] = {}
        for kind, device in self._polled.items():
            flag = flag_of(device)
            if flag is not None and self.flag_is_faster(device, flag, signals.get(kind)):
                flags[kind] = flag
        return flags

    def signal_is_faster(self, device: Device, flag: BoundCall, signal: StreamSignal) -> bool:
        """Compare a small kernel's end after a submission to an idle queue and after a signal."""
        call = self._trial(device)
        signal.reset()

        def pair() -> tuple[float, float]:
            self._clock.sleep(self._policy.calibration_s)  # the queue falls asleep
            by_submission = self._end_s([call, flag], None)
            return self._end_s([call, flag], signal), by_submission

        return self._is_faster(pair)

    def flag_is_faster(self, device: Device, flag: BoundCall, signal: StreamSignal | None) -> bool:
        """Compare a small kernel's end by its event and by a flag behind it, in turns.

        Where launches wait behind wait values, so does this one: querying the driver for a launch
        that is just being started may delay it (PoCL: 38 us by event and 26 by flag; behind a gate
        3 and 4).
        """
        call = self._trial(device)

        def pair() -> tuple[float, float]:
            by_event = self._end_s([call], signal)
            return self._end_s([call, flag], signal), self._policy.flag_gain * by_event

        return self._is_faster(pair)

    def _is_faster(self, pair: Callable[[], tuple[float, float]]) -> bool:
        """Return whether the first of a pair of times is mostly the shorter one.

        Where the first few pairs agree, as they do by far, no more are timed at a start.
        """
        first, second, agreed = [], [], 0
        for count in range(1, self._policy.trials + 1):
            a, b = pair()
            first.append(a)
            second.append(b)
            agreed += a < b
            if count == self._policy.agreed and agreed in (0, count):
                break
        return statistics.median(first) < statistics.median(second)

    def _end_s(self, calls: Sequence[BoundCall], signal: StreamSignal | None) -> float:
        """Return the seconds from a submission, or the signal it waits for, to its seen end."""
        if signal is not None:
            signal.wait_value.submit()
        else:
            start_s = self._clock.now()
        *_, last = [call.submit() for call in calls]
        if signal is not None:
            self._clock.sleep(self._policy.calibration_s)
            start_s = self._clock.now()
            signal.signal()
        self._spin(last)
        return self._clock.now() - start_s

    def _spin(self, completion: Completion) -> None:
        give_up_s = self._clock.now() + time_limit(DEFAULT_DEADLINE_S)
        while not completion.done():
            if self._clock.now() > give_up_s:
                completion.wait(0.0)  # raises

    def _trial(self, device: Device) -> BoundCall:
        """Return a small kernel, bound."""
        width = self._policy.trial_width
        tensors = {port: Tensor(device.allocate(4 * width), (1, width)) for port in PORTS}
        return device.prepare(Add(d=width), {}).bind(tensors, 1)


def _is_polled(device: Device) -> bool:
    return device.capabilities.asynchronous and not device.capabilities.every_core

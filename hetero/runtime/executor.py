"""Walks a lowered step: a flat list of bound calls and waits, without look-ups or locks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias, cast

from hetero.backends.errors import DeviceError
from hetero.backends.host.clock import Clock, SystemClock
from hetero.backends.protocol import Completion, Device
from hetero.runtime.program import PREQUEUE, RUN, SIGNAL, SUBMIT, WAIT_LAYER
from hetero.runtime.step import Step
from hetero.runtime.usage import StepRun
from hetero.runtime.watchdog import WATCHDOG

DRAIN_DEADLINE_S = 5.0
OnDeviceBusy: TypeAlias = Callable[[], object]


def nothing() -> None:
    """Do nothing: the default of `on_device_busy`."""


class Executor:
    """Runs steps on the control thread; keeps nothing between two of them.

    `running` is the current step, with the time of every action that has ended, the first its
    start, and the thread (`hetero.runtime.watchdog`). Those times are the `clock`'s.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.running: tuple[Step, list[float], int] | None = None
        WATCHDOG.watch(self)

    def run(
        self, step: Step, on_device_busy: OnDeviceBusy = nothing, devices: Iterable[Device] = ()
    ) -> StepRun:
        """Execute; when it returns, all outputs are visible to the host.

        `on_device_busy` is called before the last wait, if there is one: nothing else is left to
        do. The queues of `devices` are drained if a signal handler raises.
        """
        collecting = gc.isenabled()
        try:  # around `disable` too: a signal handler may raise right after it
            gc.disable()  # a collection in the middle of a step costs milliseconds
            step.finish_binding()
            if step.signal is not None:
                step.signal.reset()
            walked = self._walk(step, on_device_busy)
            if step.signal is not None:
                step.signal.check()
            return StepRun(step.counts, *walked, step.kinds)
        except BaseException as error:  # what is queued must not write into the next step
            drain(step)
            if not isinstance(error, DeviceError):
                drain_queues(devices)
            raise
        finally:
            self.running = None
            if collecting:
                gc.enable()

    def _walk(
        self, step: Step, on_device_busy: OnDeviceBusy
    ) -> tuple[list[float], list[float], list[float]]:
        """Run every action; return busy seconds of each of the step's kinds, stamps and sleeps.

        A completion of the run before is freed when its launch is submitted again. To touch all 200
        of a step before anything is submitted takes 0.1 ms and more: they left the caches long ago.
        """
        now, before = self.clock.now, step.completions
        completions: list[Completion | None] = [None] * len(before)
        step.completions = completions
        count = len(step.kinds)
        busy, since, last = [0.0] * count, [0.0] * count, [-1] * count
        last_wait = step.last_wait
        at_s = now()
        stamps, sleeps = [at_s], list[float]()
        self.running = step, stamps, threading.get_native_id()
        stamp, slept = stamps.append, sleeps.append
        for code, index, kind, target in step.program:
            call = cast("Any", target)
            if code == SUBMIT:
                completions[index] = call()
                before[index] = None
                if last[kind] < 0:
                    since[kind] = at_s
                last[kind] = index
                at_s = now()
            elif code == RUN:
                call()
                before_s, at_s = at_s, now()
                busy[kind] += at_s - before_s
            elif code == PREQUEUE:  # behind a wait value: not running yet
                completions[index] = call()
                before[index] = None
                at_s = now()
            elif code == SIGNAL:
                call()
                if last[kind] < 0:
                    since[kind] = at_s
                last[kind] = index
                at_s = now()
            elif code == WAIT_LAYER:
                slept(call())
                at_s = now()
            else:
                if index == last_wait:
                    on_device_busy()
                slept(call(completions[index]))
                at_s = now()
                if last[kind] == index:  # the queue is empty
                    last[kind] = -1
                    busy[kind] += at_s - since[kind]
            stamp(at_s)
        return busy, stamps, sleeps


def drain(step: Step) -> None:
    """Wait, within reason, for every launch of a step that was broken off."""
    if step.signal is not None:
        step.signal.release()
    last = {
        a.kind: a.launch
        for a in step.program
        if a.code in (SUBMIT, PREQUEUE) and step.completions[a.launch]
    }
    for index in last.values():
        completion = step.completions[index]
        if completion is not None:
            with suppress(DeviceError):  # the failure itself is on its way up
                completion.wait(DRAIN_DEADLINE_S)


def drain_queues(devices: Iterable[Device]) -> None:
    """Wait, within reason, for every launch.

    Where a signal handler raised between a submission and the store of its completion, no step
    knows of that launch.
    """
    for device in devices:
        with suppress(DeviceError):  # which the next step meets
            device.drain(DRAIN_DEADLINE_S)

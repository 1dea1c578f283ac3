"""How the control thread learns that the GPU is done (paper section 4.2, fast synchronisation).

`fast`   sleep for what is left of the predicted wait, less what a sleep may be late, then poll: a
         flag in shared memory where that is sound and faster, else the event's status
`event`  the driver's wait for one launch
`finish` the driver's wait for the whole queue, before anything else is submitted
`copy`   `finish`, and what is handed over is copied (`hetero.runtime.handover`)
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hetero.backends.errors import WaitTimeoutError
from hetero.backends.host.clock import SystemClock
from hetero.backends.memory import Tensor
from hetero.backends.ops import Add
from hetero.backends.protocol import (
    DEFAULT_DEADLINE_S,
    BoundCall,
    Completion,
    Device,
    DeviceKind,
    Doorbell,
)
from hetero.profiler.interference import waited_for_core_s
from hetero.profiler.sync import lateness

SyncMethod: TypeAlias = Literal["fast", "event", "finish", "copy"]
SiteKey: TypeAlias = tuple[str, tuple[int, ...], str, str]

RISE: Final = 0.05  # how fast a prediction follows longer waits,
FALL: Final = 0.4  # and shorter ones: it settles low, because a sleep too long is paid for in full
OUTLIER: Final = 3.0  # a wait of more than so many predictions counts as that many
EARLY: Final = 0.03  # of a wait is polled, at most so long: kernels vary, and who sleeps longer is
EARLIEST_S: Final = 0.2e-3  # woken later (a hypervisor gives the core of a long sleep to others)
OVERSLEPT: Final = 0.85  # a wait that was over when the sleep ended counts as this much of it
SHORTEST_NAP_S: Final = 30e-6
LONGEST_NAP_S: Final = 1e-3  # or so much of a wait: then the launch is looked at, for a wait may be
NAP: Final = 1 / 32  # far shorter than the one before (the first step of all is slow)
WORTH: Final = 6.0  # times the lateness: shorter waits than that and `LONG_S` are polled
LATE_S: Final = 2e-3  # polling longer than predicted by this becomes a nap between looks
LATE_NAP_S: Final = 50e-6
LATENESS: Final = 0.65  # of all sleeps that are to end no later than expected: see `SleepTimes`
LATENESS_STEP_S: Final = 2e-6
DOUBT: Final = 0.01  # of a lateness is forgotten where it seems wrong: a sleep was
FAR: Final = 4.0  # so many times less late
LONG_S: Final = 300e-6  # waits of which most should be slept through
PREEMPTED_S: Final = 500e-6  # between two looks: something else had the core
STOPPED_S: Final = 1.0  # between two looks: the whole process was stopped (Ctrl-Z)
OTHERS: Final = 0.5  # of a gap that our thread waited for other programs: it was theirs
CROWDED_GAPS: Final = 3  # of these within `CROWDED_S` mean that others use the core: a hypervisor
CROWDED_S: Final = 0.25  # takes it for a moment now and then, and that is no reason to stop polling
SLICE_S: Final = 2.5e-3  # as long as a scheduler gives the core to another program: one is enough
CROWDED_WAITS: Final = 32  # that are slept through then, because sleepers get the core back
GATELESS_STEPS: Final = 64  # a gate polls too, on the device's core
CALIBRATION_S: Final = 150e-6
CALIBRATION_SLEEPS: Final = 24
TRIALS: Final = 25
TRIAL_WIDTH: Final = 1 << 12
FLAG_GAIN: Final = 0.8
PORTS: Final = ("x", "residual", "y")


@dataclass
class SleepTimes:
    """How late `time.sleep` returns here: a sleep is asked for so much less.

    It is learned from every sleep, as it changes with what else the machine does (40 to 100 us on a
    virtual machine): steps of one size up and down, whose odds settle at a quantile.
    """

    late_s: float

    def saw(self, late_s: float) -> None:
        """A sleep was so late."""
        share = LATENESS if late_s > self.late_s else LATENESS - 1
        self.late_s = max(0.0, self.late_s + share * LATENESS_STEP_S)
        if late_s < self.late_s / FAR:
            self.doubt()

    def doubt(self) -> None:
        """Sleeps are not so late, or so late that a long wait was not slept through: that may be
        left from a disturbance, and only another sleep can tell.
        """
        self.late_s *= 1 - DOUBT

    @classmethod
    def measure(cls) -> SleepTimes:
        """The same quantile of a few sleeps; some milliseconds."""
        late = lateness(SystemClock(), CALIBRATION_S, CALIBRATION_SLEEPS)
        return cls(late[int(LATENESS * len(late))])


@dataclass
class WaitTotals:
    """What waiting cost: seconds asleep, seconds polling or blocked, and how many waits."""

    waits: int = 0
    asleep_s: float = 0.0
    polling_s: float = 0.0


class Site:
    """A place in the steps of one token count where a device is waited for; all layers share it.

    `expected_s` predicts the wait from the moment that the control thread arrives, learned from
    every run. `wait` returns the seconds that the control thread slept.
    """

    def __init__(self, owner: Synchroniser, key: SiteKey, kind: DeviceKind, name: str) -> None:
        self.owner, self.key, self.kind, self.name = owner, key, kind, name
        self.expected_s = 0.0
        self.samples = 0
        self.wait: Callable[[Completion], float] = {
            "fast": self._fast,
            "event": self._event,
            "finish": self._finish,
            "copy": self._finish,
        }[owner.method]

    def _fast(self, completion: Completion) -> float:
        if completion.done():
            self._learn(0.0)
            return 0.0
        now = time.perf_counter
        start_s = now()
        polls = self.owner.polls(self.kind)
        late_s = self.owner.sleep.late_s
        nap_s, napped_s = self.expected_s - late_s, 0.0
        nap_s -= min(EARLY * self.expected_s, EARLIEST_S)
        # A third of all sleeps is later than expected, and what runs next finds the core cold: in
        # a short wait that costs more time than is slept.
        worth = not polls or self.expected_s > min(WORTH * late_s, LONG_S)
        if worth and nap_s > SHORTEST_NAP_S:
            looked_s, napped_s = self._nap(completion, start_s, nap_s)
            if completion.done():
                self._learn(looked_s + OVERSLEPT * (napped_s - looked_s))
                self._count(napped_s, 0.0)
                return napped_s
        elif self.expected_s > LONG_S:
            self.owner.sleep.doubt()
        (self._poll if polls else self._doze)(completion, start_s)
        waited_s = now() - start_s
        if not polls:
            napped_s = waited_s
        self._learn(waited_s)
        self._count(napped_s, waited_s - napped_s)
        return napped_s

    def _nap(self, completion: Completion, start_s: float, nap_s: float) -> tuple[float, float]:
        """Sleep for so long, or less if the launch is done before; seconds from `start_s` to the
        last look at it before the end of the sleep, and to that.
        """
        now, sleep, end_s = time.perf_counter, self.owner.sleep, start_s + nap_s
        longest_s = max(LONGEST_NAP_S, NAP * nap_s)
        looked_s, left_s = start_s, nap_s
        while True:
            last = left_s < longest_s + sleep.late_s + SHORTEST_NAP_S
            asked_s = left_s if last else longest_s
            time.sleep(asked_s)
            woke_s = now()
            sleep.saw(woke_s - looked_s - asked_s)
            left_s = end_s - woke_s  # none is left where this piece was very late
            if last or left_s < SHORTEST_NAP_S or completion.done():
                return looked_s - start_s, woke_s - start_s
            looked_s = woke_s

    def _poll(self, completion: Completion, start_s: float) -> None:
        done, now = completion.done, time.perf_counter
        late_s = start_s + self.expected_s + LATE_S
        give_up_s = start_s + self.owner.deadline_s
        looked_s = now()
        while not done():
            at_s = now()
            if at_s - looked_s > PREEMPTED_S:
                self.owner.preempted(at_s, at_s - looked_s)
                give_up_s += _stopped(at_s - looked_s)
            looked_s = at_s
            if at_s > late_s:
                if at_s > give_up_s:
                    raise self.owner.timeout(self.name, self.kind)
                time.sleep(LATE_NAP_S)
                looked_s = now()
                give_up_s += _stopped(looked_s - at_s)

    def _doze(self, completion: Completion, start_s: float) -> None:
        """Wait in naps: who polls on a core that others use as well loses it for milliseconds, or
        takes it from the device that is waited for.
        """
        looked_s = time.perf_counter()
        give_up_s = start_s + self.owner.deadline_s
        while not completion.done():
            time.sleep(SHORTEST_NAP_S)
            at_s = time.perf_counter()
            give_up_s += _stopped(at_s - looked_s)
            looked_s = at_s
            if at_s > give_up_s:
                raise self.owner.timeout(self.name, self.kind)

    def _event(self, completion: Completion) -> float:
        start_s = time.perf_counter()
        completion.block()
        self._count(0.0, time.perf_counter() - start_s)
        return 0.0

    def _finish(self, completion: Completion) -> float:
        start_s = time.perf_counter()
        self.owner.devices[self.kind].finish()
        completion.wait(self.owner.deadline_s)
        self._count(0.0, time.perf_counter() - start_s)
        return 0.0

    def _learn(self, waited_s: float) -> None:
        self.samples += 1
        if self.samples == 1:
            self.expected_s = waited_s
            return
        seen_s = min(waited_s, OUTLIER * self.expected_s + SHORTEST_NAP_S)
        rate = RISE if seen_s > self.expected_s else FALL
        self.expected_s += rate * (seen_s - self.expected_s)

    def _count(self, asleep_s: float, polling_s: float) -> None:
        totals = self.owner.totals
        totals.waits += 1
        totals.asleep_s += asleep_s
        totals.polling_s += polling_s


class Synchroniser:
    """The waits of one model: its method, its sites and what they learned. Control thread only.

    `eager`: a GPU tile is submitted before the control thread waits for earlier work, so that the
    queue never runs dry; with `finish` and `copy` that would wait for the tile as well. `bells` are
    for `fast` with `gates` where they gain (`hetero.runtime.program`).
    """

    def __init__(
        self,
        devices: Mapping[DeviceKind, Device],
        method: SyncMethod = "fast",
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        sleep: SleepTimes | None = None,
        gates: bool = True,
    ) -> None:
        self.devices = dict(devices)
        self.method = method
        self.deadline_s = deadline_s
        self.sleep = sleep or SleepTimes.measure()
        self.totals = WaitTotals()
        self.crowded = 0  # waits that are still to be slept through
        self.unpolled = {k for k, device in devices.items() if device.capabilities.every_core}
        self._gateless = 0  # steps that are still to run without gates
        self._gaps: deque[float] = deque(maxlen=CROWDED_GAPS)  # when the core was lost
        self._queued_s: dict[int, float] = {}  # by thread, until the last loss
        fast = method == "fast"
        self.bells: dict[DeviceKind, Doorbell] = find_bells(devices) if fast and gates else {}
        self.flags: dict[DeviceKind, BoundCall] = find_flags(devices, self.bells) if fast else {}
        self._sites: dict[tuple[SiteKey, DeviceKind], Site] = {}

    @property
    def eager(self) -> bool:
        """See the class."""
        return self.method not in ("finish", "copy")

    def polls(self, kind: DeviceKind) -> bool:
        """Whether the wait that begins now may keep the core busy; counts those that may not."""
        if self.crowded:
            self.crowded -= 1
            return False
        return kind not in self.unpolled

    def preempted(self, at_s: float, lost_s: float) -> None:
        """Something else had the control core for so long, until this moment. Where that was
        another program for long, or is one often, sleep more and poll less for a while. A
        hypervisor gives the core back to who sleeps no sooner than to who polls.
        """
        thread, queued_s = threading.get_native_id(), waited_for_core_s()
        if queued_s is not None:
            before_s = self._queued_s.get(thread, 0.0)
            self._queued_s[thread] = queued_s
            if queued_s - before_s < OTHERS * lost_s:
                return
        self._gaps.append(at_s)
        often = len(self._gaps) == CROWDED_GAPS and at_s - self._gaps[0] < CROWDED_S
        if often or lost_s > SLICE_S:
            self.crowd()

    def crowd(self) -> None:
        """Others use the control core."""
        self.crowded = CROWDED_WAITS
        self._gateless = GATELESS_STEPS

    def gates_now(self) -> bool:
        """Whether the step that begins now is to have gates; counts the steps."""
        self._gateless = max(0, self._gateless - 1)
        return self._gateless == 0

    def site(self, key: SiteKey, kind: DeviceKind, name: str) -> Site:
        """The site of a phase, its chunks' tokens, the waiting node and the awaited node."""
        if (key, kind) not in self._sites:
            self._sites[key, kind] = Site(self, key, kind, name)
        return self._sites[key, kind]

    def timeout(self, kernel: str, kind: DeviceKind) -> WaitTimeoutError:
        """A wait past its deadline, with what each device says of itself."""
        states = "; ".join(f"{k}: {_state(d)}" for k, d in sorted(self.devices.items()))
        backend = self.devices[kind].info.backend
        return WaitTimeoutError(backend, f"{kernel} ({states})", self.deadline_s, kind)


def find_bells(devices: Mapping[DeviceKind, Device]) -> dict[DeviceKind, Doorbell]:
    """Doorbells of the devices on which ringing is faster than submitting (measured)."""
    found: dict[DeviceKind, Doorbell] = {}
    for kind, device in devices.items():
        flag = device.flag() if _is_polled(device) else None
        bell = device.doorbell() if flag is not None else None
        if flag is not None and bell is not None and _bell_is_faster(device, flag, bell):
            found[kind] = bell
    return found


def find_flags(
    devices: Mapping[DeviceKind, Device], bells: Mapping[DeviceKind, Doorbell]
) -> dict[DeviceKind, BoundCall]:
    """Flags of the devices on which watching one is faster than asking the driver (measured)."""
    found: dict[DeviceKind, BoundCall] = {}
    for kind, device in devices.items():
        flag = device.flag() if _is_polled(device) else None
        if flag is not None and _flag_is_faster(device, flag, bells.get(kind)):
            found[kind] = flag
    return found


def _is_polled(device: Device) -> bool:
    return device.capabilities.asynchronous and not device.capabilities.every_core


def _bell_is_faster(device: Device, flag: BoundCall, bell: Doorbell) -> bool:
    """A small kernel's end after submitting it to an idle queue and after a ring, in turns."""
    call = _trial(device)
    by_submission, by_ring = [], []
    bell.settle()
    for _ in range(TRIALS):
        time.sleep(CALIBRATION_S)  # the queue falls asleep
        by_submission.append(_end_s([call, flag], None))
        by_ring.append(_end_s([call, flag], bell))
    return statistics.median(by_ring) < statistics.median(by_submission)


def _flag_is_faster(device: Device, flag: BoundCall, bell: Doorbell | None) -> bool:
    """A small kernel's end by its event and by a flag behind it, in turns.

    A flag is a second kernel to submit, so a difference within the noise is none. Where launches
    wait behind gates so does this one: who asks a driver for a launch that is just being started
    may hold it up (PoCL: 38 us by event and 26 by flag, behind a gate 3 and 4).
    """
    call = _trial(device)
    by_event, by_flag = [], []
    for _ in range(TRIALS):
        by_event.append(_end_s([call], bell))
        by_flag.append(_end_s([call, flag], bell))
    return statistics.median(by_flag) < FLAG_GAIN * statistics.median(by_event)


def _end_s(calls: Sequence[BoundCall], bell: Doorbell | None) -> float:
    """From submitting some calls, or ringing the bell that they wait for, until the last one's end
    is seen.
    """
    if bell is not None:
        bell.gate.submit()
    else:
        start_s = time.perf_counter()
    *_, last = [call.submit() for call in calls]
    if bell is not None:
        time.sleep(CALIBRATION_S)
        start_s = time.perf_counter()
        bell.ring()
    _spin(last)
    return time.perf_counter() - start_s


def _trial(device: Device) -> BoundCall:
    """A small kernel."""
    tensors = {port: Tensor(device.allocate(4 * TRIAL_WIDTH), (1, TRIAL_WIDTH)) for port in PORTS}
    return device.prepare(Add(d=TRIAL_WIDTH), {}).bind(tensors, 1)


def _stopped(gap_s: float) -> float:
    """The part of a gap between two looks that counts for no deadline: devices may stop as well."""
    return gap_s if gap_s > STOPPED_S else 0.0


def _spin(completion: Completion) -> None:
    give_up_s = time.perf_counter() + DEFAULT_DEADLINE_S
    while not completion.done():
        if time.perf_counter() > give_up_s:
            completion.wait(0.0)  # raises


def _state(device: Device) -> str:
    return f"{device.info.backend} {device.state()}"

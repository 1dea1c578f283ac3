"""Work that is queued before its inputs are ready: it starts when the host stores a number.

A wait is a kernel of one item. It increments a word, by which the host sees that everything before
it is complete (as by a `Flag`), then polls another word until the host has signalled so many waits.
The queue never runs empty, so its worker never sleeps, and starting the calls after a wait costs a
store to memory instead of a submission and the wake-up of a thread.

That is only sound where a running kernel sees the host's stores, and the kernels after it the data
stored before: `_probe` tries both, once for each device. On processors that do not keep the order
of stores, such as Arm's, a fence goes in front of the number.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.host.fence import fence
from hetero.backends.host.time_limits import time_limit
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import KernelLaunch, OpenCLCall
from hetero.backends.opencl.failures import BACKEND
from hetero.backends.opencl.flag import Flag, FlagCompletion, ProbePolicy, flag_program
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.visibility import ProbeCall
from hetero.backends.optional import StreamSignal
from hetero.backends.protocol import DEFAULT_DEADLINE_S, BoundCall, Completion

SIGNALLED, REACHED, GAVE_UP = 0, 16, 32  # 32-bit words, a cache line each, as in flag.cl
WORDS: Final = GAVE_UP + 16
MAX_POLLS: Final = 2**31 - 1  # of a wait's 32-bit count
PROBE: Final = ProbePolicy(floats=1 << 14)


class WaitValueCall(BoundCall):
    """The kernel that waits.

    Its completion is that of everything before it. Counts its submissions.
    """

    def __init__(self, device: Resources) -> None:
        self.name, self.m = "wait", 1
        self.device = device
        self._tensor = Tensor(device.allocate(4 * WORDS), (WORDS,), np.dtype(np.int32))
        self.words = self._tensor.array.view(np.uint32)
        self.word = self.words[REACHED : REACHED + 1]
        self.submissions = 0
        self._call = self._bound(MAX_POLLS)

    def submit(self) -> FlagCompletion:
        """Enqueue and flush."""
        self.submissions += 1  # first: what an interruption leaves in the queue is counted
        return FlagCompletion(self, self._call.submit())

    def run(self) -> None:
        """Refuse: a wait alone has nothing to wait for."""
        raise TypeError("a wait is submitted, then passed by StreamSignal.signal")

    def be_patient(self, patience_s: float, repeats: int = 3, tried: int = 20_000) -> None:
        """Give up only after `patience_s`, by how long `tried` polls take here.

        The shortest of `repeats` counts; it never polls more than 2^31 times.
        """
        times = []
        self._call = self._bound(tried)
        for _ in range(repeats):
            start_s = time.perf_counter()
            self.submit().wait()  # not signalled: it gives up
            times.append(time.perf_counter() - start_s)
        polls = int(tried * patience_s / min(times))
        self._call = self._bound(min(polls, MAX_POLLS))
        self.words[:] = 0
        self.submissions = 0

    def _bound(self, polls: int) -> OpenCLCall:
        program = flag_program(self.device)
        launch = KernelLaunch(program, "wait_value", (1,), (1,), (1, self._tensor, polls))
        return OpenCLCall(self.device, self.name, 1, [launch], {}, keep=(self._tensor,))


class OpenCLStreamSignal(StreamSignal):
    """See `StreamSignal`. Waits and signals are numbered from the last `reset`, modulo 2^32."""

    def __init__(self, device: Resources, flag: Flag) -> None:
        self.wait_value = self._wait_value = WaitValueCall(device)
        self._words = self._wait_value.words
        self._flag = flag
        self._signalled = 0
        self._wait_value.be_patient(time_limit(DEFAULT_DEADLINE_S))

    def signal(self) -> None:
        """See `StreamSignal.signal`."""
        self._signalled = signalled = (self._signalled + 1) & 0xFFFFFFFF
        fence()  # what was stored before the number is seen before it
        self._words[SIGNALLED] = signalled

    def release(self) -> None:
        """See `StreamSignal.release`."""
        self._signalled = self._wait_value.submissions & 0xFFFFFFFF
        fence()
        self._words[SIGNALLED] = self._signalled

    def reset(self) -> None:
        """See `StreamSignal.reset`."""
        reached = int(self._words[REACHED])
        if not reached == self._signalled == self._wait_value.submissions & 0xFFFFFFFF:
            self.release()
            self._flag.submit().wait(DEFAULT_DEADLINE_S)
            self._wait_value.submissions = int(self._words[REACHED])
            self.release()
        self._words[GAVE_UP] = 0

    def check(self) -> None:
        """See `StreamSignal.check`."""
        if self._words[GAVE_UP]:
            raise DeviceError(
                BACKEND,
                "waiting for the control thread's signal",
                f"no signal within {MAX_POLLS} polls or {time_limit(DEFAULT_DEADLINE_S):.0f} s",
                "use --sync event",
            )


def find_stream_signal(device: Resources, flag: Flag | None) -> OpenCLStreamSignal | None:
    """Return a signal that works on this device, which has this flag.

    Probing takes milliseconds.
    """
    if flag is None:
        return None
    signal = OpenCLStreamSignal(device, flag)
    return signal if _probe(device, signal, flag) else None


def _probe(
    device: Resources, signal: OpenCLStreamSignal, flag: Flag, policy: ProbePolicy = PROBE
) -> bool:
    """Return whether waits block, pass at a signal, and make earlier stores visible."""
    add = ProbeCall.of(device, policy.floats)
    _, x, residual, y = add
    calls = add.handed_over()
    for i in range(policy.probes):
        x.array[:], residual.array[:], y.array[:] = -1.0, 1.0, np.nan
        reached = signal.wait_value.submit()
        for each in calls:
            each.submit()
        end = flag.submit()
        blocked = _completes_within(reached, policy.deadline_s) and bool(np.isnan(y.array).all())
        x.array[:] = i
        signal.signal()
        if not (
            blocked and _completes_within(end, policy.deadline_s) and bool((y.array == i + 1).all())
        ):
            end.wait()
            return False
    return True


def _completes_within(completion: Completion, deadline_s: float) -> bool:
    give_up_s = time.perf_counter() + deadline_s
    while not completion.done():
        if time.perf_counter() > give_up_s:
            return False
    return True

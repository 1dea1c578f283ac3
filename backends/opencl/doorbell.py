"""Work that is queued before its inputs are there: it starts when the host stores a number.

A gate is a kernel of one item. It counts up a word, by which the host sees that everything before
it is complete (as by a `Flag`), then watches another word until the host has opened so many gates.
The queue never runs dry, so its worker never falls asleep, and starting what is behind a gate costs
a store to memory instead of a submission and the wake-up of a thread.

That is only sound where a running kernel sees the host's stores, and kernels behind it the data
stored before: `probe` tries both, once for each device. It is only offered on processors that keep
the order of stores (x86), since Python has no other means to.
"""

from __future__ import annotations

import platform
import time
from typing import Final

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.host.limits import time_limit
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Launch, OpenCLCall
from hetero.backends.opencl.failures import BACKEND
from hetero.backends.opencl.flag import Flag, FlagCompletion, ProbePolicy, flag_program
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import Add
from hetero.backends.protocol import DEFAULT_DEADLINE_S, BoundCall, Completion, Doorbell

ORDERED_STORES: Final = frozenset({"x86_64", "AMD64"})
OPENED, REACHED, GAVE_UP = 0, 16, 32  # 32-bit words, a cache line each, as in flag.cl
WORDS: Final = GAVE_UP + 16
MOST_LOOKS: Final = 2**31 - 1  # of a gate's 32-bit count
PROBE: Final = ProbePolicy(floats=1 << 14)


class Gate(BoundCall):
    """The kernel; its completion is that of everything before it. Counts its submissions."""

    def __init__(self, device: Resources) -> None:
        self.name, self.m = "gate", 1
        self.device = device
        self._tensor = Tensor(device.allocate(4 * WORDS), (WORDS,), np.dtype(np.int32))
        self.words = self._tensor.array.view(np.uint32)
        self.word = self.words[REACHED : REACHED + 1]
        self.submissions = 0
        self._call = self._bound(MOST_LOOKS)

    def submit(self) -> FlagCompletion:
        """Enqueue and flush."""
        self.submissions += 1  # first: what an interruption leaves in the queue is counted
        return FlagCompletion(self, self._call.submit())

    def run(self) -> None:
        """A gate alone would wait for nobody."""
        raise TypeError("a gate is submitted, then opened by Doorbell.ring")

    def be_patient(self, patience_s: float, trials: int = 3, tried: int = 20_000) -> None:
        """Give up only after so many seconds, by how long `tried` looks take here, the shortest of
        some trials (or 2^31 looks).
        """
        times = []
        self._call = self._bound(tried)
        for _ in range(trials):
            start_s = time.perf_counter()
            self.submit().wait()  # not opened: it gives up
            times.append(time.perf_counter() - start_s)
        looks = int(tried * patience_s / min(times))
        self._call = self._bound(min(looks, MOST_LOOKS))
        self.words[:] = 0
        self.submissions = 0

    def _bound(self, looks: int) -> OpenCLCall:
        program = flag_program(self.device)
        launch = Launch(program, "gate", (1,), (1,), (1, self._tensor, looks))
        return OpenCLCall(self.device, self.name, 1, [launch], {"position": self._tensor})


class OpenCLDoorbell(Doorbell):
    """See `Doorbell`. Gates and rings are numbered from the last `settle` on, modulo 2^32."""

    def __init__(self, device: Resources, flag: Flag) -> None:
        self.gate = self._gate = Gate(device)
        self._words = self._gate.words
        self._flag = flag
        self._opened = 0
        self._gate.be_patient(time_limit(DEFAULT_DEADLINE_S))

    def ring(self) -> None:
        """See `Doorbell.ring`."""
        self._opened = opened = (self._opened + 1) & 0xFFFFFFFF
        self._words[OPENED] = opened

    def release(self) -> None:
        """See `Doorbell.release`."""
        self._opened = self._gate.submissions & 0xFFFFFFFF
        self._words[OPENED] = self._opened

    def settle(self) -> None:
        """See `Doorbell.settle`."""
        reached = int(self._words[REACHED])
        if not reached == self._opened == self._gate.submissions & 0xFFFFFFFF:
            self.release()
            self._flag.submit().wait(DEFAULT_DEADLINE_S)
            self._gate.submissions = int(self._words[REACHED])
            self.release()
        self._words[GAVE_UP] = 0

    def check(self) -> None:
        """See `Doorbell.check`."""
        if self._words[GAVE_UP]:
            raise DeviceError(
                BACKEND,
                "waiting at a gate for the control thread",
                f"not opened within {MOST_LOOKS} looks or {time_limit(DEFAULT_DEADLINE_S):.0f} s",
                "use --sync event",
            )


def find_doorbell(device: Resources, flag: Flag | None) -> OpenCLDoorbell | None:
    """A doorbell that works on this device, which has this flag; tried, some milliseconds."""
    if flag is None or platform.machine() not in ORDERED_STORES:
        return None
    bell = OpenCLDoorbell(device, flag)
    return bell if _probe(device, bell, flag) else None


def _probe(
    device: Resources, bell: OpenCLDoorbell, flag: Flag, policy: ProbePolicy = PROBE
) -> bool:
    """Whether gates hold, open at a store, and let what was stored before be seen."""
    floats = policy.floats
    size = 4 * floats
    buffer = device.allocate(3 * size)
    x, residual, y = (Tensor(buffer, (1, floats), offset_bytes=size * i) for i in range(3))
    add = device.prepare(Add(d=floats), {})
    call = add.bind({"x": x, "residual": residual, "y": y}, 1)
    for i in range(policy.probes):
        x.array[:], residual.array[:], y.array[:] = -1.0, 1.0, np.nan
        reached = bell.gate.submit()
        call.submit()
        end = flag.submit()
        held = _soon(reached, policy.deadline_s) and bool(np.isnan(y.array).all())
        x.array[:] = i
        bell.ring()
        if not (held and _soon(end, policy.deadline_s) and bool((y.array == i + 1).all())):
            end.wait()
            return False
    return True


def _soon(completion: Completion, deadline_s: float) -> bool:
    give_up_s = time.perf_counter() + deadline_s
    while not completion.done():
        if time.perf_counter() > give_up_s:
            return False
    return True

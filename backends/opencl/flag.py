"""A completion flag in shared memory: a one-item kernel after the others counts up a word.

The host learns of the end by reading memory instead of asking the driver (paper section 4.2). That
is only sound where the flag and the data written before it are seen by the host while the queue is
still at work; `probe` tries that, once for each device.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from hetero.backends.host.fence import fence
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import KernelLaunch, OpenCLCall
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.visibility import ProbeCall
from hetero.backends.protocol import DEFAULT_DEADLINE_S, BoundCall, Completion


@dataclass(frozen=True, kw_only=True)
class ProbePolicy:
    """Policy of probing whether the host and running kernels see each other's stores.

    probes      launches; each has to be seen
    floats      values that each writes
    deadline_s  of one: a busy machine is late, not wrong
    """

    probes: int = 20
    floats: int = 1 << 16
    deadline_s: float = 1.0


DEFAULT: Final = ProbePolicy()


def flag_program(device: Resources) -> cl.Program:
    """Return the built program of `kernels/flag.cl`.

    It is in a standard with fences that reach the host, where the device has one.
    """
    version = re.match(r"OpenCL C (\d)\.\d", device.native.opencl_c_version)
    is_cpu = bool(device.native.type & cl.device_type.CPU)
    newer = not is_cpu and version is not None and int(version[1]) >= 2
    options = (f"-cl-std=CL{version[1]}.0",) if newer and version is not None else ()
    return device.programs.get("flag.cl", {}, before=("fences.cl",), options=options)


class Flag(BoundCall):
    """Submitted after a launch; its completion is seen in memory. Counts its submissions."""

    def __init__(self, device: Resources) -> None:
        self.name, self.m = "completion flag", 1
        self.buffer = device.allocate(64)
        self.word = self.buffer.array(np.int32, (1,))
        self.submissions = 0
        program = flag_program(device)
        tensor = Tensor(self.buffer, (1,), np.dtype(np.int32))
        launch = KernelLaunch(program, "raise_flag", (1,), (1,), (1, tensor))
        self._call = OpenCLCall(device, self.name, 1, [launch], {}, keep=(tensor,))

    def submit(self) -> FlagCompletion:
        """Enqueue and flush."""
        self.submissions += 1
        return FlagCompletion(self, self._call.submit())

    def run(self) -> None:
        """Submit and wait."""
        self.submit().wait()


class Counted(Protocol):
    """A call whose kernel counts up `word` to the number of `submissions`."""

    word: npt.NDArray[Any]
    submissions: int


class FlagCompletion(Completion):
    """Done when the word has reached this submission's number, or when the driver says so.

    The driver is asked after so many polls of the word, for its errors.
    """

    def __init__(self, flag: Counted, event: Completion, ask_every: int = 64) -> None:
        self._word, self._event = flag.word, event
        self._number = flag.submissions
        self._polls, self._ask_every = 0, ask_every

    def done(self) -> bool:
        """See `Completion.done`."""
        if (int(self._word[0]) - self._number) & 0x80000000 == 0:  # a 32-bit counter goes round
            fence()  # what was written before the word is read after it
            return True
        self._polls += 1
        return self._polls % self._ask_every == 0 and self._event.done()

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """See `Completion.wait`."""
        self._event.wait(deadline_s)

    def block(self) -> None:
        """Wait as the driver does."""
        self._event.block()

    def span(self) -> tuple[float, float] | None:
        """See `Completion.span`. The flag is seen before the driver has the kernel's times."""
        self._event.wait()
        return self._event.span()


def probe(device: Resources, flag: Flag, policy: ProbePolicy = DEFAULT) -> bool:
    """Return whether the flag is seen before the driver reports the end.

    All data before it must be seen as well.
    """
    add = ProbeCall.of(device, policy.floats)
    call, x, residual, y = add
    calls = add.handed_over()
    early = False
    for i in range(policy.probes):
        x.array[:], residual.array[:], y.array[:] = i, 1.0, np.nan
        for each in calls:
            each.submit()
        flag.submit()
        later = call.submit()  # keeps the queue at work, so that its end shows nothing
        give_up_s = time.perf_counter() + policy.deadline_s
        while int(flag.word[0]) != flag.submissions:
            if time.perf_counter() > give_up_s:
                later.wait()
                return False
        fence()
        early = early or not later.done()  # else a flag may just come with the queue's end
        seen = bool((y.array == i + 1).all())
        later.wait()
        if not seen:
            return False
    return early

"""Interfaces that only some devices have, besides the core of `Device`.

A device class derives from those that it implements; callers ask with `isinstance`, and go without
where the answer is no.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from hetero.backends.groups import Group
from hetero.backends.memory import Tensor
from hetero.backends.protocol import BoundCall, Device, Kernel, WeightValue

Stages: TypeAlias = Sequence[Sequence[BoundCall]]


class StreamSignal(ABC):
    """Starts queued calls by a store to shared memory (`SupportsSignals.stream_signal`).

    Like a stream wait on a value (cuStreamWaitValue32): `wait_value` is submitted before calls
    whose inputs are not ready yet; its completion is that of everything before it. Calls after it
    start when the device sees `signal`. A wait that is never signalled gives up after about
    `DEFAULT_DEADLINE_S`, which `check` reports.

    """

    wait_value: BoundCall

    @abstractmethod
    def signal(self) -> None:
        """Pass the oldest wait that is not signalled, submitted or not.

        Earlier stores are visible.
        """

    @abstractmethod
    def release(self) -> None:
        """Pass every submitted wait, so that the queue runs to its end."""

    @abstractmethod
    def reset(self) -> None:
        """Reset the signal before a step, whatever became of the waits of an earlier one."""

    @abstractmethod
    def check(self) -> None:
        """Raise `DeviceError` if a wait gave up since `reset`: the calls after it ran too early."""


class SupportsSignals(ABC):
    """Device and host see each other's stores while a kernel runs (OpenCL on shared memory)."""

    @abstractmethod
    def flag(self) -> BoundCall | None:
        """Return a call that, submitted after another, shows its completion in shared memory.

        Without the driver; None where the host does not see such a flag and the data before it in
        time.
        """

    @abstractmethod
    def stream_signal(self) -> StreamSignal | None:
        """Return a signal that starts queued calls without the driver.

        None where a running kernel does not see the host's stores in time.
        """


class SupportsFusedLaunch(ABC):
    """Many launches run as one, without the driver between them."""

    @abstractmethod
    def fuse(self, runs: Sequence[Stages], *, compiles: bool = True) -> Sequence[BoundCall] | None:
        """Return one launch for each run of this device's calls that computes the same.

        Calls keep their order, except within one stage, whose calls are independent. None where
        nothing is gained by it, or a program would have to be compiled and `compiles` is False.
        """


class SupportsPrewarm(ABC):
    """Kernels that a model needed at its last start are compiled early at the next one."""

    @abstractmethod
    def prewarm(self, what: str) -> AbstractContextManager[bool]:
        """Record the kernels prepared inside as those that `what` needs.

        Kernels recorded last time are compiled on a thread from now on. An error of one is raised
        where that kernel is prepared. Yield True where there was a record, so that they are
        compiled already.
        """

    @abstractmethod
    def discard_prewarm(self) -> None:
        """Discard the prewarm list after a failed build: it is not noted for the next time."""


class SupportsCompaction(ABC):
    """Prepared weights can be moved to where they are read faster (huge pages)."""

    @abstractmethod
    def compact_weights(self) -> None:
        """Compact the weights of prepared kernels that will run often; takes half a second."""


class SupportsGroups(ABC):
    """Several operations run as one graph (`Capabilities.fused_groups`)."""

    @abstractmethod
    def prepare_group(self, group: Group, weights: Sequence[Mapping[str, WeightValue]]) -> Kernel:
        """Compile a `groups.Group` on the weights of each of its steps.

        Its kernel is bound to the group's slots, and to what `Group.fixed` names. Raises
        `ValueError` for a group whose name is not among the capabilities' `fused_groups`.
        """


class SupportsTransfer(ABC):
    """The device has a command that copies between host memory and memory of its own."""

    @abstractmethod
    def transfer(self, host: Tensor, own: Tensor, *, to_device: bool) -> BoundCall:
        """Return a call that copies between host memory and an equal tensor of this device's own.

        It runs in the order of the device's calls. A tensor that is handed over to itself (`own` is
        `host`) is copied where memory is not unified, and made visible, in place, where it is not
        coherent.
        """


class SupportsHandovers(SupportsTransfer):
    """The device's memory may not be coherent with the host's (`Capabilities.coherent`)."""

    @abstractmethod
    def set_explicit_handovers(self, on: bool) -> None:
        """Let calls that are bound from here on hand nothing over: their caller does (`transfer`).

        Else each call hands over all its tensors, caches whole, where memory is not coherent.
        """


class SupportsThreads(ABC):
    """Another thread can launch calls of its own during those of this device."""

    @abstractmethod
    def clone_for_thread(self) -> Device:
        """Return this device for another thread, which prepares kernels of its own there.

        Their calls are not ordered with those of this one.
        """


class SupportsQueueControl(ABC):
    """The driver's queue can be finished and timed, for measurements and comparisons."""

    @abstractmethod
    def finish(self) -> None:
        """Block until everything submitted is complete, as the driver does it; for comparisons."""

    @abstractmethod
    def set_timing(self, on: bool) -> None:
        """Let completions know when they ran (`Completion.span`)."""


def flag_of(device: Device) -> BoundCall | None:
    """Return `SupportsSignals.flag`; None where the device has no flags."""
    return device.flag() if isinstance(device, SupportsSignals) else None


def signal_of(device: Device) -> StreamSignal | None:
    """Return `SupportsSignals.stream_signal`; None where the device has no signals."""
    return device.stream_signal() if isinstance(device, SupportsSignals) else None

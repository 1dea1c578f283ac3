"""The OpenCL device: context, in-order queue, mapped buffers, programs and kernels."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyopencl as cl

from hetero.backends.checks import check_weights
from hetero.backends.errors import (
    DeviceError,
    DeviceOptionError,
    KernelBuildError,
    WaitTimeoutError,
)
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.opencl.calls import KernelLaunch, OpenCLCall
from hetero.backends.opencl.coherence import hands_over, is_coherent
from hetero.backends.opencl.failures import BACKEND, decoded
from hetero.backends.opencl.flag import Flag, flag_program, probe
from hetero.backends.opencl.gpu_capabilities import capabilities_of
from hetero.backends.opencl.imported import NOT_TRIED, Import, find_import
from hetero.backends.opencl.megakernel import fuse
from hetero.backends.opencl.resources import DeviceMemory, Resources
from hetero.backends.opencl.selected import Selected
from hetero.backends.opencl.stream_signal import OpenCLStreamSignal, find_stream_signal
from hetero.backends.opencl.transfer import TransferCall
from hetero.backends.ops import Op, describe
from hetero.backends.optional import (
    Stages,
    SupportsFusedLaunch,
    SupportsHandovers,
    SupportsPrewarm,
    SupportsQueueControl,
    SupportsSignals,
    SupportsThreads,
)
from hetero.backends.protocol import Acceptance, DeviceInfo, Kernel, WeightValue
from hetero.backends.registry import EVERY_CORE

Prepare: TypeAlias = Callable[["OpenCLDevice", Any, Mapping[str, WeightValue]], Kernel]
Accepts: TypeAlias = Callable[[Any], Acceptance]


class KernelEntry(NamedTuple):
    """Functions that prepare one class of operation, and accept its records."""

    prepare: Prepare
    accepts: Accepts = lambda _op: Acceptance(True)


class OpenCLDevice(
    Resources,
    SupportsSignals,
    SupportsFusedLaunch,
    SupportsPrewarm,
    SupportsHandovers,
    SupportsThreads,
    SupportsQueueControl,
):
    """One OpenCL device, `selected` before.

    `family`, `unified_memory`, `coherent` and `svm` are those of `hetero.backends.opencl.open`;
    `table` holds the kernels and `weight_formats` what its matmul takes.

    `worker_cpu` is the core that a CPU driver's one worker is pinned to, None if it is not pinned;
    the workers are the process's, so the device that was opened last decides.
    """

    def __init__(
        self,
        table: Mapping[type[Op], KernelEntry],
        weight_formats: tuple[WeightFormat, ...],
        selected: Selected,
        *,
        every_core: bool = False,
        family: str | None = None,
        unified_memory: bool | None = None,
        coherent: bool | None = None,
        svm: bool = False,
    ) -> None:
        native = selected.device
        super().__init__(
            selected, family=family, unified_memory=unified_memory, coherent=coherent, svm=svm
        )
        self.info = _info(selected, self.tuning.family, every_core=every_core)
        largest = int(native.max_mem_alloc_size)
        self.capabilities = capabilities_of(
            weight_formats, max_allocation_bytes=largest, every_core=every_core
        )
        self._table = table
        self._flag: Flag | None = None
        self._stream_signal: OpenCLStreamSignal | None = None
        self._stream_signal_tried = False
        self._import: Import | None = NOT_TRIED
        self.at_close: Callable[[], None] = lambda: None
        self.on_host = selected.driver.computes_on_cpu
        self.worker_cpu = selected.cores[0] if len(selected.cores) == 1 else None
        if svm and not self.has_svm:
            raise DeviceOptionError(
                BACKEND, "opening it in shared virtual memory",
                f"{native.name.strip()} has none that is fine-grained",
                "unset HETERO_OPENCL_MEMORY",
            )  # fmt: skip
        if self.coherent is None:
            self._probe_memory()
        self.capabilities = capabilities_of(
            weight_formats,
            unified_memory=self.unified_memory,
            coherent=bool(self.coherent),
            own_memory=self.svm,
            memory_limit_bytes=None if self.unified_memory else int(native.global_mem_size),
            max_allocation_bytes=largest,
            every_core=every_core,
        )

    def _probe_memory(self) -> None:
        """Find out how host and device see each other's writes (`coherence`)."""
        self.coherent = False
        with suppress(DeviceError):  # the model's kernels fail as well, and say so
            self.coherent = is_coherent(self)
            if not self.coherent and not self.svm and self.has_svm:
                self.svm = True
                self.coherent = self.svm = is_coherent(self)
            self.unified_memory = self.coherent or hands_over(self)
        self._mapped.clear()

    def imported(self, buffer: HostBuffer) -> DeviceMemory | None:
        """See `Resources.imported`; how is found out with the first buffer."""
        if buffer.dma_buf is None or not self.unified_memory:
            return None
        if self._import is NOT_TRIED:
            self._import = find_import(self, buffer)
        if self._import is not None:
            with suppress(DeviceError):  # then as any memory of this process
                return self._import.of(self.context, buffer)
        return None

    def accepts(self, op: Op) -> Acceptance:
        """See `Device.accepts`."""
        entry = self._table.get(type(op))
        if entry is None:
            return Acceptance(False, f"{BACKEND} has no kernel for {type(op).__name__}")
        return entry.accepts(op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """See `Device.prepare`."""
        self.check()
        accepted = self.accepts(op)
        if not accepted:
            raise ValueError(f"{describe(op)}: {accepted.reason}")
        check_weights(op, weights)
        with decoded(f"preparing {describe(op)}"):
            return self._table[type(op)].prepare(self, op, weights)

    def prewarm(self, what: str) -> AbstractContextManager[bool]:
        """See `SupportsPrewarm.prewarm`."""
        return self.programs.prewarm(f"{what} on {self.threads} threads")

    def flag(self) -> Flag | None:
        """See `SupportsSignals.flag`; probed at the first call, which takes a few milliseconds."""
        if self.capabilities.early_visibility is None:
            self._flag = None
            if self.capabilities.unified_memory:
                with suppress(KernelBuildError):  # a compiler without such fences
                    self._flag = Flag(self)
            visible = self._flag is not None and probe(self, self._flag)
            self.capabilities = replace(self.capabilities, early_visibility=visible)
        return self._flag if self.capabilities.early_visibility else None

    def stream_signal(self) -> OpenCLStreamSignal | None:
        """See `SupportsSignals.stream_signal`; probed at the first call, in a few milliseconds."""
        if not self._stream_signal_tried:
            self._stream_signal_tried = True
            self._stream_signal = find_stream_signal(self, self.flag())
        return self._stream_signal

    def discard_prewarm(self) -> None:
        """See `SupportsPrewarm.discard_prewarm`."""
        self.programs.discard_prewarm()

    def fuse(self, runs: Sequence[Stages], *, compiles: bool = True) -> Sequence[OpenCLCall] | None:
        """See `SupportsFusedLaunch.fuse`."""
        return fuse(self, runs, compiles=compiles)

    def transfer(self, host: Tensor, own: Tensor, *, to_device: bool) -> TransferCall:
        """See `SupportsHandovers.transfer`."""
        return TransferCall(self, host, own, to_device)

    def set_explicit_handovers(self, on: bool) -> None:
        """See `Device.set_explicit_handovers`."""
        self.explicit_handovers = on

    def clone_for_thread(self) -> OpenCLDevice:
        """See `SupportsThreads.clone_for_thread`: a queue of its own, everything else shared."""
        self.check()
        other = copy.copy(self)
        with decoded("making a queue"):
            other.queue, other.clock_offset_s = cl.CommandQueue(self.context), None
        other._scratch = None
        return other

    def set_timing(self, on: bool) -> None:
        """See `SupportsQueueControl.set_timing`: a queue that keeps the times of its commands."""
        self.finish()
        with decoded("making a queue"):
            if not on:
                self.queue, self.clock_offset_s = cl.CommandQueue(self.context), None
                return
            profiling = cl.command_queue_properties.PROFILING_ENABLE
            self.queue = cl.CommandQueue(self.context, properties=profiling)
            self.clock_offset_s = self._clock_offset_s()

    def _clock_offset_s(self) -> float:
        """Return the offset of the host's clock from the device's.

        From commands that take no time: the host saw the end at the earliest when it was.

        Their status is polled, because a blocking wait returns tens of microseconds late.
        """
        offsets = []
        complete = cl.command_execution_status.COMPLETE
        for _ in range(CLOCK_SAMPLES):
            event = cl.enqueue_marker(self.queue)
            self.queue.flush()
            if not any(event.command_execution_status == complete for _ in range(CLOCK_POLLS)):
                event.wait()
            offsets.append(time.perf_counter() - event.profile.end * 1e-9)
        return min(offsets)

    def drain(self, deadline_s: float) -> None:
        """See `Device.drain`. The flag counts on from what the queue has run."""
        self.check()
        give_up_s = time.perf_counter() + deadline_s
        with decoded("draining the queue"):
            event = cl.enqueue_marker(self.queue)
            self.queue.flush()
            while event.command_execution_status > cl.command_execution_status.COMPLETE:
                if time.perf_counter() > give_up_s:
                    raise WaitTimeoutError(BACKEND, "draining the queue", deadline_s)
                time.sleep(DRAIN_SLEEP_S)
        if self._flag is not None:
            self._flag.submissions = int(self._flag.word[0])

    def start_threads(self) -> None:
        """Launch work-groups that do nothing, until a driver's threads have had some each."""
        program = flag_program(self)
        groups = STARTING_GROUPS * self.threads
        word = Tensor(self.allocate(64), (1,), np.dtype(np.int32))
        launch = KernelLaunch(program, "raise_flag", (groups,), (1,), (0, word))
        OpenCLCall(self, "starting threads", 1, [launch], {}).run()

    def state(self) -> str:
        """See `Device.state`."""
        return self._health.state

    def close(self) -> None:
        """See `Device.close`."""
        alive = self._health.alive
        self._health.lose("it was closed")
        try:
            if alive:
                with decoded("closing"):
                    self.queue.finish()
        finally:
            self._mapped.clear()
            self._scratch = None
            self.rope_tables.clear()
            self.fused_programs.clear()
            self.programs.close()
            self.at_close()


STARTING_GROUPS = 1 << 12
REVISION = "3"  # of the kernels: another one where their times change, for profiles taken before
CLOCK_SAMPLES = 20
DRAIN_SLEEP_S = 1e-4
CLOCK_POLLS = 10_000


def _info(selected: Selected, family: str, *, every_core: bool) -> DeviceInfo:
    native = selected.device
    details = {
        "platform": native.platform.version.strip(),
        "version": native.version.strip(),
        "tuning": family,
        "kernels": REVISION,
        "level": selected.level.name,
    }
    if selected.driver.computes_on_cpu:
        details["cpu"] = selected.level.llvm_cpu or selected.level.name
    if every_core:
        details["cores"] = str(selected.threads)
    return DeviceInfo(
        backend=EVERY_CORE if every_core else BACKEND,
        name=native.name.strip(),
        driver=native.driver_version.strip(),
        details=details,
    )

"""Ahead-of-time swap-out: when a call has returned, its new chunks are encoded and written.

One thread, which works between and during calls. Until it has encoded a job, keys and values are
only in the cache that the devices computed them in; loading another context there waits with
`wait_encoded`. Written chunks can leave the memory at no cost (LLMS, section 3.4).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from hetero.backends.host.signals import let_handlers_run
from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_files import ChunkFiles
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk
from hetero.contexts.codec import RAW, STATES, Array, ChunkCodec, Codes
from hetero.contexts.compaction import compact, make_room
from hetero.contexts.planes import CodecError
from hetero.contexts.unbound import UnboundApps
from hetero.errors import UserError
from hetero.runtime.kv.kv_cache import KvCache

When: TypeAlias = Literal["ahead", "pressure", "never"]
_POLL_S: Final = 0.1  # how often signals are polled in a wait
STALLED_S: Final = 60.0  # the longest wait while nothing is encoded, written or read


def stalled(what: str, wait_s: float) -> UserError:
    """Return the error of a disk that hangs, or a thread that gets no processor time."""
    return UserError(
        f"no keys and values of a context have been {what} for {wait_s:g} s: check "
        "that the disk of the contexts' directory responds, and try again"
    )


@dataclass
class SwapJob:
    """Chunks of one text that are only in a cache, in order.

    `durable` chunks survive a crash of the system, which takes most of the time. `states` are those
    of snapshots: copies that do not change.
    """

    chunks: Sequence[Chunk]
    cache: KvCache
    durable: bool = True
    states: Mapping[Chunk, Sequence[Array]] = field(default_factory=dict)
    encoded: threading.Event = field(default_factory=threading.Event)


class SwapOut:
    """The writing thread. `files` returns an app's files; `faults` are the errors of failed writes.

    `when` is `ahead` (of need) or, for comparison, `pressure` (chunks are written as they leave the
    memory) or `never`.
    """

    def __init__(
        self,
        memory: ChunkMemory,
        codec: ChunkCodec,
        files: Callable[[str], ChunkFiles],
        disk: ByteBudget,
        unbound: UnboundApps | None = None,
        wait_s: float = STALLED_S,
        when: When = "ahead",
    ) -> None:
        self.when = when
        if when == "pressure":
            memory.write_back = self._write_back
        self.faults: list[str] = []
        self.wait_s = wait_s
        self._unbound, self._steps = unbound, 0
        self._memory, self._codec, self._files, self._disk = memory, codec, files, disk
        self._jobs: queue.SimpleQueue[SwapJob | None] = queue.SimpleQueue()
        self._open: list[SwapJob] = []
        self._idle = threading.Condition()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hetero swap-out", daemon=True)
        self._thread.start()

    def submit(self, job: SwapJob) -> None:
        """Queue a job."""
        with self._idle:
            self._open.append(job)
        self._jobs.put(job)

    def wait_encoded(self, cache: KvCache) -> None:
        """Wait until each job of this cache is encoded. Raises `UserError` if the thread stalls."""
        with self._idle:
            jobs = [job for job in self._open if job.cache is cache]
        for job in jobs:
            self._wait(job.encoded.wait)
        self._check()

    def drain(self) -> None:
        """Wait for all jobs. Raises `UserError` if the thread stalls."""
        with self._idle:
            self._wait(lambda limit_s: self._idle.wait_for(lambda: not self._open, limit_s))
        self._check()

    def is_written(self, limit_s: float) -> bool:
        """Return whether all jobs have ended within that time; raises nothing of theirs."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, limit_s)

    def close(self) -> None:
        """Finish all jobs and end the thread; idempotent. Raises `UserError` if it stalls."""
        self._jobs.put(None)

        def ended(limit_s: float) -> bool:
            self._thread.join(limit_s)
            return not self._thread.is_alive()

        self._wait(ended)

    def _wait(self, ended: Callable[[float], bool]) -> None:
        """Wait until `ended`, as long as chunks are still being encoded or written."""
        steps, give_up_s = self._steps, time.monotonic() + self.wait_s
        while not ended(min(_POLL_S, self.wait_s)):
            let_handlers_run()
            if steps != self._steps:
                steps, give_up_s = self._steps, time.monotonic() + self.wait_s
            elif time.monotonic() > give_up_s:
                raise stalled("encoded or written", self.wait_s)

    def _check(self) -> None:
        error, self._broken = self._broken, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._work(job)
            except BaseException as error:
                self._broken = error
            finally:
                job.encoded.set()
                with self._idle:
                    self._open.remove(job)
                    self._idle.notify_all()

    def _work(self, job: SwapJob) -> None:
        batch: list[Chunk] = []
        try:
            sizes = (self._codec.encoding_bytes(len(x.tokens), x.bits) for x in job.chunks)
            self._memory.free(sum(sizes))
            self._encode(job.chunks, job, batch)
            job.encoded.set()
            self._write(batch, durable=job.durable)
            for chunk in job.states:  # in a file of its own, which goes with it
                self._encode([chunk], job, batch)
                self._write(batch, durable=job.durable)
        finally:
            self._unpin(batch)

    def _encode(self, chunks: Iterable[Chunk], job: SwapJob, batch: list[Chunk]) -> None:
        """Encode chunks into the memory, and add those to write to the batch."""
        for chunk in chunks:
            self._steps += 1
            codes = self._encoded(chunk, job, batch)
            if codes is not None:
                if self.when == "ahead":
                    with self._memory.lock:
                        chunk.pins += 1  # until it is written
                        batch.append(chunk)
                self._memory.keep(chunk, codes)

    def _write_back(self, chunks: Sequence[Chunk]) -> None:
        """Write chunks that are about to leave the memory, under its lock."""
        for app in {chunk.app for chunk in chunks}:
            self._put([chunk for chunk in chunks if chunk.app == app], durable=False)

    def _unpin(self, batch: list[Chunk]) -> None:
        with self._memory.lock:
            for chunk in batch:
                chunk.pins -= 1
        batch.clear()

    def _encoded(self, chunk: Chunk, job: SwapJob, batch: list[Chunk]) -> Codes | None:
        """Return codes whose bytes are claimed; None without room, or if they are not needed."""
        with self._memory.lock:
            if not chunk.refs or chunk.stored:
                return None
            bits = chunk.bits if chunk.full else RAW
        room = self._codec.encoding_bytes(len(chunk.tokens), bits)
        if not self._memory.claim(room):
            self._write(batch, durable=job.durable)  # which may leave after that
            if not self._memory.claim(room):
                return None
        try:
            if bits == STATES:
                return self._codec.encode_states(job.states[chunk])
            codes = self._codec.encode_cached(job.cache, chunk.start, chunk.stop, bits)
        except CodecError:  # text alone can stand for it
            self._memory.budget.give(room)
            return None
        except BaseException:
            self._memory.budget.give(room)
            raise
        codes = Codes(codes.bits, codes.tokens, tuple(plane.copy() for plane in codes.planes))
        self._memory.budget.give(room - codes.nbytes)
        return codes

    def _free(self) -> int:
        return self._disk.free

    def _write(self, batch: list[Chunk], *, durable: bool) -> None:
        """Write a batch to the disk; chunks that cannot be written stay in memory alone."""
        if batch:
            app = batch[0].app
            self._put(batch, durable=durable)
            self._steps += 1
            compact(self._files(app), self._memory, app)
        self._unpin(batch)

    def _put(self, batch: Sequence[Chunk], *, durable: bool) -> None:
        """Write the chunks of an app in one file."""
        with self._memory.lock:
            entries = [(c, c.codes) for c in batch if c.refs and c.codes is not None]
        pairs = [(chunk, codes) for chunk, codes in entries if codes is not None]
        if not pairs:
            return
        files, keep = self._files(pairs[0][0].app), {chunk for chunk, _ in pairs}
        wanted, others = files.nbytes(pairs), self._unbound
        make_room(wanted, self._memory, self._files, self._free, keep, others)
        try:
            places = files.write(pairs, durable=durable)
        except OSError as error:
            self.faults.append(str(error))
            return
        with self._memory.lock:
            for (chunk, _), place in zip(pairs, places, strict=True):
                if chunk.refs and chunk.place is None:
                    chunk.place = place
                else:
                    files.drop(place)

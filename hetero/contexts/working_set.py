"""The cache that the devices compute in, and how contexts are loaded into it and leave it.

    enter   Load: the common prefix stays in the cache; chunks in memory are decoded, chunks on the
            disk read, layer by layer by a thread while the prompt's call runs; missing chunks, and
            those slower to read than to compute, are computed in that call.
    leave   the text becomes what the cache holds now; new chunks are swapped out ahead of time.

Only chunks of the text itself, or of another text of the same app with the same prefix, are used.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Protocol, TypeVar

import numpy as np

from hetero.backends.host.affinity import unpinned
from hetero.contexts.chunk_files import ChunkFiles, Reader
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk, Snapshot
from hetero.contexts.codec import CHUNK_TOKENS, ChunkCodec, Codes
from hetero.contexts.decoding import ChunkDecoder, HostDecoder
from hetero.contexts.load_plan import LoadItem, LoadPlan, Rates, plan_load
from hetero.contexts.swap_out import STALLED_S, SwapJob, SwapOut, stalled
from hetero.errors import UserError
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.context import common_prefix
from hetero.runtime.kv.kv_cache import KvCache
from hetero.runtime.kv.layer_gate import LayerGate, LoadError

T = TypeVar("T")
TRIES: Final = 4  # of a call whose chunks cannot be read


class LiveContext(Protocol):
    """The context that the devices compute on (`hetero.runtime.kv.context.Context`)."""

    gate: LayerGate | None
    holes: tuple[tuple[int, int], ...]
    score_stats: ScoreStats | None
    forgotten: int

    @property
    def cache(self) -> KvCache:
        """Return keys and values."""

    @property
    def cached(self) -> int:
        """Return how many tokens have keys and values."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the text."""

    def adopt(self, tokens: Sequence[int]) -> None:
        """Set the text: the cache holds these tokens now, none of which were `forgotten`."""

    def forget(self, keep: int, drop: int) -> None:
        """Drop tokens [keep, keep + drop); the cached ones after them move to their place."""


@dataclass(eq=False)
class CachedText:
    """A text of an app, and its known chunks and snapshots.

    `root` is `origin` until the text has been shifted. Its keys and values are then no longer those
    of its tokens, so each shift gives it a root that no other text has.
    """

    app: str
    root: bytes
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    origin: bytes = b""

    def __post_init__(self) -> None:
        self.origin = self.origin or self.root

    @property
    def shifted(self) -> bool:
        """Return whether it has lost tokens that its keys and values were computed from."""
        return self.root != self.origin

    @property
    def all_chunks(self) -> list[Chunk]:
        """Return its chunks with those of its snapshots: one for each of its references."""
        return [*self.chunks, *(chunk for x in self.snapshots for chunk in x.chunks)]


@dataclass
class Switch:
    """The cost of loading a context.

    `ready_s` is the time until the prompt's call could begin, `waited_s` what that call then waited
    for layers; `recomputed_tokens` had no keys and values to load, or it was faster, `tail_tokens`
    of them at the end of the text. `bits` counts its chunks by where they were before. Above the
    break-even speed of a disk reading is faster than computing.
    """

    ready_s: float = 0.0
    waited_s: float = 0.0
    reused_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    recomputed_tokens: int = 0
    tail_tokens: int = 0
    faults: int = 0
    bits: dict[str, int] = field(default_factory=dict)
    predicted_s: float = 0.0
    break_even_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0

    @property
    def switch_s(self) -> float:
        """Return the part of the time to the first token that the switch took, at most.

        A device with a queue may have computed while it waited for layers. Tokens that are computed
        again are not counted: that is part of the prompt's call.
        """
        return self.ready_s + self.waited_s


class CallTimes:
    """Logical times of calls, for all slots of a service. `last` is that of the latest call."""

    def __init__(self) -> None:
        self.last = 0

    def tick(self, after: int = 0) -> int:
        """Return the time of a call that has returned.

        It is later than any before, those of other processes included (`after`, a stored time).
        """
        self.last = max(self.last + 1, after, time.time_ns() // 1_000_000)
        return self.last


@dataclass
class _Load:
    """A running load: chunks with the codes that they are read into, and whether they are read."""

    chunks: list[tuple[Chunk, Codes, bool]]
    gate: LayerGate
    failed: Chunk | None = None
    nbytes: int = 0


class WorkingSet:
    """Used by the thread that has the `ServiceLock`.

    `files` returns an app's chunks on the disk; `decoder` (default: the host's) works on the
    loading thread.
    """

    def __init__(
        self,
        active: LiveContext,
        memory: ChunkMemory,
        codec: ChunkCodec,
        swap: SwapOut,
        *,
        files: Callable[[str], ChunkFiles],
        rates: Rates,
        recompute: bool = True,
        decoder: ChunkDecoder | None = None,
        wait_s: float = STALLED_S,
        times: CallTimes | None = None,
    ) -> None:
        self._decoder = decoder or HostDecoder(codec)
        self.rates, self.recompute, self.wait_s = rates, recompute, wait_s
        self._active, self._memory, self._codec, self._swap = active, memory, codec, swap
        self._files = files
        self._root = b""  # of the text that is in the cache
        self.cached_time = 0  # the logical time of the call that left it there, if all of it is
        # Tokens whose keys and values there came from codes: encoded again they would drift.
        self._lossy = np.zeros(active.cache.layout.capacity, np.bool_)
        self._reading: Future[None] | None = None
        self._loading: _Load | None = None
        self._times = times or CallTimes()
        self._thread = ThreadPoolExecutor(1, "hetero load", initializer=unpinned)

    def close(self) -> None:
        """End the thread."""
        try:
            with suppress(LoadError):
                self._join_reader()
        except UserError:  # it hangs
            self._thread.shutdown(wait=False)
            raise
        self._thread.shutdown()

    def answering(
        self, text: CachedText, tokens: Sequence[int], run: Callable[[Switch], Iterator[T]]
    ) -> Iterator[T]:
        """Yield from `run` while the active context holds the prefix of a text to continue from.

        The text's chunks stay in memory meanwhile. Where a chunk cannot be read `run` starts again
        without it; its first step fails before anything is yielded. Raises what `run` does.
        """
        for attempt in range(TRIES):
            last = attempt == TRIES - 1  # a disk that keeps failing: the text alone
            chunks = [] if last else self._known(text, tokens)
            try:
                with self._memory.pinned(chunks):
                    switch = self._enter(text, tokens, chunks)
                    switch.faults += attempt
                    gate = self._active.gate
                    yield from run(switch)
                    switch.waited_s = 0.0 if gate is None else gate.waited_s
                    self._join_reader()
                return
            except LoadError:
                self.forget()  # everything is computed again
                if last:
                    raise

    def holds(self, root: bytes) -> bool:
        """Return whether the cache holds a text of this root."""
        return self._root == root

    def forget(self) -> None:
        """Empty the cache."""
        self.cached_time = 0
        with suppress(LoadError):
            self._join_reader()
        self._root = b""
        self._active.adopt(())
        self._swap.wait_encoded(self._active.cache)

    def tick(self, after: int = 0) -> int:
        """Return the logical time of a call that has returned (`CallTimes.tick`)."""
        return self._times.tick(after)

    def shared(self, root: bytes, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a text of this root the cache holds."""
        active = self._active
        if self._root != root or active.forgotten:
            return 0
        return min(common_prefix(active.tokens[: _whole(active)], tokens), len(tokens) - 1)

    def wait_until_free(self) -> None:
        """Wait until no other thread uses the cache, whose rows may then move."""
        self._join_reader()
        self._swap.wait_encoded(self._active.cache)

    def root_after(self, text: CachedText) -> bytes:
        """Return the root that `leave` is to give a text: a new one if the call has shifted it."""
        return secrets.token_bytes(32) if self._active.forgotten else text.root

    def leave(self, text: CachedText, bits: int, root: bytes | None = None) -> list[Chunk]:
        """Take over the active context's text as of the last `tick`, and return its chunks.

        `root` is the text's from now on (default: `root_after`). `swap_out` follows.
        """
        active = self._active
        with self._memory.lock:
            shifted = active.forgotten > 0
            text.root = self._root = self.root_after(text) if root is None else root
            if shifted:  # its keys and values are whatever the cache holds, rounded or not
                active.forgotten, self._lossy[:] = 0, False
            before, cached = text.chunks, active.tokens[: _whole(active)]
            text.chunks = self._memory.table.refer(text.app, text.root, cached, bits)
            for chunk in text.chunks:
                chunk.used = self._times.last
            self.cached_time = self._times.last
            if active.score_stats is not None and not shifted:
                active.score_stats.give(text.chunks)
        text.tokens = list(active.tokens)
        self.release(before)
        return text.chunks

    def swap_out(self, text: CachedText, *, durable: bool = True) -> None:
        """Encode and write, in the background, the chunks that are only in the active cache.

        Chunks decoded in part from codes that were dropped are left out: they are computed again.
        `durable`: they must survive a crash.
        """
        lossy = self._lossy
        with self._memory.lock:
            fresh = [c for c in text.chunks if not c.stored and not lossy[c.start : c.stop].any()]
        if fresh:
            self._swap.submit(SwapJob(fresh, self._active.cache, durable))

    def release(self, chunks: Sequence[Chunk]) -> None:
        """Drop references, and free unreferenced chunks in memory and on the disk."""
        for chunk in self._memory.release(chunks):
            if chunk.place is not None:
                self._files(chunk.app).drop(chunk.place)

    # --- Load -------------------------------------------------------------------------------

    def _enter(self, text: CachedText, tokens: Sequence[int], chunks: Sequence[Chunk]) -> Switch:
        start_s = time.perf_counter()
        self.cached_time = 0
        self._join_reader()
        if self._active.score_stats is not None:
            self._active.score_stats.reset()
        switch = Switch(bits=self._memory.histogram(chunks))
        reused = self.shared(text.root, tokens)
        if reused < self._active.cached:
            self._swap.wait_encoded(self._active.cache)
        self._active.adopt(tokens[:reused])
        self._lossy[reused:] = False
        self._root, switch.reused_tokens = text.root, reused
        self._load(tokens, chunks, switch)
        switch.ready_s = time.perf_counter() - start_s
        return switch

    def _known(self, text: CachedText, tokens: Sequence[int]) -> list[Chunk]:
        """Return a text's chunks that can be used: after another prefix keys and values differ."""
        return list(takewhile(lambda c: tuple(tokens[c.start : c.stop]) == c.tokens, text.chunks))

    def _load(self, tokens: Sequence[int], chunks: Sequence[Chunk], switch: Switch) -> None:
        """Load chunks after the tokens in the cache, and leave holes for those to compute."""
        active = self._active
        wanted = [c for c in chunks if c.stop > active.cached and c.stop < len(tokens)]
        if not wanted:
            return
        claimed = self._claimed(wanted)
        try:
            load = self._planned(wanted, claimed, len(tokens), switch).load
            loaded = [chunk for chunk, is_loaded in zip(wanted, load, strict=True) if is_loaded]
            if loaded:
                self._place(tokens, loaded, claimed, switch)
        finally:  # of those that are not read
            for codes in claimed.values():
                self._unclaim(codes)
        switch.tail_tokens = wanted[-1].stop - active.cached
        switch.recomputed_tokens = switch.tail_tokens + sum(b - a for a, b in active.holes)

    def _place(
        self,
        tokens: Sequence[int],
        loaded: Sequence[Chunk],
        claimed: dict[Chunk, Codes],
        switch: Switch,
    ) -> None:
        """Start to load chunks; the text reaches to the last of them, with holes in between."""
        active, first, stop = self._active, self._active.cached, loaded[-1].stop
        stops = [first, *(chunk.stop for chunk in loaded)]
        holes = [(at, chunk.start) for at, chunk in zip(stops, loaded, strict=False)]
        active.adopt(tokens[: min(first, loaded[0].start)])
        gate = self._start(loaded, claimed, switch)
        active.adopt(tokens[:stop])
        active.gate, active.holes = gate, tuple((a, b) for a, b in holes if a < b)

    def _claimed(self, chunks: Sequence[Chunk]) -> dict[Chunk, Codes]:
        """Claim memory for the chunks that are only on the disk, as far as it goes."""
        absent = [(x, x.place) for x in chunks if x.codes is None and x.place is not None]
        self._memory.free(sum(self._codec.nbytes(len(x.tokens), y.bits) for x, y in absent))
        claimed = {}
        for chunk, _ in absent:
            bits = chunk.readable_bits
            if not self._memory.claim(self._codec.nbytes(len(chunk.tokens), bits)):
                break
            claimed[chunk] = self._codec.empty(len(chunk.tokens), bits)
        return claimed

    def _unclaim(self, codes: Codes | None) -> None:
        if codes is not None:
            self._memory.budget.give(codes.nbytes)

    def _planned(
        self, wanted: Sequence[Chunk], claimed: dict[Chunk, Codes], tokens: int, switch: Switch
    ) -> LoadPlan:
        rates = self.rates
        plan = plan_load(
            _items(wanted, claimed, rates),
            tokens - wanted[-1].stop,
            rates,
            self._codec.layers,
            before=wanted[0].start,
            recompute=self.recompute,
        )
        switch.predicted_s = plan.predicted_s
        per_token = self._codec.nbytes(CHUNK_TOKENS, wanted[0].bits) / CHUNK_TOKENS
        switch.break_even_bytes_per_s = rates.break_even_bytes_per_s(per_token)
        switch.read_bytes_per_s = rates.read_bytes_per_s
        return plan

    def _start(
        self, chunks: Sequence[Chunk], claimed: dict[Chunk, Codes], switch: Switch
    ) -> LayerGate:
        """Start the thread that loads these chunks layer by layer."""
        items = [(c, c.codes or claimed[c], c in claimed) for c in chunks]
        switch.loaded_tokens += sum(len(c.tokens) for c in chunks)
        for chunk, codes, _ in items:
            self._lossy[chunk.start : chunk.stop] = codes.bits not in self._codec.exact
        switch.loaded_bytes += sum(codes.nbytes for _, codes, read in items if read)
        self._loading = _Load(items, LayerGate(self._codec.layers))
        self._reading = self._thread.submit(self._read, self._loading, self._active.cache)
        for chunk in chunks:  # the thread's from here on
            claimed.pop(chunk, None)
        return self._loading.gate

    def _read(self, load: _Load, cache: KvCache) -> None:
        """Load layer by layer (the thread); chunks that were read completely stay in memory."""
        from_disk = [(chunk, codes) for chunk, codes, read in load.chunks if read]
        parts = [(chunk.start, codes) for chunk, codes, _ in load.chunks]
        reader: Reader | None = None
        try:
            with ExitStack() as opened:
                if from_disk:
                    chunks = [chunk for chunk, _ in from_disk]
                    reader = opened.enter_context(
                        closing(self._files(chunks[0].app).reader(chunks))
                    )
                for layer in range(self._codec.layers):
                    if reader is not None:
                        reader.layer(layer, [codes for _, codes in from_disk])
                    self._decoder.decode(parts, layer, cache)
                    load.gate.open()
        except BaseException as error:  # or a step would wait for its deadline
            at = 0 if reader is None else reader.at
            load.failed = from_disk[at][0] if from_disk else None
            for _, codes in from_disk:
                self._unclaim(codes)
            load.gate.fail(error)
        else:
            for chunk, codes in from_disk:
                self._memory.keep(chunk, codes)

    def _join_reader(self) -> None:
        """Wait until the thread no longer uses the cache."""
        reading, load = self._reading, self._loading
        if reading is None or load is None:
            return
        try:
            reading.result(self.wait_s)
        except TimeoutError:
            raise stalled("read", self.wait_s) from None
        self._reading, self._loading = None, None  # or what is evicted would stay in memory
        if not load.gate.done:  # the caller may have ended before a step failed on it
            self._root = b""
            self._active.adopt(())
            if load.failed is not None:
                self._lose(load.failed)
            raise LoadError("keys and values could not be read")

    def _lose(self, chunk: Chunk) -> None:
        """Forget a chunk's place on the disk."""
        with self._memory.lock:
            place, chunk.place = chunk.place, None
        if place is not None:
            self._files(chunk.app).drop(place)


def _whole(active: LiveContext) -> int:
    """Return how many tokens of a context have keys and values, without a hole before them."""
    return min([active.cached, *(start for start, _ in active.holes)])


def in_memory(chunk: Chunk, claimed: dict[Chunk, Codes]) -> bool:
    """Return whether a chunk is in memory, or has memory to be read into."""
    return chunk.codes is not None or chunk in claimed


def _items(wanted: Sequence[Chunk], claimed: dict[Chunk, Codes], rates: Rates) -> list[LoadItem]:
    """Return what loading each chunk takes."""
    items = []
    for chunk in wanted:
        codes = chunk.codes or claimed.get(chunk)
        if codes is None:
            items.append(LoadItem(len(chunk.tokens), 0.0, 0, missing=True))
        else:
            read = codes.nbytes if chunk in claimed else 0
            items.append(rates.load_item(len(chunk.tokens), codes.bits, read))
    return items

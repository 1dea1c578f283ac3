"""What switching between contexts takes on a machine of given rates, on a virtual clock.

Memory, budgets, eviction, bits and the plan of what is read and what is computed are those of a
service; keys and values are sizes, and times are predictions from `Rates`. All of it is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk, Place
from hetero.contexts.codec import MIXED, RAW, ChunkCodec, Codes
from hetero.contexts.compression import Compression
from hetero.contexts.head_bits import alike, by_head
from hetero.contexts.load_plan import LoadItem, Rates, plan_load
from hetero.runtime.kv.kv_cache import CacheLayout
from lab.managers import Manager


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`rates` as a service measures them; writing and encoding in bytes a second of codes."""

    rates: Rates
    write_bytes_per_s: float
    encode_bytes_per_s: float


@dataclass(frozen=True)
class Call:
    """A context's call, at a time; how many tokens it adds."""

    at_s: float
    context: int
    prompt: int
    answer: int


def simulated_codec(layout: CacheLayout, ratio: float = 0.5) -> ChunkCodec:
    """Return a codec whose mixed bits have this part of the bytes at 8 bits."""
    bits = by_head(alike(layout.layers), ChunkCodec(layout), ratio)
    return ChunkCodec(layout, mixed=[bits])


def most_tokens(calls: Sequence[Call], window: int) -> int:
    """That all contexts have together, at any time."""
    lengths: dict[int, int] = {}
    most = 0
    for call in calls:
        grown = call.prompt + call.answer
        before = lengths.get(call.context, 0)
        lengths[call.context] = grown if before + grown > window else before + grown
        most = max(most, sum(lengths.values()))
    return most


@dataclass(eq=False)
class SimulatedContext:
    """A text, by ids of no meaning, and its chunks."""

    app: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class SimulatedService:
    """Calls of contexts, one after another. `densities` draws a chunk's information density."""

    def __init__(
        self,
        codec: ChunkCodec,
        machine: Machine,
        manager: Manager,
        memory_bytes: int,
        *,
        ratio: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.codec, self.machine, self.manager = codec, machine, manager
        self.memory = ChunkMemory(ByteBudget(memory_bytes), manager.eviction)
        self.compression = Compression(manager.kv_bits, ratio, "layers")
        self.compression.mixed = MIXED + len(codec.mixed) - 1
        self.written_bytes = 0
        self._random = np.random.default_rng(seed)
        self._clock, self._encoded_s = 0, 0.0
        self._held: SimulatedContext | None = None
        self._reclaim_s = 0.0
        if manager.swap == "pressure":
            self.memory.write_back = self._write_back

    def run(self, calls: Sequence[Call], window: int) -> list[float]:
        """`switch_s` of calls on contexts that have a text. One whose text would be longer than the
        window begins anew; that call is not among them.
        """
        contexts: dict[int, SimulatedContext] = {}
        found, fresh = [], 0
        for call in calls:
            context = contexts.setdefault(call.context, SimulatedContext(str(call.context)))
            grown = call.prompt + call.answer
            if len(context.tokens) + grown > window:
                context.tokens = []
            elif context.tokens:
                found.append(self.switch_s(context, call.prompt, call.at_s))
            fresh += grown
            text = [*context.tokens, *range(fresh, fresh + grown)]
            self.leave(context, text, call.at_s)
        return found

    def switch_s(self, context: SimulatedContext, prompt: int, now_s: float) -> float:
        """Seconds that a call's first token comes later than with the context in place."""
        rates, self._reclaim_s = self.machine.rates, 0.0
        if context is self._held or not context.chunks:
            return 0.0
        wait_s = max(0.0, self._encoded_s - now_s)  # the cache is still being encoded
        with self.memory.pinned(context.chunks):
            away = [x for x in context.chunks if x.codes is None and x.place is not None]
            self.memory.free(sum(self._codes(chunk).nbytes for chunk in away))
            pieces = [self._piece(chunk) for chunk in context.chunks]
            plan = plan_load(
                pieces, prompt, rates, self.codec.layers, recompute=self.manager.recompute
            )
            for chunk, piece, load in zip(context.chunks, pieces, plan.load, strict=True):
                if piece.disk_bytes and load:
                    self.memory.keep(chunk, self._codes(chunk))
                elif piece.disk_bytes:  # claimed, and not read
                    self.memory.budget.give(piece.disk_bytes)
        in_place_s = float(rates.prefill_s(prompt, len(context.tokens)))
        return wait_s + self._reclaim_s + max(plan.predicted_s - in_place_s, 0.0)

    def leave(self, context: SimulatedContext, tokens: Sequence[int], now_s: float) -> None:
        """The text is this now: what is new is encoded and, ahead of time, written."""
        self._clock += 1
        before, self._held, context.tokens = context.chunks, context, list(tokens)
        with self.memory.lock:
            root = context.app.encode()
            context.chunks = self.memory.table.refer(
                context.app, root, tokens, self.compression.first
            )
            for chunk in context.chunks:
                chunk.used = self._clock
                chunk.density = chunk.density or float(np.exp(self._random.standard_normal()))
            self.memory.release(before)
        self.compression.apply(self.memory, context.chunks)
        fresh = [chunk for chunk in context.chunks if not chunk.stored]
        nbytes = 0
        with self.memory.pinned(context.chunks):
            self.memory.free(sum(self._codes(chunk).nbytes for chunk in fresh))
            for chunk in fresh:
                codes = self._codes(chunk)
                if self.memory.claim(codes.nbytes):
                    self.memory.keep(chunk, codes)
                    nbytes += codes.nbytes
                if self.manager.swap == "ahead":
                    self._write_back([chunk])
        self._encoded_s = now_s + nbytes / self.machine.encode_bytes_per_s

    def _piece(self, chunk: Chunk) -> LoadItem:
        """Bytes of what is on the disk alone are claimed where there is room."""
        rates, codes, count = self.machine.rates, self._codes(chunk), len(chunk.tokens)
        if chunk.codes is not None:
            return rates.load_item(count, codes.bits, 0)
        if chunk.place is None or not self.memory.claim(codes.nbytes):
            return LoadItem(count, 0.0, 0, missing=True)
        return rates.load_item(count, codes.bits, codes.nbytes)

    def _codes(self, chunk: Chunk) -> Codes:
        """Of no contents: one byte that is everywhere."""
        bits, none = chunk.bits if chunk.full else RAW, np.zeros(1, np.uint8)
        size = self.codec.nbytes(len(chunk.tokens), bits)
        planes: list[Any] = [np.broadcast_to(none, size)]
        if bits in self.codec.nested:  # which may be lowered
            sizes = self.codec.plane_bytes(len(chunk.tokens), bits, 0)  # of layers that are alike
            planes = [np.broadcast_to(none, (self.codec.layers, x)) for x in sizes]
        return Codes(bits, len(chunk.tokens), tuple(planes))

    def _write_back(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            nbytes = self._codes(chunk).nbytes
            chunk.place = Place(0, 0, chunk.bits)
            self.written_bytes += nbytes
            self._reclaim_s += nbytes / self.machine.write_bytes_per_s

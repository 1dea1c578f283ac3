"""Contexts without a model: keys and values of a token are a function of the text up to it.

`FakeActive.compute` is the fake engine: it writes them, layer by layer, behind the gate as a step
does, and checks that everything before them is what it should be. Those of a text that was shifted
are what its cache held then, or, computed again, what they are without the shift.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hetero.backends.memory import HostBuffer
from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_files import ChunkFiles
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.codec import MIXED, RAW, ChunkCodec
from hetero.contexts.eviction import Policy
from hetero.contexts.load_plan import Rates
from hetero.contexts.read_ahead import ReadAhead
from hetero.contexts.swap_out import SwapOut
from hetero.contexts.working_set import CachedText, Switch, WorkingSet
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache
from hetero.runtime.kv.layer_gate import LayerGate

LAYOUT = CacheLayout(layers=3, kv_heads=2, capacity=160, head_dim=4)
LONGEST = 128
FAST = Rates(prefill_s=lambda m, _: 1.0 + m, read_bytes_per_s=1e9, run_s=1.0)
KEEP = 4  # first tokens that a shift leaves
TOLERANCE = {RAW: 0.0, 8: 1 / 128, 4: 1 / 8, 2: 1 / 2, MIXED: 1 / 8}  # of values in [-1, 1]


def truth(tokens: Sequence[int]) -> Any:
    """Keys and values [L, 2, G, tokens, D] of a text, in [-1, 1]; each by its whole beginning."""
    found = np.empty((LAYOUT.layers, 2, LAYOUT.kv_heads, len(tokens), LAYOUT.head_dim), np.float32)
    state = b""
    for i, token in enumerate(tokens):
        state = hashlib.blake2b(state + bytes([token]), digest_size=16).digest()
        seed = int.from_bytes(state[:8], "little")
        shape = found[:, :, :, 0].shape
        found[:, :, :, i] = np.random.default_rng(seed).uniform(-1, 1, shape)
    return found


class FakeActive:
    """The context that the fake engine computes on."""

    def __init__(self, tolerance: float) -> None:
        self.cache = KvCache(LAYOUT, HostBuffer)
        self.gate: LayerGate | None = None
        self.holes: tuple[tuple[int, int], ...] = ()
        self.score_stats = None
        self.tolerance = tolerance
        self.computed = self.forgotten = 0
        self.moved: Any = truth(())  # what a shift has left of the text
        self._tokens: list[int] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def cached(self) -> int:
        return len(self._tokens)

    def adopt(self, tokens: Sequence[int]) -> None:
        self._tokens, self.gate, self.forgotten, self.holes = list(tokens), None, 0, ()

    def check(self, layer: int, wanted: Any) -> None:
        """Return whether a layer has the keys and values of the text."""
        moved, count = self.moved[layer], self.moved.shape[3]
        for kind, cache in enumerate(self.cache.layer(layer)):
            found = cache[:, : self.cached]
            off = np.abs(found - wanted[layer, kind, :, : self.cached])
            apart = np.abs(found[:, :count] - moved[kind, :, : self.cached])
            off[:, :count] = np.minimum(off[:, :count], apart)
            worst = off.max(initial=0)
            assert worst <= self.tolerance, f"layer {layer} of {self.cached} tokens: {worst}"

    def forget(self, keep: int, drop: int) -> None:
        """Shift, when nothing is missing; rows do not turn here."""
        self.compute(())
        for layer in range(LAYOUT.layers):
            self.check(layer, truth(self._tokens))
            for cache in self.cache.layer(layer):
                moved = cache[:, keep + drop : self.cached].copy()
                cache[:, keep : self.cached] = np.nan
                cache[:, keep : keep + moved.shape[1]] = moved
        del self._tokens[keep : keep + drop]
        self.forgotten += drop
        self.moved = self.cache.read(0, self.cached)

    def compute(self, tokens: Sequence[int]) -> None:
        """Fill the holes and append tokens; rows behind them are spoilt, as padded calls do."""
        before, whole = self.cached, [*self._tokens, *tokens]
        wanted = truth(whole)
        for layer in range(LAYOUT.layers):
            if self.gate is not None:
                self.gate.wait(layer)
            for start, stop in self.holes:
                for kind, cache in enumerate(self.cache.layer(layer)):
                    cache[:, start:stop] = wanted[layer, kind, :, start:stop]
            self.check(layer, wanted)
            for kind, cache in enumerate(self.cache.layer(layer)):
                cache[:, before : len(whole)] = wanted[layer, kind, :, before:]
                cache[:, len(whole) : len(whole) + 8] = np.nan
        self.computed += len(tokens) + sum(stop - start for start, stop in self.holes)
        self._tokens, self.gate, self.holes = whole, None, ()


class FakeService:
    """Everything of a service but texts on the disk and a model."""

    def __init__(
        self,
        folder: Path,
        *,
        memory: int,
        disk: int,
        bits: int = 8,
        policy: Policy = "lctru",
        rates: Rates | None = None,
        recompute: bool = True,
        read_ahead: bool = False,
    ) -> None:
        self.bits, self.folder = bits, folder
        self.codec = ChunkCodec(LAYOUT, mixed=[[4, 8, [6, 4]]])
        self.active = FakeActive(TOLERANCE[bits])
        self.disk = ByteBudget(disk, "disk")
        self.memory = ChunkMemory(ByteBudget(memory), policy)
        self.apps: dict[str, ChunkFiles] = {}
        self.moved: dict[bytes, Any] = {}  # of shifted texts by root: see `FakeActive.moved`
        self.swap = SwapOut(self.memory, self.codec, self.files, self.disk)
        self.working = WorkingSet(
            self.active,
            self.memory,
            self.codec,
            self.swap,
            files=self.files,
            rates=rates or FAST,
            recompute=recompute,
        )
        self.ahead: ReadAhead | None = None
        if read_ahead:
            self.ahead = ReadAhead(
                self.memory, self.codec, self.files, self.swap, lambda: [self.working.cached_time]
            )

    def turn(self) -> AbstractContextManager[None]:
        """Inside, no other thread changes chunks: what the lock of a service does."""
        return nullcontext() if self.ahead is None else self.ahead.paused()

    def files(self, app: str) -> ChunkFiles:
        if app not in self.apps:
            (self.folder / app).mkdir(exist_ok=True)
            self.apps[app] = ChunkFiles(self.folder / app, self.codec, self.disk)
        return self.apps[app]

    def held(self, app: str) -> CachedText:
        return CachedText(app, app.encode())

    def call(
        self,
        held: CachedText,
        tokens: Sequence[int],
        answer: Sequence[int] = (),
        old: int | None = None,
    ) -> Switch:
        """A prompt (the whole text with it) and an answer. With `old` a full text is shifted, at
        the cost of the first `old` tokens where the prompt does not fit.
        """
        with self.turn():
            return self._call(held, tokens, answer, old)

    def _call(
        self, held: CachedText, tokens: Sequence[int], answer: Sequence[int], old: int | None
    ) -> Switch:
        switches: list[Switch] = []
        active = self.active
        active.moved = self.moved[held.root] if held.shifted else truth(())

        def run(switch: Switch) -> Iterator[None]:
            switches.append(switch)
            text = list(tokens)
            if old is not None:
                self.working.wait_until_free()
                if (over := len(text) + 1 - LONGEST) > 0:
                    drop = max(over, (old - KEEP) // 2)
                    active.forget(KEEP, drop)
                    del text[KEEP : KEEP + drop]
            active.compute(text[active.cached :])
            yield

        for _ in self.working.answering(held, tokens, run):
            for token in answer:
                if active.cached == LONGEST:
                    active.forget(KEEP, (LONGEST - KEEP) // 2)
                active.compute([token])
        root = self.working.root_after(held)
        if active.forgotten:
            self.moved[root] = active.moved
        self.working.tick()
        self.working.leave(held, self.bits, root)
        self.working.swap_out(held)
        return switches[-1]

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.swap.close()
        self.working.close()

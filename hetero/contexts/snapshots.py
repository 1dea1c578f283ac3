"""Snapshots of the states of a text, stored with the keys and values of its tokens.

Layers whose state has a fixed size (`hetero.runtime.kv.layer_states`) keep nothing of single
tokens, so keys and values alone are nothing to continue from. Snapshots are the states after some
numbers of tokens: where the text ends, and where its last calls began and ended. Each is a chunk
without tokens (`hetero.contexts.chunks.Snapshot`), so it is under the budgets of all chunks, and is
evicted, written, encrypted and compacted like them.

A text goes on from the last snapshot before which all keys and values are stored, and what follows
is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Final

from hetero.contexts.chunk_format import ChunkError
from hetero.contexts.chunks import Chunk, Snapshot, chained_key, end_keys
from hetero.contexts.codec import STATES, Codes
from hetero.contexts.swap_out import SwapJob
from hetero.contexts.working_set import CachedText, Switch, WorkingSet, in_memory
from hetero.runtime.kv.layer_gate import LayerGate
from hetero.runtime.kv.layer_states import crowded

MOST: Final = 3  # of a text


class StatefulWorkingSet(WorkingSet):
    """A working set of a model some of whose layers have a state."""

    _snapshots: Sequence[Snapshot] = ()  # of the text that is loaded

    def leave(self, text: CachedText, bits: int, root: bytes | None = None) -> list[Chunk]:
        """Take over the active context's text, with snapshots of it."""
        before = text.snapshots
        with self._memory.lock:
            chunks = super().leave(text, bits, root)
            text.snapshots = self._taken(text, before)
            for snapshot in text.snapshots:
                for chunk in snapshot.chunks:
                    chunk.used = self._times.last
        self.release([chunk for snapshot in before for chunk in snapshot.chunks])
        return chunks

    def swap_out(self, text: CachedText, *, durable: bool = True) -> None:
        """Encode and write chunks and snapshots in the background (`WorkingSet.swap_out`)."""
        cache, lossy = self._active.cache, self._lossy
        with self._memory.lock:
            tails = (x.tail for x in text.snapshots if x.tail is not None)
            fresh = {
                chunk: None
                for chunk in [*text.chunks, *tails]
                if not chunk.stored and not lossy[chunk.start : chunk.stop].any()
            }
            lost = (c.start for c in text.chunks if c.full and not c.stored and c not in fresh)
            usable = min(lost, default=cache.layout.capacity)
            states = {
                x.states: copy
                for x in text.snapshots
                if not x.states.stored and x.at <= usable and (copy := cache.states.copy(x.at))
            }
        if fresh or states:
            self._swap.submit(SwapJob(list(fresh), cache, durable, states))

    def _taken(self, text: CachedText, before: Sequence[Snapshot]) -> list[Snapshot]:
        """Return the snapshots of a text that has just been computed, each referenced once more."""
        cache, cached = self._active.cache, self._active.cached
        cache.keep_state()
        tokens, table = text.tokens[:cached], self._memory.table
        known = {x.at: x.states.key for x in before if x.at <= cached and x.stored}
        keys = end_keys(text.root, tokens, known)
        places = {at for at, key in keys.items() if chained_key(key, ()) == known[at]}
        places |= {at for at in cache.states.kept if at <= cached}
        while len(places) > MOST:
            places.remove(crowded(sorted(places)))
        return [table.refer_snapshot(text.app, text.root, tokens[:at]) for at in sorted(places)]

    # --- Load -------------------------------------------------------------------------------

    def _known(self, text: CachedText, tokens: Sequence[int]) -> list[Chunk]:
        self._snapshots = text.snapshots
        return [*super()._known(text, tokens), *(c for x in text.snapshots for c in x.chunks)]

    def _load(self, tokens: Sequence[int], chunks: Sequence[Chunk], switch: Switch) -> None:
        """Restore the last snapshot that can be, if that is beyond what the cache goes on from."""
        active, reused = self._active, self._active.cached
        reached = active.cache.continued(reused)
        if reached < reused:
            self._swap.wait_encoded(active.cache)
            active.adopt(tokens[:reached])
        if chunks:
            for snapshot in sorted(self._snapshots, key=lambda x: x.at, reverse=True):
                parts = self._parts(snapshot, tokens, chunks)
                wanted = [chunk for chunk in parts if chunk.stop > reused]
                beyond = reached < snapshot.at < len(tokens)
                if beyond and parts and self._restored(snapshot, wanted, tokens, switch):
                    break
        self._lossy[active.cached :] = False
        switch.reused_tokens = min(reached, active.cached)
        known = max(
            (c.stop for c in chunks if c.tokens == tuple(tokens[c.start : c.stop])), default=0
        )
        switch.tail_tokens = max(min(known, len(tokens) - 1) - active.cached, 0)
        switch.recomputed_tokens = switch.tail_tokens

    def _parts(
        self, snapshot: Snapshot, tokens: Sequence[int], chunks: Sequence[Chunk]
    ) -> list[Chunk]:
        """Return the chunks of all tokens before a snapshot; none where one is not stored."""
        whole = [x for x in chunks if x.tokens and x.full and x.stop <= snapshot.at]
        parts = list(dict.fromkeys([*whole, *([] if snapshot.tail is None else [snapshot.tail])]))
        at = 0
        for chunk in parts:
            if chunk.start != at or chunk.tokens != tuple(tokens[at : chunk.stop]):
                return []
            at = chunk.stop
        stored = snapshot.states.stored and all(chunk.stored for chunk in parts)
        return parts if stored and at == snapshot.at else []

    def _restored(
        self, snapshot: Snapshot, wanted: Sequence[Chunk], tokens: Sequence[int], switch: Switch
    ) -> bool:
        """Load states, and start to load the keys and values; return whether that was possible."""
        active, states = self._active, snapshot.states
        claimed = self._claimed([*wanted, states])
        try:
            loaded = all(in_memory(x, claimed) for x in [*wanted, states])
            if loaded and not self._slower(snapshot.at, wanted, claimed, len(tokens), switch):
                codes = self._states(states, claimed, switch)
                if codes is not None:
                    gate: LayerGate | None = None
                    if wanted:
                        active.adopt(tokens[: min(wanted[0].start, active.cached)])
                        gate = self._start(wanted, claimed, switch)
                    active.adopt(tokens[: snapshot.at])
                    active.cache.load_states(self._codec.decode_states(codes), snapshot.at)
                    active.cache.keep_state()
                    active.gate = gate
                    return True
            return False
        finally:
            for codes in claimed.values():
                self._unclaim(codes)

    def _states(self, chunk: Chunk, claimed: dict[Chunk, Codes], switch: Switch) -> Codes | None:
        """Return a snapshot's states, read if need be; None where the disk has lost them."""
        if chunk.codes is not None:
            return chunk.codes
        codes = claimed[chunk]
        try:
            with closing(self._files(chunk.app).reader([chunk])) as reader:
                for layer in range(self._codec.layers):
                    reader.layer(layer, [codes])
        except ChunkError:
            self._lose(chunk)
            switch.faults += 1
            return None
        self._memory.keep(chunk, claimed.pop(chunk))
        switch.loaded_bytes += codes.nbytes
        return codes

    def _slower(
        self,
        at: int,
        wanted: Sequence[Chunk],
        claimed: dict[Chunk, Codes],
        tokens: int,
        switch: Switch,
    ) -> bool:
        """Return whether computing again is faster than loading up to `at`."""
        rates, reached = self.rates, self._active.cached
        alone_s = float(rates.prefill_s(tokens - reached, reached))
        load_s = float(rates.prefill_s(tokens - at, at)) + rates.read_latency_s * bool(claimed)
        for chunk in wanted:
            codes = chunk.codes or claimed[chunk]
            read = codes.nbytes if chunk in claimed else 0
            item = rates.load_item(len(chunk.tokens), codes.bits, read)
            load_s += item.read_s + item.work_s
        load_s += (
            sum(x.nbytes for x in claimed.values() if x.bits == STATES) / rates.read_bytes_per_s
        )
        switch.predicted_s = min(alone_s, load_s) if self.recompute else load_s
        return self.recompute and alone_s <= load_s

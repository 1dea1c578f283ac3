"""Recent texts of an app: a call that shares a prefix with one continues from it.

They are in no log and end with the process; their keys and values are exact, and under the same
budgets as all others. Their chunks have a root of their own, so a context's chunk, which may have
fewer bits, is never used for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hetero.backends.host.files import sync_directory
from hetero.backends.host.signals import WholeSteps, whole
from hetero.contexts.codec import RAW
from hetero.contexts.compaction import compact
from hetero.contexts.service import App, AppContext
from hetero.contexts.slot_pool import Slot
from hetero.contexts.working_set import CachedText, Switch
from hetero.errors import UserError
from hetero.generation.loop import Delta, GenerationResult, Pending
from hetero.runtime.kv.context import common_prefix


@dataclass(eq=False)
class RecentText:
    """One recent text. `used` is the number of its last call; `switch` its cost."""

    cached: CachedText
    used: int = 0
    switch: Switch = field(default_factory=Switch)


class RecentTexts:
    """An app's last `count` texts. Used by one thread at a time."""

    def __init__(self, app: App, count: int) -> None:
        self.app = app
        self.texts = [RecentText(CachedText(app.name, self._root(""))) for _ in range(count)]
        self.busy: set[int] = set()
        self._saved: dict[str, CachedText] = {}
        self._calls = 0

    def choose(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the idle text to replace by an answer to `tokens`.

        It is the one that shares the longest prefix, if that is most of it, else the least recently
        used.
        """
        root, texts = self._root(salt), self.texts
        shares = {
            i: common_prefix(x.cached.tokens, tokens) if x.cached.origin == root else 0
            for i, x in enumerate(texts)
            if i not in self.busy
        }
        best = max(shares, key=lambda i: shares[i])
        if 2 * shares[best] > len(texts[best].cached.tokens):
            return best
        return min(shares, key=lambda i: texts[i].used)

    def stream(
        self,
        at: int,
        tokens: Sequence[int],
        results: list[GenerationResult],
        salt: str = "",
        **options: Any,
    ) -> WholeSteps[Delta | Pending | None]:
        """Stream the answer to a whole text, which replaces text `at`.

        A step without output yields None. Texts of another `salt` are not reused. With `echo` and
        `logprobs` every token is computed.
        """
        return WholeSteps(self._steps(at, tokens, results, salt, options))

    def _steps(
        self,
        at: int,
        tokens: Sequence[int],
        results: list[GenerationResult],
        salt: str,
        options: dict[str, Any],
    ) -> Iterator[Delta | Pending | None]:
        service, text, tokens = self.app.service, self.texts[at], list(tokens)
        whole = options.get("echo") and options.get("logprobs") is not None
        with service._lock.taken(), self._working(at):
            self._calls += 1
            origin, text.used = self._root(salt), self._calls
            goes_on = tokens[: len(text.cached.tokens)] == text.cached.tokens
            root = text.cached.root if goes_on and text.cached.origin == origin else origin
            with service.memory.lock:
                table = service.memory.table
                known = 0 if whole else table.known(self.app.name, root, tokens)
                chunks = table.refer(self.app.name, root, tokens[:known], RAW)
                snapshots = [] if whole else table.refer_snapshots(self.app.name, root, tokens)
            before = text.cached
            text.cached = CachedText(self.app.name, root, tokens, chunks, snapshots, origin)
            service._working.release(before.all_chunks)
            ended: list[GenerationResult] = []
            with service._slots.taken(root, tokens) as slot:
                run = partial(self._run, slot, text, tokens, options, ended)
                yield from slot.working.answering(text.cached, tokens, run)
                slot.working.tick()
                slot.working.leave(text.cached, RAW)
                slot.working.swap_out(text.cached, durable=False)  # ends with the process
            results += ended

    @contextmanager
    def _working(self, at: int) -> Iterator[None]:
        """Mark a text as busy inside the block."""
        self._check(at)
        self.busy.add(at)
        try:
            yield
        finally:
            self.busy.discard(at)

    def _check(self, at: int) -> None:
        if at in self.busy:
            raise UserError("an answer on this text is unfinished: wait for it, or end it")

    @whole
    def erase(self, at: int) -> int:
        """Delete a text, and return how many tokens it had."""
        service = self.app.service
        with service._lock.taken():
            self._check(at)
            text = self.texts[at]
            service._slots.forget(text.cached.root)
            service.swap.drain()
            service._working.release(text.cached.all_chunks)
            compact(self.app.files, service.memory, self.app.name, everything=True)
            sync_directory(self.app.folder)
            count = len(text.cached.tokens)
            text.cached, text.used = CachedText(self.app.name, self._root("")), 0
            return count

    @whole
    def save(self, at: int, context: AppContext) -> None:
        """Save a text as a context; its keys and values stay until the process ends."""
        self._check(at)
        cached = self.texts[at].cached
        context.become(cached.tokens)
        self.forget(context.id)
        self._saved[context.id] = self._again(cached)

    @whole
    def restore(self, at: int, context: AppContext) -> None:
        """Restore a context that `save` wrote, in any process, as a recent text."""
        saved = self._saved.get(context.id)
        if saved is None or tuple(saved.tokens) != context.tokens:
            saved = CachedText(self.app.name, self._root(""), list(context.tokens))
        again = self._again(saved)
        self.erase(at)
        self._calls += 1
        self.texts[at].cached, self.texts[at].used = again, self._calls

    @whole
    def forget(self, name: str) -> None:
        """Drop the keys and values of a saved text."""
        if (cached := self._saved.pop(name, None)) is not None:
            self.app.service._working.release(cached.all_chunks)

    def _again(self, cached: CachedText) -> CachedText:
        memory = self.app.service.memory
        with memory.lock:
            known = cached.chunks[-1].stop if cached.chunks else 0
            tokens, table = cached.tokens[:known], memory.table
            chunks = table.refer(cached.app, cached.root, tokens, RAW)
            snapshots = table.refer_snapshots(cached.app, cached.root, tokens)
        tokens, origin = list(cached.tokens), cached.origin
        return CachedText(cached.app, cached.root, tokens, chunks, snapshots, origin)

    def _run(
        self,
        slot: Slot,
        text: RecentText,
        tokens: list[int],
        options: dict[str, Any],
        ended: list[GenerationResult],
        switch: Switch,
    ) -> Iterator[Delta | Pending | None]:
        text.switch = switch
        yield from self.app.service._steps(slot, tokens, options, ended)

    def _root(self, salt: str) -> bytes:
        data = salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self.app.root, person=b"recent", digest_size=32).digest()

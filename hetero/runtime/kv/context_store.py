"""The contexts of one loaded model: which are open, and how many fit the memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hetero.backends.errors import DeviceLostError
from hetero.backends.host import forks
from hetero.backends.optional import SupportsHandovers
from hetero.errors import UserError
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.kv_cache import Allocate, Array, CacheLayout, KvCache
from hetero.runtime.kv.session_file import Identity
from hetero.runtime.kv.shift import Ropes
from hetero.runtime.step_lock import StepLock

Admit: TypeAlias = Callable[[int], None]


class ContextStore:
    """Opens contexts and knows the open ones; it keeps none of them alive.

    The engine defines caches, their memory and, by its method `admit(count)`, which raises
    `UserError`, whether that many contexts fit (`provide`). Any thread may open one. A context that
    outlives its model does not keep its weights.
    """

    def __init__(
        self, lock: StepLock, identity: Identity, max_tokens: int, ropes: Ropes | None = None
    ) -> None:
        self.identity = identity
        self.max_tokens = max_tokens
        self.ropes = ropes
        self._lock = lock
        self._open: weakref.WeakSet[Context] = weakref.WeakSet()
        self._channels: Sequence[Array] | Array | None = None
        forks.in_child(self._forked)

    def provide(
        self,
        layout: CacheLayout,
        allocate: Allocate,
        admit: Admit,
        gpu: SupportsHandovers | None = None,
    ) -> list[tuple[Context, list[int]]]:
        """Set what caches are like from now on; open contexts move into new ones.

        `gpu` is as in `KvCache`. Returns what `Context.move` does, of the contexts that lost some
        tokens.
        """
        self._layout, self._allocate, self._gpu = layout, allocate, gpu
        self._admit = weakref.WeakMethod(admit)
        moved = [(x, x.move(KvCache(layout, allocate, gpu))) for x in self.open_contexts()]
        return [(context, lost) for context, lost in moved if lost]

    def scale_by(self, channels: Sequence[Array] | Array) -> None:
        """Set the scales of channels of coded keys, for contexts that are empty from now on."""
        self._channels = channels
        for context in self.open_contexts():
            if not context.cached:
                context.cache.scale_by(channels)

    def open_contexts(self) -> list[Context]:
        """Return the contexts that take memory."""
        return [context for context in list(self._open) if not context.closed]

    def open(self, *, waits: bool = False) -> Context:
        """Return an empty context. Raises `UserError` where there is no memory for another one."""
        with self._lock:
            admit = self._admit()
            if admit is None:
                raise DeviceLostError("engine", "opening a context", "the model is gone")
            admit(len(self.open_contexts()) + 1)
            cache = KvCache(self._layout, self._allocate, self._gpu)
            cache.scale_by(self._channels)
            context = Context(self, cache, waits=waits)
            self._open.add(context)
        return context

    def own(self, context: object) -> Context:
        """Return the context if it belongs to this store. Raises `UserError`."""
        if not isinstance(context, Context):
            raise UserError(
                "context must be a Context from new_context(), got "
                f"{type(context).__name__} {str(context)[:40]!r}"
            )
        if context.home is not self:
            raise UserError(
                "this context belongs to another model: use it with the one whose new_context() "
                "made it"
            )
        return context

    def _forked(self) -> None:
        for context in self.open_contexts():
            context.forked()

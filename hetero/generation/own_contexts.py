"""The contexts of calls that name none: one each, while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hetero.errors import UserError
from hetero.runtime.kv.context import Context, Hold


class OwnContexts:
    """The model's own context, and further ones while several calls without a context run at once.

    A call takes a free one, `first` before the others; with `reuse` the one that shares most of the
    beginning with its prompt. Further ones are closed when no call uses any of them. Takes no lock:
    `end` also runs in finalisers.
    """

    def __init__(self, more: Callable[[], Context]) -> None:
        self.first = more()
        self._more = more
        self._extra: list[Context] = []

    def take(self, tokens: Sequence[int], *, reuse: bool) -> tuple[Context, Hold]:
        """Return a context for a call, and its hold.

        Where the memory has no room for another context, wait for a call of another thread. Raises
        `UserError` where all are used by streams of this thread.
        """
        contexts = [self.first, *self._extra]
        if reuse:
            contexts.sort(key=lambda context: -context.shared(tokens))
        for context in contexts:
            hold = context.try_hold()
            if hold is not None and (context is self.first or not context.closed):
                return context, hold
        try:
            context = self._more()
        except UserError as error:
            return self._waited_for(contexts, error)
        hold = context.hold()
        self._extra.append(context)
        return context, hold

    def end(self) -> None:
        """Close the further contexts if none is in use; called when a call has ended."""
        if any(context.user is not None for context in [self.first, *self._extra]):
            return
        for context in list(self._extra):
            if context.try_hold() is not None:  # no call has taken it meanwhile
                context.close()
        self._extra = [context for context in self._extra if not context.closed]

    def _waited_for(self, contexts: Sequence[Context], error: UserError) -> tuple[Context, Hold]:
        mine = threading.get_ident()
        for context in contexts:
            user = context.user
            if user is None or user.thread != mine:
                return context, context.hold()
        raise UserError(
            f"{len(contexts)} streams of this model are unfinished, and there is no room for "
            f"another context ({error}): read one to its end or close() it before the next call"
        ) from error

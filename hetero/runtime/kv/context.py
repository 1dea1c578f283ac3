"""A context: a text that a model continues, as a value."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hetero.backends.errors import DeviceError
from hetero.backends.host.closing import Closing
from hetero.errors import UserError
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.kv_cache import KvCache
from hetero.runtime.kv.layer_gate import LayerGate, LoadError
from hetero.runtime.kv.session_file import Identity, read_session, save_session
from hetero.runtime.kv.shift import Ropes, forget
from hetero.runtime.step_lock import lost_error
from hetero.runtime.usage import Work

T = TypeVar("T")
Rows: TypeAlias = npt.NDArray[np.float32]
WAIT_S: Final = 600.0  # for another thread's stream of the same context
_NAP_S: Final = 1e-3


class Home(Protocol):
    """The model that a context belongs to (`hetero.runtime.kv.context_store`)."""

    identity: Identity
    max_tokens: int
    ropes: Ropes | None  # None: cached keys cannot be turned to other positions

    def open(self) -> Context:
        """Return another, empty context. Raises `UserError` where there is no room for it."""


class Hold:
    """The use of a context by one call or stream.

    It ends when `active` is set to false, or when nothing refers to it any more: an interruption
    never leaves a context in use.

    `thread` is the one that the call or stream runs in.
    """

    __slots__ = ("__weakref__", "active", "thread")

    def __init__(self) -> None:
        self.active, self.thread = True, threading.get_ident()


class Context(Closing):
    """Tokens, and the model's keys and values of them.

    Made by `LLM.new_context` or `load_context`, or by `fork`.

    `tokens` is the text; the first `cached` of them have keys and values: all but what was chosen
    last, which the next call computes first. One call or stream uses a context at a time; another
    one meanwhile is a `UserError`, or waits for its turn with `waits` (a model's own context).
    Contexts of one model do not disturb each other, whichever threads use them. Memory is freed
    when a context is closed, which ends an answer that is made on it with the `UserError` of every
    later use, or when nothing refers to it. `tokens` and `len` may be read at any time.
    """

    def __init__(self, home: Home, cache: KvCache, *, waits: bool = False) -> None:
        self.work = Work()
        self.gate: LayerGate | None = None  # layers that another thread is still filling
        self.score_stats: ScoreStats | None = None  # adds up who attends to what, if asked for
        self.on_states: Callable[[int, Rows], object] | None = None  # called with hidden states
        self._home = home
        self._cache: KvCache | None = cache
        self._tokens: list[int] = []
        self._cached = self.forgotten = 0  # the latter by shifts, since the text was adopted
        self.holes: tuple[tuple[int, int], ...] = ()  # of the cached: without keys and values yet
        self._waits, self.wait_s, self._lost = waits, WAIT_S, False
        self._choosing = threading.RLock()  # also a signal handler may want the context
        self._hold: weakref.ref[Hold] | None = None

    # --- for everyone -----------------------------------------------------------------------

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the token ids of the text."""
        return tuple(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __bool__(self) -> bool:  # an empty one is a context, too
        return True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)} of {self._home.max_tokens} tokens"
        return f"<hetero.Context, {state}>"

    @property
    def closed(self) -> bool:
        """Return whether it was closed."""
        return self._cache is None

    def fork(self) -> Context:
        """Return an equal, independent context. Costs a copy of the keys and values so far.

        Raises `UserError` where there is no memory for another one.
        """
        return self._alone(self.copy)

    def truncate(self, tokens: int) -> None:
        """Drop all but the first tokens. Raises `UserError` if there are fewer."""

        def cut() -> None:
            if not 0 <= tokens <= len(self):
                raise UserError(
                    f"a context of {len(self)} tokens cannot be cut to {tokens}: give a number "
                    f"from 0 to {len(self)}"
                )
            self.rewind(tokens)

        self._alone(cut)

    def shift(self, keep: int, drop: int) -> None:
        """Drop tokens [keep, keep + drop); later ones move up without being computed again.

        It is an approximation: they were computed from the dropped tokens
        (`hetero.runtime.kv.shift`). Raises `UserError` for tokens that it does not hold, or a model
        with learned positions.
        """

        def shifted() -> None:
            if not (keep >= 0 and drop > 0 and keep + drop <= len(self)):
                raise UserError(
                    f"a context of {len(self)} tokens cannot forget {drop} after the first {keep}:"
                    f" keep and drop are at most {len(self)} together, and drop at least 1"
                )
            self.forget(keep, drop)

        self._alone(shifted)

    def save(self, path: str | os.PathLike[str], *, messages: Sequence[Any] = ()) -> None:
        """Write it to a file, all or nothing, with the messages that it came from.

        Raises `UserError` if it is empty or the file cannot be written.
        """

        def saved() -> None:
            self.recover()
            save_session(
                Path(path), self._home.identity, self.cache, self._tokens, self._cached, messages
            )

        self._alone(saved)

    def load(self, path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Load what `save` wrote, on any plan and device of the same model; return its messages.

        Raises `ModelError`, and changes nothing, if the file is broken or of another model.
        """

        def loaded() -> list[dict[str, Any]]:
            home, cache = self._home, self.cache
            session = read_session(Path(path), home.identity, cache, home.max_tokens)
            self._cached = 0  # or an interruption would leave keys and values of both texts
            session.restore(cache)
            self._tokens, self._cached = session.tokens, session.cached
            return session.messages

        return self._alone(loaded)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._cache = None

    # --- for who makes an answer on it ------------------------------------------------------

    @property
    def home(self) -> Home:
        """Return the model's contexts."""
        return self._home

    @property
    def cache(self) -> KvCache:
        """Return the keys and values. Raises `UserError` if the context was closed."""
        if self._cache is None:
            raise UserError("this context was closed: make another one with new_context()")
        return self._cache

    @property
    def cached(self) -> int:
        """Return how many tokens have keys and values in the cache: where the next step begins."""
        return self._cached

    @property
    def pending(self) -> tuple[int, ...]:
        """Return the tokens that are not cached yet."""
        return tuple(self._tokens[self._cached :])

    @property
    def user(self) -> Hold | None:
        """Return the call or stream that uses the context now."""
        hold = None if self._hold is None else self._hold()
        return hold if hold is not None and hold.active else None

    def try_hold(self) -> Hold | None:
        """Return what `hold` does, or None where the context is in use."""
        hold = Hold()
        try:
            taken = self._taken(weakref.ref(hold))
        except BaseException:
            hold.active = False
            raise
        return hold if taken else None

    def hold(self) -> Hold:
        """Reserve it until `active` of what this returns is false.

        Raises `UserError` if it is closed or in use.
        """
        hold = Hold()
        try:
            self._wait_for(hold)
            _ = self.cache  # raises where the context is closed
        except BaseException:  # also where its traceback is kept
            hold.active = False
            raise
        return hold

    def _wait_for(self, hold: Hold) -> None:
        give_up_s = time.monotonic() + self.wait_s
        while not self._taken(weakref.ref(hold)):
            if self._lost:
                raise lost_error()
            user = self.user
            if not self._waits or (user is not None and user.thread == hold.thread):
                raise UserError(
                    "a stream of this context is unfinished: read it to its end or close() it "
                    "before the next call, or use another context"
                )
            if time.monotonic() > give_up_s:
                raise UserError(
                    f"another thread's stream of this context has not ended within {self.wait_s:g} "
                    "s: read it to its end or close() it, or use another context"
                )
            time.sleep(_NAP_S)

    def _taken(self, hold: weakref.ref[Hold]) -> bool:
        with self._choosing:  # allocates nothing: a finaliser in here could want another context
            if self.user is not None:
                return False
            self._hold = hold
            return True

    def _alone(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which has the context to itself."""
        hold = self.hold()
        try:
            return work()
        finally:
            hold.active = False

    def copy(self, target: Context | None = None) -> Context:
        """Return a copy, for the holder of the context: `target`, or a new context."""
        cache, other = self.cache, target or self._home.open()
        other.cache.copy_from(cache, self._cached)
        other._tokens, other._cached = list(self._tokens), self._cached
        return other

    def rewind(self, tokens: int) -> None:
        """Truncate, for the holder; what no step can continue from is computed again."""
        self._cached = self._reached(min(self._cached, tokens))
        self.holes = tuple((a, min(b, tokens)) for a, b in self.holes if a < tokens)
        del self._tokens[tokens:]

    def _reached(self, cached: int) -> int:
        """Return up to `cached` the last position that a step can continue from."""
        return cached if self._cache is None else self._cache.continued(cached)

    def recover(self) -> list[int]:
        """Return what must be computed again because a step that did not end changed the states."""
        if self._cache is None or not self._cache.layout.states:
            return []
        cached, self._cached = self._cached, self._reached(self._cached)
        return self._tokens[self._cached : cached]

    def forget(self, keep: int, drop: int) -> None:
        """Shift, for the holder of the context."""
        ropes = check_shift(self._home)
        cached, stop = self._cached, min(keep + drop, self._cached)
        if keep < stop:
            self._cached = self._reached(keep)  # while the others move: see `slide`
            forget(self.cache, ropes, keep, stop, cached)
            cached = self._reached(cached - (stop - keep))
        del self._tokens[keep : keep + drop]
        self._cached, self.forgotten = cached, self.forgotten + drop

    def slide(self) -> None:
        """Move the rows of windows so that a step may begin.

        Where that is interrupted all tokens are computed again.
        """
        cache, cached = self.cache, self._cached
        self._cached = 0
        cache.slide(cached)
        self._cached = cached

    def advance(self, tokens: Sequence[int], *, keep_state: bool = False) -> None:
        """Append tokens whose keys and values a step has computed after the cached ones."""
        stop = self._cached + len(tokens)
        self._tokens[self._cached : stop] = tokens
        self._cached = stop
        if self._cache is not None:
            self._cache.ended(stop, keep_state=keep_state)

    def note(self, text: Sequence[int]) -> None:
        """Set the whole text, not all of it computed yet; drop what was cached of another text."""
        if self._tokens[: self._cached] != text[: self._cached]:
            self.rewind(self.shared(text))
        self._tokens[self._cached :] = text[self._cached :]

    def adopt(self, tokens: Sequence[int]) -> None:
        """Set the tokens, whose keys and values are in the cache, or will be when `gate` opens."""
        if self._cache is not None:
            self._cache.states.forget(self.shared(tokens))
        self._tokens, self._cached, self.gate = list(tokens), len(tokens), None
        self.forgotten, self.holes = 0, ()

    def shared(self, tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` are cached."""
        return common_prefix(self._tokens[: self._cached], tokens)

    def move(self, cache: KvCache) -> list[int]:
        """Continue in another cache: the devices have changed.

        Returns the tokens to compute again, because only a device that failed has seen their rows.
        """
        lost: list[int] = []
        if self._cache is not None:
            if self.gate is not None:
                with suppress(LoadError):  # which the next step meets
                    self.gate.wait(self.gate.layers - 1)
            try:
                cache.copy_from(self._cache, self._cached)
            except DeviceError:
                lost, self._cached = self._tokens[: self._cached], 0
            self._cache = cache
        return lost

    def forked(self) -> None:
        """Mark the context in a forked child: another thread's call on it never ends there."""
        user = self.user
        self._choosing = threading.RLock()
        self._lost = user is not None and user.thread != threading.get_ident()


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_shift(home: Home) -> Ropes:
    """Return the rotary embeddings by which tokens move.

    Raises `UserError` where there are none.
    """
    if home.ropes is None:
        raise UserError(
            "the context of this model cannot be shifted, since its positions are learned and no "
            "rotations, keys are normed after their rotation, or layers have states: leave out "
            "context_shift, or open the model with a larger max_seq_len"
        )
    return home.ropes

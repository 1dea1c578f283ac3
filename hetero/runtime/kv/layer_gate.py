"""A gate for layers of a cache that are loaded one after another, and for their readers."""

from __future__ import annotations

import threading
import time

from hetero.backends.host.time_limits import time_limit

DEADLINE_S = 30.0


class LoadError(Exception):
    """Keys and values that a step waits for do not come: it is run again without them."""


class LayerGate:
    """A gate that the loading thread opens layer by layer.

    The thread that runs a step waits at it, before the first call that reads a layer.
    HETERO_TIMEOUT_SCALE multiplies `deadline_s`.
    """

    def __init__(self, layers: int, deadline_s: float = DEADLINE_S) -> None:
        self.layers, self.deadline_s = layers, time_limit(deadline_s)
        self.waited_s = 0.0
        self._ready = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Return whether every layer is loaded."""
        return self._ready == self.layers and self._error is None

    def open(self) -> None:
        """Record that the next layer is loaded."""
        with self._changed:
            self._ready += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that loading failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, layer: int) -> float:
        """Wait until a layer is loaded; return the seconds.

        Raises `LoadError` if it is not loaded, or not in time.
        """
        if self._ready > layer and self._error is None:
            return 0.0
        start_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready > layer or self._error is not None, self.deadline_s
            )
        waited_s = time.perf_counter() - start_s
        self.waited_s += waited_s
        if self._error is not None:
            raise LoadError(f"layer {layer} did not come: {self._error}") from self._error
        if self._ready <= layer:
            raise LoadError(f"layer {layer} did not come within {self.deadline_s:g} s")
        return waited_s

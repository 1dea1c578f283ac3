"""Layers with a sliding attention window, and the rows of their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

FULL: Final = "full_attention"  # in `layer_types` of config.json
SLIDING: Final = "sliding_attention"
EXTRA_TOKENS: Final = 64  # tokens before the window: a text may be cut by so many and continue
STRIDES: Final = (64, 1024)  # tokens that a cache moves at a time: the least and the most
STRIDE_PART: Final = 8  # of a window is such a stride


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """Layers that see at most the last `window` tokens, in caches with room for `rows` of them."""

    layers: frozenset[int]
    window: int
    rows: int

    @classmethod
    def of(cls, windows: Sequence[int], capacity: int, written: int | None) -> Self | None:
        """Return the sizes for layers with these windows (0: none).

        Calls write up to `written` tokens before anything moves; None: all tokens have rows, as in
        the other layers.
        """
        layers = frozenset(i for i, window in enumerate(windows) if window)
        if not layers:
            return None
        window = max(windows[i] for i in layers)
        rows = capacity if written is None else window + EXTRA_TOKENS + stride_of(window) + written
        return cls(layers=layers, window=window, rows=min(rows, capacity))

    def seen(self, position: int) -> int:
        """Return the first token that the one at `position` sees."""
        return max(position - self.window + 1, 0)

    def base(self, position: int) -> int:
        """Return the first token that has a row where a call begins at `position`.

        It follows from the position alone, and by whole strides, so that equal texts have equal
        layouts.
        """
        stride = stride_of(self.window)
        return max(self.seen(position) - EXTRA_TOKENS, 0) // stride * stride


def stride_of(window: int) -> int:
    """Return the tokens by which caches of such a window move.

    It is a power of two, up to an eighth of the window.
    """
    least, most = STRIDES
    return min(max(1 << max((window // STRIDE_PART).bit_length() - 1, 0), least), most)

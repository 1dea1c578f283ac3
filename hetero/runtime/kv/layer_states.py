"""States of a fixed size: what layers without keys and values keep of a text.

A state is that after the last token of a call and cannot be cut at a token. So copies are kept at
some positions (`States.keep`): a text that is cut goes on from the last one before the cut, and the
tokens after it are computed again (llama.cpp: context checkpoints). A call at position 0 starts
from zeros whatever the states hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor

Array = npt.NDArray[Any]
MOST_COPIES: Final = 8  # of a context's states
FEWEST_COPIES: Final = 2  # of the end of a prompt, and before guesses
COPIES_BYTES: Final = 64 << 20
UNKNOWN: Final = -1


def copies_of(nbytes: int) -> int:
    """Return how many copies are kept of states of so many bytes; 0 of none."""
    if not nbytes:
        return 0
    return min(max(COPIES_BYTES // nbytes, FEWEST_COPIES), MOST_COPIES)


def crowded(positions: Sequence[int]) -> int:
    """Return the one of several rising positions whose neighbours are closest, but not the last."""
    places = (0, *positions)
    gaps = {b: c - a for a, b, c in zip(places, places[1:], places[2:], strict=False)}
    return min(gaps, key=gaps.__getitem__)


class States:
    """The states of one context, in memory that `allocate` gives, with up to `copies` copies.

    `at` is the number of tokens that they are the states after, `UNKNOWN` where a step that has not
    ended may have changed them.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        allocate: Callable[[int], HostBuffer],
        copies: int,
    ) -> None:
        self._most = copies
        self.tensors = {
            slot: Tensor(
                allocate(-(-4 * math.prod(shape) // PAGE_BYTES) * PAGE_BYTES),
                shape,
                np.dtype(np.float32),
            )
            for slot, shape in shapes
        }
        self.at = 0
        self._copies: dict[int, list[Array]] = {}

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the positions of the copies, rising."""
        return tuple(sorted(self._copies))

    def keep(self) -> None:
        """Keep a copy; where there are too many, drop the one whose neighbours are closest."""
        if self.at <= 0 or self.at in self._copies:
            return
        self._copies[self.at] = [x.array.copy() for x in self.tensors.values()]
        if len(self._copies) > self._most:
            del self._copies[crowded(self.kept)]

    def copy(self, position: int) -> list[Array]:
        """Return the copy at a position, to be read only; an empty list without one."""
        return self._copies.get(position, [])

    def restore(self, position: int) -> int:
        """Restore the last states up to `position`, drop those after it, and return where it is."""
        self.forget(position)
        if self.at != position:
            self.at = max(self._copies, default=0)
            for tensor, copy in zip(
                self.tensors.values(), self._copies.get(self.at, ()), strict=False
            ):
                tensor.array[...] = copy
        return self.at

    def forget(self, position: int) -> None:
        """Drop the states after `position`: another text follows there."""
        self._copies = {at: copy for at, copy in self._copies.items() if at <= position}
        if self.at > position:
            self.at = UNKNOWN

    def copy_from(self, other: States) -> None:
        """Copy states of the same model, with their copies."""
        for own, theirs in zip(self.tensors.values(), other.tensors.values(), strict=True):
            own.array[...] = theirs.array
        self.at, self._copies = other.at, dict(other._copies)

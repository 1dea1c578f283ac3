"""Keys or values of a layer as a cache stores them, on the host: floats, or codes of 8 bits.

Notation: G heads, C tokens that fit, D head size. Floats are [G, C, D]. With codes a token of a
head is a row of bytes: D codes, padded to whole words, and a float32 step after them; rows C and
on of a head hold the scales of its D channels, float32. A code i from -128 to 127 stands for

    (i + 1/2) · (step · channel),  step = amplitude / 128

where the amplitude is the largest |x / channel| of the row, rounded up to float16, and i is
floor((x / channel / amplitude + 1) · 128) - 128, at most 127; divisions, products and sums are
those of float32. So |x - x'| <= step · channel / 2. It is the code that contexts store (i + 128:
`ops.DecodeChunks`) with the amplitude that they store, so that nothing is rounded twice.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import CHANNEL_ROWS, CacheFormat
from hetero.backends.ops import Attention, AttentionHeads, ColumnMass, DecodeChunks, Op

Array: TypeAlias = npt.NDArray[Any]
LARGEST: Final = 127
STEPS: Final = np.float32(128)


class CacheRows:
    """A cache's tensor `array` of the shape `kv.shape(G, C, head_dim)`. Reads and writes tokens."""

    def __init__(self, array: Array, kv: CacheFormat, head_dim: int) -> None:
        self.array, self.kv, self.head_dim = array, kv, head_dim
        self.tokens = array.shape[1] - CHANNEL_ROWS * kv.coded

    @property
    def channels(self) -> Array:
        """Return the scales of the channels, float32 [G, D]: a view."""
        tail = self.array[:, self.tokens :].reshape(len(self.array), -1)
        return tail[:, : 4 * self.head_dim].view(np.float32)

    @property
    def codes(self) -> Array:
        """Return int8 [G, C, D]: a view."""
        return self.array[:, : self.tokens, : self.head_dim]

    @property
    def steps(self) -> Array:
        """Return float32 [G, C, 1]: a view."""
        return self.array[:, : self.tokens, -4:].view(np.float32)

    def read(self, start: int, stop: int) -> Array:
        """Return tokens [start, stop): a view where they are floats, else a float32 copy."""
        if not self.kv.coded:
            return self.array[:, start:stop]
        values = self.codes[:, start:stop].astype(np.float32)
        values += np.float32(0.5)
        values *= self.steps[:, start:stop] * self.channels[:, None]
        return values

    def write(self, start: int, values: Array) -> None:
        """Write tokens from `start` on, [G, tokens, D]."""
        stop = start + values.shape[1]
        if not self.kv.coded:
            self.array[:, start:stop] = values
            return
        scaled = values / self.channels[:, None]
        amplitudes = rounded_up(np.abs(scaled).max(axis=2, keepdims=True, initial=0))
        scaled /= np.where(amplitudes > 0, amplitudes, np.float32(1))
        scaled += np.float32(1)
        scaled *= STEPS
        with np.errstate(invalid="ignore"):  # what is not finite has any code, and its amplitude
            self.codes[:, start:stop] = np.minimum(np.floor(scaled) - STEPS, LARGEST)
        self.steps[:, start:stop] = amplitudes / STEPS

    def copy(self, start: int, other: CacheRows, first: int, last: int) -> None:
        """Copy tokens [first, last) of a cache of the same heads, maybe this one, to `start`.

        As stored where both have the same format and channels.
        """
        stop = start + last - first
        alike = self.kv is other.kv
        if alike and (not self.kv.coded or np.array_equal(self.channels, other.channels)):
            self.array[:, start:stop] = other.array[:, first:last].copy()  # they may overlap
        else:
            self.write(start, other.read(first, last))


def cache_rows(op: Op, array: Array) -> CacheRows:
    """Return a cache of an operation that has some."""
    of = op.attention if isinstance(op, ColumnMass | AttentionHeads) else op
    assert isinstance(of, Attention | DecodeChunks)
    return CacheRows(array, of.kv, of.head_dim)


def rounded_up(values: Array) -> Array:
    """Return float32 magnitudes to the next that float16 has; as they are beyond its range."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    short = rounded.astype(np.float32) < values
    rounded[short] = np.nextafter(rounded[short], np.float16(np.inf))
    wide = rounded.astype(np.float32)
    return np.where(np.isinf(wide), values, wide)


def random_rows(rows: CacheRows, known: int, random: np.random.Generator, *, keys: bool) -> None:
    """Return tokens and, of `keys`, scales of channels, for self-tests and tests.

    After the first `known` tokens is what poisons a result (NaN, steps that are NaN).
    """
    rows.array[...] = LARGEST if rows.kv.coded else np.nan
    if rows.kv.coded:
        rows.steps[...] = np.nan
        rows.channels[...] = random.uniform(0.3, 3, rows.channels.shape) if keys else 1
    shape = len(rows.array), known, rows.head_dim
    rows.write(0, random.standard_normal(shape, np.float32))

"""The memory of a context: runs of tokens come out and go back in, whatever lies around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.backends.memory import HostBuffer
from hetero.errors import UserError
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache

LAYOUT = CacheLayout(layers=3, kv_heads=2, capacity=40, head_dim=8)


def filled(seed: int) -> KvCache:
    cache, random = KvCache(LAYOUT, HostBuffer), np.random.default_rng(seed)
    for slot in LAYOUT.slots:
        cache[slot].array[:] = random.standard_normal(LAYOUT.shape(0))
    return cache


@given(seed=st.integers(0, 99), start=st.integers(0, 40), stop=st.integers(0, 40))
def test_what_was_taken_out_can_be_put_back_elsewhere(seed: int, start: int, stop: int) -> None:
    start, stop = sorted((start, stop))
    source, other = filled(seed), filled(seed + 1)
    part, before = source.read(start, stop), other.read(0, 40)
    assert part.shape == (3, 2, 2, stop - start, 8)
    other.write(start, part)
    after = other.read(0, 40)
    assert np.array_equal(after[:, :, :, start:stop], part)
    assert np.array_equal(after[:, :, :, :start], before[:, :, :, :start])
    assert np.array_equal(after[:, :, :, stop:], before[:, :, :, stop:])
    keys, values = source.layer(1)
    assert np.array_equal(part[1, 0], keys[:, start:stop])
    assert np.array_equal(part[1, 1], values[:, start:stop])
    assert np.shares_memory(keys, source["k_cache.1"].array), "a view"
    assert not np.shares_memory(part, keys), "a copy"


def test_a_longer_cache_takes_the_beginning_of_another() -> None:
    source = filled(1)
    longer = KvCache(CacheLayout(layers=3, kv_heads=2, capacity=90, head_dim=8), HostBuffer)
    longer.copy_from(source, 17)
    assert np.array_equal(longer.read(0, 17), source.read(0, 17))
    assert not longer.read(17, 90).any()


def test_its_size_is_known_before_it_is_made() -> None:
    cache = filled(0)
    assert cache.nbytes == LAYOUT.nbytes >= 4 * 3 * 2 * 2 * 40 * 8


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c: c.read(3, 41), r"tokens \[3, 41\) are outside a cache of 40"),
        (lambda c: c.read(5, 3), "outside"),
        (lambda c: c.write(38, np.zeros((3, 2, 2, 3, 8))), r"tokens \[38, 41\) are outside"),
        (lambda c: c.write(0, np.zeros((3, 2, 2, 3, 9))), "a part of this cache has the shape"),
        (lambda c: c.write(0, np.zeros(7)), "a part of this cache has the shape"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(filled(0))


def test_memory_that_the_system_refuses_is_a_sentence() -> None:
    def refuse(_nbytes: int) -> HostBuffer:
        raise MemoryError

    with pytest.raises(UserError, match=r"not enough memory for a context of 0\.0 MiB"):
        KvCache(LAYOUT, refuse)

"""Bits of chunks: the least error in so many bytes, against every assignment there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.contexts.ratios import RATIOS, least_error, paper

NBYTES = {8: 100, 4: 52, 2: 28}
ERRORS = {8: 0.01, 4: 0.13, 2: 0.5}
DENSITIES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def error(densities: list[float], bits: tuple[int, ...] | list[int]) -> float:
    return sum(d * ERRORS[b] for d, b in zip(densities, bits, strict=True))


@given(densities=DENSITIES, part=st.floats(0.2, 1.1))
def test_no_assignment_in_so_many_bytes_has_less_error(densities: list[float], part: float) -> None:
    budget = part * len(densities) * NBYTES[8]
    found = least_error(densities, budget, NBYTES, ERRORS)
    fitting = [
        bits
        for bits in itertools.product((8, 4, 2), repeat=len(densities))
        if sum(NBYTES[b] for b in bits) <= budget
    ]
    if not fitting:
        assert found == [2] * len(densities)
        return
    assert sum(NBYTES[b] for b in found) <= budget
    best = min(error(densities, bits) for bits in fitting)
    assert error(densities, found) == pytest.approx(best, abs=1e-12)


@given(densities=DENSITIES)
def test_the_papers_rule_to_the_letter(densities: list[float]) -> None:
    found = paper(densities, 0.5)
    ranks = sorted(range(len(densities)), key=lambda i: -densities[i])
    assert [found[i] for i in ranks] == sorted(found, reverse=True), "denser, no fewer bits"
    used = sum(RATIOS[b] for b in found)
    assert 0.5 * len(densities) - 0.25 <= used <= 0.5 * len(densities)
    info = sum(d / RATIOS[b] for d, b in zip(densities, found, strict=True))
    for top in range(len(densities) + 1):
        for middle in range(top, len(densities) + 1):
            bits = [8] * top + [4] * (middle - top) + [2] * (len(densities) - middle)
            if 0.5 * len(densities) - 0.25 < sum(RATIOS[b] for b in bits) <= 0.5 * len(densities):
                other = sum(densities[i] / RATIOS[b] for i, b in zip(ranks, bits, strict=True))
                assert info >= other - 1e-9


def test_ours_has_less_error_than_the_papers() -> None:
    densities = np.random.default_rng(0).exponential(size=60).tolist()
    ours = least_error(densities, 60 * NBYTES[8] * 0.52, NBYTES, ERRORS)
    assert error(densities, ours) < error(densities, paper(densities))
    assert set(ours) == {8, 4, 2}, "an optimum inside"


def test_of_equals_the_earlier_has_more() -> None:
    assert least_error([1, 1, 1], 180, NBYTES, ERRORS) == sorted(
        least_error([1, 1, 1], 180, NBYTES, ERRORS), reverse=True
    )
    assert least_error([], 0, NBYTES, ERRORS) == paper([]) == []

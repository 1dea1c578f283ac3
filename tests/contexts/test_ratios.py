"""Bits of chunks: the least error in so many bytes, against every assignment there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero.contexts.ratios import RATIOS, newest, paper

NBYTES = {8: 100, 4: 52, 3: 40, 2: 28}
DENSITIES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@given(count=st.integers(1, 40), ratio=st.floats(0.2, 1))
def test_the_first_and_the_newest_chunks_have_most_bits(count: int, ratio: float) -> None:
    found, budget = newest(count, ratio, NBYTES), ratio * (count - 1) * NBYTES[8]
    assert len(found) == count
    assert found[0] == 8
    assert found[1:] == sorted(found[1:]), "the newest no fewer than others"
    used, levels = sum(NBYTES[x] for x in found[1:]), sorted(set(found[1:]))
    assert used <= budget + 1e-6 or set(levels) == {2}, "the fewest bits where nothing fits"
    assert [x for x in (2, 3, 4, 8) if levels[0] <= x <= levels[-1]] == levels if levels else True
    if levels and levels[0] < 8 and used <= budget:  # one more would not fit
        high = min(x for x in NBYTES if x > levels[0])
        assert used + NBYTES[high] - NBYTES[levels[0]] > budget - 1e-6
    longer = newest(count + 1, ratio, NBYTES)
    assert all(after <= before for after, before in zip(longer, found, strict=False)), "bits fall"


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

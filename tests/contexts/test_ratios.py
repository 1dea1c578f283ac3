"""Bits of chunks by the paper's rule, against every assignment there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero.contexts.ratios import RATIOS, paper

DENSITIES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


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

"""One option for each item within a budget, against trying every selection."""

from __future__ import annotations

import itertools
import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.solver import knapsack
from hetero.solver.knapsack import Alternative, cheapest, least_loss

ITEMS = st.lists(
    st.lists(
        st.builds(
            Alternative, st.integers(0, 9), st.sampled_from([0, 1, 2, 3, 5, 0.125, 0.25, 2**-20])
        ),
        min_size=1,
        max_size=4,
    ),
    max_size=6,
)


def large(seed: int) -> list[list[Alternative]]:
    """Return tensors of some layers in some types: smaller ones lose more."""
    rng = np.random.default_rng(seed)
    items = []
    for size in rng.choice([4, 9, 16, 24], 150):
        loss = rng.lognormal(-7, 1.2)
        bits = (4.5, 1.0), (5.0, 0.7), (5.5, 0.25), (6.0, 0.2), (8.5, 0.004), (16.0, 0.0)
        scale = rng.uniform(0.9, 1.1, len(bits))
        items.append(
            [
                Alternative(float(size * b), float(loss * x * y))
                for (b, x), y in zip(bits, scale, strict=True)
            ]
        )
    return items


@settings(deadline=None)
@given(items=ITEMS, budget=st.floats(0, 25))
def test_nothing_within_the_budget_is_cheaper(
    items: list[list[Alternative]], budget: float
) -> None:
    ways = [x for x in itertools.product(*items) if math.fsum(y.loss for y in x) <= budget]
    if not ways:
        with pytest.raises(ValueError, match="above the budget"):
            cheapest(items, budget)
        return
    best = cheapest(items, budget)
    assert best.cost == min(sum(x.cost for x in way) for way in ways)
    assert best.loss == math.fsum(items[i][x].loss for i, x in enumerate(best.chosen))
    assert best.loss <= budget
    assert best.gap == 0


def test_a_budget_of_the_least_loss_is_met() -> None:
    items = large(0)
    assert cheapest(items, least_loss(items)).loss <= least_loss(items)
    with pytest.raises(ValueError, match="above the budget"):
        cheapest(items, -1.0)


@pytest.mark.parametrize("seed", range(4))
def test_many_items_are_chosen_within_the_gap_that_is_named(seed: int) -> None:
    """The complete search gives what the thinned one may miss by its gap, and no more."""
    items = large(seed)
    for budget in (0.01, 0.1):
        exact = cheapest(items, budget)
        assert exact.gap == 0
        with patch.object(knapsack, "MAX_STATES", 8):
            thin = cheapest(items, budget)
        assert thin.loss <= budget
        assert thin.bound <= exact.cost <= thin.cost
        assert 0 < thin.gap < 0.01

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
from hetero.solver.knapsack import (
    Alternative,
    Setting,
    cheapest,
    cheapest_set,
    least_loss,
    lower_bound,
)

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


@st.composite
def groups(draw: st.DrawFn) -> list[list[Setting]]:
    """Return groups of items whose costs, not losses, depend on the group's setting."""
    made = []
    for _ in range(draw(st.integers(0, 3))):
        losses = draw(
            st.lists(st.lists(st.sampled_from([0, 0.25, 1, 3]), min_size=1, max_size=3), max_size=2)
        )
        settings = draw(st.integers(1, 3))
        made.append(
            [
                Setting(
                    draw(st.integers(0, 5)),
                    [[Alternative(draw(st.integers(0, 9)), x) for x in item] for item in losses],
                )
                for _ in range(settings)
            ]
        )
    return made


@settings(deadline=None)
@given(sets=groups(), budget=st.floats(0, 12))
def test_no_setting_of_the_groups_is_cheaper(sets: list[list[Setting]], budget: float) -> None:
    costs = [
        sum(x.cost for x in chosen) + sum(x.cost for x in way)
        for chosen in itertools.product(*sets)
        for way in itertools.product(*(item for setting in chosen for item in setting.items))
        if math.fsum(x.loss for x in way) <= budget
    ]
    if not costs:
        with pytest.raises(ValueError, match="within the budget"):
            cheapest_set(sets, budget)
        return
    best = cheapest_set(sets, budget)
    picked = [group[i] for group, i in zip(sets, best.settings, strict=True)]
    items = [item for setting in picked for item in setting.items]
    ways = [item[i] for item, i in zip(items, best.selection.chosen, strict=True)]
    assert best.selection.cost == min(costs)
    assert best.selection.cost == sum(x.cost for x in picked) + sum(x.cost for x in ways)
    assert math.fsum(x.loss for x in ways) <= budget
    assert best.selection.gap == 0
    assert lower_bound(sets, budget) <= min(costs) + 1e-9


def test_settings_that_are_not_tried_are_in_the_gap() -> None:
    rng = np.random.default_rng(0)
    losses = rng.lognormal(-7, 1, (6, 8, 3))
    sets = [
        [
            Setting(
                0.0,
                [[Alternative(float(rng.uniform(1, 2)), float(y)) for y in x] for x in item],
            )
            for _ in range(4)
        ]
        for item in losses
    ]
    exact = cheapest_set(sets, 0.05)
    assert exact.selection.gap < 1e-9
    with patch.object(knapsack, "MAX_TRIES", 1):
        thin = cheapest_set(sets, 0.05)
    assert thin.selection.bound <= exact.selection.cost <= thin.selection.cost

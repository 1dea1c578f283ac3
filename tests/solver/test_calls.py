"""Cutting prompts into calls."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.solver.prompt_calls import CALL_OVERHEAD_TOKENS, padded_size, split

SIZES = (1, 2, 4, 8, 32, 64, 128, 256, 512)


@given(st.integers(1, 3000), st.sets(st.sampled_from(SIZES)), st.sampled_from((64, 512)))
def test_calls_add_up_and_fit(tokens: int, sizes: set[int], longest: int) -> None:
    calls = split(tokens, sorted(sizes), longest)
    usable = [size for size in sizes if size <= longest]
    assert sum(calls) == tokens
    assert all(1 <= call <= (max(usable) if usable else longest) for call in calls)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, (1,)),
        (32, (32,)),
        (33, (32, 1)),
        (60, (60,)),
        (300, (256, 44)),
        (500, (500,)),
        (600, (512, 64, 24)),
        (2600, (512, 512, 512, 512, 512, 32, 8)),
    ],
)
def test_known_cuts(tokens: int, expected: tuple[int, ...]) -> None:
    assert split(tokens, SIZES, 512) == expected


def cost(calls: tuple[int, ...]) -> int:
    return sum(padded_size(call, (4, 16, 64)) + CALL_OVERHEAD_TOKENS for call in calls)


@pytest.mark.parametrize("tokens", range(1, 65))
def test_as_cheap_as_the_best_of_all_cuts_with_up_to_three_calls(tokens: int) -> None:
    """Brute force over ordered cuts; more than three calls never pay with these sizes."""
    cuts = [
        c
        for count in (1, 2, 3)
        for c in itertools.product(range(1, tokens + 1), repeat=count)
        if sum(c) == tokens
    ]
    assert cost(split(tokens, (4, 16, 64), 64)) == min(map(cost, cuts))


def test_any_token_count_is_cut_into_the_longest_calls_and_a_rest() -> None:
    assert split(1200, (), 512) == (512, 512, 176)
    assert padded_size(77, ()) == 77


def test_what_no_graph_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no graph holds 65 tokens, prepared are \[32, 64\]"):
        padded_size(65, (32, 64))
    with pytest.raises(ValueError, match="at least one token"):
        split(0, SIZES, 512)

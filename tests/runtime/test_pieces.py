"""Cutting prompts into pieces for static graphs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.runtime.pieces import PIECE_OVERHEAD_TOKENS, padded_size, split

SIZES = (1, 2, 4, 8, 32, 64, 128, 256, 512)


@given(st.integers(1, 3000), st.sets(st.sampled_from(SIZES)), st.sampled_from((64, 512)))
def test_pieces_add_up_and_fit(tokens: int, sizes: set[int], longest: int) -> None:
    pieces = split(tokens, sorted(sizes), longest)
    usable = [size for size in sizes if size <= longest]
    assert sum(pieces) == tokens
    assert all(1 <= piece <= (max(usable) if usable else longest) for piece in pieces)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, [1]),
        (32, [32]),
        (33, [32, 1]),
        (60, [60]),
        (300, [256, 44]),
        (500, [500]),
        (600, [512, 32, 56]),
    ],
)
def test_known_cuts(tokens: int, expected: list[int]) -> None:
    assert split(tokens, SIZES, 512) == expected


def cost(pieces: tuple[int, ...]) -> int:
    return sum(padded_size(piece, (4, 16, 64)) + PIECE_OVERHEAD_TOKENS for piece in pieces)


@pytest.mark.parametrize("tokens", range(1, 65))
def test_as_cheap_as_the_best_of_all_cuts_with_up_to_three_pieces(tokens: int) -> None:
    """Brute force over ordered cuts; more than three pieces never pay with these sizes."""
    cuts = [
        c
        for count in (1, 2, 3)
        for c in itertools.product(range(1, tokens + 1), repeat=count)
        if sum(c) == tokens
    ]
    assert cost(tuple(split(tokens, (4, 16, 64), 64))) == min(map(cost, cuts))


def test_dynamic_shapes_are_cut_only_where_the_pool_ends() -> None:
    assert split(1200, (), 512) == [512, 512, 176]
    assert padded_size(77, ()) == 77


def test_what_no_graph_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no graph holds 65 tokens, prepared are \[32, 64\]"):
        padded_size(65, (32, 64))
    with pytest.raises(ValueError, match="at least one token"):
        split(0, SIZES, 512)

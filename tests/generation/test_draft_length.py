"""The number of guesses that a call verifies: the best one, and none where guessing loses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.generation.draft_length import DraftLength
from hetero.generation.speculative import LONGEST_MATCH, SHORTEST_MATCH, LookupDrafter


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=8, max_size=8),
    rights=st.lists(st.booleans(), max_size=40),
    guess_s=st.sampled_from([0.0, 0.05, 1.0]),
    most=st.integers(0, 7),
)
def test_it_is_the_best_of_all(
    seconds: list[float], rights: list[bool], guess_s: float, most: int
) -> None:
    length = DraftLength()
    for rows, spent_s in enumerate(seconds, 1):
        length.took(rows, spent_s)
    for right in rights:
        length.saw(3, right=right)
    rate = length.rate(3)
    speeds = [
        sum(rate**i for i in range(count + 1)) / (seconds[count] + count * guess_s)
        for count in range(most + 1)
    ]
    best = length.best(3, most, guess_s)
    assert speeds[best] == pytest.approx(max(speeds))
    assert length.rate(2) == 0.5


def speed(rate: float, seconds: list[float], guess_s: float, tokens: int = 3000) -> float:
    """Tokens a second of a simulated answer, over those of plain steps."""
    rng, length = np.random.default_rng(8), DraftLength()
    spent_s, done = 0.0, 0
    while done < tokens:
        choose = length.best_or_probe if guess_s else length.best
        count = choose(0, 7, guess_s)
        step_s = seconds[count] * float(rng.uniform(0.95, 1.05))
        length.took(count + 1, step_s)
        spent_s += step_s + count * guess_s
        done += 1
        for _ in range(count if guess_s else 7):  # a free guess is compared in any case
            right = bool(rng.random() < rate)
            length.saw(0, right=right)
            if not right:
                break
            done += count > 0
    return done * seconds[0] / spent_s


@pytest.mark.parametrize("guess_s", [0.0, 0.1])
def test_guesses_that_are_wrong_cost_nearly_nothing(guess_s: float) -> None:
    assert speed(0.0, [1 + 0.15 * i for i in range(8)], guess_s) > 0.98
    assert speed(0.1, [1 + 0.5 * i for i in range(8)], guess_s) > 0.97


@pytest.mark.parametrize("guess_s", [0.0, 0.1])
def test_guesses_that_are_right_save_calls(guess_s: float) -> None:
    assert speed(0.9, [1 + 0.05 * i for i in range(8)], guess_s) > 2


def test_guesses_that_become_right_are_noticed() -> None:
    length = DraftLength()
    for rows in range(1, 9):
        length.took(rows, 1 + 0.1 * rows)
    for _ in range(100):
        length.saw(0, right=False)
    assert length.best(0, 7) == 0
    for _ in range(60):
        length.saw(0, right=True)
    assert length.best(0, 7) == 7


def test_a_drafter_that_lost_is_tried_again_ever_more_rarely() -> None:
    length = DraftLength()
    for rows in range(1, 9):
        length.took(rows, float(rows))
    tried = []
    for i in range(4000):
        if length.best_or_probe(0, 7, 0.5):
            tried.append(i)
            length.saw(0, right=False)
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps[-1] == 1024
    assert all(b >= a for a, b in itertools.pairwise(gaps))


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 7))
def test_lookups_find_what_a_search_finds(text: list[int], most: int) -> None:
    """The index of all matches against a search from the end, as the text grows."""
    drafter = LookupDrafter()
    for stop in range(1, len(text) + 1):
        part = text[:stop]
        wanted: tuple[list[int], int] = ([], 0)
        for length in range(min(LONGEST_MATCH, stop - 1), SHORTEST_MATCH - 1, -1):
            ends = [e for e in range(length, stop) if part[e - length : e] == part[stop - length :]]
            if ends:
                wanted = part[ends[-1] : ends[-1] + most], length
                break
        guess = drafter.guess(part, most)
        assert (list(guess.tokens), guess.kind) == wanted

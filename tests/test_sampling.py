"""Sampling: exact distributions on small vocabularies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from hetero.generation.sampling import Sampler, SamplingParams

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def frequencies(count: int = 4000, **params: Any) -> np.ndarray:
    sampler = Sampler(SamplingParams(seed=1, **params))
    draws = [sampler.choose(LOGITS) for _ in range(count)]
    return np.bincount(draws, minlength=4) / count


def test_greedy_takes_the_first_of_the_best() -> None:
    sampler = Sampler(SamplingParams())
    assert sampler.choose(np.array([1, 3, 3, 2], dtype=np.float32)) == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.25, 0.09, 0.0225, 0.0025]),
        ({"temperature": 1.0, "top_k": 2}, [0.5, 0.3, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.75}, [0.5, 0.3, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.5}, [0.5, 0, 0, 0]),
        ({"temperature": 1.0, "min_p": 0.25}, [0.5, 0.3, 0.15, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.9}, [0.5, 0.3, 0.15, 0]),
    ],
)
def test_filters_give_the_expected_distribution(
    params: dict[str, Any], expected: list[float]
) -> None:
    wanted = np.array(expected) / sum(expected)
    measured = frequencies(**params)
    assert np.abs(measured - wanted).max() < 0.03
    assert (measured[wanted == 0] == 0).all()


def test_repetition_penalty_lowers_seen_tokens_only() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    logits = np.array([2.0, 1.5, -1.0], dtype=np.float32)
    assert sampler.choose(logits, [0]) == 1
    assert sampler.choose(logits) == 0
    assert logits.tolist() == [2.0, 1.5, -1.0]


@given(st.integers(0, 2**32 - 1))
def test_a_seed_repeats(seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed)
    first, second = (
        [sampler.choose(LOGITS) for _ in range(10)]
        for sampler in (Sampler(params), Sampler(params))
    )
    assert first == second


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"top_k": -3}, "top_k must be at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_impossible_options_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (1e-30, 1e30)),
        ("repetition_penalty", (1e-30, 1e30)),
        ("frequency_penalty", (-1e4, 1e4)),
        ("presence_penalty", (-1e4, 1e4)),
        ("logit_bias", ({1: 1e4}, {1: -1e4})),
    ],
)
def test_the_largest_values_that_are_allowed_keep_the_numbers_finite(
    name: str, values: tuple[Any, ...], sign: int
) -> None:
    logits = sign * np.asarray([3e38, -3e38, 1.0, 2.0], dtype=np.float32)
    for value in values:
        for temperature in (0.0, 1e-30, 1.0):
            params = SamplingParams(**{"temperature": temperature, "seed": 1} | {name: value})
            assert Sampler(params).choose(logits, [0, 1, 2], [0, 1] * 1000) in range(4)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 1e-320}, r"temperature must be 0 .* or from 1e-30 to 1e\+30, got"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty must be from 1e-30"),
        ({"frequency_penalty": -1e308}, "frequency_penalty must be within ±10000"),
        ({"presence_penalty": 10**400}, "presence_penalty must be within ±10000"),
    ],
)
def test_numbers_that_would_overflow_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**params)


def test_logits_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Sampler(SamplingParams()).choose(np.full(4, np.nan, dtype=np.float32))

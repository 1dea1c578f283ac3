"""Sampling: exact distributions on small vocabularies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from hetero.generation.sampling import Sampler, SamplingParams, log_softmax, token_logprob

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


def sorted_whole(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """Probabilities by what the parameters say, word by word: of a vocabulary that is sorted."""
    wide = logits.astype(np.float64) / params.temperature
    ids = np.lexsort((np.arange(len(wide)), -wide))[: params.top_k or len(wide)]
    shares = np.exp(wide[ids] - wide[ids[0]])
    shares /= shares.sum()
    if params.top_p < 1:
        count = int(np.searchsorted(np.cumsum(shares), params.top_p)) + 1
        ids, shares = ids[:count], shares[:count]
    likely = shares >= params.min_p * shares[0]
    ids, shares = ids[likely], shares[likely]
    return dict(zip(ids.tolist(), (shares / shares.sum()).tolist(), strict=True))


@pytest.mark.full
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 5, 300, 5000]),
    st.sampled_from([1.0, 0.1, 0.5, 0.95, 0.999999]),
    st.sampled_from([0.0, 1e-9, 0.05, 1.0]),
    st.sampled_from([0.01, 1.0, 8.0]),
)
def test_nobody_sees_that_the_vocabulary_is_not_sorted(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, 700).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = Sampler(params)._distribution(logits, float(logits.max()))
    shares = (weights / weights.sum()).tolist()
    found = dict(enumerate(shares)) if ids is None else dict(zip(ids.tolist(), shares, strict=True))
    expected = sorted_whole(logits, params)
    assert found.keys() == expected.keys()
    assert all(found[token] == pytest.approx(expected[token], rel=1e-9) for token in expected)
    if ids is not None:
        assert list(found) == list(expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_bias_alone_is_added_as_with_all_else(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, 12).astype(np.float32)  # with equal ones
    bias = {int(t): float(rng.integers(-4, 5)) / 2 for t in rng.choice(12, count, replace=False)}
    scores = logits.astype(np.float64)
    for token, value in bias.items():
        scores[token] += value
    assert Sampler(SamplingParams(logit_bias=bias)).choose(logits) == int(np.argmax(scores))
    everything = SamplingParams(logit_bias=dict.fromkeys(range(12), 1.0))
    assert Sampler(everything).choose(logits) == int(np.argmax(logits))


@given(st.integers(0, 2**32 - 1), st.integers(0, 14))
def test_alternatives_are_the_first_of_all_sorted(seed: int, count: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 4, 12).astype(np.float32)
    found = token_logprob(logits, 3, count)
    order = np.argsort(-log_softmax(logits), kind="stable")[:count]
    assert [token for token, _ in found.top] == order.tolist()
    assert [value for _, value in found.top] == log_softmax(logits)[order].tolist()


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

"""Trees: what they learn, what they leave to the roofline, and how far off they say they are."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hetero.backends.ops import MatMul
from hetero.profiler import features, fit, predict
from hetero.profiler.features import FEATURES
from hetero.profiler.fit import Fitting
from hetero.profiler.forest import ForestPolicy, Residuals, grow
from hetero.profiler.records import MatMulPredictor, MatMulRow, Tree
from tests.profiler.fakes import GRAPHS, PAIRS, W4, knots, npu_cost, record, row, rows_of, sizes

NPU = record("npu", static_shapes=True, graph_sizes=GRAPHS, row_alignment=32)
M = (1, 4, 32, 256)


def residuals(logs: np.ndarray, pairs: int) -> Residuals:  # type: ignore[type-arg]
    """Rows of so many pairs at every token count, each pair a fold of its own."""
    m = np.tile(np.asarray(M, dtype=float), pairs)
    pair = np.repeat(np.arange(pairs), len(M))
    n, k = 256.0 * (1 + pair), np.full(len(pair), 512.0)
    columns = features.columns(NPU, W4, "plain", (m, n, k), np.full(len(pair), 1e-3))
    return Residuals(columns, logs, np.tile(logs, (pairs, 1)), np.ones(len(pair)), pair, pair)


def answers(trees: tuple[Tree, ...], rows: Residuals) -> np.ndarray:  # type: ignore[type-arg]
    return predict.evaluate_trees(trees, rows.columns)


@pytest.mark.full
def test_what_many_pairs_share_is_learnt_in_its_phase_alone() -> None:
    decode = np.tile(np.asarray(M) <= 8, 10)
    rows = residuals(np.where(decode, 0.0, 0.4), 10)
    trees, left_out = grow(rows, ForestPolicy(), 0)
    np.testing.assert_allclose(answers(trees, rows), np.where(decode, 0.0, 0.4), atol=0.06)
    np.testing.assert_allclose(left_out, answers(trees, rows), atol=0.06)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_left_to_the_roofline_and_is_the_spread(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.1, 12)  # of each pair, as if it were its own
    rows = residuals(np.repeat(noise, len(M)), 12)
    trees, left_out = grow(rows, ForestPolicy(sure=2.0), 0)
    assert not predict.answer(trees)
    assert not left_out.any()
    assert np.median(predict.tree_spread(trees, rows.columns)) == pytest.approx(0.1, rel=0.5)


@pytest.mark.full
def test_a_leaf_of_few_pairs_is_shrunk_more() -> None:
    def answer(pairs: int) -> float:
        rows = residuals(np.full(len(M) * pairs, 0.5), pairs)
        policy = ForestPolicy(shrinks=(4.0,), depths=(1,), sure=-9.0)
        return float(answers(grow(rows, policy, 0)[0], rows).mean())

    assert 0 < answer(3) < answer(6) < answer(24) < 0.5
    assert answer(24) == pytest.approx(0.5 * 16 / 20, rel=0.15)  # two thirds are in a sample


@pytest.mark.full
def test_leaves_say_how_far_off_their_own_rows_are() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 10 * len(M))
    large = np.repeat(np.arange(10) >= 5, len(M))
    rows = residuals(np.where(large, 0.6, 0.0) + np.where(large, 0.2, 0.01) * noise, 10)
    trees, _ = grow(rows, ForestPolicy(), 0)
    spread = predict.tree_spread(trees, rows.columns)
    assert spread[large].min() > 2 * np.median(spread[~large])


def test_without_shrinks_the_roofline_is_alone_and_few_rows_have_no_trees() -> None:
    rows = rows_of("npu", npu_cost)
    alone = fit.fit(NPU, rows, fitting=Fitting(trees=ForestPolicy(shrinks=())))
    assert alone.trees
    assert not predict.answer(alone.trees)
    assert not fit.fit(NPU, rows[:20]).trees


@pytest.mark.full
def test_trees_are_never_worse_on_pairs_left_out() -> None:
    rows = rows_of("npu", npu_cost)
    alone = fit.fit(NPU, rows, fitting=Fitting(trees=ForestPolicy(shrinks=())))
    for before, after in zip(alone.validation, fit.fit(NPU, rows).validation, strict=True):
        assert after.mape <= before.mape


LAUNCHES = {W4: ((1, 64), (1024, 32))}


def in_launches(m: int, n: int, k: int) -> float:
    """A launch takes 10 µs and its arithmetic."""
    count = math.ceil(m / (32 if k >= 1024 else 64))
    return count * 1e-5 + 2.0 * m * n * k / 2e11


@pytest.mark.full
def test_a_call_of_several_launches_takes_so_many_times_as_long() -> None:
    chip = record(
        "npu", static_shapes=True, graph_sizes=(1, 32, 64, 128, 256, 512), launch_tokens=LAUNCHES
    )
    rows = [
        row("npu", m, n, k, in_launches(m, n, k)) for n, k in PAIRS for m in (1, 32, 64, 128, 256)
    ]
    predictor = fit.fit(chip, rows)
    for m, n, k in ((512, 768, 512), (128, 1536, 768), (512, 768, 2048), (256, 3072, 4096)):
        seconds = predict.predict(predictor, chip, *sizes(m, n, k))[0]
        assert seconds == pytest.approx(in_launches(m, n, k), rel=0.02)
        table = predict.predict_table(
            predictor, chip, np.asarray([float(m)]), np.asarray([float(n)]), float(k)
        )
        assert table[0, 0] == pytest.approx(seconds)
    without = fit.fit(chip.model_copy(update={"capabilities": NPU.capabilities}), rows)
    assert without.validation[-1].mape > 2 * predictor.validation[-1].mape


def test_columns_have_alignment_launches_and_order() -> None:
    chip = record("npu", launch_tokens=LAUNCHES)
    m, n, k = (np.asarray(x, dtype=float) for x in ([8, 256], [96, 512], [512, 2048]))

    def column(name: str) -> list[float]:
        made = features.columns(chip, W4, "transposed", (m, n, k), np.ones(2))
        values: list[float] = made[:, FEATURES.index(name)].tolist()
        return values

    assert column("row_alignment") == [5, 8]
    assert column("launches") == [1, 8]
    assert column("log_launch_m") == [3, 5]
    assert column("transposed") == [1, 1]
    assert column("decode") == [1, 0]


def test_trees_of_earlier_profiles_are_read_and_answer_as_before() -> None:
    old = Tree(
        feature=(0, -1, -1), threshold=(5.0, 0.0, 0.0), left=(1, 0, 0), right=(2, 0, 0),
        value=(0.0, 0.3, -0.2),
    )  # fmt: skip
    document = MatMulPredictor(
        device="npu", weight_format=W4, knots=knots((1, 1e-9), (64, 3e-9)),
        features=FEATURES[:12], trees=(old,), measured={"m": (1, 64), "n": (1, 64), "k": (1, 64)},
    ).model_dump(mode="json")  # fmt: skip
    del document["trees"][0]["spread"]
    read = MatMulPredictor.model_validate_json(json.dumps(document))
    plain = read.model_copy(update={"trees": ()})
    for m, factor in ((16, math.exp(0.3)), (64, math.exp(-0.2))):
        seconds = [predict.predict(x, NPU, *sizes(m, 512, 512))[0] for x in (read, plain)]
        assert seconds[0] == pytest.approx(factor * seconds[1])
    size = np.asarray([64.0])
    assert predict.spread_table(read, NPU, size, size, 64.0).tolist() == [[0.0]]


def test_times_of_measured_rows_that_did_not_converge_stay_predicted() -> None:
    from hetero.profiler.measured_rows import MeasuredTimes

    rows = rows_of("npu", npu_cost)
    predictor = fit.fit(NPU, rows)
    wild: MatMulRow = rows[0].model_copy(update={"seconds": 3 * rows[0].seconds})
    m, n, k = sizes(wild.m, wild.n, wild.k)
    sure = MeasuredTimes(predictor, NPU, [wild, *rows[1:]])
    unsure = MeasuredTimes(
        predictor, NPU, [wild.model_copy(update={"flags": ("unconverged",)}), *rows[1:]]
    )
    true_s = npu_cost(MatMul(n=wild.n, k=wild.k, weight_format=W4), wild.m)
    seconds = predict.predict(predictor, NPU, m, n, k)[0]
    assert sure.factors(m, n, k)[0] * seconds == pytest.approx(3 * true_s)
    assert unsure.factors(m, n, k)[0] == pytest.approx(1.0)


def test_rows_of_graphs_that_a_device_has_not_are_no_times_of_others() -> None:
    from hetero.profiler.measured_rows import MeasuredTimes

    rows = rows_of("npu", npu_cost)
    predictor = fit.fit(NPU, rows)
    few = record("npu", static_shapes=True, graph_sizes=(1, 256))
    for row_ in rows:
        if row_.m == 256:
            m, n, k = sizes(100, row_.n, row_.k)
            factor = MeasuredTimes(predictor, few, rows).factors(m, n, k)[0]
            seconds = predict.predict(predictor, few, m, n, k)[0]
            assert factor * seconds == pytest.approx(row_.seconds)

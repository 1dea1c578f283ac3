"""Predictors: exact on known devices, trees as scikit-learn's, padding, flags, speed."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Attention, GatedAct, MatMul, RMSNorm
from hetero.backends.protocol import DeviceKind
from hetero.profiler import features, fit, forest, predict
from hetero.profiler.cost import CostModel, predicted_alone
from hetero.profiler.device_model import DeviceModel, GpuShader, NpuArray
from hetero.profiler.errors import ProfileError
from hetero.profiler.fit import Fitting
from hetero.profiler.records import (
    Contention,
    DeviceProfile,
    DeviceSync,
    Knots,
    MatMulPredictor,
    MatMulRow,
    NonMatmulPredictor,
    Power,
    PreparationPredictor,
    PreparationRow,
    Quarantine,
    ShapeRange,
)
from tests.profiler.fakes import (
    GRAPHS,
    W4,
    Cost,
    gpu_cost,
    knots,
    npu_cost,
    record,
    rows_of,
    sizes,
)

NPU = record("npu", static_shapes=True, graph_sizes=GRAPHS, row_alignment=32)
GPU = record("gpu", asynchronous=True)
NPU_ARRAY = NpuArray(
    setup_s=1e-4, bytes_per_weight=0.5, bandwidth_bytes_per_s=2e10, flops_per_s=4e12,
    resident_k=4096,
)  # fmt: skip
GPU_SHADER = GpuShader(
    bytes_per_weight=0.5, bandwidth_bytes_per_s=4e10, direct_flops_per_s=6e11,
    tiled_flops_per_s=1e12, unpack_s_per_weight=2e-10,
)  # fmt: skip


def test_knots_are_exact_at_and_between_them() -> None:
    line = knots((1, 2e-10), (8, 2e-10), (256, 2e-8))
    assert predict.evaluate_knots(line, *sizes(4, 100, 100))[0] == pytest.approx(2e-6)
    middle = predict.evaluate_knots(line, *sizes(132, 100, 100))[0]
    assert middle == pytest.approx((2e-6 + 2e-4) / 2)
    beyond = predict.evaluate_knots(line, *sizes(504, 100, 100))[0]
    assert beyond == pytest.approx(2e-4 * 2 - 2e-6)


def test_one_knot_scales_with_tokens() -> None:
    assert predict.evaluate_knots(knots((4, 1e-9)), *sizes(8, 10, 10))[0] == pytest.approx(2e-7)


def test_static_devices_pad_to_graphs_and_others_to_stages_in_prefill() -> None:
    m = np.asarray([1.0, 3, 9, 33, 256, 300])
    assert features.padded_tokens(NPU, m).tolist() == [1, 4, 32, 64, 256, 300]
    staged = GPU.model_copy(update={"token_stage": 16, "row_stage": 64})
    assert features.padded_tokens(staged, m).tolist() == [1, 3, 16, 48, 256, 304]
    assert features.padded_rows(staged, np.asarray([1.0, 64, 65])).tolist() == [64, 64, 128]


@pytest.mark.parametrize(
    ("kind", "cost", "most"), [("gpu", gpu_cost, 0.002), ("npu", npu_cost, 0.12)]
)
def test_a_fit_finds_the_device_behind_the_times(kind: DeviceKind, cost: Cost, most: float) -> None:
    device = NPU if kind == "npu" else GPU
    predictor = fit.fit(device, rows_of(kind, cost))
    for n, k, m in ((768, 768, 32), (3072, 1024, 128), (2048, 1024, 1), (1536, 2048, 256)):
        true_s = cost(MatMul(n=n, k=k, weight_format=W4), m)
        found = predict.predict(predictor, device, *sizes(m, n, k))[0]
        assert found == pytest.approx(true_s, rel=most)
    assert {v.phase for v in predictor.validation} == {"decode", "prefill"}


def noisy_rows() -> list[MatMulRow]:
    """Rows of a GPU of which some are less certain than others, and off by more."""
    rng = np.random.default_rng()
    rows = []
    for row in rows_of("gpu", gpu_cost):
        ci, samples = float(rng.uniform(0.005, 0.3)), int(rng.integers(1, 25))
        off = float(np.exp(rng.normal(0, ci / 2)))
        update = {"seconds": row.seconds * off, "ci": ci, "samples": samples, "spread": ci}
        rows.append(row.model_copy(update=update))
    return rows


@pytest.mark.parametrize(
    "off",
    [
        {"weigh_rows": False},
        {"borrow_spread": False},
        {"ridge": 0.0},
        {"level_shrink": math.inf},
        {"shy": 0.0},
    ],
    ids=lambda off: next(iter(off)),
)
def test_every_correction_of_the_fit_can_be_switched_off(off: dict[str, Any]) -> None:
    rows = noisy_rows()
    with_all, without = (
        fit.fit_unchecked(GPU, rows, fitting=Fitting(**update)).knots for update in ({}, off)
    )
    assert with_all != without
    assert np.min(without.coefficients) >= 0


def test_without_corrections_each_token_count_has_its_own_least_squares() -> None:
    from scipy.optimize import lsq_linear

    rows = noisy_rows()
    plain = Fitting(weigh_rows=False, ridge=0.0)
    found = fit.fit_unchecked(GPU, rows, fitting=plain).knots
    for m, coefficients in zip(found.tokens, found.coefficients, strict=True):
        at = [row for row in rows if row.m == m]
        n, k, s = (
            np.asarray([getattr(row, x) for row in at], float) for x in ("n", "k", "seconds")
        )
        columns = np.stack((np.ones_like(n), n, k, n * k), axis=1) / s[:, None]
        size = np.linalg.norm(columns, axis=0)
        best = lsq_linear(columns / size, np.ones(len(at)), bounds=(0, np.inf), tol=1e-14)
        error = np.linalg.norm(columns @ np.asarray(coefficients) - 1)
        assert error == pytest.approx(np.sqrt(2 * best.cost), rel=1e-6)


@pytest.mark.parametrize("few", [{"samples": 1, "ci": None}, {"samples": 2, "ci": 0.0}])
def test_a_row_of_few_samples_spoils_no_fit(few: dict[str, float | None]) -> None:
    sure: dict[str, float | None] = {"samples": 25, "ci": 0.04}

    def worst(wrong: dict[str, float | None]) -> float:
        """Error at one token when a timing there is half of what it should be."""
        rows = [r.model_copy(update={"spread": 0.1, **sure}) for r in rows_of("gpu", gpu_cost)]
        place = next(i for i, r in enumerate(rows) if r.m == 1)
        half = {"seconds": rows[place].seconds / 2, **wrong}
        spoilt = [*rows[:place], rows[place].model_copy(update=half), *rows[place + 1 :]]
        predictor = fit.fit_unchecked(GPU, spoilt)
        found = [predict.predict(predictor, GPU, *sizes(r.m, r.n, r.k))[0] for r in rows]
        errors = [abs(f / r.seconds - 1) for f, r in zip(found, rows, strict=True) if r.m == 1]
        return max(errors)

    assert worst(few) < 0.7 * worst(sure)


def test_the_two_regimes_of_a_gpu_are_read_from_its_times() -> None:
    regimes = fit.fit(GPU, rows_of("gpu", gpu_cost)).regimes
    assert regimes.bytes_per_s == pytest.approx(20e9, rel=0.02)
    assert regimes.flops_per_s == pytest.approx(100e9, rel=0.02)
    assert regimes.knee_m == pytest.approx(4, rel=0.1)


@pytest.mark.full
def test_trees_learn_what_the_roofline_misses() -> None:
    rows = rows_of("npu", npu_cost)
    plain = fit.fit_unchecked(NPU, rows)
    grown = fit.fit(NPU, rows)
    assert predict.answer(grown.trees)
    assert not plain.trees

    def error(predictor: fit.MatMulPredictor) -> float:
        m, n, k = (np.asarray([getattr(r, c) for r in rows], dtype=float) for c in "mnk")
        truth = np.asarray([r.seconds for r in rows])
        return float(np.abs(predict.predict(predictor, NPU, m, n, k) / truth - 1).mean())

    assert error(grown) < 0.8 * error(plain)


@pytest.mark.full
def test_trees_answer_as_scikit_learn_does() -> None:
    from sklearn.tree import DecisionTreeRegressor

    rng = np.random.default_rng(0)
    columns, target = rng.standard_normal((300, 5)), rng.standard_normal(300)
    tree = DecisionTreeRegressor(max_depth=6, random_state=0).fit(columns, target)
    exported = forest.export_tree(tree.tree_, tree.tree_.value.reshape(-1))
    # scikit-learn compares features as float32.
    asked = rng.standard_normal((500, 5)).astype(np.float32).astype(np.float64)
    ours = predict.evaluate_trees((exported, exported), asked)
    np.testing.assert_allclose(ours, tree.predict(asked), rtol=1e-12)


def profile() -> DeviceProfile:
    rows = [*rows_of("gpu", gpu_cost), *rows_of("npu", npu_cost)]
    devices: dict[DeviceKind, object] = {"gpu": GPU, "npu": NPU}
    return DeviceProfile(
        name="t", created="", hetero_version="", devices=devices, matmuls=tuple(rows),  # type: ignore[arg-type]
        predictors=tuple(fit.fit_all({"gpu": GPU, "npu": NPU}, rows)),
        contention=(
            Contention(phase="decode", gpu=1.3, npu=0.9),
            Contention(phase="decode", weight_format=WeightFormat.W4A8, gpu=1.1, npu=1.2),
        ),
        sync={"gpu": DeviceSync(submit_busy_s=1e-6, submit_empty_s=9e-6, wait_s={
            "finish": 6e-5, "event": 5e-5, "fast": 5e-5}, copy_fixed_s=1e-6,
            copy_s_per_byte=1e-10)},
        other_predictors=(NonMatmulPredictor(device="gpu", op="RMSNorm", coefficients={
            "calls": 1e-6, "elements": 1e-9}, max_m=256),
            NonMatmulPredictor(device="npu", op="Attention", coefficients={"cached": 1e-9},
                           max_m=256, max_context=512)),
        preparation_predictors=(PreparationPredictor(
            device="npu", weight_format=W4, fixed_s=1e-3, s_per_byte=1e-9, cached_fixed_s=1e-4,
            cached_s_per_byte=0),),
        quarantined=(Quarantine(device="npu", op="MatMul", weight_format=W4,
                                shape_class="prefill-tall", tolerance=1e-3, detail="is off"),),
        power=Power(source="rapl", idle_w=1, gpu_w=4),
    )  # fmt: skip


@pytest.mark.full
def test_ten_thousand_shapes_take_less_than_fifty_milliseconds() -> None:
    model = CostModel(profile())
    rng = np.random.default_rng(0)
    m, n, k = rng.integers(1, 256, 10_000), *rng.integers(512, 4096, (2, 10_000))
    best = 1.0
    for _ in range(5):
        start_s = time.perf_counter()
        cost = model.matmul_s("npu", W4, m, n, k)
        best = min(best, time.perf_counter() - start_s)
    assert cost.seconds.shape == (10_000,)
    assert best < 0.05


def test_shapes_outside_the_measured_range_say_so() -> None:
    model = CostModel(profile())
    cost = model.matmul_s("gpu", W4, [1, 256, 257, 1, 1], [512, 512, 512, 8192, 512], 1024)
    assert cost.extrapolated.tolist() == [False, False, True, True, False]
    assert model.matmul_s("npu", W4, 129, 512, 512).extrapolated.item() is False  # pads to 256
    assert model.matmul_s("npu", W4, 257, 512, 512).extrapolated.item() is True


@pytest.mark.full
def test_costs_around_kernels() -> None:
    model = CostModel(profile())
    assert (model.submit_s("gpu"), model.submit_s("gpu", "empty")) == (1e-6, 9e-6)
    assert (model.wait_s("gpu"), model.wait_s("gpu", "finish")) == (5e-5, 6e-5)
    assert model.submit_s("npu") == model.wait_s("npu") == 0.0
    assert model.copy_s("gpu", 1 << 20) == 0.0  # unified memory
    assert model.contention("gpu", "decode") == model.contention("gpu", "decode", W4) == 1.3
    assert model.contention("npu", "decode", WeightFormat.W4A8) == 1.2
    assert model.contention("npu", "decode") == model.contention("gpu", "prefill") == 1.0
    fitted = model.preparation
    assert fitted.seconds("npu", W4, 1000, 1000) == pytest.approx(1e-3 + 562_500e-9)
    assert fitted.seconds("npu", W4, 1000, 1000, cached=True) == 1e-4
    row = PreparationRow(device="npu", weight_format=W4, n=1000, k=1000, cold_s=3e-3, cached_s=2e-3)
    known = CostModel(profile().model_copy(update={"preparation": (row,)})).preparation
    assert known.seconds("npu", W4, 1000, 1000) == 3e-3  # as measured
    assert known.seconds("npu", W4, 1000, 1000, cached=True) == 2e-3
    assert known.seconds("npu", W4, 1000, 1024) == fitted.seconds("npu", W4, 1000, 1024)
    assert (model.power_w("gpu"), model.power_w("both")) == (4, None)
    assert model.bandwidth("both") is None


def test_other_operations_are_charged_for_their_work() -> None:
    model = CostModel(profile())
    norm = RMSNorm(d=100, eps=1e-6)
    assert model.other_s("gpu", norm, 10).seconds == pytest.approx(1e-6 + 1e-6)
    attention = Attention(heads=4, kv_heads=2, head_dim=8, capacity=1024)
    assert model.other_s("npu", attention, 3, 100).seconds == pytest.approx(104 * 16 * 1e-9)
    assert bool(model.other_s("npu", attention, 1, 1000).extrapolated)
    with pytest.raises(ProfileError, match="no times of GatedAct on gpu"):
        model.other_s("gpu", GatedAct(f=4), 1)


def test_a_quarantined_or_unknown_kernel_is_not_allowed() -> None:
    model = CostModel(profile())
    assert model.allowed("npu", W4, 32, 512, 512)
    assert model.allowed("npu", W4, 32, 512, 4096).reason == "quarantined: is off"
    assert model.allowed("npu", W4, 1, 512, 4096)
    assert "was not measured" in model.allowed("npu", W4, 1, 8, 8, "transposed").reason
    assert model.allowed_op("gpu", RMSNorm(d=8, eps=1e-6), 1)
    assert not model.allowed_op("npu", RMSNorm(d=8, eps=1e-6), 1)
    with pytest.raises(ProfileError, match=r"no times of w4a16 \(transposed\) on gpu"):
        model.matmul_s("gpu", W4, 1, 8, 8, "transposed")


@pytest.mark.parametrize("kind", ["gpu", "npu"])
def test_a_measured_shape_takes_as_long_as_was_measured(kind: DeviceKind) -> None:
    """Its padded size counts; what only the predictor knows is another time."""
    known = profile()
    model, alone = CostModel(known), predicted_alone(known)
    off = 0.0
    for row in known.matmuls:
        if row.device == kind:
            shape = (kind, row.weight_format, row.m, row.n, row.k)
            assert float(model.matmul_s(*shape).seconds) == pytest.approx(row.seconds)
            table = model.table_s(kind, W4, np.asarray([row.m]), np.asarray([row.n]), row.k)
            assert table[0, 0] == pytest.approx(row.seconds)
            off = max(off, abs(float(alone.matmul_s(*shape).seconds) / row.seconds - 1))
    assert off > (0.05 if kind == "npu" else 0.0)
    truth = npu_cost(MatMul(n=512, k=512, weight_format=W4), 32)
    assert float(model.matmul_s("npu", W4, 20, 512, 512).seconds) == pytest.approx(truth)


def test_what_the_predictor_is_off_by_carries_to_neighbours_and_fades() -> None:
    known = profile()
    rows = [
        row.model_copy(update={"seconds": 2 * row.seconds})
        for row in known.matmuls
        if (row.device, row.m, row.k) == ("npu", 32, 1024)
    ]
    others = [row for row in known.matmuls if row.key not in {x.key for x in rows}]
    model = CostModel(known.model_copy(update={"matmuls": (*others, *rows)}))
    before = CostModel(known)

    def ratio(m: int, n: int, k: int) -> float:
        return float(
            model.matmul_s("npu", W4, m, n, k).seconds / before.matmul_s("npu", W4, m, n, k).seconds
        )

    measured = sorted(row.n for row in rows)
    assert ratio(32, measured[0], 1024) == pytest.approx(2)
    assert 1.5 < ratio(32, round(1.1 * measured[-1]), 1024) < 2
    assert 1 < ratio(32, 2 * measured[-1], 1024) < 1.5
    assert ratio(32, 4 * measured[-1], 1024) == pytest.approx(1)
    assert ratio(128, measured[0], 1024) == ratio(32, measured[0], 1025) == 1


@pytest.mark.parametrize("kind", ["gpu", "npu"])
@pytest.mark.parametrize("cut", [(1,), (1, 8), (1, 8, 64, 256)])
def test_a_table_has_the_times_of_its_pairs(kind: DeviceKind, cut: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(cut))
    line = Knots(tokens=cut, coefficients=tuple(tuple(1e-9 * rng.random(4)) for _ in cut))  # type: ignore[misc]
    trees = fit.fit(NPU, rows_of("npu", npu_cost)).trees if kind == "npu" else ()
    device = NPU if kind == "npu" else GPU.model_copy(update={"token_stage": 16, "row_stage": 8})
    shapes = ShapeRange(m=(1, 9), n=(1, 9), k=(1, 9))
    assert bool(trees) == (kind == "npu")
    predictor = MatMulPredictor(
        device=kind,
        weight_format=W4,
        knots=line,
        trees=trees,
        features=features.FEATURES if trees else (),
        measured=shapes,
    )
    m, n = np.asarray([1.0, 2, 7, 8, 9, 100, 256, 900]), np.asarray([1.0, 32, 100, 4096])
    table = predict.predict_table(predictor, device, m, n, 768.0)
    pairs = [x.ravel() for x in np.meshgrid(m, n, indexing="ij")]
    expected = predict.predict(predictor, device, *pairs, np.full(len(pairs[0]), 768.0))
    np.testing.assert_allclose(table.ravel(), expected, rtol=1e-12)


@pytest.mark.parametrize("model", [NPU_ARRAY, GPU_SHADER], ids=["npu", "gpu"])
def test_a_table_of_a_device_model_too(model: DeviceModel) -> None:
    m, n = np.asarray([1.0, 31, 256, 900]), np.asarray([1.0, 33, 4096])
    shapes = ShapeRange(m=(1, 9), n=(1, 9), k=(1, 9))
    predictor = MatMulPredictor(
        device="gpu", weight_format=W4, knots=knots((1, 0.0)), model=model, measured=shapes
    )
    table = predict.predict_table(predictor, GPU, m, n, 14336.0)
    for i, j in np.ndindex(4, 3):
        one = predict.predict(predictor, GPU, *sizes(int(m[i]), int(n[j]), 14336))
        assert table[i, j] == pytest.approx(one[0], rel=1e-12)

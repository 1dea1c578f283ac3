"""Stages, pruning and the choice of what to measure next."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul
from hetero.profiler import active, fit, predict
from hetero.profiler.grid import (
    Shape,
    Task,
    head_pairs,
    make_grid,
    model_pairs,
    shape_class,
    token_counts,
)
from hetero.profiler.records import DeviceRecord, MatMulRow
from hetero.profiler.stages import ROW_STAGES, TOKEN_STAGES, find_stage
from tests.profiler.fakes import GRAPHS, PAIRS, TOKENS, W4, gpu_cost, record, row, rows_of

NPU = record("npu", static_shapes=True, graph_sizes=GRAPHS)
GPU = record("gpu")


def test_an_output_head_is_measured_for_few_tokens_only() -> None:
    shapes = [Shape("o", 64, 64), Shape("lm_head", 256, 64), Shape("up", 64, 64)]
    heads = head_pairs(shapes)
    assert heads == ((256, 64),)
    assert head_pairs([*shapes, Shape("gate", 256, 64)]) == ()
    grid = make_grid("gpu", GPU, model_pairs(shapes), [1, 8, 32], [W4], heads=heads)
    assert {(t.m, t.n) for t in grid.tasks} == {(1, 64), (8, 64), (32, 64), (1, 256), (8, 256)}


@pytest.mark.parametrize("stage", [16, 32, 64, 128, 256])
def test_a_stage_of_rows_is_found(stage: int) -> None:
    assert find_stage(lambda n: 1e-6 + 1e-7 * -(-n // stage), ROW_STAGES) == stage


@pytest.mark.parametrize("stage", [8, 16, 32, 64])
def test_a_stage_of_tokens_is_found(stage: int) -> None:
    assert find_stage(lambda m: 1e-7 * -(-m // stage), TOKEN_STAGES) == stage


def test_a_straight_line_and_a_constant_have_no_stages() -> None:
    assert find_stage(lambda n: 1e-6 * n, ROW_STAGES) == 1
    assert find_stage(lambda _: 1e-6, ROW_STAGES) == 1


def test_sizes_of_one_stage_are_measured_once() -> None:
    staged = GPU.model_copy(update={"row_stage": 64, "token_stage": 32})
    grid = make_grid("gpu", staged, [(1000, 512), (1024, 512), (1025, 512)], [1, 20, 32, 33], [W4])
    sizes = {(t.m, t.n) for t in grid.tasks}
    assert sizes == {(1, 1024), (32, 1024), (33, 1024), (1, 1025), (32, 1025), (33, 1025)}
    stands_for = {(a.m, a.n): (b.m, b.n) for a, b in grid.pruned.items()}
    assert stands_for[20, 1000] == stands_for[32, 1000] == (32, 1024)
    assert len(grid.tasks) + len(grid.pruned) == 12


def test_static_devices_are_measured_at_their_graph_sizes() -> None:
    assert token_counts(NPU, [1, 100, 300]) == list(GRAPHS)
    grid = make_grid("npu", NPU, [(512, 512)], [3, 100, 300], [W4])
    assert [task.m for task in grid.tasks] == [4, 128]
    assert {task.m for task in grid.pruned} == {3, 100}


def test_orders_and_formats_are_the_devices_own() -> None:
    both = record("npu", operand_orders=("plain", "transposed"), weight_formats=["w4a16"])
    grid = make_grid("npu", both, [(64, 64)], [1], [W4, WeightFormat.F32])
    assert [(t.weight_format, t.order) for t in grid.tasks] == [(W4, "plain"), (W4, "transposed")]


def test_a_models_shapes_are_measured_once_each() -> None:
    shapes = [Shape("qkv", 3, 2), Shape("o", 2, 2), Shape("again", 3, 2)]
    assert model_pairs(shapes) == ((3, 2), (2, 2))


def test_every_k_is_measured_at_a_quarter_of_its_fewest_rows() -> None:
    shapes = [Shape("qkv", 1152, 896), Shape("o", 896, 896), Shape("down", 896, 4864)]
    whole = ((1152, 896), (896, 896), (896, 4864))
    assert model_pairs(shapes) == (*whole, (256, 896), (256, 4864))
    assert model_pairs([Shape("down", 2048, 8192)]) == ((2048, 8192), (512, 8192))
    assert model_pairs([Shape("down", 256, 688)]) == ((256, 688),)


@pytest.mark.parametrize(
    ("m", "n", "k", "name"),
    [(1, 512, 512, "decode-square"), (8, 4096, 1024, "decode-wide"), (9, 1, 2, "prefill-tall")],
)
def test_shape_classes(m: int, n: int, k: int, name: str) -> None:
    assert shape_class(m, n, k) == name


def all_tasks() -> list[Task]:
    return [Task("gpu", W4, "plain", m, n, k) for n, k in PAIRS for m in TOKENS]


def test_the_first_tasks_span_the_grid() -> None:
    chosen = active.first_tasks(all_tasks())
    assert len(chosen) == len(set(chosen)) == active.DEFAULT.start_least
    assert {min(TOKENS), max(TOKENS)} <= {t.m for t in chosen}
    assert len({(t.n, t.k) for t in chosen}) >= 4


def test_uncertainty_is_small_where_the_device_is_known_and_large_where_it_is_not() -> None:
    known = [r for r in rows_of("gpu", gpu_cost) if r.n * r.k <= 1 << 19]
    tasks = [Task("gpu", W4, "plain", 32, 512, 512), Task("gpu", W4, "plain", 32, 4096, 4096)]
    doubt, seconds = active.uncertainty(GPU, known, tasks)
    assert doubt[1] > 2 * doubt[0]
    assert seconds[1] > 10 * seconds[0]


def test_next_tasks_are_new_and_different() -> None:
    rows = rows_of("gpu", gpu_cost)[::4]
    measured = {r.key for r in rows}
    left = [t for t in all_tasks() if t.key not in measured]
    chosen = active.next_tasks({"gpu": GPU}, rows, left, 6)
    assert len(set(chosen)) == 6
    assert measured.isdisjoint(t.key for t in chosen)
    assert len({t.m for t in chosen}) >= 2


def test_a_quarter_of_the_grid_chosen_actively_predicts_almost_as_well() -> None:
    rng = np.random.default_rng(0)
    device: DeviceRecord = GPU
    pairs = [(n, k) for n in (512, 1024, 2048, 4096) for k in (512, 2048, 4096)]
    rows = {
        r.key: r
        for n, k in pairs
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        for r in [row("gpu", m, n, k, gpu_cost(MatMul(n=n, k=k, weight_format=W4), m)
                      * float(rng.normal(1, 0.02)))]
    }  # fmt: skip
    tasks = [Task(r.device, r.weight_format, r.order, r.m, r.n, r.k) for r in rows.values()]
    chosen = active.first_tasks(tasks)
    while len(chosen) < len(tasks) // 4:
        left = [t for t in tasks if t not in chosen]
        found = [rows[t.key] for t in chosen]
        chosen += active.next_tasks({"gpu": device}, found, left, 5, seed=len(chosen))
    held = [(768, 1536), (3072, 1024), (1536, 3072)]

    def error(known: list[MatMulRow]) -> float:
        model = fit.fit_unchecked(device, known)
        m, n, k = np.asarray([(m, *p) for p in held for m in (1, 4, 32, 256)], dtype=float).T
        truth = [
            gpu_cost(MatMul(n=int(b), k=int(c), weight_format=W4), int(a))
            for a, b, c in zip(m, n, k, strict=True)
        ]
        return float(np.abs(predict.predict(model, device, m, n, k) / truth - 1).mean())

    assert error([rows[t.key] for t in chosen]) < max(1.3 * error(list(rows.values())), 0.04)

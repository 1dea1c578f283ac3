"""Kernels between the matmuls are timed as a decode step has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.backends import null, ops
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import ManualClock, SystemClock
from hetero.backends.ops import GatedAct, Op, RMSNorm
from hetero.backends.protocol import DeviceKind
from hetero.backends.registry import open_device
from hetero.profiler.cost import CostModel, experts_s, measured_experts
from hetero.profiler.non_matmul_ops import (
    BLOCKS,
    NonMatmulMeter,
    OpCase,
    ReferenceBlock,
    fit_non_matmul,
    layer_bytes,
    reference_ops,
    sizes_of,
)
from hetero.profiler.predict import op_name, other_s
from hetero.profiler.records import (
    DECODE_TOKENS,
    DeviceProfile,
    NonMatmulPredictor,
    NonMatmulRow,
    Quarantine,
)

WARM_S, FRESH_S = 8e-6, 30e-6
NORM = RMSNorm(d=64, eps=1e-5)


def timed(
    m: int, *, cold: int, asynchronous: bool = False, model_bytes: int | None = None
) -> float:
    """What the meter finds for a device whose calls take longer after a call of something else."""
    last: list[Op] = []

    def cost(op: Op, _: int) -> float:
        warm = [type(x) for x in last[-1:]] == [type(op)]
        last.append(op)
        return WARM_S if warm else FRESH_S

    clock = ManualClock()
    device = null.open(kind="npu", asynchronous=asynchronous, cost=cost, clock=clock)
    meter = NonMatmulMeter("npu", device, clock, cold=cold, model_bytes=model_bytes)
    return meter.time(OpCase(NORM, m, 0, 1 << 12)).seconds


@pytest.mark.parametrize("m", [1, 8 * DECODE_TOKENS])
def test_a_call_is_timed_behind_other_work(m: int) -> None:
    assert timed(m, cold=1 << 16) == pytest.approx(FRESH_S)
    assert timed(m, cold=0) == pytest.approx(WARM_S)


@pytest.mark.parametrize(
    ("m", "cold", "seconds"),
    [(1, 0, WARM_S), (8 * DECODE_TOKENS, 1 << 16, FRESH_S), (8 * DECODE_TOKENS, 0, WARM_S)],
)
def test_queues_are_timed_in_batches(m: int, cold: int, seconds: float) -> None:
    assert timed(m, cold=cold, asynchronous=True) == pytest.approx(seconds)


@pytest.mark.parametrize("model_bytes", [None, 1 << 15])
def test_few_tokens_of_a_queue_take_what_they_lengthen_a_row_of_matmuls_by(
    model_bytes: int | None,
) -> None:
    """Their own time behind a matmul, and that the next one no longer follows another."""
    found = timed(1, cold=1 << 16, asynchronous=True, model_bytes=model_bytes)
    assert found == pytest.approx(FRESH_S + (FRESH_S - WARM_S))


def test_a_small_model_leaves_all_in_the_caches() -> None:
    many = 8 * DECODE_TOKENS
    found = timed(many, cold=1 << 16, asynchronous=True, model_bytes=1 << 15)
    assert found == pytest.approx(WARM_S)


def test_many_tokens_are_timed_behind_all_other_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int | None] = []
    monkeypatch.setattr(NonMatmulMeter, "_read", lambda _, nbytes=None: read.append(nbytes))
    for asynchronous in (False, True):
        timed(8 * DECODE_TOKENS, cold=1 << 16, asynchronous=asynchronous)
        assert set(read) == {None}
    for m, model_bytes in ((1, None), (1, 1 << 15), (8 * DECODE_TOKENS, 1 << 15)):
        read.clear()
        timed(m, cold=1 << 16, model_bytes=model_bytes)
        assert set(read) == {1 << 12}


def test_bytes_of_a_layer() -> None:
    llama = layer_bytes(BLOCKS[0], WeightFormat.F16)  # Llama-3.2-1B has 60.8 million in a block
    assert llama == 2 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    assert 0.26 < layer_bytes(BLOCKS[0], WeightFormat.W4A8) / llama < 0.3


@pytest.mark.parametrize("blocks", [1, 2])
def test_many_tokens_whose_tensors_leave_the_caches_are_fitted_separately(blocks: int) -> None:
    """With too few rows of either kind there is one fit."""

    def true_s(m: int, f: int) -> float:
        return 2e-6 + m * f * (1e-10 if m <= DECODE_TOKENS else 3e-10)

    rows: list[tuple[NonMatmulRow, Op]] = [
        (
            NonMatmulRow(
                device="gpu",
                op="GatedAct",
                sizes={"f": f},
                m=m,
                seconds=true_s(m, f),
                ci=0.0,
                spread=0.0,
                samples=9,
            ),
            GatedAct(f=f),
        )
        for f in (4864, 8192)[:blocks]
        for m in (1, 8, 64, 256, 1024)
    ]
    (found,) = fit_non_matmul(rows)
    assert (found.decode is None) == (blocks == 1)
    if blocks == 2:
        for m in (2, 300):
            seconds = other_s(found, GatedAct(f=6000), m, 0)
            assert seconds == pytest.approx(true_s(m, 6000), rel=1e-3)
        assert found.mape < 1e-3


def test_the_model_that_is_measured_for_weighs_most() -> None:
    """Attention of large caches takes longer for each element than the model's own."""
    small, large = ReferenceBlock(256, 768, 8, 4, 32), ReferenceBlock(2048, 8192, 32, 8, 64)
    rows: list[tuple[NonMatmulRow, Op]] = []
    for block, slower in ((small, 1.0), (large, 1.5)):
        attention = ops.Attention(
            heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim, capacity=2048
        )
        for m in (1, 8, 64, 256):
            for context in (0, 256, 1000):
                cached = block.kv_heads * block.head_dim * (context + m)
                row = NonMatmulRow(
                    device="npu",
                    op="Attention",
                    sizes=sizes_of(attention),
                    m=m,
                    context=context,
                    seconds=6e-6 + slower * (4e-10 * cached + 1e-8 * m * block.heads),
                    ci=0.0,
                    spread=0.0,
                    samples=9,
                )
                rows.append((row, attention))

    def error(predictor: NonMatmulPredictor) -> float:
        """The largest of the small model's rows of few tokens."""
        return max(
            abs(other_s(predictor, op, row.m, row.context) / row.seconds - 1)
            for row, op in rows
            if row.m <= DECODE_TOKENS and row.sizes["heads"] == small.heads
        )

    (alike,), (own,) = (
        fit_non_matmul(rows),
        fit_non_matmul(rows, reference_ops(small, WeightFormat.F32)),
    )
    assert error(own) < 0.02 < error(alike)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "opencl", "ort-cpu"])
def test_every_kind_is_checked_and_timed(backend: str) -> None:
    kind: DeviceKind = "gpu" if backend == "opencl" else "npu"
    options = {"kind": kind} if backend == "reference" else {}
    device = open_device(backend, **options)
    try:
        meter = NonMatmulMeter(kind, device, SystemClock())
        for op in reference_ops(ReferenceBlock(64, 96, 4, 2, 16), WeightFormat.F32):
            assert meter.check(op) is None
        assert meter.time(OpCase(ops.AddPositions(d=64, rows=128), 32, 0, 1 << 12)).seconds > 0
    finally:
        device.close()


@pytest.mark.parametrize("backend", ["reference", "ort-cpu"])
def test_a_small_vocabulary_is_looked_up_within_its_table(backend: str) -> None:
    with open_device(backend) as device:
        kind = device.capabilities.kind
        meter = NonMatmulMeter(kind, device, SystemClock(), cold=0)
        for vocab in (4096, 50):  # the smaller one after the larger one has drawn its tokens
            embed = ops.Embed(vocab=vocab, d=32, weight_format=WeightFormat.W4A16)
            assert meter.check(embed) is None


def experts(count: int, chosen: int, d: int, f: int) -> ops.Experts:
    return ops.Experts(experts=count, chosen=chosen, d=d, f=f, weight_format=WeightFormat.W4A16)


def test_measured_experts_are_predicted_by_what_they_take() -> None:
    """Not by their matmuls, whose times have no host that sorts tokens by expert between them."""

    def seconds(distinct: float, pairs: float, op: ops.Experts) -> float:
        return 1e-5 + 6e-5 * distinct + 3 * op.d * op.f * (1e-10 * distinct + 1e-11 * pairs)

    rows = []
    for d, f in ((2048, 1024), (896, 608), (512, 512)):
        op = experts(8, 2, d, f)
        for m in (1, 8, 64, 256):
            row = NonMatmulRow(
                device="npu", op=op_name(op), sizes=sizes_of(op), m=m, ci=0.0, spread=0.0,
                samples=9, seconds=seconds(op.distinct(m), 2 * m, op),
            )  # fmt: skip
            rows.append((row, op))
    (fitted,) = fit_non_matmul(rows)
    assert fitted.op == "Experts+w4a16"
    host = DeviceProfile.load("host")
    cost = CostModel(host.model_copy(update={"other_predictors": (fitted,)}))
    op = experts(64, 8, 1024, 768)
    for m in (1, 64):
        wanted = seconds(op.distinct(m), 8 * m, op)
        assert float(cost.other_s("npu", op, m).seconds) == pytest.approx(wanted, rel=0.02)
    assert experts_s(cost, "npu", op, 3, 1) == pytest.approx(seconds(3, 3, op), rel=0.02)
    other = replace(op, weight_format=WeightFormat.W8A8)  # as before, by its matmuls
    assert measured_experts(cost, "npu", other) is None
    assert cost.other_s("npu", other, 1).seconds > 0


def test_experts_that_compute_wrongly_are_not_used() -> None:
    op = experts(8, 2, 64, 32)
    wrong = Quarantine(device="npu", op=op_name(op), tolerance=1e-4, detail="off by 2")
    host = DeviceProfile.load("host").model_copy(update={"quarantined": (wrong,)})
    assert CostModel(host).allowed_op("gpu", op, 1)
    refused = CostModel(host).allowed_op("npu", op, 1)
    assert not refused
    assert refused.reason == "quarantined: off by 2"

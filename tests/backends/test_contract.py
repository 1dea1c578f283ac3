"""The contract that every backend keeps: operations, edge shapes, bindings, memory, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hetero.backends import checks, ops
from hetero.backends.errors import DeviceLostError
from hetero.backends.formats import CacheFormat, StorageFormat, WeightFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.kv_rows import cache_rows
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.ops import OUTPUT_PORTS, STATE_PORTS, Op
from hetero.backends.optional import SupportsGroups, SupportsThreads
from hetero.backends.protocol import FIXED_PORTS, BoundCall, Device
from hetero.backends.weights import pack, stacked
from tests.backends.cases import (
    CACHES,
    check_call,
    check_op,
    check_run,
    execute,
    expected,
    floor,
    make_tensors,
    make_weights,
    require,
    snapshot,
    tolerance,
)
from tests.backends.conftest import GRAPH_SIZES
from tests.support.helpers import assert_close

EDGE_TOKENS = (1, 2, 31, 32, 33)
SHAPES = ((1, 32), (33, 96), (37, 172), (96, 32), (64, 320), (130, 64))

ROPE = ops.Rope(heads=4, kv_heads=2, head_dim=16, theta=10000.0, max_position=64)
ATTENTION = ops.Attention(heads=4, kv_heads=2, head_dim=16, capacity=70)

ROUTER = ops.Router(experts=8, chosen=3, d=64)
EXPERTS = ops.Experts(experts=8, chosen=3, d=64, f=32, weight_format=WeightFormat.W4A16)

SMALL_OPS: dict[str, Op] = {
    "matmul": ops.MatMul(n=37, k=64, weight_format=WeightFormat.W4A16),
    "embed": ops.Embed(vocab=50, d=64, weight_format=WeightFormat.W4A16),
    "rms_norm": ops.RMSNorm(d=64, eps=1e-5),
    "rms_norm_add": ops.RMSNorm(d=64, eps=1e-5, add=True),
    "layer_norm": ops.LayerNorm(d=64, eps=1e-5),
    "rope": ROPE,
    "attention": ATTENTION,
    "short_conv": ops.ShortConv(d=64, taps=3, gated=True),
    "gated_act": ops.GatedAct(f=64),
    "act": ops.Act(f=64, activation="relu"),
    "add_positions": ops.AddPositions(d=64, rows=40, offset=2),
    "add": ops.Add(d=64),
}


@pytest.fixture(params=SMALL_OPS)
def small_op(request: pytest.FixtureRequest) -> Op:
    op = SMALL_OPS[request.param]
    if ops.has_state(op):  # which a device may lack
        name = "any_device" if "any_device" in request.fixturenames else "device"
        require(request.getfixturevalue(name), op)
    return op


# --- operations ---------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul(device: Device, shape: tuple[int, int], weight_format: WeightFormat) -> None:
    n, k = shape
    check_op(device, ops.MatMul(n=n, k=k, weight_format=weight_format), EDGE_TOKENS)


@pytest.mark.parametrize(
    "op",
    [
        *(ops.MatMul(n=48, k=172, weight_format=fmt, bias=True) for fmt in WeightFormat),
        ops.Embed(vocab=300, d=96, weight_format=WeightFormat.W4A8),
        ops.RMSNorm(d=96, eps=1e-6, add=True),
        replace(ROPE, max_position=256, head_dim=12),
        replace(ATTENTION, capacity=256),
        replace(ATTENTION, capacity=256, head_dim=12, window=100),
        ops.GatedAct(f=300),
    ],
    ids=ops.describe,
)
def test_long_prompt(device: Device, op: Op) -> None:
    check_op(device, op, (256,))


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("k", [96, 172])
def test_matmul_bias(device: Device, k: int, weight_format: WeightFormat) -> None:
    check_op(device, ops.MatMul(n=35, k=k, weight_format=weight_format, bias=True), (1, 2, 33))


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_operand_order_changes_no_result(device: Device, weight_format: WeightFormat) -> None:
    op = ops.MatMul(n=64, k=96, weight_format=weight_format, order="transposed")
    check_op(device, op, (1, 32))


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_matmul_of_extreme_inputs(device: Device, weight_format: WeightFormat) -> None:
    """Tokens of zeros, of one outlier, and of very different sizes stay independent."""
    op = ops.MatMul(n=40, k=96, weight_format=weight_format)
    require(device, op)
    rng = np.random.default_rng(3)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 5, rng, device=device)
    x = tensors["x"].array
    x[0] = 0
    x[1, 1:] = 0
    x[2] *= 1e-6
    x[3] *= 1e4
    check_call(device, device.prepare(op, weights), weights, tensors, 5)
    np.testing.assert_array_equal(tensors["y"].array[0], 0)


@pytest.mark.parametrize("weight_format", [WeightFormat.GGUF_A16, WeightFormat.GGUF_A8])
def test_matmul_of_floats_of_4_bits(device: Device, weight_format: WeightFormat) -> None:
    op = ops.MatMul(n=48, k=172, weight_format=weight_format)
    require(device, op)
    rng = np.random.default_rng(4)
    values = rng.standard_normal((op.n, op.k), dtype=np.float32)
    weights: dict[str, Any] = {"weight": stacked([pack(values, StorageFormat.MXFP4)])}
    for m in (1, 5, 33):
        tensors = make_tensors(op, m, rng, device=device)
        check_call(device, device.prepare(op, weights), weights, tensors, m)


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("outlier", [1e3, 1e4, 6e4])
@pytest.mark.parametrize("m", [1, 5])
def test_matmul_of_outliers(
    device: Device, weight_format: WeightFormat, outlier: float, m: int
) -> None:
    """Activations as models have them: one of thousands in a token that is small otherwise."""
    op = ops.MatMul(n=40, k=96, weight_format=weight_format)
    require(device, op)
    rng = np.random.default_rng(int(outlier) + m)
    weights = make_weights(op, rng)
    weights["weight"] = pack(0.02 * rng.standard_normal((40, 96)), weight_format.storage)
    tensors = make_tensors(op, m, rng, device=device)
    tensors["x"].array[0, 17] = outlier
    tensors["x"].array[-1, 83] = -outlier
    check_call(device, device.prepare(op, weights), weights, tensors, m)


@pytest.mark.parametrize("excess", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "hot"), [(37, 76, 5), (64, 172, 172), (48, 1030, 1), (33, 40, 0)]
)
def test_outliers(device: Device, n: int, k: int, hot: int, excess: bool) -> None:
    """Hot features in floating point and what codes cannot hold, on top of the residual stream."""
    if hot or excess:
        check_op(device, ops.Outliers(n=n, k=k, hot=hot, excess=excess), (1, 32))


@pytest.mark.parametrize("hot", [0, 3])
def test_outliers_without_any_excess_or_all_in_excess(device: Device, hot: int) -> None:
    op = ops.Outliers(n=40, k=96, hot=hot, excess=True)
    require(device, op)
    rng = np.random.default_rng(hot)
    weights = make_weights(op, rng)
    for size in (0.0, 1e-3, 1e3):
        tensors = make_tensors(op, 5, rng, device=device)
        tensors["x"].array[...] *= size
        check_call(device, device.prepare(op, weights), weights, tensors, 5)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_matmul_segments_make_the_whole(device: Device, weight_format: WeightFormat) -> None:
    """Rows of a cut weight, computed one segment after another, each into its own tensor."""
    rng = np.random.default_rng(4)
    op = ops.MatMul(n=100, k=96, weight_format=weight_format)
    require(device, op)
    weights = make_weights(op, rng)
    for start, stop in ((0, 32), (32, 64), (64, 100)):
        part = replace(op, n=stop - start)
        segment = {**weights, "weight": checks.packed(weights).rows(start, stop)}
        tensors = make_tensors(part, 3, rng, device=device)
        check_call(device, device.prepare(part, segment), segment, tensors, 3)


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize(("vocab", "d", "scale"), [(50, 64, 1.0), (5, 172, 8.0), (33, 96, 0.5)])
def test_embed(
    device: Device, vocab: int, d: int, scale: float, weight_format: WeightFormat
) -> None:
    op = ops.Embed(vocab=vocab, d=d, weight_format=weight_format, scale=scale)
    check_op(device, op, EDGE_TOKENS)


@pytest.mark.parametrize(
    "op",
    [
        ROUTER,
        replace(ROUTER, renormalised=False, scale=2.5, bias=True),
        replace(ROUTER, experts=33, chosen=4, scores="softmax_chosen", bias=True),
        replace(ROUTER, scores="sigmoid", choice_bias=True, eps=1e-6, scale=1.5),
        replace(ROUTER, expert_scale=True, scale=1.5),
        replace(ROUTER, d=37, experts=5, chosen=5, scores="sigmoid", renormalised=False),
    ],
    ids=ops.describe,
)
def test_router(device: Device, op: ops.Router) -> None:
    check_op(device, op, EDGE_TOKENS)


def test_router_prefers_the_first_of_equal_experts(device: Device) -> None:
    require(device, ROUTER)
    rng = np.random.default_rng(0)
    weights = make_weights(ROUTER, rng)
    weights["router"] = np.tile(checks.vector(weights, "router")[: 2 * ROUTER.d], 4)
    tensors = make_tensors(ROUTER, 5, rng, device=device)
    check_call(device, device.prepare(ROUTER, weights), weights, tensors, 5)


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("bias", [False, True])
def test_experts(device: Device, weight_format: WeightFormat, bias: bool) -> None:
    check_op(device, replace(EXPERTS, weight_format=weight_format, bias=bias), (1, 5, 64))


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu_oai"])
def test_experts_activations(device: Device, activation: ops.ExpertActivation) -> None:
    op = replace(EXPERTS, activation=activation, bias=True, experts=4, chosen=4, d=48, f=80)
    check_op(device, op, (1, 33))


@pytest.mark.parametrize("subset", [(0,), (1, 2, 6), (0, 3, 5, 7)])
def test_experts_of_which_a_device_has_some(device: Device, subset: tuple[int, ...]) -> None:
    check_op(device, replace(EXPERTS, subset=subset), (1, 33))


def test_experts_of_few_and_of_all_tokens(device: Device) -> None:
    """All tokens choose the same experts, then each its own."""
    require(device, EXPERTS)
    rng = np.random.default_rng(7)
    weights = make_weights(EXPERTS, rng)
    kernel = device.prepare(EXPERTS, weights)
    tensors = make_tensors(EXPERTS, 33, rng, device=device)
    routes = tensors["routes"].array
    routes[:, : EXPERTS.chosen] = [7, 0, 3]
    check_call(device, kernel, weights, tensors, 33)
    routes[:, : EXPERTS.chosen] = [5, 6, 7]
    routes[-1, : EXPERTS.chosen] = [0, 7, 1]
    check_call(device, kernel, weights, tensors, 33)


def test_embed_reaches_every_row(device: Device) -> None:
    op = ops.Embed(vocab=33, d=32, weight_format=WeightFormat.W4A16)
    rng = np.random.default_rng(0)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 33, rng, device=device)
    tensors["tokens"].array[:] = np.arange(33)[::-1]
    check_call(device, device.prepare(op, weights), weights, tensors, 33)


@pytest.mark.pairwise
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kind", [ops.RMSNorm, ops.LayerNorm])
@pytest.mark.parametrize("d", [3, 64, 172, 2048])
def test_norm(
    device: Device, kind: type[ops.RMSNorm] | type[ops.LayerNorm], d: int, add: bool
) -> None:
    check_op(device, kind(d=d, eps=1e-5, add=add), EDGE_TOKENS)


@pytest.mark.parametrize("kind", [ops.RMSNorm, ops.LayerNorm])
def test_norm_of_small_inputs_uses_eps(
    device: Device, kind: type[ops.RMSNorm] | type[ops.LayerNorm]
) -> None:
    op = kind(d=64, eps=1e-3)
    rng = np.random.default_rng(5)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 2, rng, device=device)
    tensors["x"].array[0] *= 1e-2
    tensors["x"].array[1] = 0
    check_call(device, device.prepare(op, weights), weights, tensors, 2)


NORMS = {
    "row": {"qk_norm_row": True},
    "after": {"qk_norm_after": True},
    "row, after": {"qk_norm_row": True, "qk_norm_after": True},
    "after, yarn": {"qk_norm_after": True, "scaling": RopeScaling(
        kind="yarn", factor=4.0, original_max_position=32)},
    "unrotated": {"scaling": RopeScaling(kind="zero")},
    "values": {"v_norm_eps": 1e-2},
    "values alone": {"v_norm_eps": 1e-2, "qk_norm_eps": None},
}  # fmt: skip


@pytest.mark.parametrize("norm", NORMS)
def test_rope_norms(device: Device, norm: str) -> None:
    """Of each head or of the whole row, before or after the rotation."""
    op = replace(ROPE, heads=3, kv_heads=1, head_dim=12, qk_norm_eps=1e-3)
    check_op(device, replace(op, **NORMS[norm]), (1, 33))  # type: ignore[arg-type]


SCALINGS = {
    "queries": RopeScaling(llama_4_scaling_beta=0.3, original_max_position=5),
    "none": RopeScaling(),
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_max_position=32),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_max_position=32),
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling(device: Device, scaling: str) -> None:
    check_op(device, replace(ROPE, scaling=SCALINGS[scaling]), (1, 33))


@pytest.mark.pairwise
@pytest.mark.parametrize("norm", [None, 1e-6])
@pytest.mark.parametrize(
    "heads",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 8},
        {"heads": 3, "kv_heads": 1, "head_dim": 12},
        {"heads": 4, "kv_heads": 4, "head_dim": 80},
        {"heads": 2, "kv_heads": 1, "head_dim": 64, "rotary_dim": 32},
        {"heads": 2, "kv_heads": 2, "head_dim": 16, "rotary_dim": 4},
        {"heads": 3, "kv_heads": 3, "head_dim": 80, "rotary_dim": 20},
    ],
    ids=lambda heads: "-".join(map(str, heads.values())),
)
def test_rope_heads(device: Device, heads: dict[str, int], norm: float | None) -> None:
    check_op(device, replace(ROPE, **heads, qk_norm_eps=norm), (1, 2, 33))  # type: ignore[arg-type]


def test_position_is_read_when_a_call_runs(device: Device) -> None:
    rng = np.random.default_rng(6)
    kernel = device.prepare(ROPE, {})
    tensors = make_tensors(ROPE, 3, rng, device=device)
    call = kernel.bind(tensors, 3)
    for position in (0, 1, 17, 61):
        tensors["position"].array[0] = position
        tensors["out"].array[:] = np.nan
        check_run(device, ROPE, call, {}, tensors)


ATTENTION_HEADS = [(4, 2, 8), (3, 1, 12), (4, 4, 80), (8, 2, 64), (6, 2, 16), (1, 1, 128)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), ATTENTION_HEADS)
def test_attention(device: Device, heads: int, kv_heads: int, head_dim: int, window: int) -> None:
    """First prompt, later pieces and decoding; the cache holds NaN wherever nothing is written."""
    op = replace(ATTENTION, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)
    kernel = device.prepare(op, {})
    for m, position in ((1, 0), (7, 0), (33, 0), (1, 9), (1, 69), (2, 5), (31, 32), (33, 37)):
        rng = np.random.default_rng(m)
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        check_call(device, kernel, {}, tensors, m)


@pytest.mark.few(2)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", [kv for kv in CacheFormat if kv is not CacheFormat.F32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), ATTENTION_HEADS)
def test_attention_on_narrow_caches(
    device: Device, heads: int, kv_heads: int, head_dim: int, kv: CacheFormat
) -> None:
    """Keys and values are rounded when they are appended, and read in place."""
    op = replace(ATTENTION, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv=kv)
    require(device, op)
    kernel = device.prepare(op, {})
    for m, position in ((1, 0), (7, 0), (33, 0), (1, 9), (1, 69), (2, 5), (31, 32), (33, 37)):
        rng = np.random.default_rng(m)
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        check_call(device, kernel, {}, tensors, m)


@pytest.mark.pairwise
@pytest.mark.parametrize("kv", CacheFormat)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap"),
    [(4, 2, 8, 0, 0.0), (3, 1, 12, 5, 0.0), (8, 1, 64, 0, 2.0), (6, 2, 16, 33, 0.0)],
)
def test_attention_with_sinks(
    device: Device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    softcap: float,
    kv: CacheFormat,
) -> None:
    """One more score of each head, without a value; whole and by some heads."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    op = replace(ATTENTION, **sizes, window=window, softcap=softcap, kv=kv, sinks=True)  # type: ignore[arg-type]
    require(device, op)
    weights = make_weights(op, np.random.default_rng(heads))
    kernel = device.prepare(op, weights)
    for m, position in ((1, 0), (7, 0), (33, 0), (1, 9), (1, 69), (2, 5), (31, 32), (33, 37)):
        rng = np.random.default_rng(m)
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        check_call(device, kernel, weights, tensors, m)
    last = ops.AttentionHeads(attention=op, first=kv_heads - 1, count=1)
    if device.accepts(last):
        tensors = make_tensors(op, 7, rng, position=2, device=device)
        wanted = expected(op, weights, snapshot(tensors), 7)["out"]
        device.prepare(last, weights).bind(tensors, 7).run()
        own = slice(*last.columns)
        limit = tolerance(op, device)
        assert_close(tensors["out"].array[:7, own], wanted[:7, own], limit, "the last heads")


@pytest.mark.pairwise
@pytest.mark.parametrize("every", [1, 2, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "more"),
    [
        (4, 2, 8, {}),
        (3, 1, 12, {"window": 5}),
        (8, 2, 64, {"kv": CacheFormat.F16}),
        (6, 2, 12, {"kv": CacheFormat.Q8}),
        (6, 2, 16, {"softcap": 2.0, "window": 33}),
        (2, 2, 80, {"scale": 2.0}),
    ],
)
def test_sums_of_what_columns_are_given(
    device: Device, heads: int, kv_heads: int, head_dim: int, more: dict[str, Any], every: int
) -> None:
    """Of sampled rows of prompts and steps, on top of what is there; nothing else is touched."""
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    op = ops.SumScores(attention=replace(ATTENTION, **sizes, **more), every=every)
    require(device, op)
    kernel = device.prepare(op, {})
    for m, position in ((1, 0), (7, 0), (33, 0), (1, 15), (1, 69), (2, 5), (33, 37)):
        rng = np.random.default_rng(m + every)
        tensors = make_tensors(op, m, rng, position=position, device=device)
        check_call(device, kernel, {}, tensors, m)


@pytest.mark.pairwise
@pytest.mark.parametrize("kv", CacheFormat)
@pytest.mark.parametrize(("kv_heads", "head_dim", "window"), [(4, 16, 0), (3, 12, 9), (2, 64, 0)])
def test_heads_of_an_attention_touch_nothing_else(
    device: Device, kv_heads: int, head_dim: int, window: int, kv: CacheFormat
) -> None:
    """Runs of heads that follow each other make the whole; before that each leaves as it was what
    is not its own.
    """
    sizes = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    whole = replace(ATTENTION, **sizes, kv=kv, window=window)  # type: ignore[arg-type]
    require(device, ops.AttentionHeads(attention=whole, first=0, count=1))
    rng = np.random.default_rng(kv_heads + head_dim)
    for m, position in ((1, 7), (3, 0), (32, 13), (33, 0)):
        cut = int(rng.integers(1, kv_heads))
        tensors = make_tensors(whole, m, rng, position=position, spare_rows=1, device=device)
        tensors["out"].array[:] = rng.standard_normal(tensors["out"].shape)
        wanted = expected(whole, {}, snapshot(tensors), m)["out"]
        for first, stop in ((cut, kv_heads), (0, cut)):
            op = ops.AttentionHeads(attention=whole, first=first, count=stop - first)
            before, (start, end) = snapshot(tensors)["out"], op.columns
            check_run(device, op, device.prepare(op, {}).bind(tensors, m), {}, tensors)
            others = np.r_[:start, end : before.shape[1]]
            np.testing.assert_array_equal(tensors["out"].array[:, others], before[:, others])
        limit = tolerance(whole, device)
        assert_close(tensors["out"].array[:m], wanted[:m], limit, f"{cut} of {kv_heads} heads")


@pytest.mark.pairwise
@pytest.mark.parametrize("kv", CacheFormat)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "by_token"),
    [(2, 64, True), (4, 32, False), (1, 128, True), (3, 12, False), (2, 8, True), (1, 4, False)],
)
def test_chunks_are_decoded_to_the_bit(
    device: Device, kv_heads: int, head_dim: int, by_token: bool, kv: CacheFormat
) -> None:
    """Chunks of every kind, at any positions of caches that are NaN; the rest is not touched."""
    shape: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "by_token": by_token}
    shape |= {"kv": kv, "keys_by_token": by_token and kv.coded}
    values = 2 * kv_heads * head_dim * 16
    op = ops.DecodeChunks(capacity=130, room=3 * 7 * values, **shape)
    require(device, op)
    check_op(device, op, (1, 2, 7))
    if not kv.coded:
        return
    rng = np.random.default_rng()
    weights = make_weights(op, rng)
    kernel, tensors = device.prepare(op, weights), make_tensors(op, 7, rng, device=device)
    own = cache_rows(op, tensors["k_cache"].array).channels
    own[:] = np.asarray(weights["channels"]).reshape(own.shape)  # codes of 8 bits go in as they are
    check_call(device, kernel, weights, tensors, 7)


@pytest.mark.few(2)
def test_chunks_are_decoded_during_other_calls(device: Device) -> None:
    """From another thread, in a queue of its own, into the same caches."""
    if not isinstance(device, SupportsThreads):
        pytest.skip(f"{device.info.backend} computes on whatever thread calls it")
    other = device.clone_for_thread()
    op = ops.DecodeChunks(kv_heads=2, head_dim=16, capacity=130, room=1 << 15)
    rng = np.random.default_rng(11)
    weights = make_weights(op, rng)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            kernel = other.prepare(op, weights)
            for m in (1, 7, 5):
                check_call(other, kernel, weights, make_tensors(op, m, rng, device=other), m)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    check_op(device, ATTENTION, (33, 1))
    thread.join()
    assert not failures, failures


@pytest.mark.few(2)
def test_attention_scale(device: Device) -> None:
    check_op(device, replace(ATTENTION, scale=0.3), (1, 7))


@pytest.mark.few(2)
def test_attention_of_large_scores(device: Device) -> None:
    """The softmax must not overflow."""
    op = replace(ATTENTION, scale=40.0)
    kernel = device.prepare(op, {})
    tensors = make_tensors(op, 7, np.random.default_rng(8), position=3, device=device)
    check_call(device, kernel, {}, tensors, 7)


@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [12, 16])
def test_attention_of_a_prompt_in_pieces(device: Device, head_dim: int) -> None:
    """One pair of caches, bound by several calls, filled piece by piece at running positions."""
    op = replace(ATTENTION, head_dim=head_dim)
    rng = np.random.default_rng(9)
    kernel = device.prepare(op, {})
    shared = make_tensors(op, 1, rng, device=device)
    position = 0
    for m in (33, 5, 1, 1, 7):
        tensors = make_tensors(op, m, rng, device=device)
        tensors |= {port: shared[port] for port in (*CACHES, "position")}
        shared["position"].array[0] = position
        check_call(device, kernel, {}, tensors, m)
        position += m


def test_attention_overwrites_forgotten_positions(device: Device) -> None:
    """After a rollback the old keys behind the position are there and must not be seen."""
    rng = np.random.default_rng(10)
    kernel = device.prepare(ATTENTION, {})
    tensors = make_tensors(ATTENTION, 2, rng, position=20, device=device)
    for cache in CACHES:
        tensors[cache].array[:] = 100.0
        tensors[cache].array[:, :20] = rng.standard_normal((2, 20, 16))
    check_call(device, kernel, {}, tensors, 2)


@pytest.mark.few(2)
@pytest.mark.pairwise
@pytest.mark.parametrize("softcap", [0.7, 50.0])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 12), (2, 1, 256)])
def test_attention_of_capped_scores(
    device: Device, heads: int, kv_heads: int, head_dim: int, softcap: float
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    op = replace(ATTENTION, **sizes, window=20, scale=0.8, softcap=softcap)  # type: ignore[arg-type]
    kernel = device.prepare(op, {})
    for m, position in ((1, 0), (2, 30), (33, 0), (32, 9), (1, 69)):
        rng = np.random.default_rng(m)
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        check_call(device, kernel, {}, tensors, m)


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("bias", [False, True])
def test_matmul_with_a_soft_cap(device: Device, weight_format: WeightFormat, bias: bool) -> None:
    op = ops.MatMul(n=37, k=96, weight_format=weight_format, bias=bias, softcap=5.0)
    check_op(device, op, EDGE_TOKENS)


@pytest.mark.pairwise
@pytest.mark.parametrize(("rows", "offset"), [(40, 2), (7, 0), (100, 5)])
@pytest.mark.parametrize("d", [1, 64, 173])
def test_add_positions(device: Device, d: int, rows: int, offset: int) -> None:
    """Rows behind the table's end are its last."""
    op = ops.AddPositions(d=d, rows=rows, offset=offset)
    rng = np.random.default_rng(12)
    weights = make_weights(op, rng)
    kernel = device.prepare(op, weights)
    for m, position in ((1, 0), (2, 3), (33, 0), (1, 60)):
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        check_call(device, kernel, weights, tensors, m)


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("f", [1, 172])
def test_act(device: Device, f: int, activation: ops.Activation) -> None:
    check_op(device, ops.Act(f=f, activation=activation), EDGE_TOKENS)


SHORT_CONVS: dict[str, dict[str, Any]] = {
    "lfm2": {"taps": 3, "gated": True},
    "qwen3.5": {"taps": 4, "activation": "silu"},
    "lfm3": {"taps": 7, "gated": True, "bias": True},
    "all": {"taps": 2, "gated": True, "activation": "gelu", "bias": True},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", SHORT_CONVS)
@pytest.mark.parametrize("d", [1, 40, 172])
@pytest.mark.parametrize("beyond", [0, 9])
def test_short_conv(device: Device, kind: str, d: int, beyond: int) -> None:
    """From a state or, at position 0, from zeros whatever is there; columns beyond are not read."""
    op = ops.ShortConv(d=d, **SHORT_CONVS[kind])
    op = replace(op, width=op.columns + beyond)
    require(device, op)
    rng = np.random.default_rng(d)
    weights = make_weights(op, rng)
    kernel = device.prepare(op, weights)
    for m, position in ((1, 0), (1, 9), (2, 1), (33, 0), (5, 70), (77, 3), (300, 1)):
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        tensors["x"].array[:, op.columns :] = np.nan
        check_call(device, kernel, weights, tensors, m)


DELTAS: dict[str, dict[str, int]] = {
    "tiny": {"k_heads": 1, "v_heads": 2, "k_dim": 8, "v_dim": 16},
    "odd": {"k_heads": 2, "v_heads": 6, "k_dim": 12, "v_dim": 20},
    "qwen3.5": {"k_heads": 2, "v_heads": 4, "k_dim": 128, "v_dim": 128},
}


def delta_op(kind: str, beyond: int = 0) -> ops.GatedDelta:
    op = ops.GatedDelta(eps=1e-6, **DELTAS[kind])
    return replace(op, width=op.gates_width + beyond)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", DELTAS)
@pytest.mark.parametrize("beyond", [0, 9])
def test_gated_delta(device: Device, kind: str, beyond: int) -> None:
    """From a state or, at position 0, from zeros whatever is there; other gates are not read."""
    op = delta_op(kind, beyond)
    require(device, op)
    rng = np.random.default_rng(beyond)
    weights = make_weights(op, rng)
    kernel = device.prepare(op, weights)
    for m, position in ((1, 0), (1, 9), (2, 1), (33, 0), (5, 70), (77, 3), (300, 1)):
        tensors = make_tensors(op, m, rng, position=position, spare_rows=1, device=device)
        tensors["gates"].array[:, :beyond] = np.nan
        check_call(device, kernel, weights, tensors, m)


@pytest.mark.parametrize("size", [0.0, 1e-4, 30.0])
def test_gated_delta_of_extreme_inputs(device: Device, size: float) -> None:
    """Keys of zeros, tokens that are all alike, states that are forgotten or never."""
    op = delta_op("odd")
    require(device, op)
    rng = np.random.default_rng(7)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 130, rng, position=1, device=device)
    tensors["x"].array[:] = tensors["x"].array[:1] * size
    tensors["gates"].array[:65, -op.v_heads :] = 40.0
    tensors["gates"].array[65:, -op.v_heads :] = -40.0
    check_call(device, device.prepare(op, weights), weights, tensors, 130)


@pytest.mark.parametrize("kind", DELTAS)
@pytest.mark.parametrize("count", [2, 30, 300])
def test_gated_delta_in_pieces(device: Device, kind: str, count: int) -> None:
    in_pieces(device, delta_op(kind), count, seed=count)


def test_value_heads_that_no_key_head_has_are_refused() -> None:
    with pytest.raises(ValueError, match="value heads must be a multiple of key heads, got 3"):
        ops.GatedDelta(k_heads=2, v_heads=3, k_dim=8, v_dim=8, eps=1e-6)


def in_pieces(device: Device, op: Op, count: int, seed: int) -> None:
    """Assert that calls of some tokens each, one after the other, do what one call does."""
    require(device, op)
    rng = np.random.default_rng(seed)
    weights = make_weights(op, rng)
    kernel = device.prepare(op, weights)
    tensors = make_tensors(op, count, rng, device=device)
    wanted = expected(op, weights, snapshot(tensors), count)
    places = np.sort(rng.integers(0, count + 1, 4))
    for start, stop in pairwise([0, *places.tolist(), count]):
        if start < stop:
            tensors["position"].array[0] = start
            rows = {p: t if p in FIXED_PORTS else t.rows(start, stop) for p, t in tensors.items()}
            execute(device, kernel.bind(rows, stop - start))
    for port in tensors:
        if port in (*OUTPUT_PORTS, *STATE_PORTS):
            limit = tolerance(op, device)
            what, least = f"{ops.describe(op)}: {port}", floor(op, device)
            assert_close(tensors[port].array, wanted[port], limit, what, floor=least)


@pytest.mark.parametrize("kind", SHORT_CONVS)
@pytest.mark.parametrize("count", [2, 30, 300])
def test_short_conv_in_pieces(device: Device, kind: str, count: int) -> None:
    in_pieces(device, ops.ShortConv(d=40, **SHORT_CONVS[kind]), count, seed=count)


@pytest.mark.parametrize("sizes", [{"d": 0, "taps": 3}, {"d": 8, "taps": 1}])
def test_impossible_convolutions_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="d >= 1 and taps >= 2"):
        ops.ShortConv(**sizes)


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("f", [1, 7, 172, 1024])
def test_gated_act(device: Device, f: int, activation: ops.Activation) -> None:
    check_op(device, ops.GatedAct(f=f, activation=activation), EDGE_TOKENS)


@pytest.mark.parametrize(("d", "first", "width"), [(1, 0, 1), (64, 64, 130), (172, 9, 181)])
def test_sigmoid_gate(device: Device, d: int, first: int, width: int) -> None:
    check_op(device, ops.SigmoidGate(d=d, first=first, width=width), EDGE_TOKENS)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("d", "first", "width"), [(1, 0, 1), (16, 32, 64), (172, 9, 181)])
def test_gated_input(
    device: Device, d: int, first: int, width: int, activation: ops.Activation
) -> None:
    op = ops.GatedInput(d=d, first=first, width=width, activation=activation)
    check_op(device, op, EDGE_TOKENS)


def test_inputs_outside_of_their_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="8 inputs from column 9 on are not in 16 columns"):
        ops.GatedInput(d=8, first=9, width=16)


@pytest.mark.parametrize("d", [1, 172])
def test_scaled_add(device: Device, d: int) -> None:
    check_op(device, ops.Add(d=d, scaled=True), EDGE_TOKENS)


@pytest.mark.parametrize("norm", [None, 1e-6])
def test_rope_of_queries_alone(device: Device, norm: float | None) -> None:
    check_op(device, replace(ROPE, kv_heads=0, qk_norm_eps=norm), (1, 2, 33))


@pytest.mark.parametrize("kv", list(CacheFormat))
@pytest.mark.parametrize(("head_dim", "window"), [(16, 0), (12, 0), (16, 9)])
def test_attention_that_reads_the_caches_of_another_layer(
    device: Device, head_dim: int, window: int, kv: CacheFormat
) -> None:
    op = replace(ATTENTION, head_dim=head_dim, window=window, kv=kv, reads=True, scale=1.0)
    check_op(device, op, (1, 2, 33))


@pytest.mark.parametrize("d", [1, 64, 173])
def test_gated_add(device: Device, d: int) -> None:
    check_op(device, ops.GatedAdd(d=d), EDGE_TOKENS)


def test_gates_outside_of_their_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="8 gates from column 9 on are not in 16 columns"):
        ops.SigmoidGate(d=8, first=9, width=16)


@pytest.mark.parametrize("norm", [None, 1e-6])
@pytest.mark.parametrize("head_dim", [8, 12, 64])
def test_rope_with_gates_of_the_output(device: Device, head_dim: int, norm: float | None) -> None:
    op = replace(ROPE, head_dim=head_dim, rotary_dim=4, qk_norm_eps=norm, gated=True)
    check_op(device, op, (1, 2, 33))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_act_of_large_inputs(device: Device, activation: ops.Activation) -> None:
    op = ops.GatedAct(f=32, activation=activation)
    tensors = make_tensors(op, 3, np.random.default_rng(11), device=device)
    tensors["x"].array[:] *= 60.0
    check_call(device, device.prepare(op, {}), {}, tensors, 3)


@pytest.mark.parametrize("d", [1, 64, 173])
def test_add(device: Device, d: int) -> None:
    check_op(device, ops.Add(d=d), EDGE_TOKENS)


# --- bindings and memory ------------------------------------------------------------------------


def test_bindings_of_one_kernel_are_independent(device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(12)
    weights = make_weights(small_op, rng)
    kernel = device.prepare(small_op, weights)
    bound = []
    for m in (1, 5, 5, 33):
        tensors = make_tensors(small_op, m, rng, position=4, spare_rows=1, device=device)
        bound.append((kernel.bind(tensors, m), tensors))
    for call, tensors in (*bound, *reversed(bound)):
        check_run(device, small_op, call, weights, tensors)


def test_a_call_sees_new_inputs(device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(13)
    weights = make_weights(small_op, rng)
    tensors = make_tensors(small_op, 3, rng, device=device)
    call = device.prepare(small_op, weights).bind(tensors, 3)
    for _ in range(3):
        fresh = make_tensors(small_op, 3, rng)
        for port, tensor in tensors.items():
            tensor.array[:] = fresh[port].array
        check_run(device, small_op, call, weights, tensors)


def test_a_call_keeps_its_kernel_and_memory_alive(device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(14)
    weights = make_weights(small_op, rng)
    tensors = make_tensors(small_op, 2, rng, device=device)
    kernel = device.prepare(small_op, weights)
    call = kernel.bind(dict(tensors), 2)
    output = next(tensors[port] for port in ("y", "out") if port in tensors)
    del kernel, tensors
    execute(device, call)
    assert np.isfinite(output.array).all()


def test_results_land_in_the_callers_memory(device: Device, small_op: Op) -> None:
    """Outputs are views of one pool buffer; not a byte next to them changes."""
    m = 5
    rng = np.random.default_rng(15)
    weights = make_weights(small_op, rng)
    tensors = make_tensors(small_op, m, rng, device=device)
    for port in [p for p in ("y", "sum", "out") if p in tensors]:
        nbytes, shape = tensors[port].nbytes, tensors[port].shape
        buffer = device.allocate(nbytes + 256)
        device.map(buffer)
        buffer.bytes[:] = 0xA5
        tensors[port] = Tensor(buffer, shape, offset_bytes=128)
    check_call(device, device.prepare(small_op, weights), weights, tensors, m)
    for port in [p for p in ("y", "sum", "out") if p in tensors]:
        tensor = tensors[port]
        assert (tensor.buffer.bytes[:128] == 0xA5).all()
        assert (tensor.buffer.bytes[128 + tensor.nbytes :] == 0xA5).all()


def test_a_tile_of_tokens(device: Device) -> None:
    """Tokens [2, 7) of larger tensors: a view bound as if it were a tensor of its own."""
    op = ops.MatMul(n=40, k=64, weight_format=WeightFormat.W4A16)
    rng = np.random.default_rng(16)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 9, rng, device=device)
    tile = {port: tensor.rows(2, 7) for port, tensor in tensors.items()}
    check_call(device, device.prepare(op, weights), weights, tile, 5)
    assert np.isnan(tensors["y"].array[[0, 1, 7, 8]]).all()


def test_results_chain_through_shared_memory(device: Device) -> None:
    """The output of one call is the input of the next, with no copy between."""
    rng = np.random.default_rng(17)
    norm, gate = ops.RMSNorm(d=64, eps=1e-6), ops.GatedAct(f=32)
    weights = make_weights(norm, rng)
    first = make_tensors(norm, 5, rng, device=device)
    second = make_tensors(gate, 5, rng, device=device)
    second["x"] = first["y"]
    check_call(device, device.prepare(norm, weights), weights, first, 5)
    check_call(device, device.prepare(gate, {}), {}, second, 5)


def test_weights_are_not_written(device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(18)
    weights = make_weights(small_op, rng)
    for value in weights.values():
        for array in (value, getattr(value, "data", None), getattr(value, "scales", None)):
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
    tensors = make_tensors(small_op, 3, rng, device=device)
    check_call(device, device.prepare(small_op, weights), weights, tensors, 3)


def test_kernels_of_one_operation_have_their_own_weights(device: Device) -> None:
    op = ops.RMSNorm(d=64, eps=1e-6)
    rng = np.random.default_rng(19)
    sets = [make_weights(op, rng) for _ in range(3)]
    loaded = [device.prepare(op, weights) for weights in sets]
    tensors = make_tensors(op, 2, rng, device=device)
    for weights, kernel in zip(sets, loaded, strict=True):
        check_call(device, kernel, weights, tensors, 2)


def test_calls_complete_in_submission_order(device: Device) -> None:
    """The last of several submissions done means that all are."""
    if not device.capabilities.asynchronous:
        with pytest.raises(TypeError, match=r"use run\(\)"):
            _bound_add(device)[0].submit()
        return
    bound = [_bound_add(device) for _ in range(5)]
    completions = [call.submit() for call, _ in bound]
    completions[-1].wait(30.0)
    assert all(completion.done() for completion in completions)
    for _, tensors in bound:
        expected_sum = tensors["x"].array + tensors["residual"].array
        np.testing.assert_allclose(tensors["y"].array, expected_sum, rtol=1e-6)


def test_run_works_on_every_device(device: Device) -> None:
    call, tensors = _bound_add(device)
    call.run()
    expected_sum = tensors["x"].array + tensors["residual"].array
    assert_close(tensors["y"].array, expected_sum, tolerance(SMALL_OPS["add"], device))


# --- declarations -------------------------------------------------------------------------------


def test_declared_data_is_sensible(any_device: Device) -> None:
    declared = any_device.capabilities
    assert declared.kind in ("gpu", "npu")
    assert declared.row_alignment % 16 == 0
    assert declared.token_alignment >= 1
    assert bool(declared.graph_sizes) == declared.static_shapes
    assert list(declared.graph_sizes) == sorted(declared.graph_sizes)
    assert "plain" in declared.operand_orders
    assert any_device.info.backend in any_device.info.fingerprint


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_every_declared_format_is_accepted(any_device: Device, weight_format: WeightFormat) -> None:
    accepted = any_device.accepts(ops.MatMul(n=8, k=32, weight_format=weight_format))
    assert bool(accepted) == (weight_format in any_device.capabilities.weight_formats)
    assert bool(accepted.reason) != accepted.ok


def test_accepts_what_a_decoder_needs(any_device: Device, small_op: Op) -> None:
    assert any_device.accepts(small_op)


def test_groups_are_declared_where_they_can_be_prepared(any_device: Device) -> None:
    if any_device.capabilities.fused_groups:
        assert isinstance(any_device, SupportsGroups)


def test_mapping_twice_is_once(any_device: Device) -> None:
    buffer = any_device.allocate(100)
    assert any_device.map(buffer) == any_device.map(buffer)
    assert buffer.nbytes >= 100
    assert buffer.address % 4096 == 0


def test_calls_have_names_and_token_counts(any_device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(20)
    call = any_device.prepare(small_op, make_weights(small_op, rng)).bind(
        make_tensors(small_op, 5, rng, device=any_device), 5
    )
    assert call.m == 5
    assert type(small_op).__name__ in call.name


# --- refusals -----------------------------------------------------------------------------------


def test_missing_tensor_is_refused(any_device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(21)
    kernel = any_device.prepare(small_op, make_weights(small_op, rng))
    for port in small_op.ports:
        tensors = make_tensors(small_op, 2, rng, device=any_device)
        del tensors[port]
        with pytest.raises(ValueError, match=rf"missing.*{port}"):
            kernel.bind(tensors, 2)


def test_unknown_tensor_is_refused(any_device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(22)
    kernel = any_device.prepare(small_op, make_weights(small_op, rng))
    tensors = make_tensors(small_op, 2, rng, device=any_device)
    with pytest.raises(ValueError, match=r"unknown.*extra"):
        kernel.bind({**tensors, "extra": new_tensor((2, 2))}, 2)


def test_wrong_shape_or_dtype_is_refused(any_device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(23)
    kernel = any_device.prepare(small_op, make_weights(small_op, rng))
    for port in small_op.ports:
        tensors = make_tensors(small_op, 2, rng, device=any_device)
        shape, dtype = tensors[port].shape, tensors[port].dtype
        wider = (*shape[:-1], shape[-1] + 1) if len(shape) > 1 else (*shape, 1)
        for wrong in (new_tensor(wider, dtype), new_tensor(shape, np.float64)):
            with pytest.raises(ValueError, match=f"takes {port} as"):
                kernel.bind({**tensors, port: wrong}, 2)


def test_too_few_rows_are_refused(any_device: Device, small_op: Op) -> None:
    rng = np.random.default_rng(24)
    kernel = any_device.prepare(small_op, make_weights(small_op, rng))
    tensors = make_tensors(small_op, 2, rng, device=any_device)
    with pytest.raises(ValueError, match=r"takes .* as"):
        kernel.bind(tensors, 3)
    with pytest.raises(ValueError, match="at least one token"):
        kernel.bind(tensors, 0)


def test_token_count_without_a_graph_is_refused(any_device: Device) -> None:
    op, m = SMALL_OPS["matmul"], 4
    assert m not in GRAPH_SIZES
    rng = np.random.default_rng(25)
    kernel = any_device.prepare(op, make_weights(op, rng))
    tensors = make_tensors(op, m, rng, device=any_device)
    if any_device.capabilities.static_shapes:
        with pytest.raises(ValueError, match="no graph for 4 tokens, prepared are"):
            kernel.bind(tensors, m)
    else:
        assert kernel.bind(tensors, m).m == m


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {}, "takes the weights"),
        (lambda w: {**w, "extra": np.zeros(3, np.float32)}, "takes the weights"),
        (lambda w: {"weight": np.zeros((37, 64), np.float32)}, "takes a PackedWeight"),
        (lambda w: {"weight": w["weight"].rows(0, 16)}, "q4 weights of 37×64, got q4 of 16×64"),
        (lambda w: {"weight": pack(np.zeros((37, 64)), StorageFormat.Q8)}, "got q8"),
    ],
)
def test_wrong_weights_are_refused(
    any_device: Device, change: Callable[[dict[str, object]], dict[str, object]], message: str
) -> None:
    op = SMALL_OPS["matmul"]
    weights = make_weights(op, np.random.default_rng(26))
    with pytest.raises(ValueError, match=message):
        any_device.prepare(op, change(dict(weights)))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(63,), (64, 1)])
def test_wrong_vectors_are_refused(any_device: Device, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes weight as float32 \(64,\)"):
        any_device.prepare(SMALL_OPS["rms_norm"], {"weight": np.zeros(shape, np.float32)})


# --- closing ------------------------------------------------------------------------------------


def test_closed_device_refuses_every_call(own_device: Device) -> None:
    op = SMALL_OPS["add"]
    call, tensors = _bound_add(own_device)
    kernel = own_device.prepare(op, {})
    buffer = own_device.allocate(64)
    own_device.close()
    own_device.close()
    attempts: list[Callable[[], object]] = [
        lambda: own_device.map(buffer),
        lambda: own_device.prepare(op, {}),
        lambda: kernel.bind(tensors, 5),
        call.run,
    ]
    if own_device.capabilities.asynchronous:
        attempts.append(call.submit)
    for attempt in attempts:
        with pytest.raises(DeviceLostError, match="closed"):
            attempt()


def test_close_and_open_again(computing_opener: Callable[[], Device]) -> None:
    op = SMALL_OPS["matmul"]
    for _ in range(2):
        with computing_opener() as device:
            check_op(device, op, (1, 5))


def test_two_devices_at_once(computing_opener: Callable[[], Device]) -> None:
    op = SMALL_OPS["matmul"]
    with computing_opener() as one, computing_opener() as other:
        check_op(one, op, (2,))
        check_op(other, op, (2,))
        one.close()
        check_op(other, op, (2,))


def _bound_add(device: Device) -> tuple[BoundCall, dict[str, Tensor]]:
    op = SMALL_OPS["add"]
    tensors = make_tensors(op, 5, np.random.default_rng(27), device=device)
    return device.prepare(op, {}).bind(tensors, 5), tensors

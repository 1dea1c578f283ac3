"""What a profile lacks is predicted from what it has, and only from what is like it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from hetero.backends import ops
from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.ops import (
    STATE_PORTS,
    Act,
    Add,
    AddPositions,
    Attention,
    GatedAct,
    GatedAdd,
    GatedDelta,
    GatedInput,
    LayerNorm,
    Op,
    RMSNorm,
    ShortConv,
    SigmoidGate,
)
from hetero.backends.protocol import port_shape
from hetero.profiler.cost import CostModel
from hetero.profiler.predict import op_name
from hetero.profiler.records import DeviceProfile, NonMatmulPredictor, Quarantine
from hetero.profiler.substitutes import (
    SUBSTITUTES,
    TENSORS,
    Substitution,
    proxy_predictor,
    with_file_formats,
)
from tests.profiler.fakes import only_formats

WIDTH = 96
RECORDS: dict[str, Op] = {
    "RMSNorm": RMSNorm(d=WIDTH, eps=1e-5),
    "RMSNorm+add": RMSNorm(d=WIDTH, eps=1e-5, add=True),
    "LayerNorm": LayerNorm(d=WIDTH, eps=1e-5),
    "LayerNorm+add": LayerNorm(d=WIDTH, eps=1e-5, add=True),
    "GatedAct": GatedAct(f=WIDTH),
    "Act": Act(f=WIDTH, activation="relu"),
    "Add": Add(d=WIDTH),
    "AddPositions": AddPositions(d=WIDTH, rows=512),
    "GatedAdd": GatedAdd(d=WIDTH),
    "SigmoidGate": SigmoidGate(d=WIDTH, first=0, width=WIDTH),
    "GatedInput": GatedInput(d=WIDTH, first=0, width=WIDTH),
    "ShortConv": ShortConv(d=WIDTH, taps=4, activation="silu"),
    "ShortConv+gated": ShortConv(d=WIDTH, taps=3, gated=True),
}


def predictor(op: str, calls: float, elements: float) -> NonMatmulPredictor:
    terms = {"calls": calls, "tokens": elements, "elements": elements}
    few = {"calls": calls / 2, "elements": elements / 2}
    return NonMatmulPredictor(device="gpu", op=op, coefficients=terms, decode=few, max_m=256)


def cost_of(*known: NonMatmulPredictor, quarantined: str = "") -> CostModel:
    host = DeviceProfile.load("host")
    wrong = Quarantine(device="gpu", op=quarantined, tolerance=1e-4, detail="is off")
    return CostModel(
        host.model_copy(
            update={"other_predictors": known, "quarantined": (wrong,) if quarantined else ()}
        )
    )


@pytest.mark.parametrize("name", TENSORS)
def test_the_table_counts_what_a_call_moves(name: str) -> None:
    """Its ports but for states of one size, and the rows of a table of positions for the tokens."""
    op, m = RECORDS[name], 7
    ports = [port for port in op.ports if port not in ("position", *STATE_PORTS)]
    moved = sum(math.prod(port_shape(op, port, m)) for port in ports)
    if isinstance(op, AddPositions):
        moved += m * op.d
    assert moved == TENSORS[name] * m * WIDTH


@pytest.mark.parametrize(
    ("op", "source"),
    [(x, s) for x in SUBSTITUTES for s in SUBSTITUTES[x] if x in TENSORS],
)
@pytest.mark.parametrize("m", [1, 64])
def test_a_launch_costs_the_same_and_the_rest_goes_by_bytes(op: str, source: str, m: int) -> None:
    measured = predictor(source, calls=3e-6, elements=2e-10)
    cost = cost_of(measured)
    known = float(cost.other_s("gpu", RECORDS[source], m).seconds)
    found = float(cost.other_s("gpu", RECORDS[op], m).seconds)
    launch_s = 3e-6 if m > 8 else 1.5e-6
    assert found - launch_s == pytest.approx((known - launch_s) * TENSORS[op] / TENSORS[source])
    assert cost.allowed_op("gpu", RECORDS[op], m)
    assert cost.measured_as("gpu", op) == source
    assert proxy_predictor(measured, op).max_m == measured.max_m


@pytest.mark.parametrize("source", CacheFormat)
@pytest.mark.parametrize("wanted", CacheFormat)
def test_attention_on_other_caches_goes_by_their_bytes(
    source: CacheFormat, wanted: CacheFormat
) -> None:
    """Of a decoding step, what is read for more context; a row of 64 codes has a step besides."""
    attention = Attention(heads=4, kv_heads=2, head_dim=64, capacity=4096)
    terms = {"calls": 3e-6, "cached": 1e-9}
    measured = NonMatmulPredictor(
        device="gpu", op=op_name(replace(attention, kv=source)), coefficients=terms, max_m=256,
        max_context=4096,
    )  # fmt: skip
    cost = cost_of(measured)

    def grows_s(kv: CacheFormat) -> float:
        op = replace(attention, kv=kv)
        short, long = (float(cost.other_s("gpu", op, 1, x).seconds) for x in (100, 3100))
        return long - short

    row = {CacheFormat.F32: 4 * 64, CacheFormat.F16: 2 * 64, CacheFormat.Q8: 64 + 4}
    assert grows_s(wanted) == pytest.approx(grows_s(source) * row[wanted] / row[source])
    assert cost.measured_as("gpu", op_name(replace(attention, kv=wanted))) == measured.op


def test_a_gated_delta_rule_goes_by_the_work_of_attention() -> None:
    """Its pass over a state of 3 multiply-adds an element, of which a pair of attention has 2."""
    terms = {"pairs": 2e-12, "cached": 1e-9}
    cost = cost_of(NonMatmulPredictor(device="gpu", op="Attention", coefficients=terms, max_m=256))
    op = GatedDelta(k_heads=2, v_heads=4, k_dim=64, v_dim=32, eps=1e-6)
    state = 4 * 64 * 32
    for m in (64, 256):
        seconds = float(cost.other_s("gpu", op, m).seconds)
        assert seconds == pytest.approx(m * state * 3 * 1e-12 + 2 * state * 1e-9)


def test_what_was_measured_is_taken_as_it_is() -> None:
    own = predictor("LayerNorm", calls=1e-6, elements=1e-9)
    cost = cost_of(predictor("RMSNorm", calls=2e-6, elements=1e-10), own)
    assert cost.other("gpu", RECORDS["LayerNorm"]) is own
    assert cost.measured_as("gpu", "LayerNorm") == "LayerNorm"
    assert cost.measured_as("npu", "LayerNorm") is None
    assert not cost.allowed_op("npu", RECORDS["LayerNorm"], 1)


@pytest.mark.parametrize("wrong", ["Act", "GatedAct"])
def test_nothing_stands_in_for_a_wrong_kernel_and_no_wrong_one_does(wrong: str) -> None:
    cost = cost_of(predictor("GatedAct", calls=1e-6, elements=1e-9), quarantined=wrong)
    assert cost.allowed_op("gpu", RECORDS["Act"], 1).reason == "quarantined: is off"


def test_it_is_said() -> None:
    said = "LayerNorm was not measured: predicted from RMSNorm by its bytes"
    assert Substitution("LayerNorm", "RMSNorm").note == said


def test_only_known_operations_stand_in() -> None:
    kinds = {kind.__name__ for kind in get_args(ops.Op)}
    assert {name.partition("+")[0] for name in TENSORS} <= kinds
    caches = {
        op_name(Attention(heads=1, kv_heads=1, head_dim=8, capacity=8, kv=x)) for x in CacheFormat
    }
    standing = {x for found in SUBSTITUTES.values() for x in found} | set(SUBSTITUTES)
    assert standing == set(TENSORS) | caches | {"GatedDelta"}


FILES = {WeightFormat.GGUF_A16: WeightFormat.W4A16, WeightFormat.GGUF_A8: WeightFormat.W4A8}


@pytest.mark.parametrize("wanted", FILES)
@pytest.mark.parametrize(
    ("name", "slower"),
    [("host", True), ("host-amx", True), ("host-avx2", True), ("snapdragon-8-gen-3", False)],
)
def test_files_take_longer_on_processors(name: str, slower: bool, wanted: WeightFormat) -> None:
    """Prompts of blocks with minima, some of six bits, are no 4-bit ones; a chip's are unknown."""
    profile = DeviceProfile.load(name)
    known = {(p.device, p.weight_format) for p in profile.predictors}
    cost = CostModel(profile)
    for device in profile.devices:
        if (device, FILES[wanted]) not in known or (device, wanted) in known:
            continue  # or measured
        shape = (64, 1536, 576)
        ratio = cost.matmul_s(device, wanted, *shape).seconds / (
            cost.matmul_s(device, FILES[wanted], *shape).seconds
        )
        assert (ratio > 1.2) == slower
        assert slower or ratio == pytest.approx(1.0)


@pytest.mark.full
def test_what_was_measured_of_files_is_not_derived() -> None:
    """Kind by kind: a profile of before every core was measured in them has their substitutes'."""
    host = only_formats(DeviceProfile.load("host"), WeightFormat.W4A16, WeightFormat.W4A8)
    own = tuple(
        p.model_copy(update={"weight_format": WeightFormat.GGUF_A16, "scale": {"prefill": 7.0}})
        for p in host.predictors
        if p.weight_format is WeightFormat.W4A16
    )
    found = with_file_formats(host.model_copy(update={"predictors": (*host.predictors, *own)}))
    assert [p for p in found.predictors if p.weight_format is WeightFormat.GGUF_A16] == [*own]
    for wanted, source in FILES.items():
        gains = [
            [(x.phase, x.speedup, x.layer_s) for x in found.every_core if x.weight_format is name]
            for name in (wanted, source)
        ]
        assert gains[0] == gains[1] != []
    assert with_file_formats(found) == found

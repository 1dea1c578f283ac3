"""Preparation as measured on devices that say how long it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from hetero.backends.host.clock import ManualClock
from hetero.backends.ops import Op
from hetero.backends.protocol import Kernel, WeightValue
from hetero.profiler.features import weight_bytes
from hetero.profiler.preparation import fit_preparation, measure_preparation
from hetero.profiler.workload import WeightPool
from tests.profiler.fakes import PAIRS, W4, devices, npu_cost

FIXED_S, S_PER_BYTE, PUT_OFF_S = 2e-3, 5e-9, 1e-3


def test_preparation_is_what_a_first_run_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    opened = devices(clock)
    npu = opened["npu"]
    prepare, new = npu.prepare, False

    def slowly(op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        nonlocal new
        clock.sleep(FIXED_S + S_PER_BYTE * weights["weight"].nbytes)
        new = True
        return prepare(op, weights)

    def cost(op: Op, m: int) -> float:
        nonlocal new
        put_off_s, new = PUT_OFF_S * new, False
        return npu_cost(op, m) + put_off_s

    monkeypatch.setattr(npu, "prepare", slowly)
    npu._cost = cost
    rows = measure_preparation({"npu": npu}, WeightPool(1 << 24), clock, PAIRS, [W4])
    assert len(rows) == len(PAIRS)
    for row in rows:
        nbytes = float(weight_bytes(W4, row.n, row.k))
        wanted_s = FIXED_S + PUT_OFF_S + S_PER_BYTE * nbytes
        assert (row.cold_s, row.cached_s) == pytest.approx((wanted_s, wanted_s), rel=1e-6)
    (found,) = fit_preparation(rows)
    assert found.fixed_s == pytest.approx(FIXED_S + PUT_OFF_S, rel=1e-3)
    assert found.s_per_byte == pytest.approx(S_PER_BYTE, rel=1e-3)


@pytest.mark.parametrize("static_shapes", [True, False])
def test_cold_is_typical_of_graphs_and_the_first_of_other_kernels(
    static_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    npu = devices(clock)["npu"]
    capabilities = dataclasses.replace(npu.capabilities, static_shapes=static_shapes)
    monkeypatch.setattr(npu, "capabilities", capabilities)
    monkeypatch.setattr(npu, "_cost", npu_cost)
    prepare = npu.prepare
    took_s = itertools.cycle((9e-3, 3e-3, 4e-3, 2e-3))  # three weights, then the last one again
    monkeypatch.setattr(
        npu, "prepare", lambda op, w: (clock.sleep(next(took_s)), prepare(op, w))[1]
    )
    next(took_s), next(took_s), next(took_s)  # the smallest comes once before
    rows = measure_preparation({"npu": npu}, WeightPool(1 << 24), clock, PAIRS, [W4])
    cold_s = 4e-3 if static_shapes else 9e-3
    assert all(row.cold_s == pytest.approx(cold_s, rel=1e-6) for row in rows)
    assert all(row.cached_s == pytest.approx(2e-3, rel=1e-6) for row in rows)

"""Preparation as measured on devices that say how long it takes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hetero.backends.clock import ManualClock
from hetero.backends.ops import Op
from hetero.backends.protocol import Kernel, WeightValue
from hetero.profiler.predict import weight_bytes
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

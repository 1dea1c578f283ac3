"""Routed experts on every variant of a device, in all tiles of sorted rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.opencl import experts
from hetero.backends.opencl.device import OpenCLDevice
from tests.backends.cases import check_op, make_tensors, make_weights

ROUTER = ops.Router(experts=24, chosen=4, d=96)
EXPERTS = ops.Experts(experts=24, chosen=4, d=96, f=48, weight_format=WeightFormat.W4A16)
FORMATS = (WeightFormat.W4A16, WeightFormat.W4A8, WeightFormat.F16, WeightFormat.GGUF_A8)


@pytest.mark.full
@pytest.mark.parametrize("weight_format", FORMATS)
def test_experts(variant: OpenCLDevice, weight_format: WeightFormat) -> None:
    op = replace(EXPERTS, weight_format=weight_format, bias=weight_format is WeightFormat.F16)
    check_op(variant, op, (1, 2, 40))


def test_router(variant: OpenCLDevice) -> None:
    check_op(variant, ROUTER, (1, 33))


@pytest.mark.full
def test_several_passes(device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 tokens each, the last one of fewer."""
    monkeypatch.setattr(experts, "PASS_TOKENS", 20)
    check_op(device, EXPERTS, (64,))


def test_few_experts_take_wide_tiles(device: OpenCLDevice) -> None:
    check_op(device, replace(EXPERTS, experts=2, chosen=2), (3, 33))


@pytest.mark.full
@pytest.mark.parametrize("weight_format", [WeightFormat.W4A16, WeightFormat.F32])
def test_rows_take_no_more_memory_than_is_said(
    device: OpenCLDevice, weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    scratch = device.shared_scratch
    monkeypatch.setattr(device, "shared_scratch", lambda x: asked.append(x) or scratch(x))
    op, rng = replace(EXPERTS, weight_format=weight_format), np.random.default_rng(0)
    kernel = device.prepare(op, make_weights(op, rng))
    for m in (1, 7, 64, 600):
        asked.clear()
        kernel.bind(make_tensors(op, m, rng, device=device), m)
        assert max(asked) <= op.row_bytes(m)

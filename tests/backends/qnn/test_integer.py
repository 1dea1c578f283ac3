"""Matmuls with integer activations, against float64 of the dequantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import pack
from tests.backends.cases import make_tensors
from tests.support.helpers import relative_difference

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)

N, K, M = 200, 172, 33
# What is rounded: 16-bit codes of x and y, and fp16 where each group has a scale of its own.
LIMITS = {"int16": 5e-4, "int8": 4e-2}


def weight_of(storage: StorageFormat, scales: str) -> Any:
    """A random weight whose scales are alike in the whole weight, in rows, or nowhere."""
    random = np.random.default_rng(0)
    values = random.uniform(-1, 1, (N, K)).astype(np.float32)
    if scales != "groups":
        values[:, ::32] = -1  # the largest of each group, so that all groups have one scale
    if scales != "whole":
        values *= random.uniform(0.5, 2, (N, 1)).astype(np.float32)
        values[::2] *= -1  # 4-bit weights have a negative scale where the largest is positive
    return pack(values, storage)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("activations", "storage", "scales"),
    [
        ("int16", StorageFormat.Q4, "groups"),
        ("int16", StorageFormat.Q4, "rows"),
        ("int16", StorageFormat.Q4, "whole"),
        ("int16", StorageFormat.Q8, "groups"),
        ("int16", StorageFormat.Q8, "rows"),
        ("int8", StorageFormat.Q8, "rows"),
        ("int8", StorageFormat.Q8, "whole"),
    ],
)
def test_integer_activations(activations: Any, storage: StorageFormat, scales: str) -> None:
    weight = weight_of(storage, scales)
    form = WeightFormat.W4A16 if storage is StorageFormat.Q4 else WeightFormat.W8A16
    op = ops.MatMul(n=N, k=K, weight_format=form, bias=True)
    bias = np.linspace(-1, 1, N, dtype=np.float32)
    with qnn.open(graph_sizes=(M,), cache=None, activations=activations) as device:
        tensors = make_tensors(op, M, np.random.default_rng(1), device=device)
        x = tensors["x"].array
        x[0], x[1] = 0, x[1] * 1e4
        if activations == "int16":  # 8-bit codes leave little of such a row
            x[2, 1:] = 0
        x[3] = np.sign(weight.dequantize()[5])  # as large a result as this weight can give
        device.prepare(op, {"weight": weight, "bias": bias}).bind(tensors, M).run()
    expected = x.astype(np.float64) @ weight.dequantize().T.astype(np.float64)
    for row in range(M):
        found = tensors["y"].array[row] - bias
        assert relative_difference(found, expected[row], floor=1e-3) < LIMITS[activations], row


def test_8_bit_activations_take_no_groups() -> None:
    op = ops.MatMul(n=N, k=K, weight_format=WeightFormat.W8A16)
    weights = {"weight": weight_of(StorageFormat.Q8, "groups")}
    with (
        qnn.open(cache=None, activations="int8") as device,
        pytest.raises(ValueError, match="a weight with one scale for each row"),
    ):
        device.prepare(op, weights)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activations 'int4' are not one of float16, int16, int8"):
        qnn.open(activations="int4")

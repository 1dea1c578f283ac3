"""A group as one graph: the numbers of its steps, its bindings, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.groups import Group, GroupStep
from hetero.backends.memory import new_tensor
from hetero.backends.reference.compute import program
from tests.backends.cases import make_weights
from tests.support.helpers import assert_close

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)

D, F = 96, 172
UP = ops.MatMul(n=2 * F, k=D, weight_format=WeightFormat.W4A16)
DOWN = ops.MatMul(n=D, k=F, weight_format=WeightFormat.W4A16, bias=True)
GROUP = Group(
    "feed_forward",
    (
        GroupStep(UP, (("x", "h"), ("y", "wide"))),
        GroupStep(ops.GatedAct(f=F), (("x", "wide"), ("y", "active"))),
        GroupStep(DOWN, (("x", "active"), ("y", "h"))),  # a slot that is read and written
    ),
    ("h",),
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[tuple[Any, list[Any]]]:
    random = np.random.default_rng(0)
    weights = [make_weights(step.op, random) for step in GROUP.steps]
    with qnn.open(graph_sizes=(1, 5, 300), cache=None) as device:
        yield device.prepare_group(GROUP, weights), weights


@pytest.mark.parametrize("m", [1, 5, 300])
def test_a_group_computes_what_its_steps_do(kernel: tuple[Any, list[Any]], m: int) -> None:
    found, weights = kernel
    h = new_tensor((m, D))
    h.array[:] = np.random.default_rng(m).standard_normal((m, D))
    up, down = (w["weight"].dequantize().astype(np.float64) for w in (weights[0], weights[2]))
    wide = h.array @ up.T
    gate, rest = wide[:, :F], wide[:, F:]
    expected = (gate / (1 + np.exp(-gate)) * rest) @ down.T + weights[2]["bias"]
    found.bind({"h": h}, m).run()
    assert_close(h.array, expected, 1.5e-3)


def test_no_bit_of_a_group_depends_on_the_call(kernel: tuple[Any, list[Any]]) -> None:
    """Tokens of a long call, of short ones and of padded ones; graphs of this process and cached.

    Features of a group are never cut. Query, key and value are one matmul (test_identity.py).
    """
    found, _ = kernel
    x = np.random.default_rng(7).standard_normal((300, D)).astype(np.float32)

    def result(group: Any, rows: Any, m: int) -> Any:
        h = new_tensor((m, D))
        h.array[: len(rows)] = rows
        group.bind({"h": h}, m).run()
        return h.array[: len(rows)].copy()

    whole = result(found, x, 300)
    for first, last, m in ((0, 5, 5), (254, 259, 5), (296, 298, 5), (299, 300, 1)):
        np.testing.assert_array_equal(result(found, x[first:last], m), whole[first:last])


def test_a_cached_group_gives_the_same_bits(kernel: tuple[Any, list[Any]], tmp_path: Path) -> None:
    found, weights = kernel
    results = []
    for opened in (None, tmp_path, tmp_path):
        with qnn.open(graph_sizes=(5,), cache=opened) as device:
            group = found if opened is None else device.prepare_group(GROUP, weights)
            h = new_tensor((5, D))
            h.array[:] = np.random.default_rng(3).standard_normal((5, D))
            group.bind({"h": h}, 5).run()
            results.append(h.array)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_wrong_tensors_and_token_counts_are_refused(kernel: tuple[Any, list[Any]]) -> None:
    found, _ = kernel
    with pytest.raises(ValueError, match=r"takes the tensors \['h'\], got \[\]"):
        found.bind({}, 1)
    with pytest.raises(ValueError, match="feed_forward takes h as float32"):
        found.bind({"h": new_tensor((1, D + 1))}, 1)
    with pytest.raises(ValueError, match="no graph for 2 tokens"):
        found.bind({"h": new_tensor((2, D))}, 2)


def test_a_result_beyond_fp16_is_an_error(kernel: tuple[Any, list[Any]]) -> None:
    h = new_tensor((1, D))
    h.array[:] = 1e4
    with pytest.raises(DeviceError, match="feed_forward m=1 failed: FP16_OVERFLOW"):
        kernel[0].bind({"h": h}, 1).run()


def static_group() -> tuple[Group, list[Any]]:
    """The same steps with codes of 8 bits and static scales, and their weights."""
    random = np.random.default_rng(1)
    steps, weights = [], []
    for step in GROUP.steps:
        op = step.op
        if isinstance(op, ops.MatMul):
            op = replace(op, weight_format=WeightFormat.W8A8)
        weights.append(make_weights(op, random))
        steps.append(replace(step, op=op))
    for values, scale in ((weights[0], 0.03), (weights[2], 0.05)):
        values["x_scale"] = np.full(1, scale, np.float32)
    return Group("feed_forward", tuple(steps), ("h",)), weights


def test_matmuls_of_codes_inside_a_group_are_as_those_alone() -> None:
    """The graph rounds x where the host does; tokens of small codes have steps as fine."""
    group, weights = static_group()
    x = np.random.default_rng(9).standard_normal((5, D)).astype(np.float32)
    x[1] /= 4
    with qnn.open(graph_sizes=(5,), cache=None) as device:
        h = new_tensor((5, D))
        h.array[:] = x
        device.prepare_group(group, weights).bind({"h": h}, 5).run()
        alone = x
        for step, values in zip(group.steps, weights, strict=True):
            tensors = {port: new_tensor((5, 2 * F if port == "x" else F)) for port in ("x", "y")}
            if isinstance(step.op, ops.MatMul):
                tensors = {"x": new_tensor(alone.shape), "y": new_tensor((5, step.op.n))}
            tensors["x"].array[:], tensors["y"].array[:] = alone, np.nan
            device.prepare(step.op, values).bind(tensors, 5).run()
            alone = tensors["y"].array
        off = np.abs(h.array - alone).max(axis=1) / np.abs(alone).max(axis=1)
        assert off.max() < 0.1, off  # fp16 may round a code to the other side of a half
        h.array[:] = np.sign(weights[0]["weight"].dequantize()[3])  # the longest sum of a row
        weights[0]["x_scale"] = np.full(1, 1 / 127, np.float32)
        with pytest.raises(DeviceError, match=r"CODES_CLIPPED: .* without .fused."):
            device.prepare_group(group, weights).bind({"h": h}, 5).run()


def test_keys_are_appended_elsewhere_than_they_are_turned_to() -> None:
    """Caches that slide: attention counts from their first row, the rotation from the text's."""
    rope = ops.Rope(heads=4, kv_heads=2, head_dim=16, theta=1e4, max_position=256)
    attention = ops.Attention(heads=4, kv_heads=2, head_dim=16, capacity=64, window=24)
    caches = {port: port for port in ("k_cache", "v_cache")}
    slots: list[dict[str, str]] = [
        {"qkv": "qkv", "position": "position", "out": "turned"},
        {"qkv": "turned", "position": "cache_row", **caches, "out": "y"},
    ]
    steps = [
        GroupStep(op, tuple(x.items())) for op, x in zip((rope, attention), slots, strict=True)
    ]
    group = Group("block", tuple(steps), ("y",))
    assert group.fixed["cache_row"] == ("cache_row", "position")
    random = np.random.default_rng()
    for m, position, row in ((5, 200, 30), (1, 90, 59), (5, 3, 3)):
        arrays = {
            "qkv": random.standard_normal((m, rope.width)).astype(np.float32),
            "turned": np.full((m, rope.width), np.nan, np.float32),
            "y": np.full((m, 64), np.nan, np.float32),
            "position": np.array([position], np.int32),
            "cache_row": np.array([row], np.int32),
        }
        arrays |= {port: np.zeros((2, 64, 16), np.float32) for port in caches}
        for port in caches:
            arrays[port][:, :row] = random.standard_normal((2, row, 16))
        given: dict[str, Any] = {}
        for name in set(arrays) - {"turned"}:
            given[name] = new_tensor(arrays[name].shape, arrays[name].dtype)
            given[name].array[:] = arrays[name]
        for step in group.steps:
            program(step.op, {})[0]({port: arrays[slot] for port, slot in step.slots})
        with qnn.open(graph_sizes=(m,), cache=None) as device:
            device.prepare_group(group, [{}, {}]).bind(given, m).run()
        for name in ("y", *caches):
            assert_close(given[name].array, arrays[name], 5e-3, name)

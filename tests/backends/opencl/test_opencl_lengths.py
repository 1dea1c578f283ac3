"""Programs are the same for caches of every length and for every window, and compute the same bits
on all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.formats import CacheFormat
from hetero.backends.kv_rows import cache_rows
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.protocol import CACHE_PORTS, port_dtype, port_shape
from tests.backends.cases import make_tensors, make_weights
from tests.backends.opencl.oracles import expected, relative_error
from tests.backends.opencl.test_opencl_attention import LLAMA, TOLERANCE

LENGTHS = (333, 97, 200, 1024)
POSITION = 41
SCORES = ops.SumScores(attention=LLAMA, every=2)
CHUNKS = ops.DecodeChunks(kv_heads=2, head_dim=64, capacity=333, room=1 << 15)
ELSE = {
    "score_sums": SCORES,
    "chunks": CHUNKS,
    "chunks of codes": replace(CHUNKS, kv=CacheFormat.Q8),
}


def longer(op: ops.Op, capacity: int) -> ops.Op:
    """The same on caches for so many tokens."""
    if isinstance(op, ops.SumScores):
        return replace(op, attention=replace(op.attention, capacity=capacity))
    assert isinstance(op, ops.Attention | ops.DecodeChunks)
    return replace(op, capacity=capacity)


def programs(device: OpenCLDevice) -> set[str]:
    return set(device.programs._programs)


def copied(op: ops.Op, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of an operation on other lengths, with all that those have of the first tokens; NaN,
    or steps that are, where these have more.
    """
    made = {}
    for port, tensor in wanted.items():
        m = tensor.shape[0]
        made[port] = new = new_tensor(port_shape(op, port, m), port_dtype(op, port))
        if port == "score_sums":
            new.array[:] = np.nan
            count = min(new.shape[1], tensor.shape[1])
            new.array[:, :count] = tensor.array[:, :count]
        elif port in CACHE_PORTS:
            mine, rows = cache_rows(op, new.array), cache_rows(op, tensor.array)
            new.array[...] = 127 if mine.kv.coded else np.nan
            if mine.kv.coded:
                mine.steps[...] = np.nan
                mine.channels[...] = rows.channels
            count = min(mine.tokens, rows.tokens)
            new.array[:, :count] = rows.array[:, :count]
        else:
            new.array[:] = tensor.array
    return made


def result(op: ops.Op, tensors: dict[str, Tensor], tokens: int) -> dict[str, bytes]:
    """The bits of what an operation leaves in its tensors, and of the first tokens of caches."""
    found = {}
    for port, tensor in tensors.items():
        array: Any = tensor.array
        if port == "score_sums":
            array = array[:, :tokens]
        elif port in CACHE_PORTS:
            array = array[:, : min(tokens, cache_rows(op, array).tokens)]
        found[port] = array.tobytes()
    return found


@pytest.mark.parametrize("kv", CacheFormat)
@pytest.mark.parametrize("name", ["default", "lanes"])
@pytest.mark.parametrize("m", [1, 4, 33])
@pytest.mark.sampled(2)
def test_attention_computes_the_same_bits_on_caches_of_any_length(
    opened_variant: Any, name: str, kv: CacheFormat, m: int
) -> None:
    device, op = opened_variant(name), replace(LLAMA, kv=kv)
    first = make_tensors(op, m, np.random.default_rng(m), position=POSITION)
    poisoned = {n: copied(longer(op, n), first) for n in LENGTHS}
    device.prepare(op, {}).bind(first, m).run()
    known, wanted = programs(device), result(op, first, POSITION + m)
    assert not np.isnan(first["out"].array).any()
    for capacity, tensors in poisoned.items():
        other = longer(op, capacity)
        device.prepare(other, {}).bind(tensors, m).run()
        assert result(other, tensors, POSITION + m) == wanted, capacity
    assert programs(device) == known


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["default", "lanes"])
@pytest.mark.parametrize("op", ELSE.values(), ids=ELSE)
def test_what_else_works_on_caches_does_so(opened_variant: Any, name: str, op: ops.Op) -> None:
    device, rng, m = opened_variant(name), np.random.default_rng(8), 5
    weights = make_weights(op, rng)
    first = make_tensors(longer(op, 97), m, rng, position=POSITION)  # chunks are in the shortest
    poisoned = {n: copied(longer(op, n), first) for n in LENGTHS}
    device.prepare(longer(op, 97), weights).bind(first, m).run()
    known, wanted = programs(device), result(longer(op, 97), first, 97)
    for capacity, tensors in poisoned.items():
        other = longer(op, capacity)
        device.prepare(other, weights).bind(tensors, m).run()
        assert result(other, tensors, 97) == wanted, capacity
    assert programs(device) == known


@pytest.mark.parametrize("name", ["default", "lanes"])
def test_one_program_does_for_every_window(opened_variant: Any, name: str) -> None:
    device = opened_variant(name)
    device.prepare(LLAMA, {})
    known = programs(device)
    for window, m in ((0, 1), (1, 1), (16, 3), (40, 33), (500, 20)):
        op = replace(LLAMA, window=window, capacity=120)
        tensors = make_tensors(op, m, np.random.default_rng(window), position=60)
        before = {port: tensor.array.copy() for port, tensor in tensors.items()}
        wanted = expected(op, before, {}, m)["out"]
        device.prepare(op, {}).bind(tensors, m).run()
        assert relative_error(tensors["out"].array, wanted) <= TOLERANCE
    assert programs(device) == known


@pytest.mark.full
def test_fused_launches_share_a_program(device: OpenCLDevice) -> None:
    """Layers that slide, layers that do not, and those of another start."""
    used = set()
    for capacity, window in ((97, 0), (333, 0), (200, 24)):
        op, rng = replace(LLAMA, capacity=capacity, window=window), np.random.default_rng(capacity)
        calls = []
        for _ in range(2):
            tensors = make_tensors(op, 1, rng, position=POSITION, device=device)
            calls.append(device.prepare(op, {}).bind(tensors, 1))
        fused = device.fuse([[[call] for call in calls]])
        if fused is None:
            pytest.skip("this device has no fused launches")
        used.add(id(fused[0].launches[0][0].program))
    assert len(used) == 1


@pytest.mark.exhaustive  # 10 GiB of addresses
@pytest.mark.parametrize("name", ["default", "lanes"])
def test_heads_beyond_two_to_the_31_bytes_from_the_first(opened_variant: Any, name: str) -> None:
    """Offsets of heads do not fit 32 bits; the keys are those of a short cache."""
    device, op = opened_variant(name), replace(LLAMA, kv=CacheFormat.Q8)
    far = longer(op, (1 << 31) // 68 + 5000)
    first = make_tensors(op, 1, np.random.default_rng(3), position=POSITION)
    tensors = {}
    for port, tensor in first.items():
        shape, dtype = port_shape(far, port, 1), port_dtype(far, port)
        tensors[port] = new = new_tensor(shape, dtype)
        if port in CACHE_PORTS:
            mine, rows = cache_rows(far, new.array), cache_rows(op, tensor.array)
            mine.channels[...] = rows.channels
            new.array[:, :POSITION] = rows.array[:, :POSITION]
        else:
            new.array[:] = tensor.array
    for some, made in ((op, first), (far, tensors)):
        device.prepare(some, {}).bind(made, 1).run()
    assert result(far, tensors, POSITION + 1) == result(op, first, POSITION + 1)

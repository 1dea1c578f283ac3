"""What is particular to ONNX Runtime: aliased memory, packed weights, split activations, errors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from hetero.backends import ops
from hetero.backends.blocks import BLOCK_STORAGES
from hetero.backends.errors import DeviceError
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.host.processor import cpu_flags
from hetero.backends.memory import new_tensor
from hetero.backends.onnx_common.staging import stage, stage_by_feature
from hetero.backends.ort_cpu import (
    DEFAULT_GRAPH_SIZES,
    OrtCpuDevice,
    default_path,
    graphs,
    integers,
    mixed,
)
from hetero.backends.ort_cpu import open as open_ort_cpu
from hetero.backends.ort_cpu.device import int8_pack_bytes, scale_bytes
from hetero.backends.ort_cpu.graphs import ActivationPath, weight_is_unsigned
from hetero.backends.ort_cpu.kernels import OrtGraphKernel
from hetero.backends.ort_cpu.session import OrtCall, device_error
from hetero.backends.weights import pack, stacked
from tests.backends.cases import check_call, expected, make_tensors, make_weights, snapshot
from tests.support.helpers import relative_difference


@pytest.fixture(scope="module")
def ort_cpu() -> Iterator[OrtCpuDevice]:
    with OrtCpuDevice(graph_sizes=(1, 2, 5, 32, 256), w4a16="split") as device:
        yield device


def test_default_graph_sizes() -> None:
    with open_ort_cpu() as device:
        assert device.capabilities.graph_sizes == DEFAULT_GRAPH_SIZES
        assert device.capabilities.row_alignment == 32
        assert not device.capabilities.asynchronous


@pytest.mark.parametrize("sizes", [(), (0, 4)])
def test_graph_sizes_are_checked(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="token counts of at least 1"):
        open_ort_cpu(graph_sizes=sizes)


@pytest.mark.parametrize(
    ("flags", "path"),
    [("fpu avx2 fma", "both"), ("fpu avx2 avx512f avx512_vnni", "fp32"), ("", "fp32")],
)
def test_default_path_of_a_processor(flags: str, path: str) -> None:
    assert default_path(frozenset(flags.split())) == path


def test_the_device_says_which_path_it_takes() -> None:
    with open_ort_cpu() as chosen, open_ort_cpu(w4a16="fp32") as plain:
        assert chosen.info.details["w4a16"] == default_path(cpu_flags())
        same = chosen.info.details["w4a16"] == "fp32"
        assert (chosen.info.fingerprint == plain.info.fingerprint) == same


def test_w4a16_path_is_checked() -> None:
    with pytest.raises(ValueError, match=r"w4a16 is one of .*, got 'fp16'"):
        open_ort_cpu(w4a16="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "op",
    [
        ops.MatMul(n=40, k=64, weight_format=WeightFormat.W4A8),
        ops.Add(d=64),
        ops.Attention(heads=4, kv_heads=2, head_dim=16, capacity=70),
    ],
    ids=ops.describe,
)
def test_outputs_are_bound_at_the_callers_addresses(ort_cpu: OrtCpuDevice, op: ops.Op) -> None:
    rng = np.random.default_rng(0)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 5, rng, device=ort_cpu)
    call = ort_cpu.prepare(op, weights).bind(tensors, 5)
    assert isinstance(call, OrtCall)
    call.run()
    addresses = {tensor.address for tensor in tensors.values()}
    for _, binding in call.launches:
        for value in binding.get_outputs():
            assert value.data_ptr() in addresses


def test_embedding_reads_the_packed_table_in_place(ort_cpu: OrtCpuDevice) -> None:
    """The table of a large vocabulary exists once, in the model file's layout."""
    op = ops.Embed(vocab=50, d=64, weight_format=WeightFormat.W4A8)
    table = pack(np.random.default_rng(1).standard_normal((50, 64)), StorageFormat.Q4)
    kernel = ort_cpu.prepare(op, {"weight": table})
    assert kernel.nbytes == 0
    assert isinstance(kernel, OrtGraphKernel)
    assert kernel.extra["data"].ctypes.data == table.data.ctypes.data
    assert table.scales is not None
    assert kernel.extra["scales"].ctypes.data == table.scales.ctypes.data


@pytest.mark.parametrize("storage", [StorageFormat.Q4, StorageFormat.Q8])
def test_embedding_is_exact(ort_cpu: OrtCpuDevice, storage: StorageFormat) -> None:
    fmt = WeightFormat.W4A16 if storage is StorageFormat.Q4 else WeightFormat.W8A16
    op = ops.Embed(vocab=50, d=96, weight_format=fmt)
    table = pack(np.random.default_rng(2).standard_normal((50, 96)), storage)
    tokens, y = new_tensor((32,), np.int32), new_tensor((32, 96))
    tokens.array[:] = np.arange(32)
    ort_cpu.prepare(op, {"weight": table}).bind({"tokens": tokens, "y": y}, 32).run()
    np.testing.assert_array_equal(y.array, table.dequantize()[:32])


@pytest.mark.parametrize(
    ("sizes", "bytes_per_weight"),
    [
        ((1, 256), int8_pack_bytes() + 0.625),
        ((1, 16), int8_pack_bytes() + scale_bytes(WeightFormat.W4A16, split=True)),
        ((32, 256), 0.625),
    ],
)
def test_both_holds_only_the_packs_that_graph_sizes_need(
    sizes: tuple[int, ...], bytes_per_weight: float
) -> None:
    op = ops.MatMul(n=256, k=256, weight_format=WeightFormat.W4A16)
    with open_ort_cpu(graph_sizes=sizes, w4a16="both") as device:
        weights = make_weights(op, np.random.default_rng(0))
        kernel = device.prepare(op, weights)
        assert kernel.nbytes == pytest.approx(bytes_per_weight * 256 * 256)
        assert device.capabilities.weight_bytes[op.weight_format] == bytes_per_weight
        for m in sizes:
            tensors = make_tensors(op, m, np.random.default_rng(m), device=device)
            check_call(device, kernel, weights, tensors, m)


@pytest.mark.parametrize("k", [172, 2048])
@pytest.mark.parametrize("weight_format", [WeightFormat.W4A16, WeightFormat.W8A16])
def test_split_activations_lose_less_than_fp16_would(
    ort_cpu: OrtCpuDevice, k: int, weight_format: WeightFormat
) -> None:
    op = ops.MatMul(n=64, k=k, weight_format=weight_format)
    rng = np.random.default_rng(3)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 5, rng, device=ort_cpu)
    tensors["x"].array[1] *= rng.lognormal(0, 2, k)  # outliers within a block
    wanted = expected(op, weights, snapshot(tensors), 5)["y"]
    ort_cpu.prepare(op, weights).bind(tensors, 5).run()
    assert relative_difference(tensors["y"].array, wanted) < 5e-5


def test_int8_activations_are_quantised_as_in_the_reference(ort_cpu: OrtCpuDevice) -> None:
    """The same rounding: far closer than the size of the quantisation error itself."""
    op = ops.MatMul(n=64, k=512, weight_format=WeightFormat.W4A8)
    rng = np.random.default_rng(4)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 32, rng, device=ort_cpu)
    wanted = expected(op, weights, snapshot(tensors), 32)["y"]
    ort_cpu.prepare(op, weights).bind(tensors, 32).run()
    assert relative_difference(tensors["y"].array, wanted) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize(("n", "k"), [(37, 172), (2100, 4100)])
def test_codes_of_rows_are_staged_by_feature(n: int, k: int, dtype: npt.DTypeLike) -> None:
    weight = pack(np.random.default_rng(n).standard_normal((n, k)), StorageFormat.Q8R)
    staged = stage_by_feature(weight, dtype)
    zero = 128 if weight_is_unsigned(dtype) else 0
    assert staged["weight"].array.dtype == dtype
    codes = staged["weight"].array.astype(np.int16) - zero
    np.testing.assert_array_equal(codes.T, weight.codes())
    assert weight.scales is not None
    np.testing.assert_array_equal(staged["scales"].array, weight.scales.reshape(-1)[:n])


def test_inexact_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which every 8-bit kernel saturates: no w8a8, and why."""
    monkeypatch.setattr(integers, "_first_exact", lambda: None)
    with open_ort_cpu() as device:
        op = ops.MatMul(n=32, k=32, weight_format=WeightFormat.W8A8)
        assert device.accepts(op).reason.startswith("ONNX Runtime's 8-bit products are not exact")
        assert WeightFormat.W8A8 not in device.capabilities.weight_formats


@pytest.mark.parametrize("storage", ["q4", "q8", "f16", "f32"])
def test_staged_weights_hold_the_same_numbers(storage: str) -> None:
    weight = pack(np.random.default_rng(5).standard_normal((37, 172)), StorageFormat(storage))
    staged = stage(weight)
    codes = staged["weight"].array
    if weight.storage is StorageFormat.Q4:
        values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(37, 6, 32) - 8.0
    elif weight.storage is StorageFormat.Q8:
        values = codes - 128.0
    else:
        np.testing.assert_array_equal(codes, weight.dequantize())
        return
    scaled = (values * staged["scales"].array[..., None]).reshape(37, -1)
    np.testing.assert_array_equal(scaled[:, :172].astype(np.float32), weight.dequantize())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("storage", BLOCK_STORAGES)
def test_staged_blocks_hold_the_same_numbers(
    storage: StorageFormat, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arm's codes of 8 bits use all of them, for accuracy of its kernel."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    weight = stacked([pack(np.random.default_rng(5).standard_normal((37, 172)), storage)])
    staged = mixed.staged(weight)
    codes = staged["weight0"].array
    values, bits = codes - 128.0, mixed.parts_of(weight)[0].bits
    if machine == "aarch64" and bits != 4:
        assert 64 <= np.abs(values).max() <= 128
    if bits == 4:
        values = np.stack([codes & 15, codes >> 4], axis=-1) - 8.0
    scaled = (
        values.reshape(37, -1, 32 // storage.blocks.halves) * staged["scales0"].array[..., None]
    )
    whole = scaled.reshape(37, 6, 32)
    if storage.blocks.minimum:
        whole = whole + staged["shift0"].array.T[..., None]
    np.testing.assert_allclose(whole.reshape(37, -1)[:, :172], weight.dequantize(), atol=2e-6)


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "sse2", True),
        ("aarch64", "fp asimd asimdhp asimddp", True),
        ("aarch64", "fp asimd aes crc32", False),
        ("ARM64", "", True),  # Windows has no flags; its processors have dot products
    ],
)
def test_which_kernels_round(
    machine: str, flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(graphs, "cpu_flags", lambda: frozenset(flags.split()))
    assert graphs.kernel_rounds() == expected


def float_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime as on Arm without dot products: it multiplies floats at every level."""
    monkeypatch.setattr(graphs, "kernel_rounds", lambda: False)
    monkeypatch.setattr(graphs, "INT8_LEVEL", graphs.FLOAT_LEVEL)


@pytest.mark.parametrize("k", [64, 172])
@pytest.mark.parametrize("weight_format", [WeightFormat.W4A8, WeightFormat.GGUF_A8])
def test_activations_are_rounded_where_no_kernel_does(
    weight_format: WeightFormat, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    float_kernels(monkeypatch)
    op, rng = ops.MatMul(n=64, k=k, weight_format=weight_format), np.random.default_rng(8)
    with open_ort_cpu() as device:
        weights, tensors = make_weights(op, rng), make_tensors(op, 4, rng)
        tensors["x"].array[1, :32] = 0  # a block without a step
        check_call(device, device.prepare(op, weights), weights, tensors, 4)


def test_native_errors_are_decoded(
    ort_cpu: OrtCpuDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    """A token outside the vocabulary makes ONNX Runtime fail; nothing is printed besides."""
    op = ops.Embed(vocab=50, d=64, weight_format=WeightFormat.F32)
    rng = np.random.default_rng(6)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, 2, rng, device=ort_cpu)
    call = ort_cpu.prepare(op, weights).bind(tensors, 2)
    tensors["tokens"].array[1] = 1_000_000
    with pytest.raises(DeviceError, match=r"ort-cpu: Embed\(vocab=50, .* m=2 failed: ") as caught:
        call.run()
    assert "indices element out of data bounds" in caught.value.code
    assert capfd.readouterr() == ("", "")
    tensors["tokens"].array[1] = 1
    check_call(ort_cpu, ort_cpu.prepare(op, weights), weights, tensors, 2)


def test_error_code_comes_first() -> None:
    native = RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : out\nof memory")
    assert device_error(native, "x").code == "RUNTIME_EXCEPTION: out of memory"
    assert device_error(RuntimeError("odd"), "x").code == "RuntimeError: odd"


@pytest.mark.parametrize(("position", "m"), [(69, 2), (70, 1), (-1, 1)])
@pytest.mark.parametrize("head_dim", [12, 16])
def test_positions_beyond_the_cache_are_refused(
    ort_cpu: OrtCpuDevice, head_dim: int, position: int, m: int
) -> None:
    op = ops.Attention(heads=2, kv_heads=1, head_dim=head_dim, capacity=70)
    tensors = make_tensors(op, m, np.random.default_rng(7), device=ort_cpu)
    call = ort_cpu.prepare(op, {}).bind(tensors, m)
    tensors["position"].array[0] = position
    before = snapshot(tensors)
    with pytest.raises(DeviceError, match="POSITION_OUT_OF_RANGE"):
        call.run()
    for port, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.array, before[port])


def test_run_releases_the_interpreter_lock(ort_cpu: OrtCpuDevice) -> None:
    op = ops.MatMul(n=1024, k=1024, weight_format=WeightFormat.F32)
    rng = np.random.default_rng(8)
    tensors = make_tensors(op, 256, rng, device=ort_cpu)
    call = ort_cpu.prepare(op, make_weights(op, rng)).bind(tensors, 256)
    steps, stop = 0, threading.Event()

    def count() -> None:
        nonlocal steps
        while not stop.is_set():
            steps += 1
            time.sleep(1e-4)

    counter = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5.0)  # far longer than the test: no thread is asked to give the lock away
    try:
        counter.start()
        before = steps
        for _ in range(10):
            call.run()
        during = steps - before
    finally:
        stop.set()
        counter.join()
        sys.setswitchinterval(interval)
    assert during >= 5


@pytest.mark.parametrize("path", get_args(ActivationPath))
@pytest.mark.parametrize("weight_format", [x for x in WeightFormat if not x.of_file])
def test_kernels_hold_what_the_device_declares(
    weight_format: WeightFormat, path: ActivationPath
) -> None:
    op = ops.MatMul(n=256, k=512, weight_format=weight_format)
    with open_ort_cpu(w4a16=path) as device:
        kernel = device.prepare(op, make_weights(op, np.random.default_rng(0)))
        declared = device.capabilities.weight_bytes[weight_format]
        scales_of_rows = 4 * op.n if weight_format.storage.scales == "row" else 0
        assert kernel.nbytes == declared * op.n * op.k + scales_of_rows


MEMORY_SCRIPT = """
import gc, json, numpy as np
from hetero.backends import ops, registry
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import PackedWeight, data_shape, scales_shape
def resident():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
n, k = 2048, 4096
storage = StorageFormat.Q4
weight = PackedWeight(storage, n, k, np.ones(data_shape(storage, n, k), np.uint32),
                      np.ones(scales_shape(storage, n, k), np.float16))
device = registry.open_device("ort-cpu")
op = ops.MatMul(n=n, k=k, weight_format=WeightFormat.W4A8)
kernels = [device.prepare(op, {"weight": weight})]
before = resident()
kernels += [device.prepare(op, {"weight": weight}) for _ in range(4)]
gc.collect()
print(json.dumps({"held": (resident() - before) / 4, "declared": kernels[-1].nbytes}))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup")
def test_a_kernel_holds_one_pack_of_its_weight() -> None:
    """ONNX Runtime's pack, and neither the source nor the staging copy."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    known = int8_pack_bytes() + scale_bytes(WeightFormat.W4A8, split=True)
    assert found["held"] < (known + 0.05) * 2048 * 4096
    assert found["held"] == pytest.approx(found["declared"], rel=0.15)


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_no_session_uses_kernels_that_round_by_row(
    monkeypatch: Any, weight_format: WeightFormat
) -> None:
    """KleidiAI's, on Arm: every session of every operation is made without them."""
    entries: list[str] = []
    make = ort.InferenceSession

    def recorded(model: bytes, options: ort.SessionOptions, **keywords: Any) -> Any:
        entries.append(options.get_session_config_entry("mlas.disable_kleidiai"))
        return make(model, options, **keywords)

    monkeypatch.setattr(ort, "InferenceSession", recorded)
    op = ops.MatMul(n=64, k=64, weight_format=weight_format)
    with open_ort_cpu(w4a16="both") as device:
        weights = make_weights(op, np.random.default_rng(0))
        kernel = device.prepare(op, weights)
        check_call(device, kernel, weights, make_tensors(op, 1, np.random.default_rng(1)), 1)
    assert entries
    assert set(entries) == {"1"}


@pytest.mark.parametrize(
    ("machine", "w4a8", "split"),
    [("x86_64", 0.75, 0.75), ("aarch64", 0.625, 0.625), ("arm64", 0.625, 0.625)],
)
def test_a_pack_for_int8_is_smaller_on_arm(
    monkeypatch: Any, machine: str, w4a8: float, split: float
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    with open_ort_cpu(graph_sizes=(1,), w4a16="split") as device:
        held = device.capabilities.weight_bytes
    assert (held[WeightFormat.W4A8], held[WeightFormat.W4A16]) == (w4a8, split)

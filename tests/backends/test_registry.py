"""Finding backends by name, shared memory, and errors' texts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from hetero.backends import registry
from hetero.backends.checks import Health
from hetero.backends.errors import DeviceError, DeviceLostError, DeviceUnavailableError
from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor, new_tensor
from hetero.backends.protocol import KINDS
from hetero.backends.registry import BACKENDS, Backend
from hetero.measuring.device_checks import list_devices
from tests.backends import conftest


def test_unknown_backend_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="unknown backend 'ortcpu': did you mean 'ort-cpu'"):
        registry.find("ortcpu")
    with pytest.raises(
        ValueError, match="unknown backend 'xyz': known are opencl, opencl-cores, ort-cpu"
    ):
        registry.open_device("xyz")


def test_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.Backend("reference", "npu", ("no_such_package",), "pip install it")
    monkeypatch.setitem(registry.BACKENDS, "reference", backend)
    with pytest.raises(DeviceUnavailableError, match="no_such_package is not installed; pip ins"):
        registry.open_device("reference")


def test_importing_backends_imports_no_vendor_package() -> None:
    code = (
        "import sys, hetero.backends, hetero.backends.registry, hetero.backends.reference, "
        "hetero.backends.null\n"
        "assert not {'onnxruntime', 'onnx', 'pyopencl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_device_error_states_code_operation_and_remedy() -> None:
    error = DeviceError("opencl", "building k.cl", "CL_BUILD_PROGRAM_FAILURE", "update the driver")
    assert str(error) == (
        "opencl: building k.cl failed: CL_BUILD_PROGRAM_FAILURE; update the driver"
    )


def test_health_keeps_the_first_reason() -> None:
    health = Health("x")
    health.check("anything")
    assert health.alive
    health.lose("CL_OUT_OF_RESOURCES in k")
    health.lose("closed")
    with pytest.raises(DeviceLostError, match="x: y failed: CL_OUT_OF_RESOURCES in k; open the"):
        health.check("y")


def test_host_buffer_is_page_aligned_and_zero() -> None:
    buffer = HostBuffer(PAGE_BYTES + 1)
    assert buffer.address % PAGE_BYTES == 0
    assert buffer.nbytes == 2 * PAGE_BYTES
    assert not buffer.bytes.any()
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        HostBuffer(0)
    with pytest.raises(ValueError, match="does not fit"):
        buffer.array(np.float32, (PAGE_BYTES,))


def test_rows_of_a_tensor_are_its_memory() -> None:
    tensor = new_tensor((6, 3))
    rows = tensor.rows(2, 5)
    rows.array[:] = 7
    assert rows.address == tensor.address + 2 * 3 * 4
    np.testing.assert_array_equal(tensor.array[:, 0], [0, 0, 7, 7, 7, 0])
    with pytest.raises(ValueError, match=r"rows \[4, 7\) are outside"):
        tensor.rows(4, 7)


def test_tensor_outlives_its_buffers_name() -> None:
    buffer = HostBuffer(64)
    array = Tensor(buffer, (4,)).array
    del buffer
    array[:] = 3
    np.testing.assert_array_equal(array, [3, 3, 3, 3])


def test_a_contract_suite_that_is_required_fails_where_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = registry.Backend("ort-cpu", "npu", ("no_such_package",), "pip install it")
    monkeypatch.setitem(registry.BACKENDS, "ort-cpu", missing)
    monkeypatch.setenv("HETERO_REQUIRE", "opencl,ort-cpu")
    with pytest.raises(pytest.fail.Exception, match="ort-cpu is required here"):
        conftest.open_for_tests("ort-cpu")
    monkeypatch.delenv("HETERO_REQUIRE")
    with pytest.raises(pytest.skip.Exception, match=r"needs ort-cpu: .*no_such_package"):
        conftest.open_for_tests("ort-cpu")


def test_a_record_is_the_only_place_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Backend("numpy-demo", "npu", real=True, automatic=True, note="an example")
    others = {name: replace(b, automatic=False) for name, b in BACKENDS.items()}
    monkeypatch.setattr(registry, "BACKENDS", {record.name: record, **others})
    assert registry.real_backends()[0] == registry.automatic_backend("npu") == record.name
    assert registry.choices_text("npu").startswith("auto, numpy-demo (an example), ort-cpu, ")
    assert "numpy-demo" in {finding.name for finding in list_devices()}


def test_every_kind_has_one_automatic_backend() -> None:
    for kind in KINDS:
        assert [b.kind for b in BACKENDS.values() if b.automatic].count(kind) == 1


def test_the_help_names_the_backends_of_each_kind() -> None:
    gpu = "auto, opencl, opencl:DRIVER, or opencl-cores (every core; with --device gpu)"
    npu = "auto, ort-cpu, qnn (Hexagon, or its emulator), reference, null or simulated"
    assert (registry.choices_text("gpu"), registry.choices_text("npu")) == (gpu, npu)

"""Every way in which the CPU could silently do the Hexagon's work ends in one clear error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.errors import DeviceError, DeviceUnavailableError
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.onnx_common.binding import NATIVE_ERRORS
from hetero.backends.onnx_common.builder import GraphBuilder
from hetero.errors import FallbackWarning
from hetero.placement import device_set
from tests.backends.cases import make_tensors, make_weights

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
from hetero.backends.qnn import graphs, session, startup  # noqa: E402
from hetero.backends.qnn.compiler import GraphCompiler  # noqa: E402

ADD = ops.Add(d=64)


@pytest.fixture(scope="module")
def target() -> Any:
    with qnn.open(cache=None) as device:
        return device.store.target


def one_node(kind: str, shape: tuple[Any, ...] = (2, 8), **attrs: Any) -> bytes:
    graph = GraphBuilder()
    graph.input("x", np.float32, shape)
    graph.output("y", np.float32, shape)
    graph.node(kind, "x", out="y", **attrs)
    return graph.model(graphs.OPSET)


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_a_broken_library_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libQnnHtp.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DeviceUnavailableError, match=r"LIBRARY_NOT_LOADED.*libQnnHtp.so"):
        qnn.open(htp_library=path)


def test_a_library_that_vanishes_later_runs_nothing_on_the_cpu(target: Any) -> None:
    gone = replace(target, library=replace(target.library, path=Path("/nowhere/libQnnHtp.so")))
    with pytest.raises(DeviceError, match="NOT_ON_NPU"):
        session.new_session(gone, graphs.single(ADD, 1, {}), "compiling Add")


@pytest.mark.parametrize(
    "model",
    [one_node("Hardmax"), one_node("Det", (8, 8)), one_node("Relu", ("m", 8))],
    ids=["operator", "another operator", "dynamic shape"],
)
def test_what_the_hexagon_does_not_take_is_refused(target: Any, model: bytes) -> None:
    with pytest.raises(DeviceError, match=r"compiling it failed: NOT_ON_NPU"):
        session.new_session(target, model, "compiling it")


@pytest.mark.parametrize("shape", [(5, 63), (4, 64), (64, 5)])
def test_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with qnn.open(graph_sizes=(5,), cache=None) as device:
        tensors = make_tensors(ADD, 5, np.random.default_rng(0), device=device)
        tensors["x"] = new_tensor(shape)
        kernel = device.prepare(ADD, {})
        with pytest.raises(ValueError, match="takes x as float32"):
            kernel.bind(tensors, 5)


def test_a_graph_of_another_shape_runs_nothing_on_the_cpu(target: Any) -> None:
    """Not even past the checks: the provider has the shape of the graph alone."""
    opened = session.new_session(target, graphs.single(ADD, 5, {}), "compiling Add")
    arrays = {name: np.ones((4, 64), np.float32) for name in ("x", "residual")}
    with pytest.raises(NATIVE_ERRORS, match="invalid dimensions"):
        opened.run(None, arrays)


def test_an_unknown_chip_id_is_refused(target: Any) -> None:
    chip = replace(target.chip, soc_model=99999)
    with pytest.raises(DeviceError, match="NOT_ON_NPU"):
        session.new_session(replace(target, chip=chip), graphs.single(ADD, 1, {}), "compiling Add")


def test_an_unknown_chip_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown chip 'sm865': did you mean 'sm8650'"):
        qnn.open(soc="sm865")


def test_a_misspelt_option_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    """The provider ignores unknown options; the stamp on what it made shows it."""
    spelt = session.Target.options

    def misspelt(self: Any) -> dict[str, str]:
        return {key.replace("htp_arch", "htp_architecture"): v for key, v in spelt(self).items()}

    monkeypatch.setattr("hetero.backends.qnn.graph_store.GraphCompiler", InProcess)
    monkeypatch.setattr(session.Target, "options", misspelt)
    with pytest.raises(DeviceError, match="WRONG_TARGET"):
        run_add(qnn.open(graph_sizes=(5,), cache=tmp_path))


class InProcess(GraphCompiler):
    """Compiles in this process, where the patch is."""

    def compile(self, model: bytes, output: Path, what: str, **_: Any) -> float:
        config = {"ep.context_enable": "1", "ep.context_file_path": str(output)}
        session.new_session(
            self._target, model, what, config=config | {"ep.context_embed_mode": "0"}
        )
        return 0.0


def run_add(device: Any) -> Any:
    tensors = make_tensors(ADD, 5, np.random.default_rng(0), device=device)
    device.prepare(ADD, {}).bind(tensors, 5).run()
    return tensors


@pytest.mark.full
def test_a_compiler_that_dies_is_reported(target: Any, tmp_path: Path) -> None:
    compiler = GraphCompiler(target)
    compiler.compile(graphs.single(ADD, 1, {}), tmp_path / "first.onnx", "compiling Add")
    assert compiler._child is not None
    os.kill(compiler._child.pid, signal.SIGKILL)
    compiler._child.wait()
    # A dead child is replaced; one that dies on the job is an error.
    compiler.compile(graphs.single(ADD, 1, {}), tmp_path / "second.onnx", "compiling Add")
    assert (tmp_path / "second.onnx").exists()
    compiler._child.stdin.write("nonsense\n")  # type: ignore[union-attr]
    with pytest.raises(DeviceError, match=r"COMPILER_DIED.*code 1 \(json\..*Expecting"):
        compiler.compile(graphs.single(ADD, 1, {}), tmp_path / "third.onnx", "compiling Add")
    compiler.close()
    compiler.close()


def test_a_model_that_the_child_refuses_is_reported(target: Any, tmp_path: Path) -> None:
    compiler = GraphCompiler(target)
    with pytest.raises(DeviceError, match=r"compiling it failed: NOT_ON_NPU"):
        compiler.compile(one_node("Hardmax"), tmp_path / "a.onnx", "compiling it")
    compiler.close()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Failed to finalize QNN graph. Error: X, Code: 1002", "MEM_ALLOC (1002)"),
        ("qnn_open failed, error 1002", "MEM_ALLOC (1002)"),
        ("NPU crashed. SSR detected. Error code: 1007", "SYSTEM_COMMUNICATION (1007)"),
        ("Failed to load skel, error: 1008", "INCOMPATIBLE_BINARIES (1008)"),
        ("error code 1009", "LOADING_BINARIES (1009)"),
        ("error code 5000", "QNN_CONTEXT_ERROR_INVALID_ARGUMENT (5000)"),
        ("contextCreateFromBinary failed QNN_CONTEXT_ERROR_CREATE_FROM_BINARY", "(5005)"),
        ("Failed to create device. Error 14001", "INVALID_CONFIG (14001)"),
        ("something else", "RuntimeError: something else"),
    ],
)
def test_native_codes_have_names_and_remedies(message: str, code: str) -> None:
    error = session.device_error(RuntimeError(message), "compiling Add")
    assert code in error.code
    assert error.remedy


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e5, 1e9])
def test_matmuls_of_any_size_keep_fp16s_precision(size: float) -> None:
    op = ops.MatMul(n=64, k=96, weight_format=WeightFormat.W4A16, bias=size >= 1)
    weights = make_weights(op, np.random.default_rng(0))
    with qnn.open(graph_sizes=(5,), cache=None) as device:
        tensors = make_tensors(op, 5, np.random.default_rng(1), device=device)
        tensors["x"].array[:] *= size
        device.prepare(op, weights).bind(tensors, 5).run()
    dense = weights["weight"].dequantize().astype(np.float64)  # type: ignore[union-attr]
    expected = tensors["x"].array.astype(np.float64) @ dense.T
    if op.bias:
        expected += weights["bias"]
    off = np.linalg.norm(tensors["y"].array - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert off.max() < 6e-4


def test_a_value_beyond_fp16_is_an_error() -> None:
    with qnn.open(graph_sizes=(5,), cache=None) as device:
        tensors = make_tensors(ADD, 5, np.random.default_rng(0), device=device)
        call = device.prepare(ADD, {}).bind(tensors, 5)
        tensors["x"].array[3, 7] = 40000.0
        call.run()
        for other in (40000.0, 1e6):
            tensors["residual"].array[3, 7] = other
            with pytest.raises(DeviceError, match=r"Add\(d=64\) m=5 failed: FP16_OVERFLOW"):
                call.run()


@pytest.mark.parametrize("weight_format", [WeightFormat.W4A8, WeightFormat.F32])
def test_formats_without_arithmetic_are_refused(weight_format: WeightFormat) -> None:
    op = ops.MatMul(n=16, k=32, weight_format=weight_format)
    with (
        qnn.open(cache=None) as device,
        pytest.raises(ValueError, match="is not one of"),
    ):
        device.prepare(op, make_weights(op, np.random.default_rng(0)))


def with_library(target: Any, name: str) -> Any:
    return replace(target, library=replace(target.library, path=target.library.path.parent / name))


SETUPS_THAT_FAIL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "chip": (lambda t: replace(t, chip=replace(t.chip, soc_model=99999)), "INVALID_CONFIG (14001)"),
    "no device": (lambda t: with_library(t, "libQnnGpu.so"), "QNN_BACKEND_ERROR_CANNOT_INITIALIZE"),
    "no backend": (lambda t: with_library(t, "libQnnSystem.so"), "BACKEND_NOT_SET_UP"),
}


@pytest.mark.parametrize("kind", SETUPS_THAT_FAIL)
def test_a_hexagon_that_does_not_start_is_no_device(target: Any, kind: str) -> None:
    """With QNN's own code, which only ONNX Runtime's log has."""
    broken, code = SETUPS_THAT_FAIL[kind]
    with pytest.raises(DeviceUnavailableError) as raised:
        startup.check_starts(broken(target))
    assert code in raised.value.code
    assert "starting the Hexagon failed: " in str(raised.value)
    assert "QNN SetupBackend failed" in raised.value.code
    assert raised.value.remedy


@pytest.mark.parametrize("kind", SETUPS_THAT_FAIL)
def test_the_compiler_names_why_qnn_was_not_set_up(target: Any, tmp_path: Path, kind: str) -> None:
    broken, code = SETUPS_THAT_FAIL[kind]
    compiler = GraphCompiler(broken(target))
    for name in ("first.onnx", "second.onnx"):
        with pytest.raises(DeviceError) as raised:
            compiler.compile(graphs.single(ADD, 1, {}), tmp_path / name, "compiling Add")
        assert code in raised.value.code
    compiler.close()


def test_a_hexagon_that_computes_wrongly_is_no_device(target: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(startup.graphs, "single", lambda *_: product())
    with pytest.raises(DeviceUnavailableError, match="WRONG_RESULT: 1 \\+ 1 gave 1"):
        startup.check_starts(target)


def product() -> bytes:
    """A product in the place of a sum."""
    graph = GraphBuilder()
    for name in ("x", "residual"):
        graph.input(name, np.float32, (1, startup.FEATURES))
    graph.output("y", np.float32, (1, startup.FEATURES))
    graph.node("Mul", "x", "residual", out="y")
    return graph.model(graphs.OPSET)


def no_driver(**_: Any) -> Any:
    raise DeviceUnavailableError("opencl", "looking for a driver", "CL_DEVICE_NOT_FOUND")


def test_opening_a_real_hexagon_starts_it(target: Any, monkeypatch: Any) -> None:
    real = replace(target.library, emulated=False)
    monkeypatch.setattr(qnn, "load", lambda _: real)
    with qnn.open(cache=None) as device:
        assert "Hexagon NPU" in device.info.name
    chip = replace(qnn.find_chip("sm8650"), soc_model=99999)
    monkeypatch.setattr(qnn, "find_chip", lambda _: chip)
    with pytest.raises(DeviceUnavailableError, match="14001"):
        qnn.open(cache=None)
    with qnn.open(cache=None, ahead=True):  # compiling needs no chip
        pass


@pytest.mark.parametrize(
    ("npu", "mode", "missing", "left"),
    [
        ("auto", "npu", (), "gpu"),
        ("qnn", "npu", (), "gpu"),
        ("auto", "hetero", (), "gpu"),
        ("auto", "npu", ("gpu",), "npu"),
        ("auto", "auto", ("gpu",), "npu"),
    ],
)
def test_a_model_goes_on_without_a_hexagon_that_does_not_start(
    target: Any, monkeypatch: Any, npu: str, mode: Any, missing: tuple[str, ...], left: str
) -> None:
    """One warning with QNN's code; where there is no GPU, `auto` takes the host's cores."""
    broken = replace(target.chip, soc_model=99999)
    monkeypatch.setattr(qnn, "load", lambda _: replace(target.library, emulated=False))
    monkeypatch.setattr(qnn, "find_chip", lambda _: broken)
    monkeypatch.setattr(device_set.hexagon, "present", lambda: True)
    if missing:
        monkeypatch.setattr("hetero.backends.opencl.open", no_driver)
    gpu = "opencl" if missing else "reference"
    with pytest.warns(FallbackWarning, match=r"14001") as caught:
        opened = device_set.open_devices(mode, gpu=gpu, npu=npu)
    assert len(caught) == 1
    assert list(opened.devices) == [left]
    assert opened.name("npu") == (None if left == "gpu" else "ort-cpu")
    opened.close()


def test_a_compiler_that_hangs_is_ended(
    target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hetero.backends.qnn.compiler.ENDING_S", 0.2)
    compiler = GraphCompiler(target)
    compiler.compile(one_node("Relu"), tmp_path / "a.onnx", "a graph")
    child = compiler._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    compiler.close()
    assert child.returncode == -signal.SIGKILL

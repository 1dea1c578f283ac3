"""What is here, and whether it computes correctly."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import dataclass

import numpy as np

from hetero.backends import opencl
from hetero.backends.errors import DeviceError
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.ops import Add, MatMul
from hetero.backends.protocol import Device
from hetero.backends.registry import BACKENDS, Backend, open_device
from hetero.backends.weights import pack
from hetero.placement import hexagon
from hetero.terminal import printable

REAL_BACKENDS = ("opencl", "ort-cpu", "qnn")


TOLERANCE = 1e-3


@dataclass(frozen=True)
class Finding:
    """State of one backend. `detail` is what was found, `remedy` what to do if it failed; nothing
    that a model runs on depends on one that is not `needed`.
    """

    name: str
    kind: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


def list_devices() -> list[Finding]:
    """Every real backend with the device and driver that it found; every OpenCL driver."""
    found = [_look(BACKENDS[name]) for name in REAL_BACKENDS]
    return [found[0], *opencl_drivers(), *found[1:]]


def diagnose() -> list[Finding]:
    """Check every real backend by a small sum and matmul, and the GPU and the NPU at once.

    The Hexagon is checked where there is one, or where its emulator is installed.
    """
    names = [name for name in REAL_BACKENDS if name != "qnn" or hexagon.expected()]
    found = [_diagnose(BACKENDS[name]) for name in names]
    found[1:1] = opencl_drivers()
    found += [Finding(name, "npu", *state) for name, state in hexagon.surroundings()]
    working = {finding.name for finding in found if finding.ok}
    if {"opencl", names[-1]} <= working:
        found.append(_check_together("opencl", names[-1]))
    return found


def opencl_drivers() -> list[Finding]:
    """Each OpenCL driver that is installed, with the verdict of its trial."""
    return [
        Finding(
            f"opencl:{report.driver}",
            "gpu",
            report.level is not None,
            f"{report.title}: {report.said} [{report.origin}]",
            "" if report.level is not None else f"to try it again, delete {report.kept_in}",
            needed=False,
        )
        for report in opencl.driver_reports()
    ]


def _check_together(gpu: str, npu: str) -> Finding:
    """Both devices at once in this process, on one input buffer and halves of one output."""
    name = f"{gpu} + {npu}"
    random = np.random.default_rng(0)
    weight = pack(random.standard_normal((64, 64), dtype=np.float32), StorageFormat.Q4)
    op = MatMul(n=64, k=64, weight_format=WeightFormat.W4A16)
    try:
        with _open(gpu) as first, _open(npu) as second:
            x, y = (Tensor(second.allocate(32 * 64 * 4), (m, 64)) for m in (1, 2))
            for device in (first, second):
                device.map(x.buffer)
                device.map(y.buffer)
            x.array[:] = random.standard_normal((1, 64))
            kernels = [device.prepare(op, {"weight": weight}) for device in (first, second)]
            calls = [k.bind({"x": x, "y": y.rows(i, i + 1)}, 1) for i, k in enumerate(kernels)]
            running = calls[0].submit()
            calls[1].run()
            running.wait()
            expected = x.array.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    except DeviceError as error:
        return Finding(name, "both", False, f"{error.operation}: {error.code}", error.remedy)
    off = np.linalg.norm(y.array - expected, axis=1) / np.linalg.norm(expected)
    if off.max() < TOLERANCE:
        return Finding(name, "both", True, "one buffer, both at once, in one process")
    detail = f"at once on one buffer, the results are off by {off[0]:.2g} and {off[1]:.2g}"
    return Finding(name, "both", False, detail, "update the GPU's driver; use one device alone")


def _open(name: str) -> Device:
    """Small graphs are compiled on the spot: a check must not depend on a cache."""
    return open_device(name, cache=None) if name == "qnn" else open_device(name)


def _look(backend: Backend) -> Finding:
    try:
        with _open(backend.name) as device:
            return Finding(backend.name, backend.kind, True, _describe(device))
    except DeviceError as error:
        return _failed(backend, error)


def _diagnose(backend: Backend) -> Finding:
    try:
        with _open(backend.name) as device:
            failure = _check_add(device) or _check_matmul(device)
            if failure:
                remedy = "update the driver; results from this device cannot be trusted"
                return Finding(backend.name, backend.kind, False, failure, remedy)
            return Finding(backend.name, backend.kind, True, _describe(device))
    except DeviceError as error:
        return _failed(backend, error)


def _failed(backend: Backend, error: DeviceError) -> Finding:
    detail = f"{error.operation}: {error.code}"
    return Finding(backend.name, backend.kind, False, detail, error.remedy or backend.install_hint)


def _describe(device: Device) -> str:
    level = device.info.details.get("level")
    at = f", level {level}" if level else ""
    return f"{device.info.name} ({device.info.driver}{at})"


def _check_add(device: Device) -> str:
    x, residual, y = (new_tensor((1, 3)) for _ in range(3))
    x.array[:] = (1, 2, 3)
    residual.array[:] = (10, 20, 30)
    device.prepare(Add(d=3), {}).bind({"x": x, "residual": residual, "y": y}, 1).run()
    if not np.allclose(y.array, [[11, 22, 33]], rtol=1e-6):
        return f"1+10, 2+20, 3+30 gave {y.array.tolist()}"
    return ""


def _check_matmul(device: Device) -> str:
    random = np.random.default_rng(0)
    weight = pack(random.standard_normal((64, 64), dtype=np.float32), StorageFormat.Q4)
    x, y = new_tensor((1, 64)), new_tensor((1, 64))
    x.array[:] = random.standard_normal((1, 64))
    op = MatMul(n=64, k=64, weight_format=WeightFormat.W4A16)
    device.prepare(op, {"weight": weight}).bind({"x": x, "y": y}, 1).run()
    expected = x.array.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    error = float(np.linalg.norm(y.array - expected) / np.linalg.norm(expected))
    if not error < TOLERANCE:
        return f"a 64×64 4-bit matmul is off by {error:.2g} of its size"
    return ""


def print_findings(findings: list[Finding], as_json: bool, words: tuple[str, str]) -> None:
    """A line for each, with a word for those that are well and for the others."""
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20
    for finding in findings:
        word = words[0] if finding.ok else words[1]
        said = f"{word:8}{finding.kind:4} {finding.name:12} {printable(finding.detail)}"
        _print_wrapped(said, width)
        if not finding.ok and finding.remedy:
            _print_wrapped(f"{'':13}remedy: {printable(finding.remedy)}", width)


def _print_wrapped(line: str, width: int) -> None:
    """A line, its end below its third column where the terminal is narrower."""
    indent = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        line, width, initial_indent=indent, subsequent_indent=" " * 13, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip
    print("\n".join(lines))

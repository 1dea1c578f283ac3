"""Checks of the devices of this machine: their presence, and whether they compute correctly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetero.backends import opencl
from hetero.backends.errors import DeviceError, UserError
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.ops import Add, MatMul
from hetero.backends.protocol import Device
from hetero.backends.qnn import hexagon
from hetero.backends.qnn.npu_driver import CheckResult
from hetero.backends.registry import Backend, find, open_device, real_backends
from hetero.backends.weights import pack
from hetero.errors import one_sentence

TOLERANCE = 1e-3
DRIVERS = "opencl:drivers"  # the line in place of the drivers' lines where listing them failed
UNTRUSTED = "update the driver; results from this device cannot be trusted"
REPORT = "run `hetero --debug doctor` and report its output"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """The state of one backend.

    `detail` describes it, `remedy` is what to do if it failed; no model depends on one that is not
    `needed`.
    """

    name: str
    kind: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


def list_devices() -> Iterator[Finding]:
    """Yield every real backend with its device and driver, and every OpenCL driver.

    An exception in a check is its finding: the others are still made.
    """
    for name in real_backends():
        yield from _checked(name, find(name).kind, partial(_open_and_check, find(name)))
        if name == "opencl":
            yield from _checked(DRIVERS, "gpu", opencl_drivers, needed=False)


def diagnose() -> Iterator[Finding]:
    """Check every real backend by a small sum and matmul, and the GPU and the NPU at once.

    The Hexagon is checked where there is one, or where its emulator is installed. Findings are
    yielded as they are made, and an exception in a check is its finding: the others are still made.
    """
    working: set[str] = set()
    names = [name for name in real_backends() if name != "qnn" or hexagon.expected()]
    for name in names:
        check = partial(_diagnose, find(name))
        needed = name != "qnn" or hexagon.needed()
        for finding in _checked(name, find(name).kind, check, needed=needed):
            working |= {name} if finding.ok else set()
            yield finding
        if name == "opencl":
            yield from _checked(DRIVERS, "gpu", opencl_drivers, needed=False)
    for name, state in hexagon.other_checks():
        check = partial(_surrounding, name, state)
        yield from _checked(name, "npu", check, needed=hexagon.needed())
    npu = [name for name in names if find(name).kind == "npu"][-1]
    if {"opencl", npu} <= working:
        both = partial(_check_together, "opencl", npu)
        yield from _checked(f"opencl + {npu}", "both", both)


def _surrounding(name: str, state: Callable[[], CheckResult]) -> list[Finding]:
    return [Finding(name, "npu", *state())]


def _checked(
    name: str, kind: str, check: Callable[[], list[Finding]], *, needed: bool = True
) -> list[Finding]:
    """Return the finding of a check; any exception is the finding that it failed."""
    try:
        return [replace(f, needed=f.needed and needed) for f in check()]
    except Exception as error:
        log.debug("the check of %s raised", name, exc_info=True)
        known = isinstance(error, DeviceError | UserError)
        reason = str(error) if known else f"the check raised {type(error).__name__}: {error}"
        remedy = "" if known else REPORT
        return [Finding(name, kind, False, one_sentence(reason), remedy, needed)]


def opencl_drivers() -> list[Finding]:
    """Return each OpenCL driver that is installed, with the result of its self-test."""
    return [
        Finding(
            f"opencl:{report.driver}",
            "gpu",
            report.level is not None,
            f"{report.title}: {report.said} [{report.origin}]",
            report.remedy,
            needed=False,
        )
        for report in opencl.driver_reports()
    ]


def _check_together(gpu: str, npu: str) -> list[Finding]:
    """Check both devices at once in this process, on one input buffer and halves of one output."""
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
        return [Finding(name, "both", False, f"{error.operation}: {error.code}", error.remedy)]
    off = np.linalg.norm(y.array - expected, axis=1) / np.linalg.norm(expected)
    if off.max() < TOLERANCE:
        return [Finding(name, "both", True, "one buffer, both at once, in one process")]
    detail = f"at once on one buffer, the results are off by {off[0]:.2g} and {off[1]:.2g}"
    return [Finding(name, "both", False, detail, "update the GPU's driver; use one device alone")]


def _open(name: str) -> Device:
    """Open a backend. Small graphs are compiled at once: a check must not depend on a cache."""
    return open_device(name, cache=None) if name == "qnn" else open_device(name)


def _open_and_check(backend: Backend) -> list[Finding]:
    return _opened(backend, lambda _: "")


def _diagnose(backend: Backend) -> list[Finding]:
    return _opened(backend, lambda device: _check_add(device) or _check_matmul(device))


def _opened(backend: Backend, check: Callable[[Device], str]) -> list[Finding]:
    """Open a device and check it; `check` returns the fault, or nothing."""
    try:
        with _open(backend.name) as device:
            failure = check(device)
            detail, remedy = failure or _describe(device), UNTRUSTED if failure else ""
    except DeviceError as error:
        failure = detail = f"{error.operation}: {error.code}"
        remedy = error.remedy or backend.install_hint
    return [Finding(backend.name, backend.kind, not failure, detail, remedy)]


def _describe(device: Device) -> str:
    level = device.info.details.get("level")
    at = f", level {level}" if level else ""
    return f"{device.info.name} ({device.info.driver}{at})"


def _check_add(device: Device) -> str:
    x, residual, y = (new_tensor((1, 3), allocate=device.allocate) for _ in range(3))
    x.array[:] = (1, 2, 3)
    residual.array[:] = (10, 20, 30)
    device.prepare(Add(d=3), {}).bind({"x": x, "residual": residual, "y": y}, 1).run()
    if not np.allclose(y.array, [[11, 22, 33]], rtol=1e-6):
        return f"1+10, 2+20, 3+30 gave {y.array.tolist()}"
    return ""


def _check_matmul(device: Device) -> str:
    random = np.random.default_rng(0)
    weight = pack(random.standard_normal((64, 64), dtype=np.float32), StorageFormat.Q4)
    x, y = (new_tensor((1, 64), allocate=device.allocate) for _ in range(2))
    x.array[:] = random.standard_normal((1, 64))
    op = MatMul(n=64, k=64, weight_format=WeightFormat.W4A16)
    device.prepare(op, {"weight": weight}).bind({"x": x, "y": y}, 1).run()
    expected = x.array.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    error = float(np.linalg.norm(y.array - expected) / np.linalg.norm(expected))
    if not error < TOLERANCE:
        return f"a 64×64 4-bit matmul is off by {error:.2g} of its size"
    return ""

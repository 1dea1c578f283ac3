"""Devices of this backend: as opened by default, and forced variants on the same hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

pytest.importorskip("pyopencl")

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.drivers import icd, levels
from hetero.backends.opencl.drivers.icd import DriverCandidate
from hetero.backends.opencl.platform import cache_root
from hetero.backends.opencl.self_test.runner import SelfTests, passed_level
from tests.support.selection import full

VARIANTS = {
    "default": {},
    "lanes": {"family": "other"},  # work-groups, as on a GPU
    "copies": {"unified_memory": False},  # as on a discrete GPU
    "mapped": {"coherent": False},  # as on a GPU with unified memory and caches of its own
    "narrow": {"family": "pocl"},  # vectors of 8, as on a CPU without AVX-512
}
Opened: TypeAlias = Callable[[str], OpenCLDevice]


def _open(**options: object) -> OpenCLDevice:
    """Skips where there is no device, or one without the vectors of a forced family."""
    try:
        return open_opencl(**options)  # type: ignore[arg-type]
    except DeviceUnavailableError as error:
        pytest.skip(f"needs an OpenCL device: {error}")


@pytest.fixture(scope="session")
def device() -> Iterator[OpenCLDevice]:
    with _open() as opened:
        yield opened


@pytest.fixture(scope="session")
def opened_variant() -> Iterator[Opened]:
    """Opens each variant once: a device that is opened again starts a compiler of its own."""
    opened: dict[str, OpenCLDevice] = {}
    with ExitStack() as stack:

        def find(name: str) -> OpenCLDevice:
            if name not in opened:
                opened[name] = stack.enter_context(_open(**VARIANTS[name]))
            return opened[name]

        yield find


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, opened_variant: Opened) -> OpenCLDevice:
    return opened_variant(request.param)


@pytest.fixture
def fresh_device() -> Iterator[OpenCLDevice]:
    with _open() as opened:
        yield opened


@pytest.fixture(scope="session")
def pocl() -> DriverCandidate:
    """The bundled PoCL."""
    found = [c for c in icd.candidates() if c.driver.name == "pocl"]
    if not found:
        pytest.skip("needs PoCL")
    return found[0]


@pytest.fixture(scope="session")
def kernels(pocl: DriverCandidate) -> Path:
    """Kernels of this machine's level, and of those below it with `--full`, self-tested; in the
    cache that all tests share.
    """
    root, own = cache_root(), levels.processor_levels()[: None if full() else 1]
    self_tests = SelfTests(root)
    for level in own:
        result = self_tests.examine(pocl, level)
        assert passed_level(result.devices[0], (level,)) is level, result
    return root / "kernels"

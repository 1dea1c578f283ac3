"""Devices of this backend: as opened by default, and forced variants on the same hardware."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyopencl")

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl.device import OpenCLDevice

VARIANTS = {
    "default": {},
    "lanes": {"family": "other"},  # work-groups, as on a GPU
    "copies": {"unified_memory": False},  # as on a discrete GPU
    "mapped": {"coherent": False},  # as on a GPU with unified memory and caches of its own
    "narrow": {"family": "pocl"},  # vectors of 8, as on a CPU without AVX-512
}


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


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[OpenCLDevice]:
    with _open(**VARIANTS[request.param]) as opened:
        yield opened


@pytest.fixture
def fresh_device() -> Iterator[OpenCLDevice]:
    with _open() as opened:
        yield opened

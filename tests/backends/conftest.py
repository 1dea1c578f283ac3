"""The devices that the contract suite runs on. A new backend joins by a line in `COMPUTING`.

What a machine lacks is skipped, but for the backends in `HETERO_REQUIRE` (`opencl,ort-cpu`): there
a suite that does not run is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import pytest

from hetero.backends.errors import DeviceOptionError, DeviceUnavailableError
from hetero.backends.protocol import Device
from hetero.backends.registry import open_device

# Token counts that the suite uses; a device with static shapes is opened with graphs for them.
GRAPH_SIZES = (1, 2, 3, 5, 7, 31, 32, 33, 64, 256)

COMPUTING: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("reference", {}),
    "reference-asynchronous": ("reference", {"asynchronous": True, "kind": "gpu"}),
    "reference-static": ("reference", {"graph_sizes": GRAPH_SIZES}),
    "ort-cpu": ("ort-cpu", {"graph_sizes": GRAPH_SIZES}),
    "ort-cpu-fp32": ("ort-cpu", {"graph_sizes": GRAPH_SIZES, "w4a16": "fp32"}),
    "ort-cpu-split": ("ort-cpu", {"graph_sizes": GRAPH_SIZES, "w4a16": "split"}),
    "qnn": ("qnn", {"graph_sizes": GRAPH_SIZES, "cache": None}),
    "opencl": ("opencl", {}),
    "opencl-intel": ("opencl", {"platform": "intel"}),
    # A GPU with fp16 arithmetic, emulated: every result rounded.
    "opencl-half": ("opencl", {"family": "other", "half": 2}),
    "simulated": ("simulated", {"graph_sizes": GRAPH_SIZES}),
    "simulated-asynchronous": ("simulated", {"kind": "gpu"}),
}
COMPUTING_NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "null": ("null", {"graph_sizes": GRAPH_SIZES}),
    "null-asynchronous": ("null", {"asynchronous": True, "kind": "gpu"}),
}

# GPUs that are not here: their kernels run on this processor to judge their text, not its code.
EMULATED = ("opencl-half", "opencl-work-groups", "lanes", "[other")

# What the default selection runs: one device of each backend that computes on its own.
DEFAULT = ("reference", "ort-cpu", "qnn", "opencl", "null")


def _params(names: Iterable[str]) -> list[Any]:
    return [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.full) for x in names]


Opener: TypeAlias = Callable[[], Device]


def open_for_tests(name: str) -> Device:
    """A device of `COMPUTING` or `COMPUTING_NOTHING`; skips the test where it cannot be opened."""
    backend, options = (COMPUTING | COMPUTING_NOTHING)[name]
    plain = {key: value for key, value in options.items() if key != "half"}
    try:
        device = open_device(backend, **plain)
    except (DeviceUnavailableError, DeviceOptionError) as error:
        if name in os.environ.get("HETERO_REQUIRE", "").split(","):
            pytest.fail(f"{name} is required here (HETERO_REQUIRE), but: {error}")
        pytest.skip(f"needs {backend}: {error}")
    if "half" in options:
        device.half = options["half"]  # type: ignore[attr-defined]
    return device


@pytest.fixture(autouse=True)
def emulated_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile kernels of emulated GPUs without optimisation."""
    if not any(name in request.node.name for name in EMULATED):
        yield
        return
    from tests.support.sharing import unoptimised

    with unoptimised():
        yield


@pytest.fixture(scope="session", params=_params(COMPUTING))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that computes, shared by all tests; never closed or broken by them."""
    with open_for_tests(request.param) as opened:
        yield opened


@pytest.fixture(params=_params(COMPUTING))
def computing_opener(request: pytest.FixtureRequest) -> Opener:
    """Opens a device that computes, for tests that close it."""
    return lambda: open_for_tests(request.param)


@pytest.fixture(scope="session", params=_params(COMPUTING | COMPUTING_NOTHING))
def any_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """As `device`; it may compute nothing."""
    with open_for_tests(request.param) as opened:
        yield opened


@pytest.fixture(params=_params(COMPUTING | COMPUTING_NOTHING))
def own_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device of one's own; it may compute nothing."""
    with open_for_tests(request.param) as opened:
        yield opened

"""The interfaces that only some devices have: the page for new backends says which do."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from hetero.backends import optional

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add-a-backend.md"
CLASSES = {
    "opencl": "opencl.device.OpenCLDevice",
    "reference": "reference.device.ReferenceDevice",
    "ort-cpu": "ort_cpu.device.OrtCpuDevice",
    "qnn": "qnn.device.QnnDevice",
    "null": "null.device.NullDevice",
    "simulated": "simulated.device.SimulatedDevice",
}
ROW = re.compile(r"^\| `(Supports\w+)` \|.*\| (.*) \|$", re.MULTILINE)


def test_the_page_lists_every_interface() -> None:
    listed = {name for name, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    assert listed == {
        name for name, _ in inspect.getmembers(optional, inspect.isclass) if "Supports" in name
    }


@pytest.mark.parametrize("backend", CLASSES)
def test_the_page_says_what_a_backend_has(backend: str) -> None:
    if backend == "opencl":
        pytest.importorskip("pyopencl")
    module, _, name = CLASSES[backend].rpartition(".")
    device = getattr(import_module(f"hetero.backends.{module}"), name)
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    listed = {interface for interface, who in rows if f"`{backend}`" in who}
    assert listed == {base.__name__ for base in device.__mro__ if "Supports" in base.__name__}

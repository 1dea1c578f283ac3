"""A tiny model, and it opened, for the tests of contexts; a module may have others of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, Service
from tests.contexts.models import WAYS, open_llm
from tests.runtime.models import tiny_model

FEW = ("gpu", "tensor level")  # of the ways, the others run with `--full`


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks lie between calls is what most tests here arrange: nothing is read ahead."""
    defaults: Any = Service.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "read_ahead", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=[pytest.mark.full] * (x not in FEW)) for x in WAYS],
)
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """On every kind of plan."""
    with open_llm(folder, request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[LLM]:
    """On the plan that opens fastest."""
    with open_llm(folder, "npu") as opened:
        yield opened

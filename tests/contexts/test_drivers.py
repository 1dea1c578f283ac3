"""Slices of what `tests.contexts.drivers` does at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero import LLM
from tests.contexts.drivers import random_operations, switches_between


@pytest.mark.full
def test_random_operations() -> None:
    assert random_operations(300, seed=7) == 300


@pytest.mark.full
def test_an_apps_values_never_reach_another(tmp_path: Path) -> None:
    with LLM("demo", device="npu") as llm:
        loaded, exact, wrong = switches_between(llm, tmp_path, 40, seed=3)
    assert loaded > 5
    assert exact > 5
    assert wrong == 0

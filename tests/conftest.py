"""Fixtures of every folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def stories() -> Path:
    """The real model for checks; skips where it is not at hand."""
    roots = [Path(__file__).parents[1].parent / "shared" / "models"]
    if "HETERO_TEST_MODELS" in os.environ:
        roots.insert(0, Path(os.environ["HETERO_TEST_MODELS"]))
    for root in roots:
        if (root / "stories260K" / "config.json").is_file():
            return root / "stories260K"
    pytest.skip("stories260K is neither in HETERO_TEST_MODELS nor beside the checkout")

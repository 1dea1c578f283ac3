"""Sampling that a GGUF file asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ModelError
from hetero.generation.defaults import model_sampling
from tests.models.gguf_files import write_tiny


@pytest.mark.parametrize(
    ("entries", "options"),
    [
        ({}, {}),
        ({"temp": 0.5, "top_k": 20}, {"temperature": 0.5, "top_k": 20}),
        ({"top_p": 0.25, "min_p": 0.125, "penalty_repeat": 1.5},
         {"top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5}),
        ({"sequence": "top_k;temp", "mirostat": 2}, {}),
    ],
)  # fmt: skip
def test_sampling_of_the_metadata(
    entries: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    changes = {f"general__sampling__{name}": value for name, value in entries.items()}
    assert model_sampling(write_tiny(tmp_path / "m.gguf", **changes)) == options


def test_a_value_that_no_sampling_can_have_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", general__sampling__temp=-1.0)
    with pytest.raises(ModelError, match=r"m\.gguf: temperature .* -1"):
        model_sampling(path)

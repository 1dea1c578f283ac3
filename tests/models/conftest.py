"""Models that are made on the spot, and the real one beside the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import tokenizers
from safetensors.numpy import save_file

from hetero.models.config import ModelConfig
from tests.models.model_helpers import random_tensors


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a directory with `config.json` and `model.safetensors`, and a tokenizer if asked."""

    def make(
        config: ModelConfig,
        tensors: dict[str, npt.NDArray[Any]] | None = None,
        tokenizer: tokenizers.Tokenizer | None = None,
    ) -> Path:
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config.to_dict()))
        found = random_tensors(config) if tensors is None else tensors
        save_file(found, directory / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    return make

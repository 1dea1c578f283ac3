"""A tiny random checkpoint for tests of the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import Case, make_checkpoint


def tiny_model(folder: Path, **changes: Any) -> Path:
    """Write a Llama of hidden size 64 and three layers; returns its directory."""
    make_checkpoint(Case("tiny", "Llama", changes), folder)
    return folder

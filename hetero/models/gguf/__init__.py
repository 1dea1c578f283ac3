"""GGUF files: header, configuration, tensors, tokenizer.

Imported when such a file is opened; the `gguf` library, which takes 50 ms, only when it computes.
"""

from __future__ import annotations

from pathlib import Path

from hetero.backends.formats import WeightFormat
from hetero.models.gguf.file import GgufFile
from hetero.models.gguf.gguf_weights import GgufWeights
from hetero.models.gguf.model_config import read_config
from hetero.models.gguf.tensors import default_format
from hetero.models.gguf.tokenizer import read_tokenizer

__all__ = [
    "GgufFile",
    "GgufWeights",
    "default_format",
    "open_weights",
    "read_config",
    "read_tokenizer",
]


def open_weights(path: Path, weight_format: WeightFormat) -> GgufWeights:
    """Open a file; no tensor is read. Raises `ModelError`."""
    file = GgufFile.opened(path)
    return GgufWeights(file, read_config(file), weight_format)

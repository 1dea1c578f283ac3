"""Names and bounds that options show too; nothing is imported for them."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

NamedStrategy: TypeAlias = Literal[
    "auto", "gpu-only", "npu-only", "layer", "row-cut", "sequence-cut", "multi-sequence-cut",
    "hybrid-cut", "padding", "pipe", "chunked", "online-prepare",
]  # fmt: skip
MAX_TOKENS: Final = 1 << 20  # of a prompt, a graph or a context

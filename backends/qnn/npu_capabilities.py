"""Capabilities of a chip through QNN, as data: no library is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Capabilities
from hetero.backends.qnn.integer import Activations
from hetero.backends.snapdragon import BLOCK_QUANTIZED_SINCE, Chip

# Token counts of graphs where a caller names none, and those that a plan may choose from: any is
# possible, and these are the paper's (section 4.1.1).
DEFAULT_GRAPH_SIZES: Final = (1, 32, 128, 256)
STANDARD_GRAPH_SIZES: Final = (1, 32, 64, 128, 256, 512, 1024)
ROW_ALIGNMENT: Final = 256
TOKEN_ALIGNMENT: Final = 32
# A MatMul of fused rows is QKV already.
FUSED_GROUPS: Final = ("feed_forward", "static", "block")
# W4A8 with groups of 32 is not among them: QNN has no integer kernel for it, and F32 has no
# arithmetic on the Hexagon at all.
BLOCK_FORMATS: Final = (WeightFormat.W4A16, WeightFormat.W8A16)
# Bytes of a weight in a compiled graph over the packed weight's (docs/explanation/qnn.md).
LAYOUT_OVERHEAD: Final = 1.06


def capabilities_of(
    chip: Chip,
    graph_sizes: Sequence[int],
    activations: Activations = "float16",
    *,
    shared_weights: bool = False,
) -> Capabilities:
    """Return what a chip can do with graphs of these token counts.

    Weights are constants of a graph, which the compiler lays out for the matrix unit: there is one
    operand order. With `shared_weights` the graphs of all token counts of a weight are one context,
    which has it once.
    """
    formats = weight_formats(chip, activations)
    return Capabilities(
        kind="npu",
        static_shapes=True,
        graph_sizes=tuple(sorted(set(graph_sizes))),
        weight_formats=formats,
        row_alignment=ROW_ALIGNMENT,
        token_alignment=TOKEN_ALIGNMENT,
        early_visibility=False,
        attention_heads=True,
        experts=activations == "float16",
        fused_groups=FUSED_GROUPS,
        memory_limit_bytes=chip.npu_limit_bytes,
        weight_bytes={x: x.storage.bytes_per_weight * LAYOUT_OVERHEAD for x in formats},
        per_graph_size="graph" if shared_weights else "weights",
    )


def weight_formats(chip: Chip, activations: Activations = "float16") -> tuple[WeightFormat, ...]:
    """Return formats of matmuls that a chip takes."""
    if activations != "float16":
        own = (WeightFormat.W8A16,) if activations == "int8" else BLOCK_FORMATS
        return (*own, WeightFormat.W8A8)
    blocks = BLOCK_FORMATS if chip.htp_arch >= BLOCK_QUANTIZED_SINCE else ()
    return (*blocks, WeightFormat.W8A8, WeightFormat.F16)

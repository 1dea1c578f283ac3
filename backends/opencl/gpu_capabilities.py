"""Capabilities of the OpenCL kernels on any GPU, as data: no driver is loaded."""

from __future__ import annotations

from typing import Final

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Capabilities

WEIGHT_FORMATS: Final = (
    WeightFormat.W4A16,
    WeightFormat.W4A8,
    WeightFormat.W8A16,
    WeightFormat.W8A8,
    WeightFormat.F16,
    WeightFormat.F32,
    WeightFormat.GGUF_A16,
    WeightFormat.GGUF_A8,
)


def capabilities_of(
    weight_formats: tuple[WeightFormat, ...] = WEIGHT_FORMATS,
    *,
    unified_memory: bool = True,
    coherent: bool = True,
    own_memory: bool = False,
    memory_limit_bytes: int | None = None,
    max_allocation_bytes: int | None = None,
    every_core: bool = False,
) -> Capabilities:
    """Return what a GPU with this memory can do; heads of an attention need coherent memory."""
    return Capabilities(
        kind="gpu",
        unified_memory=unified_memory,
        coherent=coherent,
        own_memory=own_memory,
        asynchronous=True,
        weight_formats=weight_formats,
        row_alignment=16,
        memory_limit_bytes=memory_limit_bytes,
        max_allocation_bytes=max_allocation_bytes,
        every_core=every_core,
        attention_heads=coherent,
        experts=True,
        reads_panels=True,
    )

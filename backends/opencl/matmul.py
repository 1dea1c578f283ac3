"""MatMul on OpenCL (placeholder until branch `gemm` is merged)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetero.backends.opencl.calls import OpenCLKernel
from hetero.backends.ops import MatMul, WeightFormat
from hetero.backends.protocol import Acceptance, WeightValue

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice

WEIGHT_FORMATS: tuple[WeightFormat, ...] = ()


def accepts_matmul(op: MatMul) -> Acceptance:
    """Whether `prepare_matmul` takes the record."""
    return Acceptance(False, f"no kernel for {op.weight_format} yet")


def prepare_matmul(
    device: OpenCLDevice, op: MatMul, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Compile a matmul on its packed weight."""
    raise NotImplementedError

"""Device models: matmul times from a few named physical quantities (for simulated chips).

Notation: m tokens (as the device pads them), n rows, k features. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

Floats: TypeAlias = npt.NDArray[np.float64]
Positive = Annotated[float, Field(ge=1e-30, le=1e30)]


class _Model(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class NpuArray(_Model):
    """A systolic array with stationary weights (paper section 3.2).

    `max(setup_s + stream, compute)`, both multiplied by the reloads of the weights: an array
    that keeps `resident_k` features of a weight panel streams wider panels `k / resident_k` times
    (shape-sensitive performance). Rows and tokens are padded to `array_size` (stage performance).
    `order_slowdown` multiplies the whole in the operand order that this model is of (1: the good
    one).
    """

    kind: Literal["npu-array"] = "npu-array"
    array_size: Annotated[int, Field(ge=1, lt=2**31)] = 32
    setup_s: Annotated[float, Field(ge=0, le=1e9)]
    bytes_per_weight: Positive
    bandwidth_bytes_per_s: Positive
    flops_per_s: Positive
    resident_k: Positive | None = None
    order_slowdown: Positive = 1.0

    def seconds(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Return [S] time of a blocking call."""
        rows = np.ceil(n / self.array_size) * self.array_size
        reloads = 1.0 if self.resident_k is None else np.maximum(1.0, k / self.resident_k)
        stream = rows * k * self.bytes_per_weight / self.bandwidth_bytes_per_s
        tokens = np.ceil(m / self.array_size) * self.array_size
        compute = 2.0 * tokens * rows * k / self.flops_per_s
        total = np.maximum(self.setup_s + stream * reloads, compute * reloads)
        return np.asarray(self.order_slowdown * total)

    def streamed_bytes(self, n: Floats, k: Floats) -> Floats:
        """Return the [S] bytes of weights that a call reads from memory."""
        rows = np.ceil(n / self.array_size) * self.array_size
        reloads = 1.0 if self.resident_k is None else np.maximum(1.0, k / self.resident_k)
        return np.asarray(rows * k * self.bytes_per_weight * reloads)


class GpuShader(_Model):
    """A GPU in a busy queue (paper section 3.1, linear performance).

    `max(stream, min(direct, tiled))`: weights stream at the memory's speed; few tokens run a kernel
    that unpacks weights as it goes (`direct_flops_per_s`); many tokens one that unpacks them first
    (`unpack_s_per_weight`) and then computes at `tiled_flops_per_s`.
    """

    kind: Literal["gpu-shader"] = "gpu-shader"
    bytes_per_weight: Positive
    bandwidth_bytes_per_s: Positive
    direct_flops_per_s: Positive
    tiled_flops_per_s: Positive
    unpack_s_per_weight: Annotated[float, Field(ge=0, le=1e9)]

    def seconds(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Return the [S] time of a kernel after another."""
        weights = n * k
        stream = weights * (self.bytes_per_weight / self.bandwidth_bytes_per_s)
        flops = 2.0 * m * weights
        tiled = self.unpack_s_per_weight * weights + flops / self.tiled_flops_per_s
        return np.asarray(np.maximum(stream, np.minimum(flops / self.direct_flops_per_s, tiled)))

    def streamed_bytes(self, n: Floats, k: Floats) -> Floats:
        """Return the [S] bytes of weights that a kernel reads from memory."""
        return np.asarray(n * k * self.bytes_per_weight)


DeviceModel: TypeAlias = Annotated[NpuArray | GpuShader, Field(discriminator="kind")]


def evaluate(model: NpuArray | GpuShader, m: Any, n: Any, k: Any) -> Floats:
    """Return the seconds for sizes that broadcast."""
    return model.seconds(*np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (m, n, k))))

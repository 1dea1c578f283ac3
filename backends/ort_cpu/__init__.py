"""The host's static-graph NPU: ONNX Runtime's CPU provider on one thread, the caller's.

`open(**options)` takes

    graph_sizes   token counts that calls may have; others are refused when bound, as on a real NPU
    w4a16         how 4-bit weights meet floating-point activations (see `graphs.matmul`):
                  "fp32"   weights dequantised on the fly, fp32 arithmetic; 0.63 bytes
                  "split"  two int8 planes of the activations, together 15 bits for each block of
                           32: for one token 1.2 to 1.8 times as fast as fp32 with AVX-512 and 2.9
                           to 3.6 times with AVX2, for 256 tokens 0.5 to 0.6 times; 0.75 bytes a
                           weight
                  "both"   split for up to 16 tokens, fp32 above: fast decode and fast
                           prefill, but the weights are stored twice, 1.38 bytes a weight
                  (packs for int8 are 0.125 bytes a weight larger on Arm)
                  "auto"   (default) "both" on x86 without AVX-512, where fp32 would leave decoding
                           five times slower than int8 activations; else "fp32"
    kind          "npu", or "cpu": rows of matmuls besides GPU and NPU, of any token count
    cores         of the CPU's threads; empty: one thread, wherever the system puts it

Sessions have a symbolic token count, so one session serves every graph size: ONNX Runtime packs
weights into a private copy for each session. The caller pins the NPU's thread; nothing here does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Literal

# Read once, when the library is loaded (that is, when a device is opened): without it a home that
# cannot be written gets a warning about a telemetry identifier.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from hetero.backends.host.processor import cpu_flags
from hetero.backends.ort_cpu.device import DEFAULT_GRAPH_SIZES, OrtCpuDevice
from hetero.backends.ort_cpu.graphs import ActivationPath
from hetero.backends.ort_cpu.workers import WorkerDevice
from hetero.backends.protocol import Device

ANY_TOKENS: Final = (1, 1 << 20)


def open(
    *,
    graph_sizes: tuple[int, ...] = DEFAULT_GRAPH_SIZES,
    w4a16: ActivationPath | Literal["auto"] = "auto",
    kind: Literal["npu", "cpu"] = "npu",
    cores: Sequence[int] = (),
) -> Device:
    """Open ONNX Runtime on the host's CPU; see the module's docstring for the options."""
    path = default_path(cpu_flags()) if w4a16 == "auto" else w4a16
    if kind == "cpu":
        return WorkerDevice(OrtCpuDevice(graph_sizes=ANY_TOKENS, w4a16=path, kind=kind), cores)
    return OrtCpuDevice(graph_sizes=graph_sizes, w4a16=path)


def default_path(flags: frozenset[str]) -> ActivationPath:
    """Return what `auto` means on a processor with these instruction sets.

    Measured: bench/RESULTS.md.
    """
    return "both" if "avx2" in flags and "avx512f" not in flags else "fp32"


__all__ = ["DEFAULT_GRAPH_SIZES", "OrtCpuDevice", "WorkerDevice", "default_path", "open"]

"""w8a8 on OpenCL: kernels of every family, and those for instructions that are not here."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl import program_source
from hetero.backends.opencl.device import OpenCLDevice
from tests.backends.test_w8a8 import check

# An AVX-512 instruction, written out for any processor. What is named here only in code that is
# not run has to compile.
VNNI = """
#define __AVX512VNNI__ 1
typedef int words_t __attribute__((ext_vector_type(16)));
static words_t written_out(words_t sum, words_t a, words_t b) {
  for (int i = 0; i < 4; i++) sum += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24);
  return sum;
}
#define __builtin_ia32_vpdpbusd512 written_out
"""
BW = """
#define __AVX512BW__ 1
typedef short shorts_t __attribute__((ext_vector_type(32)));
typedef int words_t __attribute__((ext_vector_type(16)));
static words_t written_out(shorts_t a, shorts_t b) {
  words_t sum;
  for (int i = 0; i < 16; i++)
    sum[i] = (int)a[2 * i] * b[2 * i] + (int)a[2 * i + 1] * b[2 * i + 1];
  return sum;
}
#define __builtin_ia32_pmaddwd512 written_out
"""
INSTRUCTIONS = {"pocl-avx512-vnni": VNNI, "pocl-avx512": BW}


def check_shapes(device: OpenCLDevice) -> None:
    for m, n, k in ((1, 37, 100), (2, 16, 32), (4, 50, 96), (8, 33, 64), (21, 100, 1000)):
        rng = np.random.default_rng((m, n, k))
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
        scales = rng.uniform(0.1, 1, n).astype(np.float32)
        x = rng.standard_normal((m, k), dtype=np.float32)
        check(device, x, codes, scales, np.float32(0.02))
        extreme = rng.choice(np.array([-128, 127], np.int8), (n, k))
        check(device, 4 * extreme[:1].repeat(m, axis=0).astype(np.float32), extreme, scales,
              np.float32(2))  # fmt: skip


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("family", INSTRUCTIONS)
def test_avx512_written_out(
    device: OpenCLDevice, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for AVX-512 with the one instruction that another processor lacks replaced."""
    if not device.tuning.family.startswith("pocl") or device.tuning.family == "pocl-x86-64":
        pytest.skip("needs PoCL and its vectors")
    own = program_source.source

    def source(name: str) -> str:
        return INSTRUCTIONS[family] * (name == program_source.COMMON) + own(name)

    monkeypatch.setattr(program_source, "source", source)
    with open_opencl(family=family) as opened:
        check_shapes(opened)


def test_division_without_an_instruction(device: OpenCLDevice) -> None:
    """Codes of GPUs that do not round quotients correctly: no other code on any boundary."""
    with open_opencl(family="other") as opened:
        opened.rounded_division = False
        check_shapes(opened)
        for x_scale in (0.1, 1 / 3, 0.0123, 7e-5, 12345.678):
            scale = np.float32(x_scale)
            halves = (np.arange(-128, 128) + 0.5).astype(np.float32) * scale
            x = np.stack(
                [np.nextafter(halves, np.float32(-np.inf)), halves,
                 np.nextafter(halves, np.float32(np.inf)), 1e30 * halves]
            ).reshape(32, 32)  # fmt: skip
            check(opened, x, np.eye(32, dtype=np.int8), np.ones(32, np.float32), scale)

"""The types of tensors in GGUF files and how long their blocks are.

They are a copy of the `gguf` library's, which takes 50 ms to import; a test compares them. The
library itself is imported only to compute.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Kind(IntEnum):
    """The type of a tensor (`ggml_type`)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# Values and bytes of a block.
SIZES: Final = {
    Kind.F32: (1, 4),
    Kind.F16: (1, 2),
    Kind.Q4_0: (32, 18),
    Kind.Q4_1: (32, 20),
    Kind.Q5_0: (32, 22),
    Kind.Q5_1: (32, 24),
    Kind.Q8_0: (32, 34),
    Kind.Q8_1: (32, 40),
    Kind.Q2_K: (256, 84),
    Kind.Q3_K: (256, 110),
    Kind.Q4_K: (256, 144),
    Kind.Q5_K: (256, 176),
    Kind.Q6_K: (256, 210),
    Kind.Q8_K: (256, 292),
    Kind.IQ2_XXS: (256, 66),
    Kind.IQ2_XS: (256, 74),
    Kind.IQ3_XXS: (256, 98),
    Kind.IQ1_S: (256, 50),
    Kind.IQ4_NL: (32, 18),
    Kind.IQ3_S: (256, 110),
    Kind.IQ2_S: (256, 82),
    Kind.IQ4_XS: (256, 136),
    Kind.I8: (1, 1),
    Kind.I16: (1, 2),
    Kind.I32: (1, 4),
    Kind.I64: (1, 8),
    Kind.F64: (1, 8),
    Kind.IQ1_M: (256, 56),
    Kind.BF16: (1, 2),
    Kind.TQ1_0: (256, 54),
    Kind.TQ2_0: (256, 66),
    Kind.MXFP4: (32, 17),
    Kind.NVFP4: (64, 36),
    Kind.Q1_0: (128, 18),
}

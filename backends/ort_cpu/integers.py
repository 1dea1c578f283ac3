"""The 8-bit weight codes that ONNX Runtime multiplies exactly with uint8 activations.

On x86 processors without VNNI its kernel for int8 weights adds pairs of products in 16 bits, which
saturate (https://onnxruntime.ai, "Quantize ONNX models": U8S8 on AVX2 and AVX-512); the one for
uint8 weights widens first and is exact, at half the speed or less. What a processor does is tried
with the codes of largest magnitude, once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.ort_cpu import graphs
from hetero.backends.ort_cpu.session import new_session
from hetero.backends.protocol import Acceptance

_TOKENS: Final = (1, 2, 64)


def acceptance() -> Acceptance:
    """Return whether some kernel is exact."""
    if _first_exact() is not None:
        return Acceptance(True)
    return Acceptance(
        False, "ONNX Runtime's 8-bit products are not exact on this processor; use another format"
    )


def exact_codes() -> npt.DTypeLike:
    """Return int8, the faster one, where it is exact; else uint8.

    Raises `ValueError` where neither is.
    """
    codes = _first_exact()
    if codes is None:
        raise ValueError(acceptance().reason)
    return codes


@cache
def _first_exact() -> type[np.generic] | None:
    return next((kind for kind in (np.int8, np.uint8) if _is_exact(kind)), None)


def _is_exact(kind: type[np.generic]) -> bool:
    """Return sums of products of extreme codes, in runs of equal signs, against int64."""
    op = ops.MatMul(n=48, k=272, weight_format=WeightFormat.W8A8)
    random = np.random.default_rng(0)
    weight = random.choice(np.array([-127, 127], np.int8), (op.k // 8, op.n)).repeat(8, axis=0)
    scales = np.ones(op.n, np.float32)
    stored = weight if kind is np.int8 else weight.view(np.uint8) ^ np.uint8(0x80)
    session = new_session(
        graphs.static_matmul(op, kind), {"weight": stored.astype(kind), "scales": scales}
    )
    return all(_agree(session, weight, _extremes(random, m, op.k)) for m in _TOKENS)


def _extremes(random: np.random.Generator, m: int, k: int) -> npt.NDArray[np.float32]:
    """Return the codes that are -128 or 127 (bytes 0 and 255), eight alike in a row."""
    return random.choice(np.array([-128, 127], np.float32), (m, k // 8)).repeat(8, axis=1)


def _agree(session: Any, weight: npt.NDArray[np.int8], x: npt.NDArray[np.float32]) -> bool:
    got = session.run(None, {"x": x, "x_scale": np.ones(1, np.float32)})[0]
    return bool(np.array_equal(got, x.astype(np.int64) @ weight.astype(np.int64)))

"""Kernel shapes per device family: one small frozen record each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tuning of kernels for one family of devices.

    lanes             work-items that share one row in norms and one (head, token tile) in attention
    vector            floats per vector operation of one work-item (1, 4, 8 or 16)
    attention_tokens  query tokens per tile of prefill attention
    attention_keys    keys per block of the online softmax
    decode_splits     parts of the context that decode attention computes side by side
    """

    family: str
    lanes: int
    vector: int
    attention_tokens: int = 16
    attention_keys: int = 64
    decode_splits: int = 1

    @property
    def defines(self) -> dict[str, int]:
        """Return what common.cl wants to know."""
        return {"VEC": self.vector, "LANES": self.lanes}


FAMILIES: dict[str, Tuning] = {
    tuning.family: tuning
    for tuning in (
        Tuning(family="pocl-avx512-vnni", lanes=1, vector=16),
        Tuning(family="pocl-avx512", lanes=1, vector=16),
        Tuning(family="pocl", lanes=1, vector=8),
        Tuning(family="pocl-x86-64", lanes=64, vector=4),
        Tuning(family="adreno", lanes=64, vector=4, decode_splits=8),
        Tuning(family="nvidia", lanes=64, vector=4, decode_splits=16),
        Tuning(family="other", lanes=64, vector=4, decode_splits=8),
    )
}


def find_tuning(family: str) -> Tuning:
    """Return the record of a family. Raises `ValueError` with the nearest known name."""
    if family in FAMILIES:
        return FAMILIES[family]
    near = difflib.get_close_matches(family, FAMILIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown tuning family {family!r}: {hint}known are {', '.join(FAMILIES)}")

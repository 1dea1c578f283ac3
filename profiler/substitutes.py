"""Operations that a profile lacks, predicted from measured ones that do similar work.

Profiles of before an operation was measured have no times of it. What these kernels take besides
their launch is moving their tensors, so each is predicted from one that it resembles: a launch
costs the same, the rest as many times as much as it moves bytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hetero.profiler.records import OtherPredictor

# By the names of `predict.op_name`: tensors [m, d] or [m, f] that a call reads and writes, by which
# alone these operations' sizes differ (GatedAct: gate, up and product),
TENSORS: Final = {
    "RMSNorm": 2, "RMSNorm+add": 4, "LayerNorm": 2, "LayerNorm+add": 4,
    "GatedAct": 3, "Act": 2, "Add": 3, "AddPositions": 3,
}  # fmt: skip
# and what stands in for which, the likest first.
SUBSTITUTES: Final = {
    "LayerNorm": ("RMSNorm",),
    "LayerNorm+add": ("RMSNorm+add",),
    "Act": ("GatedAct",),
    "Add": ("RMSNorm+add", "RMSNorm"),
    "AddPositions": ("Add", "RMSNorm+add", "RMSNorm"),
}


class Substitution(NamedTuple):
    """An operation that was not measured, and the one that it is predicted from."""

    op: str
    source: str

    @property
    def note(self) -> str:
        """For people."""
        return f"{self.op} was not measured: predicted from {self.source} by its bytes"


def stand_in(source: OtherPredictor, op: str) -> OtherPredictor:
    """What predicts `op` by the work of another operation."""
    ratio = TENSORS[op] / TENSORS[source.op]

    def scaled(terms: dict[str, float]) -> dict[str, float]:
        return {name: x * (1.0 if name == "calls" else ratio) for name, x in terms.items()}

    return source.model_copy(
        update={
            "op": op,
            "coefficients": scaled(source.coefficients),
            "decode": None if source.decode is None else scaled(source.decode),
        }
    )

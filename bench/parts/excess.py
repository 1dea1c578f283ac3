"""Outliers that a calibration did not see: how many, in which channels, and what adding them reads.

Figures 10 and 11 of mllm-NPU, for a text in another language or in code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from common import finish, table

from hetero.backends.ops import MatMul
from hetero.compiling.calibration import calibration_sequences
from hetero.compiling.static_scales import MAX_HOT, Scale, choose, collect_scales
from hetero.compiling.walk import CalibrationPoint, walk
from hetero.measuring.evaluation import read_tokens

HEAD = (
    "text|matmuls|tokens with any|elements|channels with any|of these in the most frequent 3 %|"
    "columns read, MB|of the matrices"
)


@dataclass
class Counts:
    """Sums over the matmuls of a role."""

    tokens: list[float] = field(default_factory=list)  # parts
    elements: list[float] = field(default_factory=list)
    channels: list[float] = field(default_factory=list)
    frequent: list[float] = field(default_factory=list)
    read: int = 0  # bytes of columns
    whole: int = 0  # and of the matrices

    def add(self, beyond: Any, n: int) -> None:
        """Count a matmul with n rows: which elements [m, k] are in excess."""
        counts = beyond.sum(axis=0)
        some = np.count_nonzero(counts)
        self.tokens.append(beyond.any(axis=1).mean())
        self.elements.append(beyond.mean())
        self.channels.append(some / len(counts))
        if some:
            most = np.sort(counts)[::-1][: max(1, int(MAX_HOT * len(counts)))]
            self.frequent.append(most.sum() / counts.sum())
        self.read += int(some) * n
        self.whole += len(counts) * n

    def cells(self) -> list[str]:
        """Return the means over matmuls, and the sums of bytes."""
        means = (np.mean(x) if x else 0.0 for x in (self.tokens, self.elements, self.channels))
        tokens, elements, channels = means
        frequent = f"{np.mean(self.frequent):.0%}" if self.frequent else ""
        return [
            f"{tokens:.2%}", f"{elements:.4%}", f"{channels:.1%}", frequent,
            f"{self.read / 1e6:.2f}", f"{self.read / self.whole:.1%}",
        ]  # fmt: skip


def excess(
    model: str,
    calibrate: Annotated[Path, typer.Option(help="another text")],
    text: Annotated[list[Path], typer.Option(help="in UTF-8; several")],
    tokens: Annotated[int, typer.Option(help="of each text, as one prompt")] = 256,
    calibration_tokens: int = 4096,
) -> None:
    """Statistics of what static codes of w8a8 cut off, every matmul with a shadow."""
    loaded, _, sequences = calibration_sequences(model, calibrate, calibration_tokens)
    scales = collect_scales(loaded.weights, sequences)
    chosen: Mapping[str, Scale] = choose(scales, frozenset(scales))
    rows = []
    for path in text:
        by_role: dict[str, Counts] = {}

        def count(site: CalibrationPoint, by_role: dict[str, Counts] = by_role) -> Any:
            if isinstance(site.node.op, MatMul) and site.node.layer is not None:
                scale = chosen[f"blocks.{site.node.layer}.{site.role}"]
                x = np.concatenate(site.inputs)
                codes = np.rint(x / np.float32(scale.step))
                beyond = (codes < -128) | (codes > 127)
                beyond[:, scale.hot] = False
                by_role.setdefault(site.role, Counts()).add(beyond, site.node.op.n)
            return site.values

        walk(loaded.weights, [read_tokens(loaded, path, tokens)], count)
        rows += [[path.name, role, *counts.cells()] for role, counts in by_role.items()]
    table(HEAD, rows)
    finish()

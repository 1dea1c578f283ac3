"""Simulated integers of a model with outliers folded in (`lab/schemes.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from lab.outliers import PART, OutlyingWeights
from lab.schemes import Schemes, SimulatedModel

from hetero.backends.reference.compute import program
from hetero.compiling.calibration import calibration_sequences
from hetero.compiling.static_scales import choose, most_important
from hetero.measuring.evaluation import evaluate, read_tokens
from hetero.models import LoadedModel

SCHEMES = ("naive", "none", "smooth", "15%", "50%", "all", "paper", "per-token", "activations")
CONTEXT = 256


class Reference:
    """The float model; every window is computed once."""

    def __init__(self, model: LoadedModel) -> None:
        self._floats = SimulatedModel(
            model, model.weights, CONTEXT, lambda node, values: program(node.op, values)[0]
        )
        self.model, self.max_seq_len = model, CONTEXT
        self._known: dict[tuple[int, ...], Any] = {}

    def logits(self, tokens: Sequence[int]) -> Any:
        """See `SimulatedModel.logits`."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._floats.logits(tokens)
        return self._known[key]


def outliers(
    model: str,
    calibrate: Annotated[Path, typer.Option(help="another text")],
    text: Annotated[Path, typer.Option(help="in UTF-8")],
    tokens: int = 1200,
    calibration_tokens: int = 2048,
    part: Annotated[float, typer.Option(help="of the channels")] = PART,
    seed: int = 1,
    draws: Annotated[int, typer.Option(help="of random prunings to 15 %")] = 0,
    scheme: Annotated[list[str] | None, typer.Option("-s", "--scheme")] = None,
) -> None:
    """The cost of int8 activations to a model with outliers, and how well importance prunes.

    The float model without outliers, whose logits have the same bits, is the reference. `--part 0`
    folds nothing in.
    """
    loaded, _, sequences = calibration_sequences(model, calibrate, calibration_tokens)
    reference, grown = Reference(loaded), loaded
    if part:
        weights = OutlyingWeights(loaded.weights, seed, part=part)
        grown = LoadedModel(loaded.name, loaded.config, weights, loaded.fingerprint)
    schemes = Schemes(grown, sequences, CONTEXT)
    scored = read_tokens(loaded, text, tokens)

    def score(name: str, candidate: Any) -> float:
        evaluation = evaluate(candidate, scored, reference=reference, window=CONTEXT)
        assert evaluation.kl_mean is not None
        print(f"| {name} | {evaluation.perplexity:.4f} | {evaluation.kl_mean:.5f} |", flush=True)
        return evaluation.kl_mean

    print("| simulated | perplexity | KL mean (nats) |\n|---|---:|---:|")
    score("f32", reference)
    for name in scheme or SCHEMES:
        score(name, schemes.model_of(name))
    if draws:
        scales = schemes.scales()
        kept = most_important(scales, 0.15)
        own = score("15%, by importance", schemes.chosen(choose(scales, kept)))
        names = sorted(set(scales) - {"lm_head"})
        drawn = [random.Random(i).sample(names, len(kept)) for i in range(draws)]
        others = [score(f"draw {i}", schemes.chosen(choose(scales, x)))
                  for i, x in enumerate(drawn)]  # fmt: skip
        print(f"importance is better than {np.sum(own < np.array(others))} of {len(others)} draws")

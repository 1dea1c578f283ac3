"""What int8 activations cost a model with outliers folded in, and whether importance prunes well.

    python docs/demo-model/outliers.py demo --calibrate stories.txt --text held_out.txt

Everything is simulated (`hetero.compiling.schemes`); the float model without outliers, whose
logits have the same bits, is the reference. `--part 0` folds nothing in.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetero.backends.reference.compute import program
from hetero.compiling.calibration import calibration_sequences
from hetero.compiling.outlying_weights import PART, OutlyingWeights
from hetero.compiling.schemes import Schemes, SimulatedModel
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--part", type=float, default=PART, help="of the channels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=0, help="of random prunings to 15 %%")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    arguments = parser.parse_args()
    loaded, _, sequences = calibration_sequences(
        arguments.model, arguments.calibrate, arguments.calibration_tokens
    )
    reference, model = Reference(loaded), loaded
    if arguments.part:
        weights = OutlyingWeights(loaded.weights, arguments.seed, part=arguments.part)
        model = LoadedModel(loaded.name, loaded.config, weights, loaded.fingerprint)
    schemes = Schemes(model, sequences, CONTEXT)
    tokens = read_tokens(loaded, arguments.text, arguments.tokens)

    def score(name: str, candidate: Any) -> float:
        found = evaluate(candidate, tokens, reference=reference, window=CONTEXT)
        assert found.kl_mean is not None
        print(f"| {name} | {found.perplexity:.4f} | {found.kl_mean:.5f} |", flush=True)
        return found.kl_mean

    print("| simulated | perplexity | KL mean (nats) |\n|---|---:|---:|")
    score("f32", reference)
    for name in arguments.schemes:
        score(name, schemes.model_of(name))
    if arguments.draws:
        scales = schemes.scales()
        kept = most_important(scales, 0.15)
        own = score("15%, by importance", schemes.chosen(choose(scales, kept)))
        names = sorted(set(scales) - {"lm_head"})
        drawn = [random.Random(i).sample(names, len(kept)) for i in range(arguments.draws)]
        others = [score(f"draw {i}", schemes.chosen(choose(scales, x)))
                  for i, x in enumerate(drawn)]  # fmt: skip
        print(f"importance is better than {np.sum(own < np.array(others))} of {len(others)} draws")


if __name__ == "__main__":
    main()

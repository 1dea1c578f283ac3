"""Scaled frequencies of rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hetero.backends.extensible import Extensible, later


@dataclass(frozen=True, kw_only=True, repr=False)
class RopeScaling(Extensible):
    """Frequency scaling of rotary embeddings, with the names of `config.json`'s `rope_scaling`.

    LongRoPE divides each frequency by a factor of its own, of `short_factor`, or of `long_factor`
    where `long` says that the context is longer than the model was first trained for. With `zero`
    all frequencies are 0: nothing is rotated (layers whose queries and keys are normed only). With
    `proportional` all but the first `partial_rotary_factor` of them are 0 (Gemma 4).
    `llama_4_scaling_beta` β scales queries, not keys, at position p by
    1 + β · ln(1 + ⌊p / original_max_position⌋).
    """

    kind: Literal["none", "linear", "llama3", "yarn", "longrope", "proportional", "zero"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = False
    llama_4_scaling_beta: float = later(0.0)
    partial_rotary_factor: float = later(1.0)

    def for_length(self, length: int) -> RopeScaling:
        """Return the scaling in a context of up to `length` tokens.

        All positions of a context have the same one, as in llama.cpp and vLLM: keys are cached
        after they are rotated. (`transformers` changes it when a text grows beyond the border.)
        """
        long = self.kind == "longrope" and length > self.original_max_position
        return replace(self, long=long)

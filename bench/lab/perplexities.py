"""The perplexity of one text in every format of weights and caches, and llama.cpp's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.generation.llm import LLM
from hetero.generation.sampling import log_softmax
from hetero.measuring.evaluation import windows

from .llama_process import GGML_TYPES, LlamaProcess

OWN: Final = WeightFormat.GGUF_A16
LLAMA_CPP: Final = "llama.cpp"


class Score(NamedTuple):
    """The perplexity of a text with weights and caches in some formats."""

    weights: str
    kv: str
    perplexity: float


class Scorer(Protocol):
    """A model with logits."""

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


def perplexity(model: Scorer, tokens: Sequence[int], window: int) -> float:
    """Return exp of the mean loss; windows overlap by half of their tokens."""
    lost = []
    for part in windows(len(tokens), window, window // 2):
        ids = tokens[part.start : part.stop]
        rows = slice(part.scored - part.start - 1, len(ids) - 1)
        logs = log_softmax(model.logits(ids)[rows])
        lost.append(-logs[np.arange(len(logs)), np.asarray(ids[rows.start + 1 : rows.stop + 1])])
    return math.exp(float(np.concatenate(lost).mean()))


def scores(
    path: Path,
    tokens: Sequence[int],
    weights: Sequence[str],
    *,
    device: str = "npu",
    window: int = 256,
) -> Iterator[Score]:
    """Yield the perplexities of a GGUF file: caches in all formats, and weights in those given.

    Those of llama.cpp follow, in which weights stay as the file stores them.
    """
    pairs = [(OWN.value, kv.value) for kv in CacheFormat]
    pairs += [(x, CacheFormat.F16.value) for x in weights if x != OWN]
    for name, kv in pairs:
        options = {"weights": name, "kv": kv, "device": device, "max_seq_len": window}
        with LLM(str(path), **options) as llm:  # type: ignore[arg-type]
            yield Score(name, kv, perplexity(llm, tokens, window))
    for kv in GGML_TYPES:
        with LlamaProcess(path, kv=kv, context=window) as process:
            yield Score(LLAMA_CPP, kv, perplexity(process, tokens, window))

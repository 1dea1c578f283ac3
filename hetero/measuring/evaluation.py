"""The quality of a model's numbers: perplexity over a text, and agreement with a float reference.

Perplexity uses windows of `window` tokens that overlap by `window - stride`: every token is scored
once, with at least `window - stride` tokens before it wherever the text has them (Hugging Face's
"Perplexity of fixed-length models"). The reference is the same model in float32, on the same
windows: top-1 agreement counts positions where both have the same most likely token, and the
Kullback-Leibler divergence is Σ p·ln(p/q), p the reference's distribution, in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hetero.backends.host.files import LONGEST_TEXT_BYTES, read_text
from hetero.errors import UserError
from hetero.generation.sampling import log_softmax
from hetero.measuring.constants import MIN_TOKENS
from hetero.models import LoadedModel

DEFAULT_WINDOW = 512
Z95 = 1.959963984540054
Progress = Callable[[int, int], None]
Float64Array = npt.NDArray[np.float64]
Interval = tuple[float, float]


class Encoder(Protocol):
    """An encoder of texts."""

    def encode(self, text: str) -> list[int]: ...


class Scorer(Protocol):
    """A model with logits: an `LLM`, or a simulated one."""

    @property
    def model(self) -> LoadedModel: ...
    @property
    def max_seq_len(self) -> int: ...
    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...


class Window(NamedTuple):
    """Tokens [start, stop) of the text, of which those from `scored` on count."""

    start: int
    scored: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measured quality on one text. `perplexity` is exp(mean negative log-likelihood).

    `top1_agreement`, `kl_mean` and `kl_p99` (nats) compare with a reference; None without one. The
    others are 95 % intervals, by the spread over tokens as if those were independent (Wilson's for
    a share): the range for another text of the same kind and length.
    """

    tokens: int
    perplexity: float
    perplexity_95: Interval
    top1_agreement: float | None = None
    top1_agreement_95: Interval | None = None
    kl_mean: float | None = None
    kl_mean_95: Interval | None = None
    kl_p99: float | None = None


def read_tokens(llm: Encoder, path: Path, limit: int | None = None) -> list[int]:
    """Return token ids of a text file. Raises `UserError` if there is not enough text to score."""
    try:
        text = read_text(path, LONGEST_TEXT_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path}: cannot be read as UTF-8 text ({why}); give a text file"
        ) from error
    tokens = llm.encode(text)[:limit] if text.strip() else []
    if len(tokens) < MIN_TOKENS:
        raise UserError(
            f"{path}: has {len(tokens)} tokens, a score needs at least {MIN_TOKENS}; give more text"
        )
    return tokens


def windows(count: int, window: int, stride: int) -> Iterator[Window]:
    """Return windows over `count` tokens in which every token but the first is scored once."""
    scored = 1
    for start in range(0, count, stride):
        stop = min(start + window, count)
        if scored < stop:
            yield Window(start, scored, stop)
            scored = stop
        if stop == count:
            return


def evaluate(
    llm: Scorer,
    tokens: Sequence[int],
    *,
    reference: Scorer | None = None,
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score `tokens`; `stride` defaults to half a window. Raises `UserError` for bad sizes."""
    stride = window // 2 if stride is None else stride
    _check_sizes(llm, window, stride)
    _check_vocabulary(llm, reference)
    lost: list[Float64Array] = []
    divergence: list[Float64Array] = []
    agreed: list[npt.NDArray[np.bool_]] = []
    for part in windows(len(tokens), window, stride):
        ids = list(tokens[part.start : part.stop])
        rows = slice(part.scored - part.start - 1, len(ids) - 1)
        logs = log_softmax(llm.logits(ids)[rows])
        targets = np.asarray(ids[rows.start + 1 : rows.stop + 1])
        lost.append(-logs[np.arange(len(targets)), targets])
        if reference is not None:
            wanted = log_softmax(reference.logits(ids)[rows])
            divergence.append((np.exp(wanted) * (wanted - logs)).sum(axis=-1))
            agreed.append(wanted.argmax(axis=-1) == logs.argmax(axis=-1))
        if progress is not None:
            progress(part.stop, len(tokens))
    losses = np.concatenate(lost)
    low, high = mean_95(losses)
    evaluation = Evaluation(
        tokens=len(losses),
        perplexity=math.exp(float(losses.mean())),
        perplexity_95=(math.exp(low), math.exp(high)),
    )
    return evaluation if reference is None else _compared(evaluation, divergence, agreed)


def mean_95(values: Float64Array) -> Interval:
    """Return the 95 % interval of the mean of [S] independent values by the normal distribution."""
    mean = float(values.mean())
    off = Z95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - off, mean + off


def share_95(hits: int, count: int) -> Interval:
    """Return Wilson's 95 % interval of a share."""
    share, scale = hits / count, 1 + Z95**2 / count
    middle = share + Z95**2 / (2 * count)
    off = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max((middle - off) / scale, 0.0), min((middle + off) / scale, 1.0)


def _compared(
    evaluation: Evaluation,
    divergence: Sequence[Float64Array],
    agreed: Sequence[npt.NDArray[np.bool_]],
) -> Evaluation:
    kl, same = np.concatenate(divergence), np.concatenate(agreed)
    return replace(
        evaluation,
        top1_agreement=float(same.mean()),
        top1_agreement_95=share_95(int(same.sum()), len(same)),
        kl_mean=float(kl.mean()),
        kl_mean_95=mean_95(kl),
        kl_p99=float(np.quantile(kl, 0.99)),
    )


def _check_vocabulary(llm: Scorer, reference: Scorer | None) -> None:
    own = llm.model.config.vocab_size
    if reference is not None and reference.model.config.vocab_size != own:
        raise UserError(
            f"the reference has a vocabulary of {reference.model.config.vocab_size} tokens, the "
            f"model one of {own}: give the same model in floats"
        )


def _check_sizes(llm: Scorer, window: int, stride: int) -> None:
    if not 2 <= window <= llm.max_seq_len:
        raise UserError(
            f"the window must be in [2, {llm.max_seq_len}] tokens for this model, got {window}"
        )
    if not 1 <= stride < window:
        raise UserError(f"the stride must be in [1, {window - 1}] (below the window), got {stride}")

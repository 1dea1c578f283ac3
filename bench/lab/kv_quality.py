"""The quality of a model's numbers on keys and values of few bits.

Half a window of text is computed, its chunks are encoded and decoded, and the other half is scored
by teacher forcing on the decoded ones; the reference is the same on exact keys and values. Bytes
are all that is stored, amplitudes included, relative to those at 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from hetero.contexts.chunks import Chunk, spans
from hetero.contexts.codec import CHUNK_TOKENS, NESTED, ChunkCodec
from hetero.contexts.measured import errors_of, measure_channels
from hetero.contexts.ratios import least_error, paper
from hetero.errors import UserError
from hetero.generation.llm import LLM
from hetero.generation.sampling import log_softmax
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.context import Context

RANDOM: Final = "random"  # mixed bits, by densities in another order
Chooser = Callable[[Sequence[float]], list[int]]


@dataclass(frozen=True, kw_only=True)
class KvQuality:
    """Quality of one storage format. `ratio` is of the bytes at 8 bits; KL in nats a token."""

    ratio: float
    perplexity: float
    top1_agreement: float
    kl_mean: float


class _Scores:
    """Sums of one storage format."""

    def __init__(self) -> None:
        self.lost, self.divergence, self.agreed = [], [], []  # type: ignore[var-annotated]
        self.nbytes = 0

    def add(self, wanted: Any, logs: Any, targets: Any, nbytes: int) -> None:
        """Add a window: log-probabilities [tokens, vocabulary]."""
        self.lost.append(-logs[np.arange(len(targets)), targets])
        self.divergence.append((np.exp(wanted) * (wanted - logs)).sum(axis=-1))
        self.agreed.append(wanted.argmax(axis=-1) == logs.argmax(axis=-1))
        self.nbytes += nbytes

    def quality(self, eight: int) -> KvQuality:
        """Return the means, and the bytes relative to 8 bits."""
        return KvQuality(
            ratio=self.nbytes / eight,
            perplexity=math.exp(float(np.concatenate(self.lost).mean())),
            top1_agreement=float(np.concatenate(self.agreed).mean()),
            kl_mean=float(np.concatenate(self.divergence).mean()),
        )


def kv_quality(
    llm: LLM, tokens: Sequence[int], ways: Sequence[str], *, ratio: float, window: int, seeds: int
) -> dict[str, KvQuality]:
    """Return qualities by name: `exact`, then `ways` (8, 4, 2, mixed, paper).

    With `mixed`, `seeds` random orders of its densities follow. Raises `UserError` for too little
    text.
    """
    half = window // 2 // CHUNK_TOKENS * CHUNK_TOKENS
    starts = range(0, len(tokens) - window + 1, window)
    if not half or not starts:
        raise UserError(
            f"a text of {len(tokens)} tokens has no window of {max(window, 2 * CHUNK_TOKENS)}: "
            "give more text, or a smaller --window"
        )
    if llm.context.cache.layout.slides:
        raise UserError(
            "chunks are of all tokens, and this model was opened with caches that forget what its "
            "windows have left: open it with whole_caches=True"
        )
    with llm.new_context() as context:
        facts = measure_channels(context, llm.model.config.vocab_size, _prefill(llm, context))
        layout = context.cache.layout
        shape = layout.layers, layout.kv_heads, layout.head_dim
        codec = ChunkCodec(layout, np.array(facts["channels"], np.float32).reshape(shape))
        choosers = dict(_choosers(ways, codec, errors_of(facts), ratio, seeds))
        scores = {name: _Scores() for name in ("exact", *choosers)}
        eight = len(starts) * half // CHUNK_TOKENS * codec.nbytes(CHUNK_TOKENS, 8)
        for start in starts:
            part = list(tokens[start : start + window])
            _window(llm, context, codec, part, half, choosers, scores)
    return {name: sums.quality(eight) for name, sums in scores.items()}


def _prefill(llm: LLM, context: Context) -> Callable[[Sequence[int]], Any]:
    def prefill(tokens: Sequence[int]) -> None:
        with llm.engine.lock:
            llm.engine.prefill(context, tokens)

    return prefill


def _choosers(
    ways: Sequence[str], codec: ChunkCodec, errors: dict[int, float], ratio: float, seeds: int
) -> Iterator[tuple[str, Chooser]]:
    """Return functions from the densities of chunks to their bits."""
    sizes = {bits: codec.nbytes(CHUNK_TOKENS, bits) for bits in NESTED}

    def mixed(densities: Sequence[float]) -> list[int]:
        return least_error(densities, ratio * len(densities) * sizes[8], sizes, errors)

    for way in ways:
        if way == "mixed":
            yield way, mixed
            for seed in range(seeds):
                random = np.random.default_rng(seed)

                def shuffled(densities: Sequence[float], random: Any = random) -> list[int]:
                    order = random.permutation(len(densities))
                    bits = mixed(densities)
                    return [bits[i] for i in order]

                yield f"{RANDOM} {seed}", shuffled
        elif way == "paper":
            yield way, lambda densities: paper(densities, ratio)
        else:
            yield way, partial(_same, int(way))


def _same(bits: int, densities: Sequence[float]) -> list[int]:
    return [bits] * len(densities)


def _window(
    llm: LLM,
    context: Context,
    codec: ChunkCodec,
    part: list[int],
    half: int,
    choosers: dict[str, Chooser],
    scores: dict[str, _Scores],
) -> None:
    """Score a window's second half on each way's first."""
    context.adopt(())
    context.score_stats = ScoreStats(llm.max_seq_len)
    _prefill(llm, context)(part[:half])
    chunks = [Chunk("", b"", at, tokens, 8) for at, tokens in spans(part[:half])]
    context.score_stats.give(chunks)
    context.score_stats = None
    densities = [chunk.density for chunk in chunks]
    values = context.cache.read(0, half)
    targets = np.asarray(part[half + 1 :])

    def logs() -> Any:
        context.rewind(half)
        with llm.engine.lock:
            return log_softmax(llm.engine.score(context, part[half:])[:-1])

    wanted = logs()
    scores["exact"].add(wanted, wanted, targets, values.nbytes)
    for name, choose in choosers.items():
        nbytes = 0
        for chunk, bits in zip(chunks, choose(densities), strict=True):
            codes = codec.encode(values[:, :, :, chunk.start : chunk.stop], bits)
            context.cache.write(chunk.start, codec.decode(codes))
            nbytes += codes.nbytes
        scores[name].add(wanted, logs(), targets, nbytes)

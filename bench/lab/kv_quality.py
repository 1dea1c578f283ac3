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

from hetero.contexts.chunks import Chunk, first_bits, spans
from hetero.contexts.codec import CHUNK_TOKENS, FIRST_VERSIONS, MIXED, ChunkCodec
from hetero.contexts.head_bits import by_head, measure_heads
from hetero.contexts.measured import SAMPLE_TEXT, measure_channels
from hetero.contexts.ratios import paper
from hetero.errors import UserError
from hetero.generation.llm import LLM
from hetero.generation.sampling import log_softmax
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.context import Context

RANDOM: Final = "random"  # mixed bits, of other layers
Chooser = Callable[[Sequence[float]], list[int]]
# From keys and values [L, 2, G, T, D], and densities of chunks, to what is read back, and bytes.
Way = Callable[[Any, Sequence[float]], tuple[Any, int]]
KIVI_GROUP: Final = 32


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
    """Return qualities by name: `exact`, then `ways`.

    These are bits (8, 4, 3, 2), bits of the first version's codec (`first 4`), `kivi 3` (keys by
    channel, values by token), `mixed` (bits by layer), and `paper` (by density of chunks). With
    `mixed`, `seeds` random orders of its layers follow. Raises `UserError` for too little text.
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
        facts = measure_channels(context, llm.encode(SAMPLE_TEXT), _prefill(llm, context))
        layout = context.cache.layout
        shape = layout.layers, layout.kv_heads, layout.head_dim
        scales = np.array(facts["channels"], np.float32).reshape(shape)
        codec = ChunkCodec(layout, scales)
        if "mixed" in ways:
            text = llm.encode(SAMPLE_TEXT)
            losses = measure_heads(context, codec, text, llm.engine, ratio)
            bits = by_head(losses, codec, ratio)
            orders = (np.random.default_rng(x).permutation(bits).tolist() for x in range(seeds))
            codec = ChunkCodec(layout, scales, mixed=[bits, *orders])
        first = ChunkCodec(layout, scales, FIRST_VERSIONS[0])
        coders = {
            way: _kivi(int(way[4:]))
            if way.startswith("kivi")
            else _coded(first, partial(_same, int(way[5:])))
            for way in ways
            if way.startswith(("kivi", "first"))
        }
        others = [way for way in ways if way not in coders]
        choosers = dict(_choosers(others, ratio, seeds))
        coders |= {name: _coded(codec, choose) for name, choose in choosers.items()}
        scores = {name: _Scores() for name in ("exact", *coders)}
        eight = len(starts) * half // CHUNK_TOKENS * codec.nbytes(CHUNK_TOKENS, 8)
        for start in starts:
            part = list(tokens[start : start + window])
            _window(llm, context, part, half, coders, scores)
    return {name: sums.quality(eight) for name, sums in scores.items()}


def _prefill(llm: LLM, context: Context) -> Callable[[Sequence[int]], Any]:
    def prefill(tokens: Sequence[int]) -> None:
        with llm.engine.lock:
            llm.engine.prefill(context, tokens)

    return prefill


def _choosers(ways: Sequence[str], ratio: float, seeds: int) -> Iterator[tuple[str, Chooser]]:
    """Return functions from the densities of chunks to their bits."""
    for way in ways:
        if way == "mixed":
            yield way, partial(_same, MIXED)
            for seed in range(seeds):
                yield f"{RANDOM} {seed}", partial(_same, MIXED + 1 + seed)
        elif way == "paper":
            yield way, lambda densities: paper(densities, ratio)
        else:
            yield way, partial(_same, int(way))


def _coded(codec: ChunkCodec, choose: Chooser) -> Way:
    """Return chunks in the bits that are chosen for them."""

    def read_back(values: Any, densities: Sequence[float]) -> tuple[Any, int]:
        found, nbytes = np.empty_like(values), 0
        for i, bits in enumerate(choose(densities)):
            part = np.s_[:, :, :, CHUNK_TOKENS * i : CHUNK_TOKENS * (i + 1)]
            codes = codec.encode(values[part], bits)
            found[part] = codec.decode(codes)
            nbytes += codes.nbytes
        return found, nbytes

    return read_back


def _kivi(bits: int) -> Way:
    """Return KIVI's coding (arXiv 2402.02750): a minimum and a step, float16, for 32 values.

    These are a key channel's in neighbouring tokens, or a token's in neighbouring value channels.
    """

    def rounded(values: Any, axis: int) -> Any:
        low = values.min(axis=axis, keepdims=True).astype(np.float16).astype(np.float32)
        step = (values.max(axis=axis, keepdims=True) - low) / (2**bits - 1)
        step = np.maximum(step.astype(np.float16).astype(np.float32), np.float32(1e-7))
        return np.clip(np.round((values - low) / step), 0, 2**bits - 1) * step + low

    def read_back(values: Any, densities: Sequence[float]) -> tuple[Any, int]:  # noqa: ARG001
        layers, _, heads, tokens, size = values.shape
        found, group = np.empty_like(values), min(KIVI_GROUP, size)
        for start in range(0, tokens, KIVI_GROUP):
            part = np.s_[:, 0, :, start : start + KIVI_GROUP]
            found[part] = rounded(values[part], 2)
        by_group = values[:, 1].reshape(layers, heads, tokens, size // group, group)
        found[:, 1] = rounded(by_group, 4).reshape(found[:, 1].shape)
        groups = layers * heads * size * -(-tokens // KIVI_GROUP) + by_group[..., 0].size
        return found, values.size * bits // 8 + 4 * groups

    return read_back


def _same(bits: int, densities: Sequence[float]) -> list[int]:
    return [first_bits(bits), *[bits] * (len(densities) - 1)]


def _window(
    llm: LLM,
    context: Context,
    part: list[int],
    half: int,
    coders: dict[str, Way],
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
    for name, read_back in coders.items():
        decoded, nbytes = read_back(values, densities)
        context.cache.write(0, decoded)
        scores[name].add(wanted, logs(), targets, nbytes)

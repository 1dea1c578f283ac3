"""Bits by head: the fewest nats lost in so many bytes.

Heads differ in what few bits cost: the keys of some need 8 bits, the values of most do with 2. On a
text's second part each head alone is given few bits of the first part's keys and values, and the
divergence of the predictions is measured; losses of heads are added, and a multiple-choice knapsack
chooses. At equal bytes that loses a third less than bits by layer, which lose less than the same
bits for all, or more bits for the newest or the densest chunks
([note](../../bench/notes/2026-11-29-bits-by-layer.md)). Where measuring every head would take
longer than `LONGEST_S`, all heads of a layer are measured together, and have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.kv_codes import OWN_BITS
from hetero.contexts.codec import CHUNK_TOKENS, MIXED, ChunkCodec, codec_of
from hetero.contexts.compression import Compression
from hetero.contexts.directory import ServiceDirectory
from hetero.contexts.measured import SAMPLE_TEXT
from hetero.generation.llm import LLM
from hetero.generation.sampling import log_softmax
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.kv_cache import KvCache
from hetero.solver.knapsack import Alternative, cheapest, least_loss
from hetero.terminal.notices import notify

Losses: TypeAlias = Mapping[int, float]  # of a head: nats a token by bits
LayerLosses: TypeAlias = Sequence[Losses]  # of each head of a layer, or of all together
TRIED: Final = (4, 3)  # and 2, where fewer bytes than those of 3 are asked for
LONGEST_S: Final = 180.0  # of measuring heads one by one
READ: Final = 1280  # tokens of the text, at most
SCORED: Final = 256  # tokens, at most; of half of them losses are too noisy to gain
_LEAST: Final = 1e-12  # nats, of 8 bits: more bits are better where nothing was measured


def measure_heads(
    context: Context, codec: ChunkCodec, text: Sequence[int], engine: Engine, ratio: float
) -> list[LayerLosses]:
    """Return what each head loses alone, as `by_head` takes it for a ratio.

    The context is left empty.

    Where a text, or what fits the context, is too short nothing is measured, and all layers lose
    alike.
    """
    tokens = min(len(text), READ, context.home.max_tokens - 1)
    kept = (tokens - min(SCORED, tokens // 2)) // CHUNK_TOKENS * CHUNK_TOKENS
    firsts = range(CHUNK_TOKENS, kept, CHUNK_TOKENS)  # the first chunk has 8 bits
    scored = text[kept:tokens]
    if not firsts or not scored:
        return alike(codec.layers)
    fits = codec.nbytes(CHUNK_TOKENS, 3) <= ratio * codec.nbytes(CHUNK_TOKENS, 8)
    tried = TRIED if fits else (*TRIED, 2)
    trial = codec_of(
        context.cache.layout, codec.channels, codec.version, [[x] * codec.layers for x in tried]
    )
    context.adopt(())
    with engine.lock:
        engine.prefill(context, text[:kept])
    cache = context.cache
    encoded = {
        bits: [(at, trial.encode_cached(cache, at, at + CHUNK_TOKENS, MIXED + i)) for at in firsts]
        for i, bits in enumerate(tried)
    }

    def logs() -> npt.NDArray[np.float64]:
        context.rewind(kept)
        with engine.lock:
            return log_softmax(engine.score(context, scored))

    logs()  # prepares the steps
    start_s = time.perf_counter()
    exact = logs()
    calls = len(tried) * sum(map(codec.heads_at, range(codec.layers)))
    apart = codec.splits_heads and calls * (time.perf_counter() - start_s) <= LONGEST_S
    p = np.exp(exact)
    losses: list[LayerLosses] = []
    for layer in range(codec.layers):
        count = codec.heads_at(layer)
        parts = [slice(x, x + 1) for x in range(count)] if apart else [slice(None)]
        lost: list[dict[int, float]] = [{} for _ in parts]
        for bits in tried:
            decode = partial(trial.decode_into, encoded[bits], layer)
            changed = _each_alone(cache, layer, kept, parts, decode)
            for own, _ in zip(lost, changed, strict=True):
                own[bits] = float((p * (exact - logs())).sum(axis=1).mean())
        losses.append([_losses(own) for own in lost])
    context.adopt(())
    return losses


def _each_alone(
    cache: KvCache, layer: int, kept: int, parts: Sequence[slice], decode: Callable[..., None]
) -> Iterator[slice]:
    """Yield heads of a layer while they alone have what `decode` writes into the first tokens."""
    rows = cache.rows(layer)
    whole = [x.array[:, :kept].copy() for x in rows]
    decode(*rows)
    few = [x.array[:, :kept].copy() for x in rows]
    for heads in (*parts, slice(0)):  # at last none
        for x, stored, coded in zip(rows, whole, few, strict=True):
            x.array[:, :kept] = stored
            x.array[heads, :kept] = coded[heads]
        cache.wrote(layer, 0, kept)
        if heads != slice(0):
            yield heads


def alike(layers: int) -> list[LayerLosses]:
    """Return losses of layers of which nothing was measured."""
    return [[_losses({})]] * layers


def with_head_bits(
    codec: ChunkCodec, directory: ServiceDirectory, rule: Compression, llm: LLM, context: Context
) -> ChunkCodec:
    """Return a codec that knows the bits by head of a folder; `rule` has the number of its own.

    Those of another ratio than before are measured, on an empty context, and saved.
    """
    known = directory.read(lambda facts: {**facts.get("mixed", {})})
    ratio = repr(rule.ratio)
    if rule.by_head and ratio not in known:
        notify(f"measuring how many bits each head needs, once for {directory.path}")
        text = llm.encode(SAMPLE_TEXT)
        losses = measure_heads(context, codec, text, llm.engine, rule.ratio)
        known[ratio] = by_head(losses, codec, rule.ratio)
        directory.save(mixed=known)
    if rule.by_head:
        rule.mixed = MIXED + list(known).index(ratio)
    mixed, layout = list(known.values()), context.cache.layout
    return directory.read(lambda _: codec_of(layout, codec.channels, codec.version, mixed))


def _losses(measured: Mapping[int, float]) -> Losses:
    """Return a layer's losses by all bits, of which more never lose more.

    8 bits lose next to nothing. 6 lose what values do in 4, which is about a fifteenth of what 2
    bits add to that: an error of a fourth is a sixteenth of the loss. 2 bits of keys lose far more.
    """
    four, three = measured.get(4, 0.0), measured.get(3, 0.0)
    known = {6: max(three - four, 0.0) / 15, 2: 64 * three, **measured}
    losses, most = {}, 0.0
    for bits in OWN_BITS:
        most = max(most, known.get(bits, 0.0), _LEAST * 4 ** (8 - bits))
        losses[bits] = most
    return losses


def by_head(losses: Sequence[LayerLosses], codec: ChunkCodec, ratio: float) -> list[list[int]]:
    """Return the bits of each layer's heads in a chunk, in `ratio` of the bytes at 8 bits.

    All have the fewest where even these do not fit.
    """
    counts = [codec.heads_at(layer) // len(own) for layer, own in enumerate(losses)]
    items, places = [], []
    for layer, own in enumerate(losses):
        for lost in own:
            sizes = {x: sum(codec.plane_bytes(CHUNK_TOKENS, x, layer)) / len(own) for x in lost}
            items.append([Alternative(lost[x], sizes[x]) for x in lost])
            places.append((layer, [*lost]))
    budget = ratio * codec.nbytes(CHUNK_TOKENS, 8)
    fits = least_loss(items) <= budget
    chosen = cheapest(items, budget).chosen if fits else None
    bits: list[list[int]] = [[] for _ in losses]
    for item, (layer, kinds) in enumerate(places):
        own_bits = min(kinds) if chosen is None else kinds[chosen[item]]
        bits[layer] += [own_bits] * counts[layer]
    return bits

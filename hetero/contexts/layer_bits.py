"""Bits by layer: the fewest nats lost in so many bytes.

Layers differ in what few bits cost: the keys of some need 8 bits, the values of most do with 2. On
a text's second part each layer alone is given few bits of the first part's keys and values, and the
divergence of the predictions is measured; losses of layers are added, and a multiple-choice
knapsack chooses. At equal bytes that loses less than the same bits for all layers, and less than
more bits for the newest or the densest chunks
([note](../../bench/notes/2026-11-29-bits-by-layer.md)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.kv_codes import OWN_BITS
from hetero.contexts.codec import CHUNK_TOKENS, MIXED, RAW, ChunkCodec, codec_of
from hetero.contexts.compression import Compression
from hetero.contexts.directory import ServiceDirectory
from hetero.contexts.measured import SAMPLE_TEXT
from hetero.generation.llm import LLM
from hetero.generation.sampling import log_softmax
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.solver.knapsack import Alternative, cheapest, least_loss
from hetero.terminal.notices import notify

Losses: TypeAlias = Mapping[int, float]  # of a layer: nats a token by bits
TRIED: Final = (4, 3)  # and 2, where fewer bytes than those of 3 are asked for
SCORED: Final = 256  # tokens, at most; of half of them losses are too noisy to gain
_LEAST: Final = 1e-12  # nats, of 8 bits: more bits are better where nothing was measured


def measure_layers(
    context: Context, codec: ChunkCodec, text: Sequence[int], engine: Engine, ratio: float
) -> list[Losses]:
    """Return what each layer loses alone, as `by_layer` takes it for a ratio.

    The context is left empty.

    Where a text, or what fits the context, is too short nothing is measured, and all layers lose
    alike.
    """
    tokens = min(len(text), context.home.max_tokens - 1)
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
        bits: [(at, trial.encode_cached(cache, at, at + CHUNK_TOKENS, code)) for at in firsts]
        for bits, code in [(RAW, RAW), *((x, MIXED + i) for i, x in enumerate(tried))]
    }

    def logs() -> npt.NDArray[np.float64]:
        context.rewind(kept)
        with engine.lock:
            return log_softmax(engine.score(context, scored))

    exact = logs()
    p = np.exp(exact)
    losses = []
    for layer in range(codec.layers):
        rows = cache.rows(layer)
        lost = {}
        for bits in tried:
            trial.decode_into(encoded[bits], layer, *rows)
            lost[bits] = float((p * (exact - logs())).sum(axis=1).mean())
        trial.decode_into(encoded[RAW], layer, *rows)
        losses.append(_losses(lost))
    context.adopt(())
    return losses


def alike(layers: int) -> list[Losses]:
    """Return losses of layers of which nothing was measured."""
    return [_losses({})] * layers


def with_layer_bits(
    codec: ChunkCodec, directory: ServiceDirectory, rule: Compression, llm: LLM, context: Context
) -> ChunkCodec:
    """Return a codec that knows the bits by layer of a folder; `rule` has the number of its own.

    Those of another ratio than before are measured, on an empty context, and saved.
    """
    known = directory.read(lambda facts: {**facts.get("mixed", {})})
    ratio = repr(rule.ratio)
    if rule.by_layer and ratio not in known:
        notify(f"measuring how many bits each layer needs, once for {directory.path}")
        text = llm.encode(SAMPLE_TEXT)
        losses = measure_layers(context, codec, text, llm.engine, rule.ratio)
        known[ratio] = by_layer(losses, codec, rule.ratio)
        directory.save(mixed=known)
    if rule.by_layer:
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


def by_layer(losses: Sequence[Losses], codec: ChunkCodec, ratio: float) -> list[int]:
    """Return the bits of each layer of a chunk, in `ratio` of the bytes at 8 bits.

    All layers have the fewest where even these do not fit.
    """
    items = [
        [
            Alternative(lost, sum(codec.plane_bytes(CHUNK_TOKENS, bits, layer)))
            for bits, lost in own.items()
        ]
        for layer, own in enumerate(losses)
    ]
    budget = ratio * codec.nbytes(CHUNK_TOKENS, 8)
    if least_loss(items) > budget:
        return [min(own) for own in losses]
    chosen = cheapest(items, budget).chosen
    return [list(own)[i] for own, i in zip(losses, chosen, strict=True)]

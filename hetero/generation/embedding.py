"""Embeddings of texts: their last hidden states, pooled and of length 1.

A text's tokens are those of a prompt: a tokenizer of a model for embeddings adds the token that
ends a text (Qwen3-Embedding, e5-mistral; GGUF: `tokenizer.ggml.add_eos_token`), whose hidden state
the pooling `last` takes. Several short texts of about the same length are read in one step, so that
weights are read once for all; others one after the other, in the plan's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from hetero.arguments import check_count, check_prompt
from hetero.errors import UserError
from hetero.models import LoadedModel
from hetero.models.pooling import Pooling, pooling_of
from hetero.runtime.engine import Engine
from hetero.runtime.hidden_states import hidden_states, max_together, states_together
from hetero.runtime.kv.context import Context

PADDED: Final = 4  # tokens: of texts that are read together, to a multiple of it
FEW: Final = 8  # tokens that cost a step of several texts next to nothing
Floats: TypeAlias = npt.NDArray[np.floating]
Embedding: TypeAlias = npt.NDArray[np.float32]
Texts: TypeAlias = Sequence[str | Sequence[int]]


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.embed`.

    pooling     last (the last token's hidden state) or mean (all tokens'); default: what the
                model's files say, else last
    dimensions  features to keep, from the first; for models trained for it (Matryoshka)
    """

    pooling: str | None
    dimensions: int | None


class Batch(NamedTuple):
    """Texts to read together, by their places, each padded to `length` tokens; or one as it is."""

    places: tuple[int, ...]
    length: int


def batches(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Yield the batches of texts, the longest first.

    A text is padded by a quarter of its batch's length at most, or by a few tokens. Lengths are
    rounded, since a step is lowered for each, which takes as long as running it.
    """
    left = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    while left:
        length = -(-len(texts[left[0]]) // PADDED) * PADDED
        most = max_together(engine, length) if length else 1
        least = length - max(FEW, length // 4)
        near = [place for place in left[:most] if len(texts[place]) >= least]
        yield Batch(tuple(near), length)
        left = left[len(near) :]


def embedding_steps(
    engine: Engine,
    context: Context,
    texts: Sequence[Sequence[int]],
    length: int,
    pooling: Pooling,
) -> Generator[None, None, list[Embedding]]:
    """Compute the embeddings [d] of a batch on a context, whose own text is dropped, in steps."""
    if len(texts) > 1:
        with engine.lock:
            context.rewind(0)
            states = states_together(engine, context, texts, length)
        if states is not None:
            yield
            every = [x[: len(text)] for x, text in zip(states, texts, strict=True)]
            return [_pooled(x.sum(axis=0, dtype=np.float64), x[-1], pooling) for x in every]
    embeddings = list[Embedding]()
    for text in texts:
        embedding = yield from _alone(engine, context, text, pooling)
        embeddings.append(embedding)
    return embeddings


def _alone(
    engine: Engine, context: Context, tokens: Sequence[int], pooling: Pooling
) -> Generator[None, None, Embedding]:
    """Compute the embedding of a text that is read alone.

    It begins again where devices have changed: a call that others repeat in parts has left
    only the hidden states of its last part.
    """
    while True:
        devices = engine.devices
        total, last, states = np.zeros(engine.config.hidden_size), None, None
        with engine.lock:
            context.rewind(0)
        calls = hidden_states(engine, context, tokens, every=pooling == "mean")
        while True:
            with engine.lock:
                states = next(calls, None)
            if states is None:
                break
            total, last = total + states.sum(axis=0, dtype=np.float64), states[-1]
            yield
        if engine.devices is devices:
            assert last is not None
            return _pooled(total, last, pooling)


def _pooled(total: Floats, last: Floats, pooling: Pooling) -> Embedding:
    """Return the embedding of a text by the sum of its states, or the last of them."""
    return shortened(total if pooling == "mean" else last)


def shortened(embedding: Floats, dimensions: int | None = None) -> Embedding:
    """Return the first features of an embedding, of length 1 again.

    Fewer than all have a meaning where a model was trained for that (Matryoshka embeddings).
    """
    part = np.asarray(embedding, np.float64)[:dimensions]
    return (part / max(float(np.linalg.norm(part)), 1e-12)).astype(np.float32)


def embed(
    engine: Engine,
    model: LoadedModel,
    emptied: Callable[[], AbstractContextManager[Context]],
    texts: Texts,
    options: EmbedOptions,
) -> Embedding:
    """Compute the embeddings of `LLM.embed`, each on an emptied context. Raises `UserError`."""
    if isinstance(texts, str):
        raise UserError("texts must be a list of texts; for one give [text]")
    dimensions = options.get("dimensions")
    width = check_dimensions(dimensions, model.config.hidden_size)
    pooling = pooling_of(model.source, options.get("pooling"))
    prompts = [check_prompt(text) for text in texts]
    if not all(prompts):
        raise UserError("a text is empty: give some text to embed")
    ids = [model.encode(text) if isinstance(text, str) else text for text in prompts]
    embeddings = np.empty((len(ids), width), np.float32)
    for places, length in batches(engine, ids):
        part = [ids[place] for place in places]
        with emptied() as context:
            vectors = _result(embedding_steps(engine, context, part, length, pooling))
        for place, embedding in zip(places, vectors, strict=True):
            embeddings[place] = shortened(embedding, width)
    return embeddings


def check_dimensions(wanted: int | None, width: int) -> int:
    """Return how many features an embedding of a model that has `width` gets, all by default.

    Raises `UserError`.
    """
    if wanted is not None and check_count("dimensions", wanted) > width:
        raise UserError(f"an embedding of this model has {width} dimensions: ask for fewer")
    return width if wanted is None else wanted


def _result(steps: Generator[None, None, list[Embedding]]) -> list[Embedding]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            embeddings: list[Embedding] = end.value
            return embeddings

"""Embeddings of texts: their last hidden states, pooled and of length 1.

A text's tokens are those of a prompt: a tokenizer of a model for embeddings adds the token that
ends a text (Qwen3-Embedding, e5-mistral; GGUF: `tokenizer.ggml.add_eos_token`), whose hidden state
the pooling `last` takes. Texts are read one after the other, each in the plan's calls: a step of
several contexts has one token of each, and so reads the weights more often.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from hetero.arguments import check_count, check_prompt
from hetero.errors import UserError
from hetero.models import LoadedModel
from hetero.models.pooling import Pooling, pooling_of
from hetero.runtime.engine import Engine
from hetero.runtime.hidden_states import hidden_states
from hetero.runtime.kv.context import Context

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


def embedding_steps(
    engine: Engine, context: Context, tokens: Sequence[int], pooling: Pooling
) -> Generator[None, None, Embedding]:
    """Compute the embedding [d] of a text on a context, whose own text is dropped, step by step.

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
            return shortened(total if pooling == "mean" else last)


def shortened(embedding: npt.NDArray[np.floating], dimensions: int | None = None) -> Embedding:
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
    for row, tokens in zip(embeddings, ids, strict=True):
        with emptied() as context:
            row[:] = shortened(_result(embedding_steps(engine, context, tokens, pooling)), width)
    return embeddings


def check_dimensions(wanted: int | None, width: int) -> int:
    """Return how many features an embedding of a model that has `width` gets, all by default.

    Raises `UserError`.
    """
    if wanted is not None and check_count("dimensions", wanted) > width:
        raise UserError(f"an embedding of this model has {width} dimensions: ask for fewer")
    return width if wanted is None else wanted


def _result(steps: Generator[None, None, Embedding]) -> Embedding:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            embedding: Embedding = end.value
            return embedding

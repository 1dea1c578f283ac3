"""Guesses of a Gemma 4 assistant, from the keys and values of the model that it guesses for.

The formulas are those of `hetero.models.assistant_weights`. An assistant has some 10 million
weights besides its output head, of which it multiplies a few clusters: a guess takes a few
milliseconds of one core, where a step of the smallest such model takes tens. So it is computed on
the host with numpy, whatever devices the model is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from hetero.backends.host.closing import Closing
from hetero.backends.reference.compute import activate
from hetero.backends.rope_tables import Float64Array, inverse_frequencies
from hetero.backends.weights import Float32Array
from hetero.errors import ModelError, UserError
from hetero.generation.draft_model import LEAST_PROBABILITY, TimedDrafter
from hetero.generation.loading import LoadOptions
from hetero.generation.speculative import Drafter
from hetero.models import LoadedModel
from hetero.models.assistant_weights import ASSISTANTS, AssistantLayer, AssistantWeights
from hetero.models.graph import rope_of
from hetero.models.row_tables import Ids, scaled
from hetero.runtime.kv.context import Context, Rows
from hetero.runtime.kv.kv_cache import KvCache

TARGETS: Final = tuple(ASSISTANTS.values())


def check_assistant(path: Path, model: LoadedModel, options: LoadOptions) -> AssistantWeights:
    """Return an assistant's weights. Raises `ModelError` of one that is another model's."""
    if options.sync == "copy":
        raise UserError(
            "--sync copy keeps hidden states from the host, which an assistant reads: choose "
            "another --sync"
        )
    weights = AssistantWeights(path)
    own, config = weights.config, model.config
    ours = (config.architecture in TARGETS, config.vocab_size, config.hidden_size)
    if ours != (True, own.vocab_size, weights.backbone):
        raise ModelError(
            f"{weights.name}: is the assistant of a Gemma 4 with a vocabulary of {own.vocab_size} "
            f"and a width of {weights.backbone}, which {model.name} is not: name its own assistant"
        )
    for layer in range(own.num_layers):
        source = _source(model, windowed=own.windows[layer] > 0)
        size, heads = config.at(source).head_dim, config.at(source).kv_heads
        if size != own.at(layer).head_dim or own.heads % heads:
            raise ModelError(
                f"{weights.name}: layer {layer} has {own.heads} heads of {own.at(layer).head_dim}, "
                f"which cannot attend to {heads} heads of {size} in {model.name}: name its own "
                "assistant"
            )
    return weights


def _source(model: LoadedModel, *, windowed: bool) -> int:
    """Return the last layer of a kind that has keys and values."""
    config = model.config
    layers = [i for i in config.cached_layers if (config.windows[i] > 0) == windowed]
    if not layers:
        raise ModelError(f"{model.name}: has no layer that an assistant attends to: leave it out")
    return layers[-1]


class Assistant(Closing):
    """An assistant for any number of answers at once; its guesses run under the model's lock."""

    def __init__(self, weights: AssistantWeights, model: LoadedModel) -> None:
        self._weights, config = weights, weights.config
        self._embedding = scaled(model.weights.table("embed"), model.config.embed_scale)
        self._eps = np.float32(config.rms_norm_eps)
        sources = [_source(model, windowed=window > 0) for window in config.windows]
        self._numbers = [model.config.cache_numbers[x] for x in sources]
        self._windows = [model.config.windows[x] for x in sources]
        ropes = [rope_of(config, i) for i in range(config.num_layers)]
        self._frequencies = [None if x is None else inverse_frequencies(x) for x in ropes]

    def drafter(self, context: Context, _tokens: Sequence[int]) -> Drafter:
        """Return what guesses on from the text of a context, and receives its hidden states."""
        read = _State()
        context.on_states = read.receive

        def ended() -> None:
            context.on_states = None

        return TimedDrafter(partial(self.guess, read, context), ended)

    def guess(
        self, read: _State, context: Context, text: Sequence[int], most: int
    ) -> tuple[list[int], int]:
        """Return tokens that may follow a text, and how many steps they took beyond one.

        There are none where the state before the last token, or keys and values, are not known.
        """
        position, hidden = len(text) - 1, read.before(len(text) - 1)
        if hidden is None or context.cached != position or context.holes:
            return [], 0
        caches = self._caches(context.cache, position)
        turns = [None if x is None else position * x for x in self._frequencies]
        tokens: list[int] = []
        token = text[-1]
        for step in range(most):
            ids, logits, hidden = self.step(token, hidden, caches, turns)
            best = int(np.argmax(logits))
            if LEAST_PROBABILITY * float(np.exp(logits - logits[best]).sum()) > 1:
                return tokens, step
            tokens.append(token := int(ids[best]))
        return tokens, most - 1

    def step(
        self,
        token: int,
        hidden: Float32Array,
        caches: Sequence[tuple[Float32Array, Float32Array]],
        turns: Sequence[Float64Array | None],
    ) -> tuple[Ids, Float32Array, Float32Array]:
        """Return tokens, their logits, and the hidden state of the next guess.

        `caches` are keys and values [kv_heads, n, head_dim] by layer, `turns` the angles of the
        last token's position.
        """
        weights = self._weights
        embedded = self._embedding(np.array([token]))[0]
        x = weights.pre @ np.concatenate([embedded, hidden])
        for layer, cache, turn in zip(weights.layers, caches, turns, strict=True):
            x = self._layer(layer, x, cache, turn)
        x = self._norm(x, weights.final_norm)
        ids, logits = weights.logits(x)
        after: Float32Array = weights.post @ x
        return ids, logits, after

    def _layer(
        self,
        layer: AssistantLayer,
        x: Float32Array,
        cache: tuple[Float32Array, Float32Array],
        turn: Float64Array | None,
    ) -> Float32Array:
        matrices, norms, (keys, values) = layer.matrices, layer.norms, cache
        size = keys.shape[-1]
        query = matrices["q_proj"] @ self._norm(x, norms["input_layernorm"])
        query = self._norm(query.reshape(-1, size), norms["q_norm"])
        query = _turned(query, turn).reshape(len(keys), -1, size)
        scores = query @ keys.transpose(0, 2, 1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = matrices["o_proj"] @ (scores @ values).reshape(-1)
        x = x + self._norm(mixed, norms["post_attention_layernorm"])
        h = self._norm(x, norms["pre_feedforward_layernorm"])
        gate = (matrices["gate_proj"] @ h).astype(np.float64)
        gated = activate(self._weights.config.activation, gate) * (matrices["up_proj"] @ h)
        down = matrices["down_proj"] @ gated.astype(np.float32)
        x = x + self._norm(down, norms["post_feedforward_layernorm"])
        return x * layer.scale

    def _norm(self, x: Float32Array, weight: Float32Array) -> Float32Array:
        normed: Float32Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self._eps)
        return normed * weight

    def _caches(self, cache: KvCache, tokens: int) -> list[tuple[Float32Array, Float32Array]]:
        """Return keys and values of each layer, of the tokens that the last computed one saw."""
        read: dict[int, tuple[Float32Array, Float32Array]] = {}
        for number, window in zip(self._numbers, self._windows, strict=True):
            if number in read:
                continue
            low, base = cache.resident(number)
            first = max(low, tokens - window) if window else 0
            keys, values = cache.rows(number)
            read[number] = (
                np.asarray(keys.read(first - base, tokens - base), np.float32),
                np.asarray(values.read(first - base, tokens - base), np.float32),
            )
        return [read[number] for number in self._numbers]

    def close(self) -> None:
        """Release nothing: its weights are its own."""


class _State:
    """The model's hidden states of its last call, from token `_at` on."""

    def __init__(self) -> None:
        self._at, self._rows = 0, np.zeros((0, 0), np.float32)

    def receive(self, at: int, states: Rows) -> None:
        """Keep the states of tokens from `at` on."""
        self._at, self._rows = at, states

    def before(self, position: int) -> Float32Array | None:
        """Return the state of the token before a position; None where it is not known."""
        row = position - 1 - self._at
        return self._rows[row] if 0 <= row < len(self._rows) else None


def _turned(heads: Float32Array, turn: Float64Array | None) -> Float32Array:
    """Return heads [h, size], the two halves of their first dimensions turned by angles."""
    if turn is None:
        return heads
    cos, sin = np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)
    half = len(turn)
    low, high = heads[:, :half], heads[:, half : 2 * half]
    rest = heads[:, 2 * half :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=1)

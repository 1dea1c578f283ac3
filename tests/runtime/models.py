"""A tiny random checkpoint for tests of the runtime."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from tests.support.checkpoints import Case, make_checkpoint


def tiny_model(folder: Path, **changes: Any) -> Path:
    """Write a Llama of hidden size 64 and three layers; returns its directory."""
    make_checkpoint(Case("tiny", "Llama", changes), folder)
    return folder


_contexts: weakref.WeakKeyDictionary[Engine, Context] = weakref.WeakKeyDictionary()


def context_of(engine: Engine) -> Context:
    """One context of an engine, always the same."""
    if engine not in _contexts:
        _contexts[engine] = engine.new_context()
    return _contexts[engine]


def emptied(engine: Engine) -> Context:
    """The same, without a token."""
    context = context_of(engine)
    context.truncate(0)
    return context


def greedy_tokens(engine: Engine, prompt: Sequence[int], steps: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    context = emptied(engine)
    logits, tokens = engine.prefill(context, prompt), list[int]()
    for _ in range(steps):
        tokens.append(int(np.argmax(logits)))
        logits = engine.decode(context, tokens[-1])
    return tokens

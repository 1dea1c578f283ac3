"""One context of an engine, for benches that need no second one."""

from __future__ import annotations

import weakref

from hetero.contexts.context import Context
from hetero.runtime.engine import Engine

_contexts: weakref.WeakKeyDictionary[Engine, Context] = weakref.WeakKeyDictionary()


def context_of(engine: Engine) -> Context:
    """Always the same; it lives as long as the engine."""
    if engine not in _contexts:
        _contexts[engine] = engine.new_context()
    return _contexts[engine]

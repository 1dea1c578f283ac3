"""Contexts made, forked, cut, run, saved and dropped in any order, beside a twin that remembers
texts alone: whatever came before, the logits are those of a fresh prefill of the text.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hetero import Context, UserError
from hetero.runtime.engine import ContextFullError, Engine
from tests.runtime.models import tiny_model
from tests.runtime.test_faults import make_engine
from tests.support.checkpoints import relative_error
from tests.support.selection import examples

ROOM = 5  # contexts within the budget, with the twin's
LONGEST = 80  # of `make_engine`
TOKENS = st.lists(st.integers(0, 262), min_size=1, max_size=12)

engine: Engine
twin: Context


class Contexts(RuleBasedStateMachine):
    """`texts` is what each open context should hold."""

    contexts = Bundle("contexts")

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[Context, list[int]] = {}
        self.folder = tempfile.TemporaryDirectory()
        self.saved: list[int] | None = None

    def opened(self, make: Any, text: list[int]) -> Any:
        """Another context, unless there is no room for it, which is then said."""
        if len(self.texts) + 1 < ROOM:
            context = make()
            self.texts[context] = list(text)
            return context
        with pytest.raises(UserError, match=rf"{ROOM + 1} contexts of"):
            make()
        return None

    @rule(target=contexts)
    def new(self) -> Any:
        return self.opened(engine.new_context, [])

    @rule(target=contexts, source=contexts)
    def fork(self, source: Context | None) -> Any:
        if source is None or source.closed:
            return None
        return self.opened(source.fork, self.texts[source])

    @initialize(target=contexts, tokens=TOKENS)
    def first(self, tokens: list[int]) -> Any:
        """Something to fork."""
        context = self.opened(engine.new_context, [])
        self.run(context, tokens)
        return context

    @rule(context=contexts, token=st.integers(0, 262))
    def decode(self, context: Context | None, token: int) -> None:
        self.run(context, [token])

    @rule(context=contexts, tokens=TOKENS)
    def prefill(self, context: Context | None, tokens: list[int]) -> None:
        self.run(context, tokens)

    def run(self, context: Context | None, tokens: list[int]) -> None:
        """One token decodes, several are a prompt."""
        if context is None or context.closed:
            return
        text = self.texts[context]
        if len(text) + len(tokens) > LONGEST:
            with pytest.raises(ContextFullError):
                engine.prefill(context, [*tokens, *[0] * LONGEST])
            return
        text += tokens
        if len(tokens) == 1:
            found = engine.decode(context, tokens[0]).copy()
        else:
            found = engine.prefill(context, tokens).copy()
        twin.truncate(0)
        assert relative_error(found, engine.prefill(twin, text)) < 2e-5

    @rule(context=contexts, part=st.floats(0, 1))
    def truncate(self, context: Context | None, part: float) -> None:
        if context is None or context.closed:
            return
        keep = int(part * len(context))
        context.truncate(keep)
        del self.texts[context][keep:]

    @rule(context=contexts)
    def save(self, context: Context | None) -> None:
        if context is None or context.closed or not len(context):
            return
        context.save(Path(self.folder.name) / "c")
        self.saved = list(self.texts[context])

    @rule(context=contexts)
    def load(self, context: Context | None) -> None:
        if context is None or context.closed or self.saved is None:
            return
        context.load(Path(self.folder.name) / "c")
        self.texts[context] = list(self.saved)

    @rule(context=consumes(contexts))
    def close(self, context: Context | None) -> None:
        if context is not None:
            context.close()
            self.texts.pop(context, None)

    @invariant()
    def texts_and_caches_agree(self) -> None:
        for context, text in self.texts.items():
            assert context.tokens == tuple(text)
            assert context.cached == len(text)
        assert len(engine.contexts.open_contexts()) == len(self.texts) + 1

    def teardown(self) -> None:
        for context in self.texts:
            context.close()
        self.folder.cleanup()
        gc.collect()


@pytest.mark.hypothesis
def test_any_order_of_operations(tmp_path: Path) -> None:
    global engine, twin  # noqa: PLW0603, a machine takes no arguments
    folder = tiny_model(tmp_path)
    with make_engine(folder) as free:
        needs = free.memory
    budget = needs.total_bytes + (ROOM - 1) * needs.context_bytes
    with make_engine(folder, memory_budget_bytes=budget) as engine:
        twin = engine.new_context()
        machine: Any = Contexts
        machine.TestCase.settings = settings(
            max_examples=examples(20),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        machine.TestCase().runTest()

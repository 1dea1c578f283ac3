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
from hetero.runtime.kv.layer_states import UNKNOWN
from tests.runtime.test_faults import make_engine
from tests.support.checkpoints import CASES, GEMMA4, make_checkpoint, relative_error
from tests.support.selection import examples

ROOM = 5  # contexts within the budget, with the twin's
LONGEST = 80  # of `make_engine`
TOKENS = st.lists(st.integers(3, 262), min_size=1, max_size=12)  # those before may be padding

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

    @rule(context=contexts, token=st.integers(3, 262))
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
        rest = [*context.pending, *tokens]  # a state may not be known where the text was cut
        if len(rest) == 1:
            found = engine.decode(context, rest[0]).copy()
        else:
            found = engine.prefill(context, rest).copy()
        twin.truncate(0)
        assert relative_error(found, engine.prefill(twin, text)) < 2e-5

    @rule(context=contexts, part=st.floats(0, 1))
    def truncate(self, context: Context | None, part: float) -> None:
        if context is None or context.closed:
            return
        keep = int(part * len(context))
        context.truncate(keep)
        del self.texts[context][keep:]

    @rule(context=contexts, tokens=TOKENS, right=st.integers(0, 7))
    def verify(self, context: Context | None, tokens: list[int], right: int) -> None:
        """Several tokens at once, of which the first ones stay."""
        if context is None or context.closed or len(self.texts[context]) + 8 > LONGEST:
            return
        text, tokens = self.texts[context], tokens[:7]
        self.run(context, tokens[:1])
        text += tokens
        context.cache.keep_state()
        found = engine.verify(context, tokens)
        kept = min(right, len(tokens))
        del text[len(text) - len(tokens) + kept :]
        context.rewind(len(text))
        if kept:
            twin.truncate(0)
            assert relative_error(found[kept - 1], engine.prefill(twin, text)) < 2e-5

    @rule(context=contexts)
    def interrupted(self, context: Context | None) -> None:
        """A step that ran and was not taken over: states went on without the text."""
        if context is None or context.closed or not 0 < len(self.texts[context]) < LONGEST:
            return
        context.cache.states.at = UNKNOWN
        for state in context.cache.states.tensors.values():
            state.array[...] = 1e3

    @rule(context=contexts)
    def save(self, context: Context | None) -> None:
        if context is None or context.closed or not context.cached:
            return
        try:
            context.save(Path(self.folder.name) / "c")
        except UserError as error:
            assert "yet; generate something first" in str(error)  # noqa: PT017
            assert engine.placement.graph.stateful
            return
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
            assert context.cached + len(context.pending) == len(text)
            assert engine.placement.graph.stateful or not context.pending
        assert len(engine.contexts.open_contexts()) == len(self.texts) + 1

    def teardown(self) -> None:
        for context in self.texts:
            context.close()
        self.folder.cleanup()
        gc.collect()


@pytest.mark.full
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["llama-tied", "lfm2", "qwen3.5", "gemma4"])
def test_any_order_of_operations(kind: str, tmp_path: Path) -> None:
    """Also of a model some of whose layers have a state, which cannot be cut at a token."""
    global engine, twin  # noqa: PLW0603, a machine takes no arguments
    folder = tmp_path
    make_checkpoint(next(x for x in (*CASES, GEMMA4) if x.name == kind), folder)
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

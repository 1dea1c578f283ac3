"""A persistent context that is full forgets its oldest tokens and goes on, as one of an `LLM` does:
in memory, through the disk, in another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, Service, UserError
from hetero.contexts.recent import RecentTexts
from hetero.runtime.engine import ContextFullError
from tests.contexts.models import open_llm
from tests.contexts.test_contexts import ids
from tests.contexts.test_service import evicted
from tests.runtime.models import tiny_model
from tests.support.checkpoints import Case, make_checkpoint

FULL, KEEP = 64, 4


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: Any) -> Path:
    """A model of one layer: keys and values of a token do not depend on others, so that a shift is
    exact and a text that is computed again has the same.
    """
    return tiny_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def llm(shallow: Path) -> Iterator[LLM]:
    with open_llm(shallow, "npu", max_seq_len=FULL) as opened:
        yield opened


def opened(llm: LLM, folder: Path, **options: Any) -> Service:
    given: dict[str, Any] = {"context_memory": "8MiB", "context_disk": "8MiB", "kv_bits": "raw"}
    return Service(llm, directory=folder, **(given | options))


def answer(service: Service, context: Any, turn: list[int], count: int = 20) -> tuple[int, ...]:
    """Stream the answer to a turn."""
    results: list[Any] = []
    text = [*context.tokens, *turn]
    options = {"max_tokens": count, "context_shift": True, "old": len(context)}
    for _ in context.stream_text(text, results, **options):
        pass
    return tuple(results[0].tokens)


def by_hand(llm: LLM, text: list[int], turn: list[int], count: int = 20) -> list[int]:
    """The text with the answer, every token of it computed from an empty context."""
    seen, room = [*text, *turn], len(text) - KEEP
    if (over := len(seen) + 1 - FULL) > 0:
        del seen[KEEP : KEEP + max(over, room // 2)]
    for _ in range(count):
        if len(seen) >= FULL:
            del seen[KEEP : KEEP + (len(seen) - 1 - KEEP) // 2]
        seen.append(llm.generate(seen, max_tokens=1).tokens[0])
    return seen


@pytest.mark.parametrize("between", ["stays", "disk", "text", "reopened"])
def test_a_full_context_goes_on(llm: LLM, tmp_path: Path, between: str) -> None:
    """By raw tokens, in calls whose prompts and whose answers do not fit."""
    service = opened(llm, tmp_path, recompute=between == "text")
    context = service.bind("a").new_context(chat=False)
    text: list[int] = []
    for seed, turn in enumerate((30, 12, 40, 1, 33, 8)):
        said = ids(seed, turn)
        text = by_hand(llm, text, said)
        assert list(answer(service, context, said)) == text[-20:]
        assert list(context.tokens) == text
        if between == "reopened":
            service.close()
            service = opened(llm, tmp_path, recompute=False)
            context = service.bind("a").contexts()[0]
            assert list(context.tokens) == text
        elif between != "stays":
            evicted(service, disk=between == "disk")
        switch = context.last_switch
        if between in ("disk", "reopened") and seed and switch is not None:
            assert switch.loaded_tokens > 0
            assert switch.recomputed_tokens == 0
        service.memory.check()
    service.close()


@pytest.mark.full
def test_a_prompt_and_a_chat_stream_on(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service, LLM("demo", device="npu", max_seq_len=96) as demo:
        raw = service.bind("a").new_context(chat=False)
        for _ in range(4):
            result = raw.call("abcdefghijklmnopqrst", max_tokens=16, context_shift=True)
            assert len(result.tokens) == 16
            assert result.finish_reason == "length"
        assert result.stats.shifted_tokens > 0
        with pytest.raises(ContextFullError):
            raw.call("x" * 200, context_shift=True)
        with pytest.raises(ContextFullError):
            raw.call("abcdefghijklmnopqrstuvwxyz" * 2, max_tokens=2)
        with opened(demo, tmp_path / "demo") as other:
            chat = other.bind("a").new_context(system="You are kind.")
            for i in range(4):
                shifted = chat.call(f"Tell me of fox {i}", max_tokens=24, context_shift=True)
            assert shifted.stats.shifted_tokens > 0
            assert len(chat.messages) == 9
            assert "You are kind." in demo.decode(chat.tokens)
            assert "fox 0" not in demo.decode(chat.tokens)


def test_a_shifted_text_is_no_other_ones(llm: LLM, tmp_path: Path) -> None:
    """Forks go on from it; a text with the same tokens, or one that leaves it, does not."""
    with opened(llm, tmp_path, recompute=False) as service:
        app = service.bind("a")
        context = app.new_context(chat=False)
        for seed in (1, 2, 3):
            answer(service, context, ids(seed, 20))
        fork, same = context.fork(), app.new_context(chat=False)
        same.become(context.tokens[:-1])
        evicted(service, disk=True)
        assert answer(service, fork, [7]) == answer(service, context, [7])
        for each in (fork, context):
            assert each.last_switch is not None
            assert each.last_switch.recomputed_tokens == 0
        answer(service, same, [7], 1)
        assert same.last_switch is not None
        assert same.last_switch.loaded_tokens == same.last_switch.reused_tokens == 0
        results: list[Any] = []
        for _ in context.stream_text(ids(9, 30), results, max_tokens=2):
            pass
        assert results[0].stats.reused_tokens == 0
        service.swap.drain()
        service.memory.check()
    with opened(llm, tmp_path) as service:
        assert not service.bind("a").contexts()[0]._cached.shifted


@pytest.mark.full
def test_recent_texts_stream_on(llm: LLM, tmp_path: Path) -> None:
    text: list[int] = []
    with opened(llm, tmp_path) as service:
        recent = RecentTexts(service.bind("a"), 2)
        for seed in range(5):
            results: list[Any] = []
            whole = [*text, *ids(seed, 15)]
            at = recent.choose(whole)
            options = {"max_tokens": 20, "context_shift": True, "old": len(text)}
            for _ in recent.stream(at, whole, results, **options):
                pass
            text = by_hand(llm, text, ids(seed, 15))
            assert list(results[0].tokens) == text[-20:]
            assert recent.texts[at].cached.tokens == text
            assert seed == 0 or results[0].stats.reused_tokens > 0
        assert results[0].stats.shifted_tokens > 0


def test_a_model_that_cannot_be_shifted_says_so(tmp_path: Path) -> None:
    make_checkpoint(Case("hunyuan", "HunYuanDenseV1", {"head_dim": 16}), tmp_path / "model")
    with (
        open_llm(tmp_path / "model", "npu", max_seq_len=FULL) as llm,
        opened(llm, tmp_path / "contexts") as service,
    ):
        context = service.bind("a").new_context(chat=False)
        with pytest.raises(UserError, match="cannot be shifted"):
            context.call("Hello", context_shift=True)

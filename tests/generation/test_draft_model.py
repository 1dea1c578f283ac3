"""A draft model guesses tokens ahead; the answer is the larger model's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, ModelError, UserError
from hetero.generation.speculative import Guess, LookupDrafter
from tests.runtime.models import tiny_model

OPTIONS: dict[str, Any] = {"device": "gpu", "draft_device": "gpu", "max_seq_len": 256}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", device="gpu", max_seq_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def guessed() -> Iterator[LLM]:
    """A model that is its own draft: every likely guess is right."""
    with LLM("demo", draft_model="demo", **OPTIONS) as opened:
        yield opened


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "top_k": 20, "seed": 5},
        {"temperature": 1.5, "seed": 2, "speculative": 3},
        {"repetition_penalty": 1.3, "stop": ["."]},
    ],
    ids=["greedy", "sampled", "hot", "penalised"],
)
def test_a_draft_changes_no_token(plain: LLM, guessed: LLM, options: dict[str, Any]) -> None:
    wanted = plain.generate("Once upon a time", max_tokens=50, **{**options, "speculative": 0})
    answer = guessed.generate("Once upon a time", max_tokens=50, **options)
    assert (answer.tokens, answer.text) == (wanted.tokens, wanted.text)
    assert answer.finish_reason == wanted.finish_reason
    assert answer.stats.speculation is not None
    assert wanted.stats.speculation is None


@pytest.mark.full
def test_its_own_guesses_are_accepted(guessed: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those of near ties, which rows of several tokens may turn; nothing is looked up."""
    monkeypatch.setattr(LookupDrafter, "guess", lambda *_: Guess())
    drafts = guessed.generate("Once upon a time", max_tokens=100).stats.speculation
    assert drafts is not None
    assert drafts.drafted > 0
    assert drafts.rate > 0.9


def test_speculation_can_be_left_out(guessed: LLM) -> None:
    assert guessed.generate("Once", max_tokens=5, speculative=0).stats.speculation is None
    assert guessed.generate("Once", max_tokens=5, context_shift=True).stats.speculation is None


@pytest.mark.full
def test_a_conversation_and_forks_go_on_with_the_draft(plain: LLM, guessed: LLM) -> None:
    talks = [llm.conversation() for llm in (plain, guessed)]
    for asked in ("Tell me a story.", "And then?"):
        texts = [talk.say(asked, max_tokens=24).text for talk in talks]
        assert texts[0] == texts[1]
    drawn = [
        llm.generate_many(["Once upon"], n=3, max_tokens=12, temperature=1.0, seed=4)[0]
        for llm in (plain, guessed)
    ]
    assert [x.tokens for x in drawn[0]] == [x.tokens for x in drawn[1]]


@pytest.mark.full
def test_answers_at_once_have_contexts_of_the_draft_each(plain: LLM, guessed: LLM) -> None:
    prompts = ["Once upon a time", "The fox", "A red ball", "One day"]
    wanted = [plain.generate(x, max_tokens=40).tokens for x in prompts]
    answers: dict[int, Any] = {}

    def ask(i: int) -> None:
        answers[i] = guessed.generate(prompts[i], max_tokens=40).tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[i] for i in range(len(prompts))] == wanted


@pytest.mark.full
def test_a_draft_of_fewer_positions_stops_guessing(tmp_path: Path) -> None:
    large = str(tiny_model(tmp_path / "large"))
    small = str(tiny_model(tmp_path / "small", max_position_embeddings=64))
    prompt = [9, 8, 7, 6] * 12
    options = {"device": "gpu", "weights": "f32", "kv": "f32", "max_seq_len": 200}
    with LLM(large, **options) as llm:
        wanted = llm.generate(prompt, max_tokens=60).tokens
    with LLM(large, draft_model=small, draft_device="gpu", **options) as llm:
        assert llm.generate(prompt, max_tokens=60).tokens == wanted
        assert llm.generate([*prompt] * 3, max_tokens=5).tokens


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"another vocabulary than demo \(token .* smaller model"):
        LLM("demo", draft_model="random:qwen2.5-0.5b", **OPTIONS)


def test_a_draft_has_no_memory_budget() -> None:
    with pytest.raises(UserError, match="memory_budget bounds one model"):
        LLM("demo", draft_model="demo", memory_budget="1GiB", **OPTIONS)

"""Speculative decoding: the tokens of plain decoding in fewer calls, wherever a text ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from hetero import LLM, UserError
from hetero.generation.speculative import Drafter, Guess, SpeculativeDecoder
from hetero.models import open_model
from hetero.solver.handmade import layer_level
from tests.runtime.models import tiny_model

REPEATING = "The fox ran home. The fox ran home. The fox ran home. The fox"


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", device="gpu", max_seq_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Iterator[LLM]:
    """A random model, which soon repeats itself; both devices."""
    folder = str(tiny_model(tmp_path_factory.mktemp("tiny")))
    plan = layer_level(open_model(folder, weights="f32").spec())
    with LLM(folder, plan=plan, weights="f32", max_seq_len=200, kv="f32") as opened:
        yield opened


@pytest.mark.parametrize(
    ("prompt", "guesses", "options"),
    [
        ("Once upon a time", 1, {}),
        (REPEATING, 7, {}),
        (REPEATING, 5, {"temperature": 0.9, "top_k": 20, "seed": 5}),
        (REPEATING, 3, {"repetition_penalty": 1.3}),
    ],
    ids=["greedy", "repeating", "sampled", "penalised"],
)
def test_guesses_change_no_token(
    demo: LLM, prompt: str, guesses: int, options: dict[str, Any]
) -> None:
    plain = demo.generate(prompt, max_tokens=50, **options)
    guessed = demo.generate(prompt, max_tokens=50, speculative=guesses, **options)
    assert (guessed.tokens, guessed.text) == (plain.tokens, plain.text)
    assert guessed.finish_reason == plain.finish_reason
    found = guessed.stats.speculation
    assert found is not None
    assert found.calls + found.accepted == guessed.stats.completion_tokens - 1 + _ended(guessed)
    assert plain.stats.speculation is None


def _ended(result: Any) -> int:
    """1 if the end-of-text token, which is no part of the answer, was computed too."""
    return int(result.finish_reason == "stop")


@pytest.mark.full
def test_a_text_that_repeats_needs_few_calls(tiny: LLM) -> None:
    prompt = [9, 8, 7, 6] * 8
    plain = tiny.generate(prompt, max_tokens=80)
    guessed = tiny.generate(prompt, max_tokens=80, speculative=7)
    assert guessed.tokens == plain.tokens
    found = guessed.stats.speculation
    assert found is not None
    assert found.accepted > 0
    assert 0 < found.rate <= 1
    assert found.calls < 79


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_answer_ends_at_max_tokens_and_the_context_with_it(tiny: LLM, count: int) -> None:
    prompt = [9, 8, 7, 6] * 8
    plain = tiny.generate(prompt, max_tokens=count)
    guessed = tiny.generate(prompt, max_tokens=count, speculative=7)
    assert (guessed.tokens, guessed.finish_reason) == (plain.tokens, "length")
    assert tiny.context.cached == len(prompt) + count - 1


@pytest.mark.parametrize("room", range(1, 10))
def test_the_end_of_the_context_ends_the_answer(tiny: LLM, room: int) -> None:
    prompt = ([9, 8, 7, 6] * 50)[: 200 - room]
    guessed = tiny.generate(prompt, max_tokens=50, speculative=7)
    assert guessed.finish_reason == "context"
    assert guessed.tokens == tiny.generate(prompt, max_tokens=50).tokens
    assert len(guessed.tokens) == room


def test_a_stop_text_ends_the_answer(demo: LLM) -> None:
    text = demo.generate(REPEATING, max_tokens=40).text
    stop = text[len(text) // 2 :][:4]
    plain = demo.generate(REPEATING, max_tokens=40, stop=[stop])
    guessed = demo.generate(REPEATING, max_tokens=40, stop=[stop], speculative=5)
    assert guessed.finish_reason == plain.finish_reason == "stop"
    assert (guessed.text, guessed.tokens) == (plain.text, plain.tokens)


@pytest.mark.full
@pytest.mark.parametrize("taken", [3, 4, 5, 6, 7, 8, 9, 10])
def test_an_answer_that_is_not_read_to_its_end_leaves_no_guess_in_the_context(
    tiny: LLM, taken: int
) -> None:
    """Tokens 8 and 9 in random order: about every second guess is wrong."""
    prompt = [9, 8, 8, 9] * 4
    stream = tiny.stream(
        prompt, max_tokens=40, speculative=7, temperature=1.0, seed=2, logit_bias={8: 1e3, 9: 1e3}
    )
    tokens = [piece.token for piece in islice(stream, taken)]
    stream.close()
    longer = [*prompt, *tokens, 3, 1]
    again = tiny.generate(longer, max_tokens=4, reuse=True, logprobs=3)
    fresh = tiny.generate(longer, max_tokens=4, logprobs=3)
    assert again.stats.reused_tokens == len(prompt) + taken - 1
    found, wanted = ([x.logprob for x in r.logprobs] for r in (again, fresh))
    assert np.allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_a_conversation_says_the_same_with_guesses(demo: LLM) -> None:
    talks = [demo.conversation(), demo.conversation()]
    for asked in ("Tell me a story.", "Tell me a story.", "And then?"):
        plain = talks[0].say(asked, max_tokens=24)
        guessed = talks[1].say(asked, max_tokens=24, speculative=6)
        assert guessed.text == plain.text
    assert talks[0].messages == talks[1].messages


@pytest.mark.full
def test_right_and_wrong_guesses_leave_the_logits_of_the_text(tiny: LLM) -> None:
    prompt = [9, 8, 7, 6] * 8
    plain = tiny.generate(prompt, max_tokens=30, logprobs=0)
    guessed = tiny.generate(prompt, max_tokens=30, logprobs=0, speculative=7)
    wanted = [x.logprob for x in plain.logprobs]
    assert np.allclose([x.logprob for x in guessed.logprobs], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_guesses_leave_the_distribution_of_sampled_tokens(tiny: LLM, temperature: float) -> None:
    """Pearson's chi-square of pairs of tokens, the second of which a guess was made for."""
    prompt, allowed, runs = [9, 8, 7, 6] * 8, [6, 7, 8, 9], 2000
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 2, "speculative": 7}
    options["logit_bias"] = dict.fromkeys(allowed, 1e3)
    pairs = Counter(
        tuple(tiny.generate(prompt, seed=seed, **options).tokens) for seed in range(runs)
    )

    def probabilities(text: list[int]) -> Any:
        with tiny.new_context() as context:
            logits = tiny.engine.prefill(context, text)[allowed].astype(np.float64) / temperature
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    first, chi_square = probabilities(prompt), 0.0
    for one, share in zip(allowed, first, strict=True):
        for other, then in zip(allowed, probabilities([*prompt, one]), strict=True):
            expected = runs * share * then
            chi_square += (pairs[one, other] - expected) ** 2 / expected
    assert chi_square < 37.7  # 15 degrees of freedom: one in a thousand is beyond it


class Dear(Drafter):
    """Always guesses one token, which is wrong, and takes long."""

    guess_s = 10.0

    def __init__(self) -> None:
        self.asked = 0

    def guess(self, text: Sequence[int], most: int) -> Guess:
        self.asked += 1
        return Guess([1] * min(most, 1))

    def close(self) -> None:
        pass


@pytest.mark.full
def test_guesses_come_from_where_they_save_most_time(tiny: LLM) -> None:
    """Lookups are right and free here: a model that guesses is asked for a few tokens only."""
    dear, answer, prompt = Dear(), [9, 8, 7, 6] * 12, [9, 8, 7, 6] * 4
    with tiny.new_context() as context:
        tiny.engine.prefill(context, prompt)
        guesses = SpeculativeDecoder(tiny.engine, context, prompt, 7, dear)
        for token in answer:
            guesses.decode(token)
        guesses.close()
    assert guesses.statistics.accepted > len(answer) // 2
    assert dear.asked < 4


def test_more_guesses_than_a_step_verifies_are_refused(tiny: LLM) -> None:
    with pytest.raises(UserError, match="guesses 1 to 7 tokens ahead, got 8"):
        tiny.generate([1, 2, 3], speculative=8)
    assert tiny.generate([1, 2, 3], max_tokens=2).tokens

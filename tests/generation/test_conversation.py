"""Conversations, sessions, penalties and log-probabilities on the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.errors import ModelError, UserError
from hetero.generation.sampling import Sampler, SamplingParams, log_softmax


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu", max_seq_len=200) as opened:
        yield opened


def test_a_second_turn_prefills_only_what_is_new(llm: LLM) -> None:
    talk = llm.conversation(system="You tell stories.")
    first = talk.say("Tell me a story.", max_tokens=20)
    second = talk.say("And then?", max_tokens=20)
    assert first.stats.reused_tokens == 0
    assert second.stats.reused_tokens >= first.stats.prompt_tokens
    fresh = llm.chat(talk.messages[:-1], max_tokens=20)
    assert fresh.text == second.text
    assert fresh.stats.reused_tokens == 0


@pytest.mark.full
def test_a_full_context_drops_the_oldest_turns_but_not_the_system_message(llm: LLM) -> None:
    talk = llm.conversation(system="You tell stories.")
    for _ in range(8):
        answer = talk.say("Tell me a story about a fox.", max_tokens=40)
        assert answer.tokens
        assert answer.stats.prompt_tokens < 200
    assert talk.dropped > 0
    assert talk.dropped % 2 == 0
    assert len(talk.messages) == 17
    with pytest.raises(UserError, match="the message has"):
        talk.say("word " * 300)
    assert len(talk.messages) == 17


def test_a_session_comes_back(llm: LLM, tmp_path: Path) -> None:
    talk = llm.conversation()
    talk.say("Tell me a story.", max_tokens=20)
    talk.save(tmp_path / "s")
    wanted = talk.say("And then?", max_tokens=20)
    llm.generate("something else", max_tokens=3)
    again = llm.conversation()
    again.load(tmp_path / "s")
    found = again.say("And then?", max_tokens=20)
    assert found.tokens == wanted.tokens
    assert found.stats.reused_tokens == wanted.stats.reused_tokens > 0


def test_a_session_that_does_not_fit_changes_nothing(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "s"
    talk = llm.conversation()
    talk.say("Tell me a story.", max_tokens=5)
    talk.save(path)
    good, before = path.read_bytes(), (llm.context.cached, llm.context.tokens)
    damaged = bytearray(good)
    damaged[-5] ^= 1
    cases = {
        bytes(damaged): "its hash differs",
        good[:-7]: "download the file again",
        good.replace(b'"numerics": "f', b'"numerics": "F'): "holds keys and values as Float32",
        good.replace(b'"schema_version": "2', b'"schema_version": "9'): "another version of hetero",
        b"": "at least 8 bytes",
    }
    for content, sentence in cases.items():
        path.write_bytes(content)
        with pytest.raises(ModelError, match=sentence):
            llm.load_session(path)
        assert (llm.context.cached, llm.context.tokens) == before
    with pytest.raises(ModelError, match="no such session file"):
        llm.load_session(tmp_path / "none")
    path.write_bytes(good)
    with (
        LLM("demo", device="npu", weights="f32") as other,
        pytest.raises(ModelError, match="model"),
    ):
        other.load_session(path)
    with (
        LLM("demo", device="npu", max_seq_len=4) as small,
        pytest.raises(ModelError, match="larger max_seq_len"),
    ):
        small.load_session(path)


def test_nothing_to_save_and_nowhere_to_save_it(tmp_path: Path) -> None:
    with LLM("demo", device="npu") as fresh:
        with pytest.raises(UserError, match="nothing to save"):
            fresh.save_session(tmp_path / "s")
        fresh.generate("One", max_tokens=1)
        with pytest.raises(UserError, match="cannot be written"):
            fresh.save_session("/proc/nope/s")
    assert not list(tmp_path.iterdir())


def test_the_context_holds_prompt_and_answer(llm: LLM) -> None:
    ids = llm.encode("One day")[:1] * 199
    result = llm.generate(ids, max_tokens=5)
    assert (len(result.tokens), result.finish_reason) == (1, "context")
    with pytest.raises(UserError, match="a prompt of 200 tokens and its answer do not fit"):
        llm.generate([*ids, 5])


def test_several_prompts_and_the_best_of_several_seeds(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 8}
    found = llm.generate_many(["One day", "Once upon"], n=3, **options)
    assert [len(x) for x in found] == [3, 3]
    for answers in found:
        means = [x.mean_logprob for x in answers]
        assert means == sorted(means, reverse=True)
        assert len({x.tokens for x in answers}) > 1
    assert llm.generate_many(["One day", "Once upon"], n=3, **options)[0][0].tokens == (
        found[0][0].tokens
    )
    single = {llm.generate("One day", **{**options, "seed": 5 + i}).tokens for i in range(3)}
    assert single == {x.tokens for x in found[0]}


def test_log_probabilities_are_those_of_the_logits(llm: LLM) -> None:
    result = llm.generate("One day", max_tokens=4, echo=True, logprobs=3)
    ids = [*llm.encode("One day"), *result.tokens]
    wanted = log_softmax(llm.logits(ids))
    seen = [*result.prompt_logprobs, *result.logprobs]
    assert [x.token for x in seen] == ids[1:]
    for i, entry in enumerate(seen):
        assert entry.logprob == pytest.approx(wanted[i, ids[i + 1]], abs=2e-3)
        assert len(entry.top) == 3
        assert entry.top[0][1] == pytest.approx(wanted[i].max(), abs=2e-3)
    assert result.text.startswith("One day")


def test_stop_texts_across_tokens(llm: LLM) -> None:
    whole = llm.generate("One day", max_tokens=30)
    for start in range(5, 60, 7):
        stop = whole.text[start : start + 6]
        cut = llm.generate("One day", max_tokens=30, stop=[stop])
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"


def test_penalties() -> None:
    logits = np.array([2.0, 1.0, 1.5, -3.0], dtype=np.float32)
    cases: list[tuple[dict[str, Any], list[int], int]] = [
        ({"presence_penalty": 0.6}, [0], 2),
        ({"frequency_penalty": 0.3}, [0], 0),
        ({"frequency_penalty": 0.3}, [0, 0], 2),
        ({"logit_bias": {3: 6.0}}, [], 3),
        ({"repetition_penalty": 4.0}, [0, 2], 1),
        ({"presence_penalty": -3.0}, [1], 1),
    ]
    for options, seen, wanted in cases:
        sampler = Sampler(SamplingParams(**options))
        assert sampler.choose(logits, seen, seen) == wanted, options
    assert logits.tolist() == [2.0, 1.0, 1.5, -3.0]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (5, {}, "a prompt must be a text or a list of token ids, got int '5'"),
    (None, {}, "a prompt must be a text or a list of token ids, got nothing (None)"),
    (b"x", {}, "a prompt must be a text or a list of token ids"),
    ([1, "2"], {}, "token ids must be whole numbers, got str '2'"),
    ([1, 2.5], {}, "token ids must be whole numbers, got float '2.5'"),
    ([True], {}, "token ids must be whole numbers"),
    ("x", {"max_tokens": "3"}, "max_tokens must be a whole number, got str '3'"),
    ("x", {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ("x", {"stop": 5}, "stop must be a text or a list of texts, got int '5'"),
    ("x", {"stop": [1]}, "stop must be a text or a list of texts"),
    ("x", {"stop": [""]}, "a stop text must not be empty"),
    ("x", {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ("x", {"temperature": float("nan")}, "temperature must be at least 0, got nan"),
    ("x", {"temperature": float("inf")}, "temperature must be at least 0, got inf"),
    ("x", {"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
    ("x", {"seed": -1}, "seed must be at least 0, got -1"),
    ("x", {"seed": "a"}, "seed must be a whole number, got 'a'"),
    ("x", {"logit_bias": [1]}, "logit_bias must map token ids to numbers, got [1]"),
    ("x", {"logit_bias": {1: float("nan")}}, "logit_bias of token 1 must be within"),
    ("x", {"logit_bias": {-1: 1.0}}, "logit_bias: token id -1 is outside the vocabulary"),
    ("x", {"logprobs": -1}, "logprobs must be at least 0, got -1"),
    ("x", {"min_p": 2}, "min_p must be in [0, 1], got 2"),
    ("x", {"frequency_penalty": None}, "frequency_penalty must be a number, got None"),
    ("x", {"temprature": 1.0}, "did you mean 'temperature'?"),
]


@pytest.mark.parametrize(("prompt", "options", "sentence"), WRONG)
def test_wrong_arguments_are_one_sentence(
    llm: LLM, prompt: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        llm.generate(prompt, **options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "the conversation is empty"),
        ("hello", "a conversation must be a list of messages"),
        (None, "a conversation must be a list of messages"),
        ([5], "message 0 must be an object with role and content, got int '5'"),
        ([{"role": "robot", "content": "x"}], "role must be one of system, developer, user"),
        ([{"content": "x"}], "role must be one of"),
        ([{"role": "user"}], "message 0: content must be a text, got nothing (None)"),
        ([{"role": "user", "content": 5}], "message 0: content must be a text, got int '5'"),
    ],
)
def test_wrong_conversations_are_one_sentence(llm: LLM, messages: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        llm.chat(messages)
    assert sentence in str(caught.value)

"""The Python surface that users of other engines expect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hetero
from hetero import LLM, SamplingParams, UserError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu", max_seq_len=200) as opened:
        yield opened


def test_sampling_parameters_are_taken_whole(llm: LLM) -> None:
    whole = SamplingParams(temperature=0.9, top_k=20, seed=7)
    one = llm.generate("Once upon a time", max_tokens=12, sampling=whole)
    parts = llm.generate("Once upon a time", max_tokens=12, temperature=0.9, top_k=20, seed=7)
    assert one.text == parts.text
    with pytest.raises(UserError, match="'top_k' is given beside sampling"):
        llm.generate("Once", sampling=whole, top_k=3)
    with pytest.raises(UserError, match=r"sampling must be a hetero\.SamplingParams, got dict"):
        llm.generate("Once", sampling={"top_k": 3})  # type: ignore[call-overload]


def test_a_list_of_texts_has_a_list_of_answers(llm: LLM) -> None:
    texts = ["Once upon a time", "One day, a fox"]
    answers = llm.generate(texts, max_tokens=8)
    assert [x.text for x in answers] == [llm.generate(t, max_tokens=8).text for t in texts]


def test_text_and_ids(llm: LLM) -> None:
    text = "Once upon a time, there was"
    assert llm.decode(llm.encode(text)) == text
    assert llm.tokenizer.encode(text) == llm.encode(text)
    with pytest.raises(UserError):
        llm.decode("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", hetero.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hetero, name).__name__ == name

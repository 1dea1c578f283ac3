"""The Python surface that users of other engines expect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import hetero
from hetero import LLM, SamplingParams, UserError
from hetero.backends.errors import DeviceOptionError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu", max_seq_len=200) as opened:
        yield opened


def test_a_renamed_class_is_there_under_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"hetero\.Piece is hetero\.Delta now"):
        assert hetero.Piece is hetero.Delta


def test_sampling_parameters_are_taken_whole(llm: LLM) -> None:
    whole = SamplingParams(temperature=0.9, top_k=20, seed=7)
    one = llm.generate("Once upon a time", max_tokens=12, sampling=whole)
    parts = llm.generate("Once upon a time", max_tokens=12, temperature=0.9, top_k=20, seed=7)
    assert one.text == parts.text
    with pytest.raises(UserError, match="'top_k' conflicts with sampling"):
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


@pytest.mark.parametrize("name", ["ModelError", "PlanError", "ProfileError"])
def test_what_a_user_can_mend_is_a_user_error(name: str) -> None:
    kind = getattr(hetero, name)
    assert issubclass(kind, UserError)
    assert str(kind("two\nlines")) == "two lines"


def test_a_plan_or_device_that_cannot_be_is_one() -> None:
    with pytest.raises(UserError, match="memory"):
        hetero.plan("demo", "host", seq_lens=(64,), memory_budget="1KiB", curves=False)
    with pytest.raises(UserError, match="no-such"):
        LLM("demo", device="npu", npu="no-such")
    assert issubclass(DeviceOptionError, hetero.DeviceError)
    assert not issubclass(hetero.DeviceError, UserError)  # a device failed: not the user's doing


def test_a_stream_can_be_awaited(llm: LLM) -> None:
    """And the event loop goes on between its pieces."""

    async def answer() -> tuple[str, int]:
        ticks, text = 0, ""

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        async for piece in llm.stream("Once upon a time", max_tokens=8):
            text += piece.text
        ticking.cancel()
        return text, ticks

    text, ticks = asyncio.run(answer())
    assert text == llm.generate("Once upon a time", max_tokens=8).text
    assert ticks > 8


def test_what_a_shell_shows_is_short(llm: LLM) -> None:
    plan = hetero.plan("demo", "host", seq_lens=(64,), curves=False)
    profile = hetero.DeviceProfile.load("host")
    for shown in (repr(llm), repr(plan), str(plan), repr(profile), str(profile)):
        assert len(shown) < 250
    assert plan.plan_id in repr(plan)
    assert "'demo'" in repr(llm)


def test_a_notebook_shows_a_plan_as_its_report() -> None:
    plan = hetero.plan("demo", "host", seq_lens=(64,), curves=False)
    shown = plan._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "In short" in shown
    assert "<script" not in shown

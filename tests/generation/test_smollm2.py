"""A real assistant in the formats of its file, against `transformers` in float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import pytest

from hetero import LLM
from tests.support.real_models import SMOLLM2, find_model, float32_llama

torch = pytest.importorskip("torch")
TOKENS: Final = 16
CHATS: Final = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Translate to French: the cat sleeps on the chair.",
)
TEXTS: Final = (
    "Once upon a time",
    "The three laws of thermodynamics state that",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    '{"name": "Ada", "born": 1815, "languages": [',
    "中国的首都是",
    "東京は日本の",
    "Москва является",
    "The party was great 🎉🎉 and then",
    "1, 1, 2, 3, 5, 8, 13,",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 12 times 12?\nA:",
    "La capitale de la France est",
    "".join(f"On day {i} the crew sailed {37 * i % 101} miles to the west. " for i in range(24)),
)


COMPARED: Final = (1, 9, 14, 17)  # prompts on which caches in f16 are worth the most, and others


def _open(device: Any, kv: str) -> LLM:
    path = str(find_model(SMOLLM2))
    return LLM(path, device=device, weights="gguf-a16", kv=kv, max_seq_len=2048)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["gpu", "npu", "hetero"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with _open(request.param, "f16") as opened:
        placement = opened.generate("Hello", max_tokens=2).stats.placement
        assert set(placement) == {"hetero": {"gpu", "npu"}}.get(request.param, {request.param})
        yield opened


@cache
def _reference() -> Any:
    return float32_llama(find_model(SMOLLM2))


@cache
def log_probabilities(tokens: tuple[int, ...], count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32's log-probabilities [count, vocab] of the last tokens."""
    with torch.no_grad():
        logits = _reference()(torch.tensor([tokens[:-1]]), logits_to_keep=count).logits[0]
        return np.asarray(torch.log_softmax(logits, -1))


def assert_greedy(llm: LLM, number: int, atol: float) -> None:
    """Every token is float32's most likely one, and its log-probability nearly float32's."""
    chat = number < len(CHATS)
    text = (CHATS + TEXTS)[number]
    prompt = llm.encode(text, chat=chat)
    answer = llm.generate(text, chat=chat, max_tokens=TOKENS, logprobs=0).logprobs
    made = [x.token for x in answer]  # the end of a turn is one
    wanted = log_probabilities((*prompt, *made), len(made))
    assert made == wanted.argmax(-1).tolist()
    np.testing.assert_allclose([x.logprob for x in answer], wanted.max(-1), rtol=0, atol=atol)


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(x, marks=() if x in (0, *COMPARED[:2]) else pytest.mark.full)
        for x in range(len(CHATS) + len(TEXTS))
    ],
)
def test_greedy_answers_equal_float32(llm: LLM, number: int) -> None:
    """With caches of 16 bits, whose rounding on both devices is worth 0.012 on one prompt."""
    assert_greedy(llm, number, 0.01 if len(llm.plan.devices()) == 1 else 0.02)


@pytest.mark.full
def test_greedy_answers_equal_float32_more_nearly_with_exact_caches() -> None:
    with _open("hetero", "f32") as exact:
        for number in COMPARED:
            assert_greedy(exact, number, 0.01)

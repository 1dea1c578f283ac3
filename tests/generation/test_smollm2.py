"""A real assistant in the formats of its file, against `transformers` and llama.cpp in float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pydoc_data import topics
from typing import Any, Final

import numpy as np
import pytest

from bench.lab.llama_process import LlamaProcess
from bench.lab.perplexities import LLAMA_CPP, scores
from hetero import LLM
from hetero.generation.sampling import log_softmax
from tests.support.real_models import SMOLLM2, find_model, float32_llama, write_float32

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.optimised
TOKENS: Final = 16
LIKELIEST: Final = 5
CHATS: Final = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Translate to French: the cat sleeps on the chair.",
    "Schreibe einen Satz über Berlin.",
    "日本の首都はどこですか。",
    "Fix this code: for i in range(10) print(i)",
    "Summarise: The meeting moved from Monday to Tuesday, because the room was taken.",
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
    "العربية لغة",
    "हिन्दी भारत की",
    "Αθήνα και Θεσσαλονίκη",
    "fn main() {\n    let mut total: u64 = 0;\n    for x in",
    "\\begin{theorem}\nLet $n$ be a prime. Then",
    "  - name: build\n    run: |\n      make -j",
    "".join(f"On day {i} the crew sailed {37 * i % 101} miles to the west. " for i in range(24)),
)


COMPARED: Final = (1, 13, 18, 21)  # prompts on which caches in f16 are worth the most, and others
SCORED: Final = 400  # tokens of `ARTICLE`
ARTICLE: Final = "\n".join(topics.topics[x] for x in ("numbers", "assignment", "strings"))


def _open(device: Any, kv: str, **options: Any) -> LLM:
    path = str(find_model(SMOLLM2))
    given: dict[str, Any] = {"weights": "gguf-a16", "max_seq_len": 2048}
    return LLM(path, device=device, kv=kv, **(given | options))


@pytest.fixture(scope="module", params=["gpu", "npu", "hetero"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with _open(request.param, "f16") as opened:
        placement = opened.generate("Hello", max_tokens=2).stats.placement
        assert set(placement) == {"hetero": {"gpu", "npu"}}.get(request.param, {request.param})
        yield opened


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaProcess]:
    """The values of the file as floats: with codes it rounds activations, by up to a nat."""
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    path = tmp_path_factory.mktemp("floats") / "model.gguf"
    write_float32(find_model(SMOLLM2), path)
    with LlamaProcess(path, kv="f32", context=2048) as process:
        yield process


@cache
def _reference() -> Any:
    return float32_llama(find_model(SMOLLM2))


@cache
def log_probabilities(tokens: tuple[int, ...], count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32's log-probabilities [count, vocab] of the last tokens."""
    with torch.no_grad():
        logits = _reference()(torch.tensor([tokens[:-1]]), logits_to_keep=count).logits[0]
        return np.asarray(torch.log_softmax(logits, -1))


def assert_greedy(llm: LLM, number: int, atol: float, other: LlamaProcess | None = None) -> None:
    """Every token is float32's most likely one, and the likeliest tokens' log-probabilities are
    nearly float32's, by `transformers` and by llama.cpp.
    """
    chat = number < len(CHATS)
    text = (CHATS + TEXTS)[number]
    prompt = llm.encode(text, chat=chat)
    answer = llm.generate(text, chat=chat, max_tokens=TOKENS, logprobs=LIKELIEST).logprobs
    made = [x.token for x in answer]  # the end of a turn is one
    whole = (*prompt, *made)
    references = [log_probabilities(whole, len(made))]
    if other is not None:
        references.append(log_softmax(other.logits(whole[:-1])[-len(made) :]))
    tokens, found = (np.array([[x[i] for x in step.top] for step in answer]) for i in (0, 1))
    for wanted in references:
        assert made == wanted.argmax(-1).tolist()
        likeliest = np.take_along_axis(wanted, tokens.astype(int), -1)
        np.testing.assert_allclose(found[:, 0], likeliest[:, 0], rtol=0, atol=atol)
        np.testing.assert_allclose(found, likeliest, rtol=0, atol=2 * atol)


@pytest.mark.full
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(CHATS) + len(TEXTS)))
def test_greedy_answers_equal_float32(llm: LLM, llama_cpp: LlamaProcess, number: int) -> None:
    """With caches of 16 bits, whose rounding on both devices is worth 0.012 on one prompt."""
    assert_greedy(llm, number, 0.01 if len(llm.plan.devices()) == 1 else 0.02, llama_cpp)


@pytest.mark.full
def test_greedy_answers_equal_float32_more_nearly_with_exact_caches() -> None:
    with _open("hetero", "f32") as exact:
        for number in COMPARED:
            assert_greedy(exact, number, 0.01)


@pytest.mark.full
@pytest.mark.parametrize("device", ["gpu", pytest.param("npu", marks=pytest.mark.exhaustive)])
def test_perplexities_are_at_most_llama_cpps(device: str) -> None:
    """Compare every cache, and weights as stored; llama.cpp rounds activations as `a8` does."""
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    path = find_model(SMOLLM2)
    with _open(device, "f16") as opened:
        tokens = opened.encode(ARTICLE)[:SCORED]
    found = {x[:2]: x.perplexity for x in scores(path, tokens, ["gguf-a8"], device=device)}
    for kv in ("f32", "f16", "q8"):
        assert found["gguf-a16", kv] < 1.01 * found[LLAMA_CPP, kv]
    assert found["gguf-a8", "f16"] < 1.02 * found[LLAMA_CPP, "f16"]


@pytest.mark.full
def test_prompts_are_the_templates() -> None:
    """Tokens of all prompts, in the template of the file, with a history and a system message."""
    transformers = pytest.importorskip("transformers")
    path = find_model(SMOLLM2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    histories = [[{"role": "user", "content": x}] for x in CHATS]
    histories.append(
        [{"role": x, "content": f"{x} says"} for x in ("system", "user", "assistant", "user")]
    )
    with _open("npu", "f16") as opened:
        for text in TEXTS:
            assert opened.encode(text) == tokenizer.encode(text)
        for messages in histories:
            wanted = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            assert opened.encode_chat(messages) == wanted

"""A model's head for multi-token prediction guesses tokens ahead; answers are the model's own.

The judge of its numbers is the formula in float64 with the layer of `transformers`, which itself
drops such heads. `confident` heads are nearly right, since they and the model say what follows a
token by that token alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, ModelError, UserError
from hetero.backends.formats import WeightFormat
from hetero.errors import FallbackWarning
from hetero.generation import mtp_head
from hetero.generation.mtp_head import MtpHead
from hetero.models.config import ModelConfig
from hetero.models.random_models import RandomWeights
from tests.contexts.models import open_llm
from tests.models.test_delta_net import TINY
from tests.models.test_mtp import MOE, expected, random_head, write_gguf
from tests.support.checkpoints import Case, make_checkpoint, torch

OPTIONS: dict[str, Any] = {"device": "gpu", "weights": "f32", "kv": "f32", "max_seq_len": 256}
PROMPT = [9, 40, 7, 200, 31, 5, 88, 12, 250, 3, 99, 41, 17, 64]
FORCED = (77, 21, 130)


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5-moe"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, dict[str, Any]]:
    """A directory, its model in float64, and the head's tensors."""
    folder = tmp_path_factory.mktemp("head")
    moe = request.param.endswith("moe")
    kind, more = ("Qwen3_5Moe", MOE) if moe else ("Qwen3_5", {})
    model = make_checkpoint(Case(request.param, kind, TINY | more), folder)
    model.config._experts_implementation = "eager"  # the others know no float64
    head = random_head(model)
    add(folder, head)
    return folder, model.double(), head


def add(folder: Path, tensors: dict[str, Any]) -> None:
    """Write tensors into a checkpoint, in place of those of their names."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def write_confident(folder: Path) -> Path:
    """A model that says token 3 + (x + 4) mod 260 behind token x, and a head that does too."""
    from safetensors.torch import load_file

    model = make_checkpoint(
        Case("qwen3.5", "Qwen3_5", TINY | {"tie_word_embeddings": False}), folder
    )
    tensors = load_file(folder / "model.safetensors") | random_head(model)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensors[name] = 0.1 * value
    d, embed = model.config.hidden_size, tensors["model.embed_tokens.weight"]
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(d), 0.02 * torch.randn(d, d)], dim=1)
    after = (torch.arange(263) + 4) % 260 + 3
    tensors["lm_head.weight"] = torch.zeros_like(embed).index_copy(0, after, 2 * embed)
    add(folder, tensors)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_confident(tmp_path_factory.mktemp("confident"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def guessed(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), draft_model="mtp", **OPTIONS) as opened:
        yield opened


# --- numbers ----------------------------------------------------------------------------------


def reference(
    model: Any,
    head: dict[str, Any],
    text: Sequence[int],
    forced: Sequence[int],
    last: int | None = None,
) -> list[Any]:
    """The head's logits behind a text, or its last tokens, and behind tokens that follow it."""
    tokens, found = list(text[1:][-(last or 0) :]), []
    with torch.no_grad():
        hidden = model.model(torch.tensor([text[:-1]])).last_hidden_state[0][-(last or 0) :]
        for token in (*forced, None):
            logits, after = expected(model, head, torch.tensor(tokens), hidden)
            found.append(logits[-1].numpy())
            tokens.append(token)
            hidden = torch.cat([hidden, after[-1:]])
    return found


def logits_of(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    texts: Sequence[Sequence[int]],
    guesses: Sequence[int] = (),
) -> list[list[Any]]:
    """The logits of guesses behind texts that grow, each with forced tokens that are no part.

    `guesses` are what it then seems to have guessed.
    """
    found: list[list[Any]] = []

    def forced(engine: Any, context: Any, missing: Any, *_: Any) -> tuple[list[int], int]:
        rows = [engine.prefill(context, missing).copy()]
        rows += [engine.decode(context, token).copy() for token in FORCED]
        found.append(rows)
        return list(guesses), 0

    monkeypatch.setattr(mtp_head, "likeliest", forced)
    assert isinstance(llm.draft, MtpHead)
    with llm.new_context() as context, llm.draft.drafter(context, texts[0]) as drafter:
        for text in texts:
            llm.engine.prefill(context, text[context.cached : -1])
            drafter.guess(text, 3)
    return found


@pytest.mark.full
def test_guesses_are_those_of_the_formula(
    checkpoint: tuple[Path, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a text that is read at once or grows, and behind guesses that were wrong."""
    folder, model, head = checkpoint
    texts = [PROMPT[:5], PROMPT[:6], PROMPT]
    with LLM(str(folder), draft_model="mtp", **OPTIONS) as llm:
        found = logits_of(llm, monkeypatch, texts)
        (alone,) = logits_of(llm, monkeypatch, texts[-1:])
    wanted = [reference(model, head, text, FORCED) for text in texts]
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(alone, wanted[-1], rtol=2e-3, atol=2e-4)


@pytest.mark.full
def test_a_file_guesses_as_its_directory_to_the_bit(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_gguf(checkpoint, tmp_path / "model.gguf")
    found = []
    for path in (checkpoint[0], tmp_path / "model.gguf"):
        with LLM(str(path), draft_model="mtp", **OPTIONS) as llm:
            found.append(logits_of(llm, monkeypatch, [PROMPT[:5], PROMPT]))
    np.testing.assert_array_equal(*found)


@pytest.mark.full
def test_a_head_reads_the_last_tokens_at_first_and_all_when_it_was_right(
    checkpoint: tuple[Path, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, head = checkpoint
    monkeypatch.setattr(mtp_head, "TRIAL", 5)
    with LLM(str(folder), draft_model="mtp", **OPTIONS) as llm:
        (few,) = logits_of(llm, monkeypatch, [PROMPT])
        monkeypatch.setattr(mtp_head, "TRUSTED", 0)
        (every,) = logits_of(llm, monkeypatch, [PROMPT])
        monkeypatch.setattr(mtp_head, "TRUSTED", 1)
        later = logits_of(llm, monkeypatch, [PROMPT[:12], PROMPT], guesses=PROMPT[12:13])[-1]
    wanted = [reference(model, head, PROMPT, FORCED, last) for last in (5, None, None)]
    np.testing.assert_allclose([few, every, later], wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["w4a16", "gguf-a16", "w4a8"])
def test_a_head_in_other_formats_guesses_nearly_the_same(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
) -> None:
    write_gguf(checkpoint, tmp_path / "model.gguf")
    (wanted,) = [reference(*checkpoint[1:], PROMPT, FORCED)]
    options = OPTIONS | {"weights": weights}
    with LLM(str(tmp_path / "model.gguf"), draft_model="mtp", **options) as llm:
        (found,) = logits_of(llm, monkeypatch, [PROMPT])
    similar = np.corrcoef(np.ravel(found), np.ravel(wanted))[0, 1]
    assert similar > (0.999 if weights == "gguf-a16" else 0.9)


# --- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "top_k": 20, "seed": 5}, {"temperature": 4.0, "seed": 2}],
    ids=["greedy", "sampled", "hot"],
)
def test_guesses_change_no_token(plain: LLM, guessed: LLM, options: dict[str, Any]) -> None:
    wanted = plain.generate(PROMPT, max_tokens=60, **options)
    answer = guessed.generate(PROMPT, max_tokens=60, **options)
    assert answer.tokens == wanted.tokens
    found = answer.stats.speculation
    assert found is not None
    assert found.drafted > 0
    assert found.calls + found.accepted == 59 + (answer.finish_reason == "stop")
    if not options:
        assert found.accepted > 5
        assert found.rate > 0.9


@pytest.mark.full
@pytest.mark.parametrize("way", ["npu", "tensor level", "tensor level, rest on the npu"])
def test_guesses_on_other_devices_change_no_token(folder: Path, way: str) -> None:
    with open_llm(folder, way) as llm:
        wanted = llm.generate(PROMPT, max_tokens=40).tokens
    with open_llm(folder, way, draft_model="mtp") as llm:
        answer = llm.generate(PROMPT, max_tokens=40)
        assert answer.tokens == wanted
        assert answer.stats.speculation is not None
        assert answer.stats.speculation.accepted > 0


@pytest.mark.full
def test_sampled_answers_have_the_model_s_distribution(plain: LLM, guessed: LLM) -> None:
    """By a chi-square test of the third token, with the probabilities of the model's logits."""
    from scipy.stats import chisquare

    kept = [10, 17, 24, 31]
    bias = {x: (0.0 if x in kept else -1e4) for x in range(263)}
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 3.0, "logit_bias": bias}
    probability: Counter[int] = Counter()
    for one in kept:
        for two in kept:
            text = [*PROMPT, one, two]
            rows = plain.logits(text)[len(PROMPT) - 1 :][:, kept].astype(np.float64) / 3.0
            chances = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
            before = chances[0, kept.index(one)] * chances[1, kept.index(two)]
            for i, x in enumerate(kept):
                probability[x] += before * chances[2, i]
    count = 250
    drawn = Counter(guessed.generate(PROMPT, seed=i, **options).tokens[2] for i in range(count))
    found = [drawn[x] for x in kept]
    assert sum(found) == count
    assert chisquare(found, [count * probability[x] for x in kept]).pvalue > 1e-3


@pytest.mark.full
def test_conversations_forks_and_later_answers_go_on_with_the_head(
    plain: LLM, guessed: LLM
) -> None:
    drawn = [
        llm.generate_many([PROMPT], n=3, max_tokens=12, temperature=3.0, seed=4)[0]
        for llm in (plain, guessed)
    ]
    assert [x.tokens for x in drawn[0]] == [x.tokens for x in drawn[1]]
    texts: dict[LLM, list[int]] = {}
    for llm in (plain, guessed):
        text = list(PROMPT)
        with llm.new_context() as context:
            for cut in (0, 4, 1, 9):
                text = text[: len(text) - cut] + PROMPT[:3]
                few = {"speculative": 0} if cut == 4 else {}
                answer = llm.generate(text, context=context, reuse=True, max_tokens=12, **few)
                text += answer.tokens
        texts[llm] = text
    assert texts[plain] == texts[guessed]


@pytest.mark.full
def test_what_was_read_of_a_context_is_not_read_again(
    guessed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    read = mtp_head.likeliest

    def counted(engine: Any, context: Any, missing: Any, *rest: Any) -> Any:
        counts.append(len(missing))
        return read(engine, context, missing, *rest)

    monkeypatch.setattr(mtp_head, "likeliest", counted)
    text = PROMPT * 4
    with guessed.new_context() as context:
        text += guessed.generate(text, context=context, max_tokens=12).tokens
        assert counts[0] == len(text) - 12 + 1  # two tokens were said, the first one is not read
        counts.clear()
        guessed.generate([*text, *PROMPT], context=context, reuse=True, max_tokens=12)
    assert counts[0] <= len(PROMPT) + 14


@pytest.mark.full
def test_answers_at_once_have_texts_of_the_head_each(plain: LLM, guessed: LLM) -> None:
    prompts = [PROMPT[i:] for i in range(4)]
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
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_an_answer_that_is_left_leaves_no_guess(plain: LLM, guessed: LLM, taken: int) -> None:
    stream = guessed.stream(PROMPT, max_tokens=40)
    tokens = [piece.token for piece in islice(stream, taken)]
    stream.close()
    text = [*PROMPT, *tokens, 50]
    again = guessed.generate(text, max_tokens=12, reuse=True)
    assert again.stats.reused_tokens >= len(PROMPT)
    assert again.tokens == plain.generate(text, max_tokens=12).tokens


@pytest.mark.full
def test_an_interruption_of_a_guess_leaves_the_answers(
    plain: LLM, guessed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plain.generate(PROMPT, max_tokens=30).tokens
    read, calls = mtp_head.likeliest, iter(range(100))

    def interrupted(engine: Any, context: Any, missing: Any, *rest: Any) -> Any:
        engine.verify(context, missing[:1])
        if next(calls) == 1:
            raise KeyboardInterrupt
        return read(engine, context, missing[1:], *rest) if len(missing) > 1 else ([], 0)

    with monkeypatch.context() as patch:
        patch.setattr(mtp_head, "likeliest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guessed.generate(PROMPT, max_tokens=200, temperature=4.0, seed=1)
    assert guessed.generate(PROMPT, max_tokens=30).tokens == wanted


@pytest.mark.full
def test_the_end_of_the_context_ends_the_answer(plain: LLM, guessed: LLM) -> None:
    prompt = (PROMPT * 20)[:250]
    answer = guessed.generate(prompt, max_tokens=50)
    assert (len(answer.tokens), answer.finish_reason) == (6, "context")
    assert answer.tokens == plain.generate(prompt, max_tokens=50).tokens


@pytest.mark.full
def test_a_head_that_guesses_nothing_is_asked_rarely(
    checkpoint: tuple[Path, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    guess = MtpHead.guess

    def counted(self: MtpHead, read: Any, text: Sequence[int], most: int) -> Any:
        asked.append(len(text))
        return guess(self, read, text, most)

    monkeypatch.setattr(MtpHead, "guess", counted)
    with LLM(str(checkpoint[0]), draft_model="mtp", **OPTIONS) as llm:
        answer = llm.generate(PROMPT, max_tokens=100, logit_bias={2: -1e4})
    assert len(answer.tokens) == 100
    assert 1 <= len(asked) <= 12


@pytest.mark.full
def test_a_head_whose_device_failed_guesses_no_more(folder: Path) -> None:
    with open_llm(folder, "tensor level") as llm:
        wanted = llm.generate(PROMPT, max_tokens=20).tokens
    with open_llm(folder, "tensor level", draft_model="mtp") as llm:
        deployment = llm.engine.deployment
        device = deployment.devices["gpu"]
        from hetero.backends.errors import DeviceLostError

        with pytest.warns(FallbackWarning, match="going on with npu"):
            llm.engine.drop(DeviceLostError(device.info.backend, "a test", "it is gone"))
        with pytest.warns(FallbackWarning, match="no more tokens are guessed, because the head"):
            answer = llm.generate(PROMPT, max_tokens=20)
        assert answer.tokens == wanted
        assert answer.stats.speculation is not None
        assert answer.stats.speculation.drafted == 0


# --- what is refused --------------------------------------------------------------------------


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match=r"demo: has no head for multi-token prediction \(Qwen"):
        LLM("demo", draft_model="mtp")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draft_device": "gpu"}, "runs on its devices: leave --draft-device out"),
        ({"sync": "copy"}, "--sync copy keeps hidden states from the host, which --draft-model"),
        ({"memory_budget": "1GiB"}, "memory_budget bounds one model"),
    ],
)
def test_options_that_do_not_go_with_a_head(
    folder: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        LLM(str(folder), draft_model="mtp", **{**OPTIONS, **options})


def test_random_weights_have_a_head_of_their_own(folder: Path) -> None:
    config = ModelConfig.from_directory(folder)
    weights = RandomWeights(config, WeightFormat.F32)
    head = weights.mtp
    assert isinstance(head, RandomWeights)
    assert head.lm_head() is weights.lm_head()
    qkv = [x.block(i).matrix("qkv").dequantize() for x, i in ((weights, 1), (head, 0))]
    assert qkv[0].shape == qkv[1].shape
    assert not np.array_equal(*qkv)

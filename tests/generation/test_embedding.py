"""Embeddings: the pooled hidden states of `transformers`, as a model's files ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from hetero import LLM
from hetero.errors import ModelError, UserError
from hetero.generation import embedding
from hetero.models import open_model, quantized
from hetero.models.pooling import pooling_of
from tests.models.gguf_files import write_tiny
from tests.support.checkpoints import CASES, GEMMA4, Case, make_checkpoint, torch

QWEN3 = Case("qwen3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True})
POOLINGS = ("last", "mean")
TEXTS = ["a", "two words", "a longer text, which is more than one call of eight tokens, is it not?"]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """As Qwen3-Embedding is published: no head, no `model.` in names, and an end token."""
    folder = tmp_path_factory.mktemp("qwen3")
    reference = make_checkpoint(QWEN3, folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {x.removeprefix("model."): y for x, y in tensors.items() if not x.startswith("lm_head")}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }  # fmt: skip
    path.write_text(json.dumps(raw))
    return folder, reference


@pytest.fixture(scope="module")
def llm(qwen3: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(str(qwen3[0]), device="npu", weights="f32", kv="f32") as opened:
        yield opened


def expected(
    reference: Any, tokens: Sequence[int], pooling: str, dimensions: int | None = None
) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        states = reference.model(torch.tensor([list(tokens)])).last_hidden_state[0].numpy()
    pooled = states[-1] if pooling == "last" else states.mean(axis=0)
    part = pooled[:dimensions]
    return np.asarray(part / np.linalg.norm(part), np.float32)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("dimensions", [None, 16])
def test_embeddings_are_the_pooled_hidden_states(
    llm: LLM, qwen3: tuple[Path, Any], pooling: str, dimensions: int | None
) -> None:
    found = llm.embed(TEXTS, pooling=pooling, dimensions=dimensions)
    assert found.shape == (3, dimensions or 64)
    assert found.dtype == np.float32
    for row, text in zip(found, TEXTS, strict=True):
        tokens = llm.encode(text)
        assert tokens[-1] == 2  # which the tokenizer adds
        np.testing.assert_allclose(
            row, expected(qwen3[1], tokens, pooling, dimensions), atol=2e-5, rtol=0
        )


def test_short_texts_are_read_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in any order, among long ones, are each as if they were alone."""
    texts = [
        [3 + (7 * i + j) % 200 for j in range(n)] for i, n in enumerate((9, 60, 20, 12, 1, 16))
    ]
    alone = {pooling: [llm.embed([x], pooling=pooling)[0] for x in texts] for pooling in POOLINGS}
    together = embedding.states_together
    sizes = list[int]()

    def noted(engine: Any, context: Any, part: Any, length: int) -> Any:
        sizes.append(len(part))
        return together(engine, context, part, length)

    monkeypatch.setattr(embedding, "states_together", noted)
    for pooling in POOLINGS:
        np.testing.assert_allclose(
            llm.embed(texts, pooling=pooling), alone[pooling], atol=2e-5, rtol=0
        )
    assert sizes == [3, 3]  # those of 12 to 20 tokens
    assert [len(b.places) for b in embedding.batches(llm.engine, [[5] * 3] * 20)] == [8, 8, 4]
    monkeypatch.setattr(embedding, "states_together", lambda *_: None)
    assert (llm.embed(texts) == np.array(alone["last"])).all()


def test_token_ids_are_taken_as_they_are_and_answers_do_not_change(llm: LLM) -> None:
    before = llm.generate(TEXTS[1], max_tokens=4)
    tokens = llm.encode(TEXTS[0])
    assert (llm.embed([tokens]) == llm.embed([TEXTS[0]])).all()
    assert not np.allclose(llm.embed([tokens[:-1]]), llm.embed([tokens]))
    assert llm.generate(TEXTS[1], max_tokens=4).tokens == before.tokens


@pytest.mark.full
@pytest.mark.parametrize("device", ["gpu", "hetero"])
def test_every_device_gives_the_same(qwen3: tuple[Path, Any], device: Any, llm: LLM) -> None:
    with LLM(str(qwen3[0]), device=device, weights="f32", kv="f32") as other:
        for pooling in ("last", "mean"):
            found = other.embed(TEXTS, pooling=pooling)
            np.testing.assert_allclose(found, llm.embed(TEXTS, pooling=pooling), atol=2e-5, rtol=0)


@pytest.mark.full
def test_layers_for_the_last_token_alone(tmp_path: Path) -> None:
    """Of Gemma 4 only the last token passes through the last layers."""
    reference = make_checkpoint(GEMMA4, tmp_path)
    tokens = list(range(3, 60))
    with LLM(str(tmp_path), device="npu", weights="f32", kv="f32") as llm:
        found = llm.embed([tokens])[0]
        with pytest.raises(UserError, match="use the pooling `last`"):
            llm.embed([tokens], pooling="mean")
        several = llm.embed([tokens[:9], tokens[:12]])
    np.testing.assert_allclose(found, expected(reference, tokens, "last"), atol=1e-4, rtol=0)
    for count, row in zip((9, 12), several, strict=True):
        wanted = expected(reference, tokens[:count], "last")
        np.testing.assert_allclose(row, wanted, atol=1e-4, rtol=0)


def test_a_model_with_states(tmp_path: Path) -> None:
    reference = make_checkpoint(next(x for x in CASES if x.name == "lfm2"), tmp_path)
    tokens = list(range(3, 60))
    with LLM(str(tmp_path), device="npu", weights="f32", kv="f32") as llm:
        for pooling in POOLINGS:
            found = llm.embed([tokens[:9], tokens, tokens[:12]], pooling=pooling)
            for count, row in zip((9, 57, 12), found, strict=True):
                wanted = expected(reference, tokens[:count], pooling)
                np.testing.assert_allclose(row, wanted, atol=1e-4, rtol=0)


def test_what_cannot_be_embedded_is_refused(llm: LLM) -> None:
    for options, message in (
        ({"dimensions": 65}, "has 64 dimensions: ask for fewer"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"pooling": "max"}, "pooling is last or mean, got 'max'"),
    ):
        with pytest.raises(UserError, match=message):
            llm.embed(TEXTS, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="give \\[text\\]"):
        llm.embed("a")
    for empty in ("", []):
        with pytest.raises(UserError, match="a text is empty"):
            llm.embed(["a", empty])
    with pytest.raises(UserError, match="do not fit the context"):
        llm.embed([[5] * 513])
    assert llm.embed([]).shape == (0, 64)


@pytest.mark.parametrize(
    ("document", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"word_embedding_dimension": 64}, "last"),
    ],
)
def test_the_pooling_of_a_directory(document: Any, pooling: str, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(document))
    assert pooling_of(tmp_path) == pooling
    assert pooling_of(tmp_path, "mean") == "mean"


@pytest.mark.parametrize(
    "document",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
    ],
)
def test_another_pooling_of_a_directory_is_refused(document: Any, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="supported are last and mean"):
        pooling_of(tmp_path)


def test_further_layers_are_refused(tmp_path: Path) -> None:
    modules = [{"idx": 2, "type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="pooled by 'dense'"):
        pooling_of(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ModelError, match=r"modules\.json: is not valid JSON"):
        pooling_of(tmp_path)


@pytest.mark.parametrize(
    ("number", "pooling"),
    [(None, "last"), (0, "last"), (1, "mean"), (3, "last"), (2, ""), (4, ""), (9, "")],
)
def test_the_pooling_of_a_gguf_file(number: int | None, pooling: str, tmp_path: Path) -> None:
    changes = {} if number is None else {"pooling_type": number}
    path = write_tiny(tmp_path / "m.gguf", **changes)
    if pooling:
        assert pooling_of(path) == pooling
        return
    with pytest.raises(ModelError, match=r"m\.gguf: its embeddings are pooled by"):
        pooling_of(path)


def test_a_quantised_directory_keeps_the_pooling(qwen3: tuple[Path, Any], tmp_path: Path) -> None:
    folder = qwen3[0] / "1_Pooling"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    try:
        out = quantized.save(open_model(qwen3[0], weights="w8a16").weights, tmp_path / "a")
    finally:
        (folder / "config.json").unlink()
        folder.rmdir()
    assert pooling_of(out) == "mean"
    path = write_tiny(tmp_path / "m.gguf", pooling_type=1)
    assert pooling_of(quantized.save(open_model(path, weights="f32").weights, tmp_path / "b")) == (
        "mean"
    )


def test_a_text_is_read_again_where_a_device_has_failed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that the other device repeated in parts has left only its last states."""
    expected_rows = llm.embed(TEXTS, pooling="mean")
    whole, deployment = embedding.hidden_states, llm.engine.deployment
    before = deployment.devices

    def failing(*arguments: Any, **options: Any) -> Iterator[Any]:
        for states in whole(*arguments, **options):
            if deployment.devices is before:
                monkeypatch.setattr(deployment, "devices", dict(before))
                yield states[-1:]
            else:
                yield states

    monkeypatch.setattr(embedding, "hidden_states", failing)
    assert (llm.embed(TEXTS, pooling="mean") == expected_rows).all()
    assert deployment.devices is not before

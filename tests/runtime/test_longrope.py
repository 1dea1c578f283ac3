"""LongRoPE (Phi-3): logits are those of `transformers` in short and in long contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.errors import UserError
from hetero.models import open_model
from hetero.models.gguf import GgufFile
from tests.models.gguf_files import convert, write
from tests.support.checkpoints import Case, make_checkpoint, reference_logits, relative_error

ORIGINAL = 64
SHORT, LONG = [1.0, 1.5, 2.0, 1.25], [2.0, 3.0, 8.0, 16.0]
SCALING = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
CASE = Case(
    "phi3-longrope",
    "Phi3",
    {"original_max_position_embeddings": ORIGINAL, "rope_scaling": SCALING, "pad_token_id": 0},
)
TOKENS = np.random.default_rng(4).integers(3, 263, 200).tolist()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("phi3")
    return folder, make_checkpoint(CASE, folder)


def as_gguf(folder: Path, target: Path) -> Path:
    """The directory as llama.cpp's converter writes it: without a type of scaling."""
    tensors = convert(folder, target / "plain.gguf")
    metadata = GgufFile(target / "plain.gguf").metadata
    config = open_model(folder).config
    entries = {k: v for k, v in metadata.items() if k.partition(".")[0] in ("phi3", "tokenizer")}
    entries |= {
        "phi3.rope.scaling.original_context_length": ORIGINAL,
        "phi3.rope.scaling.attn_factor": config.rope_scaling.attention_factor,
    }
    entries = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in entries.items()}
    factors = {
        "rope_factors_long.weight": np.array(LONG, np.float32),
        "rope_factors_short.weight": np.array(SHORT, np.float32),
    }
    write(target / "m.gguf", "phi3", entries, {**tensors, **factors})
    return target / "m.gguf"


@pytest.mark.parametrize("device", ["gpu", "npu"])
@pytest.mark.parametrize("gguf", [False, True], ids=["directory", "gguf"])
@pytest.mark.parametrize(("context", "length"), [(ORIGINAL, ORIGINAL), (512, 200), (65, 65)])
def test_logits_are_those_of_transformers(
    device: Any, gguf: bool, context: int, length: int, reference: Any, tmp_path: Path
) -> None:
    folder, model = reference
    path = as_gguf(folder, tmp_path) if gguf else folder
    with LLM(str(path), device=device, weights="f32", kv="f32", max_seq_len=context) as llm:
        found = llm.logits(TOKENS[:length])
    assert relative_error(found, reference_logits(model, TOKENS[:length])) < 2e-5


def test_a_long_context_is_long_from_its_first_token_on(reference: Any) -> None:
    """So that no key that is cached has to be rotated again when the text grows beyond."""
    folder, model = reference
    with LLM(str(folder), device="npu", weights="f32", kv="f32", max_seq_len=100) as llm:
        found = llm.logits(TOKENS[:50])
        whole = llm.logits(TOKENS[:100])
    np.testing.assert_allclose(found, whole[:50], atol=1e-4)
    assert relative_error(found, reference_logits(model, TOKENS[:50])) > 1e-3
    assert relative_error(whole, reference_logits(model, TOKENS[:100])) < 2e-5


@pytest.mark.full
def test_what_is_kept_of_a_short_context_is_not_taken_for_a_long_one(
    reference: Any, tmp_path: Path
) -> None:
    folder, _ = reference
    with LLM(str(folder), device="npu", weights="f32", max_seq_len=ORIGINAL) as llm:
        llm.generate(TOKENS[:20], max_tokens=2, chat=False)
        llm.save_session(tmp_path / "session")
        short = llm.model.fingerprint
    with LLM(str(folder), device="npu", weights="f32", max_seq_len=40) as llm:
        llm.load_session(tmp_path / "session")
        assert llm.model.fingerprint == short
    with LLM(str(folder), device="npu", weights="f32", max_seq_len=80) as llm:
        assert llm.model.fingerprint != short
        with pytest.raises(UserError):
            llm.load_session(tmp_path / "session")

"""The first layers of a model guess for it; the judge of their numbers is `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, ModelError, UserError
from hetero.cli.app import main
from hetero.generation.draft_model import DraftModel
from hetero.models.first_layers import first_layers
from hetero.models.random_models import known_config
from tests.models.test_delta_net import TINY
from tests.support.checkpoints import Case, make_checkpoint, torch

OPTIONS: dict[str, Any] = {"device": "gpu", "draft_device": "gpu", "max_seq_len": 256}
CASES = [
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case("mistral-window", "Mistral", {"sliding_window": 24, "head_dim": 16}),
    Case("qwen3.5", "Qwen3_5", TINY),
]
F32: dict[str, Any] = {"device": "gpu", "weights": "f32", "kv": "f32", "max_seq_len": 128}
PROMPT = [9, 40, 7, 200, 31, 5, 88, 12, 250, 3, 99, 41, 17, 64]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_early_exit_has_the_logits_of_the_first_layers(case: Case, tmp_path: Path) -> None:
    model = make_checkpoint(case, tmp_path)
    layers = model.config.num_hidden_layers - 1
    with LLM(str(tmp_path), draft_model=f"early-exit:{layers}", **F32) as llm:
        assert isinstance(llm.draft, DraftModel)
        engine = llm.draft._engine
        with engine.new_context() as context:
            logits = engine.prefill(context, PROMPT).copy()
    del model.model.layers[layers:]
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1].numpy()
    np.testing.assert_allclose(logits[: len(wanted)], wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "hot"])
def test_an_early_exit_changes_no_token(options: dict[str, Any]) -> None:
    with LLM("demo", device="gpu", max_seq_len=256) as plain:
        wanted = plain.generate("Once upon a time", max_tokens=50, **options)
        layers = plain.model.config.num_layers - 1
    with LLM("demo", draft_model=f"early-exit:{layers}", **OPTIONS) as llm:
        answer = llm.generate("Once upon a time", max_tokens=50, **options)
    assert answer.tokens == wanted.tokens
    assert answer.stats.speculation is not None
    assert answer.stats.speculation.accepted > 0


@pytest.mark.full
def test_an_early_exit_of_a_quantised_directory_with_shadows(tmp_path: Path) -> None:
    """Its first layers have their own scales and hot channels, and the answer is the same."""
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a fox. " * 20)
    words = ["quantize", "demo", "--weights", "w8a8", "--outliers", "all", "--calibrate", str(text)]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--out", str(tmp_path / "w8a8")])
    answers = []
    for draft in (None, "early-exit:1"):
        with LLM(str(tmp_path / "w8a8"), device="gpu", max_seq_len=256, draft_model=draft) as llm:
            answers.append(llm.generate("Once upon a time", max_tokens=30).tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("0", "an early exit is behind 1 to .* of them, got 0"),
        ("99", "an early exit is behind 1 to .* of them, got 99"),
        ("four", "give a number, as in early-exit:4"),
        ("9" * 5000, "give a number, as in early-exit:4"),
    ],
)
def test_an_early_exit_that_is_none_is_refused(layers: str, said: str) -> None:
    with pytest.raises((ModelError, UserError), match=said):
        LLM("demo", draft_model=f"early-exit:{layers}", **OPTIONS)


def test_an_early_exit_of_layers_with_inputs_is_refused() -> None:
    with pytest.raises(ModelError, match="not supported where layers have inputs of their own"):
        first_layers(known_config("gemma-4-e2b"), 4, "gemma")

"""The real trained model beside the checkout: greedy text equals the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from tests.support.real_models import find_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PROMPT = "Once upon a time"
TOKENS = 200


@pytest.fixture(scope="module")
def reference_tokens() -> tuple[Path, list[int], list[int]]:
    """(folder, prompt ids, the reference's greedy continuation)."""
    folder = find_model("stories260K")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return folder, prompt, ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("device", ["gpu", "npu", "hetero"])
def test_greedy_text_in_float32_equals_transformers(
    device: Any, reference_tokens: tuple[Path, list[int], list[int]]
) -> None:
    folder, prompt, expected = reference_tokens
    with LLM(str(folder), device=device, weights="f32", kv="f32") as llm:
        assert llm.encode(PROMPT) == prompt
        result = llm.generate(PROMPT, max_tokens=TOKENS)
        assert result.finish_reason == "length"
        assert list(result.tokens) == expected
        assert set(result.stats.placement) == {"hetero": {"gpu", "npu"}}.get(device, {device})

"""`lm-eval` through the server: the perplexity that `hetero eval` finds."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.measuring.evaluation import evaluate
from tests.serving.servers import Server, serving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs the evaluation harness: pip install 'lm-eval[api]'",
)
TEXTS = (
    "Once upon a time there was a small house in the woods, and nobody lived in it.",
    "A river begins as rain. It ends where the land does, and nobody has seen both on one day.",
)


def scored(server: Server, folder: Path) -> Any:
    """What the harness says of the texts, as `local-completions` with the server's tokenizer."""
    import lm_eval

    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in TEXTS))
    task = {
        "task": "texts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "texts.jsonl")}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    options = {
        "model": "demo",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 1,
        "max_length": 512,
        "custom_prefix_token_id": 0,  # the harness takes the first id for none
    }
    return lm_eval.simple_evaluate(
        model="local-completions", model_args=options, tasks=[task], bootstrap_iters=0
    )


@pytest.mark.filterwarnings("ignore")
def test_perplexity_is_that_of_our_own_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path / "server", keys=False) as server:
        found = scored(server, tmp_path)["results"]["texts"]["byte_perplexity,none"]
    with LLM("demo", device="npu") as llm:
        start = llm.model.tokenizer.bos_id
        lost = 0.0
        for text in TEXTS:
            tokens = llm.encode(text)
            tokens = tokens if tokens[0] == start else [start or 0, *tokens]
            scores = evaluate(llm, tokens, window=512)
            lost += math.log(scores.perplexity) * scores.tokens
    wanted = math.exp(lost / sum(len(text.encode()) for text in TEXTS))
    assert found == pytest.approx(wanted, rel=1e-5)

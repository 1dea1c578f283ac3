"""Quality on keys and values of few bits, against a window scored by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hetero import LLM, UserError
from hetero.cli import app as cli
from hetero.generation.sampling import log_softmax
from hetero.measuring.kv_quality import kv_quality

STORY = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 8


def test_qualities_of_a_text() -> None:
    with LLM("demo", device="npu") as llm:
        tokens = llm.encode(STORY)[:140]
        found = kv_quality(llm, tokens, ["8", "4", "2", "mixed"], ratio=0.5, window=128, seeds=2)
        logs = log_softmax(llm.logits(tokens[:128]))[64:127]
        lost = -logs[np.arange(63), np.array(tokens[65:128])]
        with pytest.raises(UserError, match="has no window of 256"):
            kv_quality(llm, tokens, ["8"], ratio=0.5, window=256, seeds=0)
    assert [*found] == ["exact", "8", "4", "2", "mixed", "random 0", "random 1"]
    assert found["exact"].perplexity == pytest.approx(math.exp(lost.mean()), rel=1e-3)
    assert found["exact"].kl_mean == 0
    assert 0 < found["8"].kl_mean < found["4"].kl_mean < found["2"].kl_mean
    assert found["8"].ratio == 1
    assert 0.5 < found["4"].ratio < 0.51, "amplitudes count"
    assert found["mixed"].ratio <= 0.5
    assert found["random 0"].ratio == found["mixed"].ratio


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    words = ["--kv-bits", "8", "--kv-bits", "mixed", "--kv-seeds", "2", "--window", "64"]
    with pytest.raises(SystemExit):
        cli.main(["eval", "demo", "--text", str(text), *words])
    out = capsys.readouterr().out
    assert "| 8 | 1.000 |" in out
    assert "of 2 random orders" in out

"""Quality on keys and values of few bits, against a window scored by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.lab.kv_quality import kv_quality
from hetero import LLM, UserError
from hetero.generation.sampling import log_softmax

STORY = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 8


def test_qualities_of_a_text() -> None:
    with LLM("demo", device="npu") as llm:
        tokens = llm.encode(STORY)[:140]
        ways = ["8", "4", "3", "2", "mixed", "paper", "first 4", "kivi 3"]
        found = kv_quality(llm, tokens, ways, ratio=0.6, window=128, seeds=2)
        logs = log_softmax(llm.logits(tokens[:128]))[64:127]
        lost = -logs[np.arange(63), np.array(tokens[65:128])]
        with pytest.raises(UserError, match="has no window of 256"):
            kv_quality(llm, tokens, ["8"], ratio=0.5, window=256, seeds=0)
    assert {*found} == {"exact", *ways, "random 0", "random 1"}
    assert found["exact"].perplexity == pytest.approx(math.exp(lost.mean()), rel=1e-3)
    assert found["exact"].kl_mean == 0
    assert 0 < found["8"].kl_mean < found["4"].kl_mean < found["2"].kl_mean
    assert found["8"].ratio == 1
    assert 0.6 < found["4"].ratio < 0.64, "amplitudes count, and the first chunk has 8 bits"
    assert found["mixed"].ratio <= 0.7, "the first chunk, one of four, does not count"
    assert found["random 0"].ratio == found["mixed"].ratio

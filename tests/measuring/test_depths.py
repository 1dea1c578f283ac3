"""`hetero bench -d`: what is timed comes after as many tokens as was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hetero import LLM
from hetero.measuring import contender
from hetero.measuring.contender import go_to, time_at_depth
from tests.support.checkpoints import CASES, make_checkpoint
from tests.support.helpers import Command

TOKENS = [int(x) for x in np.random.default_rng(0).integers(3, 60, 30)]


@pytest.mark.parametrize("name", ["llama-tied", "lfm2"])  # whose states cannot be cut back anywhere
def test_a_context_is_brought_to_any_depth_from_any_other(name: str, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    with LLM(str(tmp_path), device="gpu", gpu="reference", kv="f32") as llm:
        depths = (20, 9, 9, 30, 0, 1, 2, 17)
        expected = {x: llm.logits([*TOKENS[:x], 5])[-1].copy() for x in depths}
        for depth in depths:
            go_to(llm, TOKENS[:depth])
            assert list(llm.context.tokens) == TOKENS[:depth]
            logits = llm.engine.decode(llm.context, 5).copy()
            assert np.allclose(logits, expected[depth], atol=1e-4), depth


def test_a_prompt_and_an_answer_are_timed_at_their_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", device="npu") as llm:
        depths: list[tuple[str, int]] = []
        for what in ("_time_prompt", "_time_decode"):
            timed = getattr(contender, what)

            def spied(model: LLM, *rest: object, what: str = what, timed: object = timed) -> object:
                depths.append((what, len(model.context)))
                return timed(model, *rest)  # type: ignore[operator]

            monkeypatch.setattr(contender, what, spied)
        prefill, decode = time_at_depth(llm, TOKENS[:20], TOKENS[20:28], 4)
        assert depths == [("_time_prompt", 20), ("_time_decode", 20)]
        assert len(llm.context) == 24
        assert min(prefill.tokens_per_s, decode.tokens_per_s) > 0


@pytest.mark.full
def test_every_depth_has_its_rows_in_lines_of_json(command: Command) -> None:
    depths = ("-d", "64", "-d", "0", "-d", "64")
    words = ("bench", "demo", "--device", "npu", "-p", "8", "-n", "2", "-r", "2", *depths)
    result = command(*words, "-o", "jsonl")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["test"] for row in rows] == ["pp8 @ d0", "pp8 @ d64", "tg2 @ d0", "tg2 @ d64"]
    assert [row["depth"] for row in rows] == [0, 64, 0, 64]
    assert all(row["model"] == "demo" and row["environment"]["cpu"] for row in rows)
    assert all(row["tokens_per_s_median"] > 0 and row["fastest"] for row in rows)

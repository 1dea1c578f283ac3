"""Questions with several answers, against scores by hand and a plain loop over a real model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.errors import UserError
from hetero.generation.sampling import log_softmax
from hetero.measuring.choices import accuracy, read_questions
from tests.support.helpers import Command

QUESTIONS = [
    {"question": "Once upon a", "choices": ["time", "purple seventeen"], "answer": 0},
    {"question": "She said: \"Thank ", "choices": ["you", "moon", "elephants"], "answer": 0},
    {"question": "One day, a little", "choices": ["zzzz qqqq", "boy"], "answer": 0, "id": "wrong"},
]  # fmt: skip


class Letters:
    """A model of letters in which some are more likely, whatever is before them."""

    max_seq_len = 40

    def __init__(self, likely: dict[str, float]) -> None:
        self.logs = np.full(128, math.log(1e-4), np.float32)
        for letter, share in likely.items():
            self.logs[ord(letter)] = math.log(share)
        self.model: Any = SimpleNamespace(encode=lambda text: [ord(x) for x in text])

    def logits(self, tokens: Any) -> Any:
        return np.tile(self.logs, (len(tokens), 1))


def the_file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_a_short_unlikely_answer_wins_by_its_sum_and_loses_by_its_mean(tmp_path: Path) -> None:
    llm = Letters({"a": 0.9, "b": 0.2, " ": 1.0})
    path = the_file(tmp_path, {"question": "q", "choices": ["aaaaaaaaaaaaaaaaa", "b"], "answer": 1})
    found = accuracy(llm, read_questions(path))
    assert 0.9**17 < 0.2
    assert (found.questions, found.acc, found.acc_norm) == (1, 1.0, 0.0)
    assert found.acc_95[0] < 1.0


@pytest.mark.full
def test_the_shares_of_a_real_model_are_those_of_a_plain_loop(
    command: Command, tmp_path: Path
) -> None:
    path = the_file(tmp_path, *QUESTIONS, "")
    with LLM("demo", device="npu", max_seq_len=64) as llm:
        found = accuracy(llm, read_questions(path))
        right = normed = 0
        for x in QUESTIONS:
            sums, means = [], []
            for choice in x["choices"]:  # type: ignore[attr-defined]
                space = "" if str(x["question"]).endswith(" ") else " "
                ids = llm.encode(f"{x['question']}{space}{choice}")
                before = len(llm.encode(str(x["question"])))
                logs = log_softmax(llm.logits(ids))
                total = sum(logs[i - 1, ids[i]] for i in range(before, len(ids)))
                sums.append(total)
                means.append(total / len(choice.encode()))
            right += int(np.argmax(sums)) == x["answer"]
            normed += int(np.argmax(means)) == x["answer"]
    assert (found.acc, found.acc_norm) == (right / 3, normed / 3)
    done = command("eval", "demo", "--choices", str(path), "--weights", "w4a16", "--json")
    shown = json.loads(done.stdout.splitlines()[-1])["w4a16"]
    assert (shown["questions"], shown["acc"]) == (3, found.acc)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", "line 2: line: Invalid JSON"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "line 2: choices: Tuple should have at"),
        ({"question": "q", "choices": ["a", "b"]}, "line 2: answer: Field required"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "line 2: answer 2 is none of its"),
        ({"question": "", "choices": ["a", "b"], "answer": 0}, "line 2: question: String should"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_questions(the_file(tmp_path, QUESTIONS[0], line))


def test_what_cannot_be_scored_is_refused(command: Command, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no questions"):
        read_questions(the_file(tmp_path, ""))
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        read_questions(tmp_path)
    long = the_file(tmp_path, {"question": "q" * 60, "choices": ["a", "b"], "answer": 0})
    with pytest.raises(UserError, match="62 tokens, more than the context's 40"):
        accuracy(Letters({}), read_questions(long))
    for words, message in (
        ((), "give one of them"),
        (("--choices", str(long), "--window", "8"), "are for --text"),
        (("--text", str(long), "--max-questions", "8"), "--max-questions is for --choices"),
    ):
        done = command("eval", "demo", *words)
        assert done.returncode == 2
        assert message in done.stderr

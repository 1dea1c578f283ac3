"""Questions with several answers: the one that the model finds most likely, as lm-eval scores them.

A file has a JSON object a line: `{"question": "…", "choices": ["…", "…"], "answer": 0}`. An answer
is scored after the question and a space, by the sum of its tokens' log-probabilities (`acc`), and
by that over its bytes (`acc_norm`), which does not favour short answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero.backends.host.files import LONGEST_TEXT_BYTES, read_text
from hetero.errors import UserError
from hetero.generation.sampling import log_softmax
from hetero.measuring.evaluation import Interval, Scorer, share_95

MAX_CHOICES = 64
Words = Annotated[str, Field(min_length=1)]
Progress = Callable[[int, int], None]


class Question(BaseModel):
    """A question, its possible answers, and which of them is right."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore")

    question: Words
    choices: Annotated[tuple[Words, ...], Field(min_length=2, max_length=MAX_CHOICES)]
    answer: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Measured shares of right answers, with their 95 % intervals (Wilson)."""

    questions: int
    acc: float
    acc_95: Interval
    acc_norm: float
    acc_norm_95: Interval


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Return the questions of a file of JSON lines. Raises `UserError` that names the line."""
    try:
        lines = read_text(path, LONGEST_TEXT_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as UTF-8 text ({why}); give JSON lines") from error
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = Question.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "line"
            raise UserError(f"{path}, line {number}: {field}: {first['msg']}") from error
        if question.answer >= len(question.choices):
            raise UserError(
                f"{path}, line {number}: answer {question.answer} is none of its "
                f"{len(question.choices)} choices, which count from 0"
            )
        questions.append(question)
    if not questions:
        raise UserError(f"{path}: has no questions; give a JSON object a line")
    return questions[:limit]


def accuracy(
    llm: Scorer, questions: Sequence[Question], *, progress: Progress | None = None
) -> Accuracy:
    """Return how often the right answer is the most likely one.

    Raises `UserError` for a question that the context does not hold.
    """
    right, normed = 0, 0
    for done, question in enumerate(questions, 1):
        sums = np.asarray([_log_likelihood(llm, question, x) for x in question.choices])
        sizes = np.asarray([len(x.encode()) for x in question.choices])
        right += int(sums.argmax() == question.answer)
        normed += int((sums / sizes).argmax() == question.answer)
        if progress is not None:
            progress(done, len(questions))
    count = len(questions)
    return Accuracy(
        questions=count,
        acc=right / count,
        acc_95=share_95(right, count),
        acc_norm=normed / count,
        acc_norm_95=share_95(normed, count),
    )


def _log_likelihood(llm: Scorer, question: Question, choice: str) -> float:
    """Return the log-probability of an answer's tokens: those after the question's."""
    space = "" if question.question[-1].isspace() else " "
    before = len(llm.model.encode(question.question))
    tokens = llm.model.encode(f"{question.question}{space}{choice}")
    if len(tokens) > llm.max_seq_len:
        raise UserError(
            f"a question and its answer have {len(tokens)} tokens, more than the context's "
            f"{llm.max_seq_len}: give --max-seq-len, or shorter ones"
        )
    rows = slice(min(before, len(tokens) - 1) - 1, len(tokens) - 1)
    logs = log_softmax(llm.logits(tokens)[rows])
    return float(logs[np.arange(len(logs)), tokens[rows.start + 1 :]].sum())


def table_rows(by_name: dict[str, Accuracy]) -> Iterator[tuple[str, ...]]:
    """Yield a row of a table for each way in which the model was opened."""
    for name, x in by_name.items():
        cells = (
            f"{share:.1%} ({low:.1%} to {high:.1%})"
            for share, (low, high) in ((x.acc, x.acc_95), (x.acc_norm, x.acc_norm_95))
        )
        yield name, str(x.questions), *cells

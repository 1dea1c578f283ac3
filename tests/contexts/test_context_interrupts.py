"""A change of a context that a signal handler interrupts: its keys and values are of its tokens."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, Context
from tests.contexts.models import open_llm
from tests.contexts.test_contexts import ids
from tests.contexts.test_sliding import run
from tests.runtime.models import tiny_model
from tests.support.checkpoints import CASES, make_checkpoint, relative_error
from tests.support.interrupts import deadline, handler, interrupted, places
from tests.support.selection import exhaustive

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals of POSIX"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LENGTH = 448
FILES = ("context.py", "kv_cache.py", "kv_rows.py", "shift.py", "session_file.py", "loop.py")
TRIED = 50
LIMIT_S = 30


@pytest.fixture(scope="module", params=["one layer", "windows"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLM]:
    """In one layer keys and values do not depend on other tokens, so that a shift is exact."""
    folder: Path = tmp_path_factory.mktemp("model")
    if request.param == "windows":
        make_checkpoint(next(case for case in CASES if case.name == "mistral-window"), folder)
    else:
        tiny_model(folder, num_hidden_layers=1)
    with open_llm(folder, "npu", max_seq_len=LENGTH if request.param == "windows" else 80) as found:
        yield found


def changes(llm: LLM, folder: Path) -> dict[str, Callable[[Context], object]]:
    with llm.new_context() as other:
        llm.generate(ids(7, 30), max_tokens=3, context=other)
        other.save(folder / "other")
    windows = llm.context.cache.layout.slides
    found: dict[str, Callable[[Context], object]] = {
        "cut": lambda context: context.truncate(40),
        "load": lambda context: context.load(folder / "other"),
        "answer": lambda context: llm.generate(
            ids(5, 8), max_tokens=150 if windows else 12, context=context, speculative=4
        ),
    }
    if not windows:  # where a shift is exact
        found["shift"] = lambda context: context.shift(4, 11)
    return found


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["cut", "load", "answer", "shift"])
def test_keys_and_values_are_those_of_the_tokens(llm: LLM, name: str, tmp_path: Path) -> None:
    change = changes(llm, tmp_path).get(name)
    if change is None:
        pytest.skip("approximate")
    with llm.new_context() as base:
        llm.generate(ids(6, 50), max_tokens=4, context=base)
        with base.fork() as context:
            found = [
                x
                for x in places(lambda: change(context))
                if os.path.basename(x[0].co_filename) in FILES
            ]
        few = exhaustive() or len(found) <= TRIED
        with handler():
            for place in found if few else random.Random(3).sample(found, TRIED):
                with deadline(LIMIT_S), base.fork() as context, llm.new_context() as fresh:
                    interrupted(lambda: change(context), place)
                    assert context.user is None, place
                    text = [*context.tokens, 5]
                    error = relative_error(run(llm, context, [5]), run(llm, fresh, text))
                    assert error < 1e-3, (place, len(text))

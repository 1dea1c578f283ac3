"""A bounded turn of both fuzzers; `python -m tests.fuzz.run --minutes 30` is the long one."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target
from tests.support.selection import examples

EXAMPLES = 60


@pytest.fixture(scope="module", params=TARGETS)
def target(request: Any, tmp_path_factory: Any) -> Iterator[tuple[Target, list[bytes]]]:
    made = TARGETS[request.param](tmp_path_factory.mktemp("fuzz"))
    yield made, made.seeds()
    made.close()


def test_the_seeds_are_valid(target: tuple[Target, list[bytes]]) -> None:
    for seed in target[1]:
        target[0].use(seed)


@settings(
    max_examples=examples(EXAMPLES),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 5),
    edits=st.integers(0, 2**32),
    damage=st.lists(st.tuples(st.integers(0, 1 << 14), st.binary(max_size=9)), max_size=3),
)
def test_damage_is_a_sentence_or_harmless(
    target: tuple[Target, list[bytes]],
    seed: int,
    edits: int,
    damage: list[tuple[int, bytes]],
) -> None:
    loader, seeds = target
    data = seeds[seed % len(seeds)]
    data = loader.mutated(data, random.Random(edits)) or data
    for place, piece in damage:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + len(piece) :]
    loader(data)


def with_tokenizer(edit: str, loader: Target) -> bytes:
    """The seed of the tokenizer, with a replacement `old => new`."""
    old, new = edit.split(" => ")
    seed = loader.seeds()[0]
    assert old.encode() in seed
    return seed.replace(old.encode(), new.encode(), 1)


@pytest.mark.parametrize(
    "edit",
    [
        '"the":260 => "the":2147483907',  # gigabytes, to write down the ids between
        '"bos_token": "<s>" => "bos_token": "\\ud800"',
    ],
)
def test_what_the_fuzzer_found(edit: str, tmp_path: Path) -> None:
    loader = TARGETS["tokenizer"](tmp_path)
    loader(with_tokenizer(edit, loader))


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="no atheris wheel here")
def test_a_short_turn_guided_by_coverage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.worker", "gguf", str(tmp_path), "-runs=100"]
    done = subprocess.run(
        [*command, "-timeout=20", "-rss_limit_mb=1024", "-print_final_stats=1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stat::number_of_executed_units" in done.stderr

"""Each level runs the parameter sets that `tests.support.selection` promises."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import selection
from tests.support.selection import SETS, Level, selected


def items(name: str, sizes: dict[str, int], *marks: Any) -> list[Any]:
    """Return the tests of a product of parameters."""
    marks_by_name = {mark.name: mark.mark for mark in marks}
    return [
        SimpleNamespace(
            nodeid=f"tests/a.py::{name}[{at}]",
            callspec=SimpleNamespace(params=dict(zip(sizes, at, strict=True))),
            get_closest_marker=marks_by_name.get,
        )
        for at in itertools.product(*map(range, sizes.values()))
    ]


SIZES = [{"a": 1}, {"a": 6}, {"a": 4, "b": 3}, {"a": 5, "b": 2, "c": 3}, dict.fromkeys("abcd", 4)]


def values(of: list[Any], together: int) -> set[Any]:
    """Return the combinations of so many values of different parameters."""
    each = (itertools.combinations(x.callspec.params.items(), together) for x in of)
    return set(itertools.chain.from_iterable(each))


@pytest.mark.parametrize("marks", [(), (pytest.mark.few(1),), (pytest.mark.few(9),)])
@pytest.mark.parametrize("sizes", SIZES)
def test_few_sets_of_many_values_run_by_default(sizes: dict[str, int], marks: Any) -> None:
    given = items("test_x", sizes, *marks)
    default = selected(given, Level.DEFAULT)
    count = marks[0].args[0] if marks else SETS
    assert default == [x for x in given if x in default]  # in their order
    assert len(default) == min(count, len(given))
    assert len(values(default, 1)) >= min(len(default), len(values(given, 1)))
    assert selected(given, Level.FULL) == given


@pytest.mark.parametrize("every", [2, 100])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_share_of_the_sets_runs_with_full(sizes: dict[str, int], every: int) -> None:
    given = items("test_x", sizes, pytest.mark.sampled(every))
    full = selected(given, Level.FULL)
    assert full == [x for x in given if x in full]
    assert len(full) == math.ceil(len(given) / every)
    assert len(values(full, 1)) >= min(len(full), len(values(given, 1)))
    assert selected(given, Level.EXHAUSTIVE) == given


@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_of_values_is_run_with_full(sizes: dict[str, int]) -> None:
    given = items("test_x", sizes, pytest.mark.pairwise)
    kept = selected(given, Level.FULL)
    assert kept == [x for x in given if x in kept]
    assert values(kept, 2) == values(given, 2)
    if len(sizes) > 2:
        assert 2 * len(kept) <= len(given) + 1


@pytest.mark.parametrize("level", [Level.FULL, Level.EXHAUSTIVE])
def test_a_mark_is_the_least_level_that_runs_a_test(level: Level) -> None:
    plain = items("test_x", {"a": SETS})
    marked = items("test_y", {"a": 2}, getattr(pytest.mark, level.name.lower()))
    assert selected(plain + marked, Level(level - 1)) == plain
    assert selected(plain + marked, level) == plain + marked


def test_a_file_for_full_runs_is_not_imported_by_default(tmp_path: Path) -> None:
    whole, part = tmp_path / "test_whole.py", tmp_path / "test_part.py"
    whole.write_text("import pytest\n\npytestmark = pytest.mark.full\n", encoding="utf-8")
    part.write_text("@pytest.mark.full\ndef test() -> None: ...\n", encoding="utf-8")
    assert selection.is_left_out(whole) != selection.full()
    assert not selection.is_left_out(part)

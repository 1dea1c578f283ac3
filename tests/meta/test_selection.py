"""What a selection leaves out has no parameter value that no other test runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.selection import Level, selected


def items(name: str, sizes: dict[str, int], *marks: Any) -> list[Any]:
    """Return the tests of a product of parameters."""
    marks_by_name = {mark.name: mark.mark for mark in marks}
    tables = [pytest.mark.parametrize(key, range(size)).mark for key, size in sizes.items()]
    return [
        SimpleNamespace(
            nodeid=f"tests/a.py::{name}[{at}]",
            callspec=SimpleNamespace(params=dict(zip(sizes, at, strict=True))),
            get_closest_marker=marks_by_name.get,
            iter_markers=lambda _: iter(tables),
        )
        for at in itertools.product(*map(range, sizes.values()))
    ]


SIZES = [{"a": 1}, {"a": 6}, {"a": 4, "b": 3}, {"a": 5, "b": 2, "c": 3}, dict.fromkeys("abcd", 4)]


def values(of: list[Any], together: int) -> set[Any]:
    """Return the combinations of so many values of different parameters."""
    each = (itertools.combinations(x.callspec.params.items(), together) for x in of)
    return set(itertools.chain.from_iterable(each))


@pytest.mark.parametrize(
    "mark", [(), (pytest.mark.sampled(2),), (pytest.mark.sampled(100),), (pytest.mark.pairwise,)]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_value_is_run(sizes: dict[str, int], mark: tuple[Any, ...]) -> None:
    given = items("test_x", sizes, *mark)
    default, full = (selected(given, x) for x in (Level.DEFAULT, Level.FULL))
    assert full == [x for x in given if x in full]
    assert default == [x for x in full if x in default]  # in their order
    assert values(default, 1) == values(full, 1) == values(given, 1)
    assert len(default) <= sum(sizes.values())
    assert selected(given, Level.EXHAUSTIVE) == given
    if mark == (pytest.mark.pairwise,):
        assert values(full, 2) == values(given, 2)
    if not mark:
        assert full == given


def test_a_table_keeps_its_rows() -> None:
    rows = [(1, True), (1, False), (2, True)]
    table = pytest.mark.parametrize(("a", "b"), rows).mark
    given: list[Any] = [
        SimpleNamespace(
            nodeid=f"test_x[{at}]",
            callspec=SimpleNamespace(params={"a": at[0], "b": at[1]}),
            get_closest_marker={}.get,
            iter_markers=lambda _: iter([table]),
        )
        for at in rows
    ]
    assert selected(given, Level.DEFAULT) == given


@pytest.mark.parametrize("level", [Level.FULL, Level.EXHAUSTIVE])
def test_a_mark_is_the_least_level_that_runs_a_test(level: Level) -> None:
    plain = items("test_x", {"a": 3})
    marked = items("test_y", {"a": 2}, getattr(pytest.mark, level.name.lower()))
    assert selected(plain + marked, Level(level - 1)) == plain
    assert selected(plain + marked, level) == plain + marked

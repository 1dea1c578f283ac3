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


@pytest.mark.parametrize("every", [(), (2,), (100,)])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_value_is_run(sizes: dict[str, int], every: tuple[int, ...]) -> None:
    given = items("test_x", sizes, pytest.mark.sampled(*every))
    default, full = (selected(given, x) for x in (Level.DEFAULT, Level.FULL))
    assert full == [x for x in given if x in full]
    assert default == [x for x in full if x in default]  # in their order
    assert values(default, 1) == values(full, 1) == values(given, 1)
    assert len(default) <= sum(sizes.values())
    assert len(full) >= len(given) / (*every, 1)[0]
    assert selected(given, Level.EXHAUSTIVE) == given


@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_of_values_is_run(sizes: dict[str, int]) -> None:
    given = items("test_x", sizes, pytest.mark.pairwise)
    kept = selected(given, Level.DEFAULT)
    assert kept == selected(given, Level.FULL) == [x for x in given if x in kept]
    assert values(kept, 2) == values(given, 2)
    if len(sizes) > 2:
        assert 2 * len(kept) <= len(given) + 1


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_few_run_by_default_and_all_with_full(sizes: dict[str, int], count: int) -> None:
    given = items("test_x", sizes, pytest.mark.sampled, pytest.mark.few(count))
    default = selected(given, Level.DEFAULT)
    assert default == [x for x in given if x in default]
    assert len(default) == min(count, len(given))
    sampled = items("test_x", sizes, pytest.mark.sampled)
    ids = [x.nodeid for x in selected(sampled, Level.DEFAULT)]
    assert len(default) == min(count, len(ids))
    assert {x.nodeid for x in default} <= set(ids)
    assert selected(given, Level.FULL) == given


@pytest.mark.parametrize("level", [Level.FULL, Level.EXHAUSTIVE])
def test_a_mark_is_the_least_level_that_runs_a_test(level: Level) -> None:
    plain = items("test_x", {"a": 3})
    marked = items("test_y", {"a": 2}, getattr(pytest.mark, level.name.lower()))
    assert selected(plain + marked, Level(level - 1)) == plain
    assert selected(plain + marked, level) == plain + marked

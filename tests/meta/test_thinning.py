"""What the gate leaves out of large products: never a value that no other test runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.thinning import thinned


def items(name: str, sizes: dict[str, int], *marks: Any) -> list[Any]:
    """Tests of a product of parameters."""
    found = []
    for at in itertools.product(*map(range, sizes.values())):
        named = {mark.name: mark.mark for mark in marks}
        found.append(
            SimpleNamespace(
                nodeid=f"tests/a.py::{name}[{at}]",
                callspec=SimpleNamespace(params=dict(zip(sizes, at, strict=True))),
                get_closest_marker=named.get,
            )
        )
    return found


@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 6}, {"a": 4, "b": 3}, {"a": 5, "b": 2, "c": 3}])
def test_every_value_is_run(every: int, sizes: dict[str, int]) -> None:
    given = items("test_x", sizes, pytest.mark.sampled(every))
    kept, left = thinned(given)
    assert sorted(map(given.index, kept + left)) == list(range(len(given)))
    assert kept == [x for x in given if x in kept]
    for name, size in sizes.items():
        assert {x.callspec.params[name] for x in kept} == set(range(size))  # type: ignore[attr-defined]
    assert len(kept) >= len(given) / every
    assert len(kept) <= max(sum(sizes.values()), -(-len(given) // every))
    assert thinned(given) == (kept, left)


@pytest.mark.parametrize(
    "sizes",
    [{"a": 1}, {"a": 6}, {"a": 4, "b": 3}, {"a": 5, "b": 2, "c": 3}, dict.fromkeys("abcd", 4)],
)
def test_every_pair_of_values_is_run(sizes: dict[str, int]) -> None:
    given = items("test_x", sizes, pytest.mark.pairwise)
    kept, left = thinned(given)
    assert sorted(map(given.index, kept + left)) == list(range(len(given)))
    assert kept == [x for x in given if x in kept]

    def pairs(of: list[Any]) -> set[Any]:
        found = (itertools.combinations(x.callspec.params.items(), 2) for x in of)
        return set(itertools.chain.from_iterable(found))

    assert pairs(kept) == pairs(given)
    if len(sizes) < 3:
        assert kept == given
    else:
        assert 2 * len(kept) <= len(given) + 1
    assert thinned(given) == (kept, left)


def test_others_are_left_alone() -> None:
    plain = items("test_x", {"a": 3, "b": 3})
    thorough = items("test_y", {"a": 2}, pytest.mark.thorough)
    assert thinned([*plain, *thorough]) == (plain, thorough)

"""What of a large product of parameters the gate runs. `HETERO_TEST_ALL=1` runs all of it.

Marks: `pairwise` keeps a few of a test's parameter sets such that any two values of two of its
parameters meet in one of them; `sampled(n)` keeps one in n, those first that bring a value which no
other kept one has (so that every value of every parameter is run); `thorough` keeps none. Which are
kept is the same in every run.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Hashable

import pytest

ALL = bool(os.environ.get("HETERO_TEST_ALL"))


def examples(count: int, thorough: int) -> int:
    """How many random examples a property is tried on: by the gate, and where all is run."""
    return thorough if ALL else count


def thinned(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that run, in their order, and those that do not."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    kept: set[str] = set()
    for group in groups.values():
        runs = [item for item in group if item.get_closest_marker("thorough") is None]
        mark = group[0].get_closest_marker("sampled")
        if group[0].get_closest_marker("pairwise") is not None:
            kept |= _pairs(runs)
        else:
            kept |= _sample(runs, mark.args[0]) if mark is not None else {x.nodeid for x in runs}
    return [x for x in items if x.nodeid in kept], [x for x in items if x.nodeid not in kept]


def _sample(items: list[pytest.Item], every: int) -> set[str]:
    """Ids of one in `every` items, and of as many more as bring a value of their own."""
    order = sorted(items, key=_mixed)
    seen: set[Hashable] = set()
    kept: set[str] = set()
    for item in order:
        values = set(_values(item))
        if values - seen:
            seen |= values
            kept.add(item.nodeid)
    for item in order:
        if len(kept) * every >= len(items):
            break
        kept.add(item.nodeid)
    return kept


def _pairs(items: list[pytest.Item]) -> set[str]:
    """Ids of items that have every pair of values that any has: each brings the most new ones."""
    left: dict[str, set[Hashable]] = {}
    for item in sorted(items, key=_mixed):
        values = _values(item)
        left[item.nodeid] = {*values, *itertools.combinations(values, 2)}
    kept: set[str] = set()
    while left:
        best = max(left, key=lambda name: len(left[name]))
        new = left[best]
        kept.add(best)
        left = {name: rest for name, pairs in left.items() if (rest := pairs - new)}
    return kept


def _mixed(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    spec = getattr(item, "callspec", None)
    return [] if spec is None else [(name, repr(at)) for name, at in sorted(spec.params.items())]

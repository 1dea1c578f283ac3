"""What of a large product of parameters the gate runs. `HETERO_TEST_ALL=1` runs all of it.

Marks: `sampled(n)` keeps one in n of a test's parameter sets, those first that bring a value which
no other kept one has (so that every value of every parameter is run); `thorough` keeps none.
Which are kept is the same in every run.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest


def thinned(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that run, in their order, and those that do not."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    kept: set[str] = set()
    for group in groups.values():
        runs = [item for item in group if item.get_closest_marker("thorough") is None]
        mark = group[0].get_closest_marker("sampled")
        kept |= _sample(runs, mark.args[0]) if mark is not None else {x.nodeid for x in runs}
    return [x for x in items if x.nodeid in kept], [x for x in items if x.nodeid not in kept]


def _sample(items: list[pytest.Item], every: int) -> set[str]:
    """Ids of one in `every` items, and of as many more as bring a value of their own."""
    order = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    seen: set[tuple[str, str]] = set()
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


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    spec = getattr(item, "callspec", None)
    return [] if spec is None else [(name, repr(at)) for name, at in spec.params.items()]

"""Select the tests that run.

- `pytest` runs each behaviour once, in five minutes on two cores: one parameter set of a test, of
  one marked `few(n)` n, such that as many values of its parameters as possible occur.
- `pytest --full` runs all that the gate runs: the tests marked `full`, all parameter sets, more
  random examples.
- `pytest --exhaustive` also runs what takes hours: the tests marked `exhaustive`, thousands of
  random examples, and the parameter sets that these marks leave out of `--full`: of a test marked
  `pairwise`, a few run such that any two values of two parameters meet in one; of one marked
  `sampled(n)`, one in n.

Which sets run is the same each time. A test that is named by its id always runs.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Hashable
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

Values: TypeAlias = set[Hashable]
DEFAULT_SHARE: Final = 4  # one random example in so many of those of `--full`
SETS: Final = 1  # parameter sets of a test by default


class Level(IntEnum):
    """How much runs."""

    DEFAULT = 0
    FULL = 1
    EXHAUSTIVE = 2


_levels = [Level.DEFAULT]


def add_options(parser: pytest.Parser) -> None:
    """Add the switches to the command line of pytest."""
    group = parser.getgroup("selection")
    group.addoption("--full", action="store_true", help="run all that the gate runs")
    group.addoption("--exhaustive", action="store_true", help="run what takes hours, too")


def configure(config: pytest.Config) -> None:
    """Take the level from the command line, and register the marks."""
    full, exhaustive = config.getoption("full"), config.getoption("exhaustive")
    _levels[0] = Level.EXHAUSTIVE if exhaustive else Level.FULL if full else Level.DEFAULT
    for line in (
        "full: runs with `--full` only",
        "exhaustive: runs with `--exhaustive` only",
        f"few(n): runs n of the parameter sets by default, not {SETS}",
        "pairwise: `--full` runs every pair of values, `--exhaustive` all parameter sets",
        "sampled(n): `--full` runs one in n of the parameter sets, `--exhaustive` all",
        "optimised: `--full` compiles kernels as users do",
    ):
        config.addinivalue_line("markers", line)


def full() -> bool:
    """Return whether all that the gate runs is run."""
    return _levels[0] >= Level.FULL


def exhaustive() -> bool:
    """Return whether everything runs, however long it takes."""
    return _levels[0] is Level.EXHAUSTIVE


def is_left_out(path: Path) -> bool:
    """Return whether a file is for `--full` as a whole: its imports may take seconds."""
    return not full() and "\npytestmark = pytest.mark.full\n" in path.read_text(encoding="utf-8")


def examples(full: int, exhaustive: int | None = None) -> int:
    """Return the number of random examples of a property, given those of `--full` and more."""
    by_level = -(-full // DEFAULT_SHARE), full, exhaustive or full
    return by_level[_levels[0]]


def selected(items: list[pytest.Item], level: Level | None = None) -> list[pytest.Item]:
    """Return the tests that run, in their order."""
    level = _levels[0] if level is None else level
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    kept: set[str] = set()
    for group in groups.values():
        kept |= _kept([item for item in group if _least_level(item) <= level], level)
    return [x for x in items if x.nodeid in kept]


def _least_level(item: pytest.Item) -> Level:
    for level in (Level.EXHAUSTIVE, Level.FULL):
        if item.get_closest_marker(level.name.lower()) is not None:
            return level
    return Level.DEFAULT


def _kept(items: list[pytest.Item], level: Level) -> set[str]:
    """Return the ids of those items of one test that run."""
    if level is Level.EXHAUSTIVE or not items:
        return {item.nodeid for item in items}
    if level is Level.DEFAULT:
        few = items[0].get_closest_marker("few")
        return _sample(items, SETS if few is None else few.args[0])
    if items[0].get_closest_marker("pairwise") is not None:
        return _pairs(items)
    sampled = items[0].get_closest_marker("sampled")
    return _sample(items, -(-len(items) // (1 if sampled is None else sampled.args[0])))


def _sample(items: list[pytest.Item], count: int) -> set[str]:
    """Return the ids of so many items, first of those that bring a value of their own."""
    order = sorted(items, key=_mixed)
    new = _new_values(items)
    order.sort(key=lambda item: item.nodeid not in new)
    return {item.nodeid for item in order[:count]}


def _new_values(items: list[pytest.Item]) -> set[str]:
    """Return the ids of items that have every value of every parameter."""
    seen: Values = set()
    kept: set[str] = set()
    for item in sorted(items, key=_mixed):
        values = set(_values(item))
        if values - seen:
            seen |= values
            kept.add(item.nodeid)
    return kept


def _pairs(items: list[pytest.Item]) -> set[str]:
    """Return the ids of items that have every pair of values: each adds the most new pairs."""
    left: dict[str, Values] = {}
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
    spec: Any = getattr(item, "callspec", None)
    return [] if spec is None else [(name, repr(at)) for name, at in sorted(spec.params.items())]

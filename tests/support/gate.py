"""What `.ci/run` adds to a run of the tests.

- `--remaining` leaves out what the run before passed, so that `--full` repeats nothing of the
  default selection. Tests of random examples run again, with more of them.
- `--limit-s SECONDS` fails a test that takes longer and is not marked `full`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Final

import pytest

PASSED: Final = "hetero/passed"


def add_options(parser: pytest.Parser) -> None:
    """Add the switches to the command line of pytest."""
    group = parser.getgroup("gate")
    group.addoption("--remaining", action="store_true", help="leave out what the last run passed")
    group.addoption("--limit-s", type=float, help="fail unmarked tests that take longer")


def remaining(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that the last run has not passed in the same way."""
    if not config.getoption("remaining"):
        return items
    assert config.cache is not None
    passed = set(config.cache.get(PASSED, []))
    return [x for x in items if x.nodeid not in passed or x.get_closest_marker("hypothesis")]


class Recorder:
    """Keep which tests passed, and fail those that take too long."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._outcomes: dict[str, set[str]] = defaultdict(set)
        self._took_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a test whose setup and call take longer than the limit."""
        report = yield
        self._took_s[item.nodeid] += report.duration
        took_s, limit_s = self._took_s[item.nodeid], self._config.getoption("limit_s")
        marked = item.get_closest_marker("full") is not None
        if limit_s and report.when == "call" and report.passed and took_s > limit_s and not marked:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {took_s:.0f} s, over {limit_s:.0f}: mark it `full` or "
                "make it faster"
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of each phase; CI, which may end the run, prints failures at once."""
        self._outcomes[report.nodeid].add(report.outcome)
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and "CI" in os.environ:
            terminal.write_line(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}")

    def pytest_sessionfinish(self) -> None:
        """Write the tests without a failure."""
        cache = getattr(self._config, "cache", None)  # absent without its plugin
        if not hasattr(self._config, "workerinput") and cache is not None:
            before = cache.get(PASSED, []) if self._config.getoption("remaining") else []
            passed = [name for name, found in self._outcomes.items() if "failed" not in found]
            cache.set(PASSED, before + passed)

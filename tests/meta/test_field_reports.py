"""Every test that the list of field reports names exists; the tests themselves are run as such."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.field_reports import REPORTS, Report


@cache
def _tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.kind)
def test_what_a_report_names_is_tested(report: Report) -> None:
    for node in report.tests:
        path, _, name = node.partition("::")
        assert name in _tests(Path(__file__).parents[1] / path), node

"""`ExecutionPlan`: a plan that can write its own report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetero.solver.plan import Plan, write
from hetero.solver.report import document, markdown, page


class ExecutionPlan(Plan):
    """The document that a solver makes and the runtime executes (`hetero.solver.plan`)."""

    def report(self, path: str | os.PathLike[str], *, compare: Sequence[Plan] = ()) -> None:
        """Write a report, atomically: HTML, or Markdown or JSON by the ending of `path`. One in
        JSON can be loaded as the plan. Raises `PlanError`.
        """
        match Path(path).suffix.lower():
            case ".md":
                text = markdown.to_markdown(self, compare)
            case ".json":
                text = document.to_json(self, compare)
            case _:
                text = page.to_html(self, compare)
        write(path, text, "report")

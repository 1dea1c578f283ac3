"""`ExecutionPlan`: a plan that can write its own report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetero.solver.errors import PlanError
from hetero.solver.plan import Plan, write


class ExecutionPlan(Plan):
    """The document that a solver makes and the runtime executes (`hetero.solver.plan`)."""

    def __repr__(self) -> str:
        """Return which plan it is; its document is `model_dump_json()`."""
        cuts = sum(op.strategy not in ("gpu-only", "npu-only") for op in self.ops)
        return (
            f"ExecutionPlan({self.model!r} on {self.profile!r}, plan_id={self.plan_id!r}, "
            f"{cuts} of {len(self.ops)} matmuls cut)"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the report, for notebooks, in a frame of its own: its style is not theirs."""
        from html import escape

        from hetero.solver.report import page

        return (
            f'<iframe srcdoc="{escape(page.to_html(self), quote=True)}" '
            'style="width:100%;height:600px;border:0"></iframe>'
        )

    def report(self, path: str | os.PathLike[str], *, compare: Sequence[Plan] = ()) -> None:
        """Write a report, atomically: HTML, Markdown or JSON by the ending of `path`.

        One in JSON can be loaded as the plan. Raises `PlanError`.
        """
        # Every start loads this module: what draws is loaded when something is drawn.
        from hetero.solver.report import document, markdown, page

        match report_ending(path):
            case ".md":
                text = markdown.to_markdown(self, compare)
            case ".json":
                text = document.to_json(self, compare)
            case _:
                text = page.to_html(self, compare)
        write(path, text, "report")


def report_ending(path: str | os.PathLike[str]) -> str:
    """Return the form in which a report of this name is written.

    `.md`, `.json` or `.html` (also without an ending). Raises `PlanError` for another.
    """
    ending = Path(path).suffix.lower()
    if ending not in ("", ".html", ".htm", ".md", ".json"):
        raise PlanError(f"a report is not written as {ending} ({path}): choose .html, .md or .json")
    return ending if ending in (".md", ".json") else ".html"

"""The report: one page that needs nothing else, and the same content as Markdown and JSON."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import OpPlan, Rest, Tile
from hetero.solver.report import content
from hetero.solver.report.drawings import block_bars
from hetero.solver.request import PlanRequest

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements in order, texts, and whether everything that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    request = PlanRequest(seq_lens=(64, 300), curves=True)
    return make_plan(model_spec("llama-3-8b"), DeviceProfile.load("snapdragon-8-gen-3"), request)


@pytest.fixture(scope="module")
def other() -> ExecutionPlan:
    chip = DeviceProfile.load("snapdragon-8-gen-3-strong-npu")
    return make_plan(model_spec("llama-3-8b"), chip, PlanRequest(seq_lens=(64, 300)))


def written(plan: ExecutionPlan, path: Path, others: tuple[ExecutionPlan, ...] = ()) -> str:
    plan.report(path, compare=others)
    return path.read_text(encoding="utf-8")


def test_the_page_stands_alone(plan: ExecutionPlan, other: ExecutionPlan, tmp_path: Path) -> None:
    text = written(plan, tmp_path / "r.html", (other,))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(set(attrs) & {"src", "href", "onclick"} for _, attrs in page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "nan" not in re.findall(r'(?:x|y|width|height|points)="([^"]*)"', text)


def test_everything_is_drawn_to_scale(plan: ExecutionPlan, tmp_path: Path) -> None:
    page = Page(written(plan, tmp_path / "r.html"))
    tiles = [attrs for tag, attrs in page.tags if tag == "rect" and attrs.get("class") == "tile"]
    steps = {(t.phase, t.m) for t in plan.totals}
    ops = [op for op in plan.ops if (op.phase, op.m) in steps]
    assert len(tiles) == sum(len(op.tiles) for op in ops)
    area = dict.fromkeys(("gpu", "npu"), 0.0)
    for attrs in tiles:
        if attrs["height"] and float(attrs["height"]) > 46:  # a whole column of a prompt
            kind = (attrs["fill"] or "")[6:9]
            area[kind] += float(attrs["width"] or 0)
    assert area["npu"] > area["gpu"] > 0
    curves = [attrs for tag, attrs in page.tags if tag == "polyline"]
    steps_of_front = {(p.phase, p.m) for p in plan.front}
    assert len(curves) == len(plan.curves) + len(steps_of_front)
    assert {c.strategy for c in plan.curves} >= {
        "auto", "gpu-only", "layer", "padding", "pipe", "chunked", "online-prepare", "row-cut",
        "sequence-cut", "multi-sequence-cut", "hybrid-cut",
    }  # fmt: skip


def test_a_matmul_that_is_faster_than_its_halves_starts_where_the_last_ended(
    plan: ExecutionPlan,
) -> None:
    """A plan of a file need not add up; nothing is drawn to the left of the axis."""
    ops = [op.model_copy(update={"predicted_s": 0.0}) for op in plan.ops]
    odd = plan.model_copy(update={"ops": ops})
    for total in odd.totals:
        bars = block_bars(odd, total)
        assert bars
        assert min(bar.start_s for bar in bars) >= 0


def test_all_formats_say_the_same(
    plan: ExecutionPlan, other: ExecutionPlan, tmp_path: Path
) -> None:
    cells = Page(written(plan, tmp_path / "r.html", (other,))).texts
    markdown = written(plan, tmp_path / "r.md", (other,))
    document = json.loads(written(plan, tmp_path / "r.json", (other,)))
    tables = [*content.tables(plan, (other,)), *content.alternatives(plan)]
    report = document["report"]
    assert report["numbers"] == "simulated"
    assert [t["title"] for t in report["tables"] + report["alternatives"]] == [
        t.title for t in tables
    ]
    assert "What if" in [t.title for t in tables]
    for table, found in zip(tables, report["tables"] + report["alternatives"], strict=True):
        assert found["rows"] == [list(row) for row in table.rows]
        assert table.title in markdown
        for row in table.rows:
            assert "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" in markdown
            assert set(filter(None, row)) <= set(cells)


def test_numbers_say_what_they_are(plan: ExecutionPlan) -> None:
    for table in content.tables(plan, ()):
        if any(re.search(r"\d ?(ms|s|J|W)$", cell) for row in table.rows for cell in row):
            assert "Simulated" in table.note, table.title
    host = make_plan(model_spec("llama-3.2-1b"), DeviceProfile.load("host"))
    assert "Predicted" in content.gains(host).note


def test_a_report_in_json_is_the_plan(plan: ExecutionPlan, tmp_path: Path) -> None:
    written(plan, tmp_path / "r.json")
    assert ExecutionPlan.load(tmp_path / "r.json") == plan


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    tile = Tile(device="gpu", tokens=(0, None), rows=(0, 64))
    made = ExecutionPlan(
        model="<script>alert(1)</script>",
        profile='a|b & "c"',
        notes=("<b>note</b>",),
        ops=tuple(
            OpPlan(phase=phase, m=None, op="qkv", n=64, k=64, strategy="gpu-only", tiles=(tile,))
            for phase in ("prefill", "decode")
        ),
        rest=Rest(prefill="gpu", decode="gpu"),
    )
    page = Page(written(made, tmp_path / "r.html"))
    assert not {"script", "b"} & {tag for tag, attrs in page.tags if not attrs} - {"b"}
    assert "<script>alert(1)</script>" in page.texts
    assert "<b>note</b>" in page.texts


def test_a_report_that_cannot_be_written_leaves_nothing(
    plan: ExecutionPlan, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"cannot write the report .*choose another path"):
        plan.report(tmp_path / "no" / "r.html")
    (tmp_path / "r.md").mkdir()
    with pytest.raises(PlanError, match="cannot write the report"):
        plan.report(tmp_path / "r.md")
    assert [p.name for p in tmp_path.iterdir()] == ["r.md"]

"""The report: one page that needs nothing else, and the same content as Markdown and JSON."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.models import model_spec
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile
from hetero.profiler.report import write_report
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import NonMatmulDevices, OpPlan, Tile
from hetero.solver.report import content, fastest_table, units
from hetero.solver.report.conclusion import sentences
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


@pytest.mark.full
def test_the_page_stands_alone(plan: ExecutionPlan, other: ExecutionPlan, tmp_path: Path) -> None:
    text = written(plan, tmp_path / "r.html", (other,))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(set(attrs) & {"src", "onclick"} for _, attrs in page.tags)
    pointed = [target for _, attrs in page.tags if (target := attrs.get("href")) is not None]
    assert all(target.startswith("#") for target in pointed)  # marks of a chart, in the page
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    ids = [found for _, attrs in page.tags if (found := attrs.get("id")) is not None]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in pointed} <= set(ids)
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
    lines = [attrs["id"] or "" for tag, attrs in page.tags if tag == "g" and "id" in attrs]
    steps_of_front = {(p.phase, p.m) for p in plan.front}
    assert sum("-curve-" in line for line in lines) == len(plan.curves)
    assert sum("-front-" in line for line in lines) == len(steps_of_front)
    assert sum(line.endswith("-this-plan") for line in lines) == 1
    assert {c.strategy for c in plan.curves} >= {
        "auto", "gpu-only", "npu-only", "layer", "padding", "pipe", "chunked", "online-prepare",
        "row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut",
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


@pytest.mark.full
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
        non_matmul=NonMatmulDevices(prefill="gpu", decode="gpu"),
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


def test_a_plan_says_what_it_comes_to(plan: ExecutionPlan, tmp_path: Path) -> None:
    """Who, why, what it gains, how sure: on the page, and true by the plan's own numbers."""
    said = sentences(plan)
    assert [x.split(":")[0].split(",")[0] for x in said] == ["Who", "Why", "Gain", "How sure"]
    text = "".join(Page(written(plan, tmp_path / "r.html")).texts)
    for sentence in said:
        assert sentence in text
    (decode,) = [t for t in plan.totals if t.phase == "decode"]
    assert (
        f"a decoded token {units.gain(decode.predicted_s, min(decode.single_devices.values()))}"
        in said[2]
    )
    assert "simulated" in said[3]
    by_hand = ExecutionPlan(model="m", ops=plan.ops, non_matmul=plan.non_matmul)
    assert sentences(by_hand) == ()


def test_a_gain_below_the_error_of_predictions_is_named() -> None:
    made = make_plan(model_spec("demo"), DeviceProfile.load("host"), PlanRequest(seq_lens=(256,)))
    gains = [t.best_single_device_s / t.predicted_s - 1 for t in made.totals]
    sure = made.model_copy(update={"errors": {"prefill": 1e-9, "decode": 1e-9}})
    unsure = made.model_copy(update={"errors": {"prefill": 9.0, "decode": 9.0}})
    assert set(made.errors) == {"prefill", "decode"}
    assert "less than that" not in sentences(sure)[3]
    assert ("less than that" in sentences(unsure)[3]) == any(gain > 0 for gain in gains)


def test_one_number_for_one_thing(plan: ExecutionPlan) -> None:
    """What the table of lengths calls this plan is the time of the gains; the note names what the
    plan loses to being one for all lengths.
    """
    table = content.curves(plan)
    assert table is not None
    column = table.head.index("this plan")
    own = {row[0]: row[column] for row in table.rows if row[column]}
    gains = {str(t.m): units.duration(t.predicted_s) for t in plan.totals if t.phase == "prefill"}
    assert own == gains
    alone = {p.m: p.seconds for c in plan.curves if c.strategy == "auto" for p in c.points}
    costs = [t.predicted_s / (alone[t.m] or 1) - 1 for t in plan.totals if t.m in alone]
    assert f"costs at most {100 * max(costs):.0f} %" in table.note


def test_the_reason_of_a_cut_stands_where_it_is_drawn(plan: ExecutionPlan, tmp_path: Path) -> None:
    text = "".join(Page(written(plan, tmp_path / "r.html")).texts)
    for op in plan.ops:
        if op.m is not None and op.candidates:
            assert content.reason(op) in text
    assert "the GPU alone would take" in text


@pytest.mark.parametrize("ending", [".pdf", ".png", ".htmll"])
def test_other_endings_are_refused(plan: ExecutionPlan, tmp_path: Path, ending: str) -> None:
    with pytest.raises(PlanError, match=f"is not written as {ending}"):
        plan.report(tmp_path / f"r{ending}")
    with pytest.raises(ProfileError, match="is a page"):
        write_report(DeviceProfile.load("host"), tmp_path / f"r{ending}")
    assert list(tmp_path.iterdir()) == []


def test_rates_have_no_exponents() -> None:
    assert [units.rate(x) for x in (13780.4, 253.34, 12.94, 0.5)] == [
        "13,780",
        "253",
        "12.9",
        "0.50",
    ]


@pytest.mark.full
def test_every_form_of_a_report_says_where_it_is_fastest(tmp_path: Path) -> None:
    """The table of `hetero plan`, and the depths at which decoding moves."""
    chip = "snapdragon-8-elite-gen-5"
    plan = hetero.plan("qwen3-4b", chip, seq_lens=(64,), curves=False, fastest=True)
    said = fastest_table.answers(plan)
    assert said[0].startswith("Answers are fastest on CPU until ")
    assert re.search(r" tokens, then NPU \(1\.\d\d ×\) \(fitted\), each by more than ", said[0])
    table = fastest_table.table(plan)
    assert table is not None
    for ending in ("html", "md", "json"):
        plan.report(tmp_path / f"r.{ending}")
        text = (tmp_path / f"r.{ending}").read_text()
        assert table.title in text, ending
        assert table.rows[-1][3] in text, ending
        assert ending == "json" or said[0] in text, ending
    Page((tmp_path / "r.html").read_text())
    bare = plan.model_copy(update={"fastest": (), "fastest_answers": ()})
    assert fastest_table.table(bare) is None
    assert fastest_table.answers(bare) == ()

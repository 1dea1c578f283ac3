"""Contributed profiles: what `hetero profile --check` finds, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero.cli.app import app
from hetero.errors import UserError
from hetero.measuring.profile_checks import check_profile
from hetero.profiler.profile_files import shipped_names, shipped_path

Document = dict[str, Any]


def failed(path: Path) -> dict[str, str]:
    return {x.name: x.detail for x in check_profile(path) if not x.ok}


def spoilt(tmp_path: Path, name: str, change: Callable[[Document], None]) -> Path:
    document = json.loads(shipped_path(name).read_text("utf-8"))
    change(document)
    path = tmp_path / "contributed.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", shipped_names())
def test_what_is_shipped_would_be_taken(name: str) -> None:
    findings = check_profile(shipped_path(name))
    assert [x for x in findings if not x.ok] == []
    assert {x.name for x in findings} >= {name, "predictions", "speed"}


def faster(factor: float) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        for predictor in document["predictors"]:
            knots = predictor["knots"]
            knots["coefficients"] = [[x / factor for x in row] for row in knots["coefficients"]]

    return change


def rows_of_no_time(document: Document) -> None:
    document["matmuls"][-1]["seconds"] = 1e-12


def drifting(document: Document) -> None:
    for point in document["references"]:
        if point["device"] == "gpu" and point["phase"] == "decode":
            point["seconds"] *= 1 + point["at_s"] / 100


def disturbed(document: Document) -> None:
    for row in document["matmuls"]:
        row["flags"] = ["disturbed"]


def badly_predicted(document: Document) -> None:
    for predictor in document["predictors"]:
        for entry in predictor["validation"]:
            entry["mape"] = 0.5


@pytest.mark.full
@pytest.mark.parametrize(
    ("profile", "change", "name", "detail"),
    [
        ("x-elite", faster(100), "speed", "known chips have"),
        ("x-elite", faster(1e-4), "speed", "known chips have"),
        ("host", rows_of_no_time, "rows", "1 rows are faster than any chip, such as"),
        ("host", drifting, "drift", "decode kernels moved by"),
        ("host", disturbed, "disturbed rows", "100% of"),
        ("host", badly_predicted, "predictions", "is predicted with a mean error of 50%"),
    ],
)
def test_what_cannot_be_or_cannot_be_relied_on_fails(
    tmp_path: Path, profile: str, change: Callable[[Document], None], name: str, detail: str
) -> None:
    full = profile if profile == "host" else f"snapdragon-{profile}"
    problems = failed(spoilt(tmp_path, full, change))
    assert set(problems) == {name}
    assert detail in problems[name]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not JSON"),
        ("{}", "is not a profile"),
        ('{"schema_version": 99}', "this hetero reads 1"),
        ('{"schema_version": 1, "name": "x"}', "is damaged at created"),
        ('{"checks": [], "profile": null}', "is a report without a profile"),
        ('{"checks": [], "profile": {"schema_version": 1}}', "is damaged at name"),
    ],
)
def test_what_is_no_profile_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        check_profile(tmp_path / "a.json")


def test_the_command_reports_and_exits_by_the_findings(tmp_path: Path) -> None:
    words = ["profile", "--check"]
    good = CliRunner().invoke(app, [*words, str(shipped_path("iq-9075"))])
    assert (good.exit_code, good.stdout.count("PASS")) == (0, 4)
    bad = spoilt(tmp_path, "iq-9075", faster(1e4))
    done = CliRunner().invoke(app, [*words, str(bad), "--json"])
    assert done.exit_code == 1
    assert [x["ok"] for x in json.loads(done.stdout)] == [True, True, False, False]
    refused = CliRunner().invoke(app, [*words, str(bad), "--soc", "sm8650"])
    assert "--check measures nothing: leave out --soc" in str(refused.exception)

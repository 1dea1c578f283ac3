"""What `auto` chose is kept: the same answer without solving, and for the same question only."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.models import model_spec
from hetero.placement import by_profile, choosing, decisions, first_start
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.first_start import FirstStart, Machine
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from tests.placement.test_choosing import named

AUTO = PlacementRequest(mode="auto", context=512)


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's, by which the GPU alone is fastest; decisions are kept."""
    path = tmp_path / "host.json"
    monkeypatch.setattr("hetero.placement.planning.profile_files.own_profile_path", lambda: path)
    monkeypatch.setattr(decisions, "folder", lambda: tmp_path / "decisions")
    monkeypatch.setattr(
        first_start.profile_files, "cached_profile_path", lambda: tmp_path / "none" / "p"
    )
    named(DeviceProfile.load("snapdragon-8-gen-3"), npu_scale=100.0).save(path)
    return path


def solved(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by an item for each choice that is solved."""
    found: list[object] = []
    solve = by_profile.by_profile

    def counted(*args: Any) -> Choice:
        found.append(args)
        return solve(*args)

    monkeypatch.setattr(by_profile, "by_profile", counted)
    return found


@pytest.mark.full
def test_a_kept_choice_is_that_of_a_fresh_solver(
    profile: Path, spec: ModelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = solved(monkeypatch)
    request = [AUTO, replace(AUTO, expected=(40,)), replace(AUTO, seq_lens=(64, 256))]
    fresh = [choose(spec, x) for x in request]
    assert [x.mode for x in fresh] == ["gpu"] * 3
    again = [choose(spec, x) for x in request]
    assert len(times) == 3
    assert again == [replace(x, cost=None) for x in fresh]  # only plans have costs
    with monkeypatch.context() as patched:
        patched.setattr(decisions, "load_cached", lambda _: None)
        assert [replace(choose(spec, x), cost=None) for x in request] == again


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "what",
    [
        "model",
        "format",
        "wish",
        "backend",
        "profile",
        "variable",
        "cores",
        "quota",
        "driver",
        "processor",
        "version",
        "code",
    ],
)
def test_another_question_is_decided_anew(
    profile: Path, spec: ModelGraph, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    times = solved(monkeypatch)
    choose(spec, AUTO)
    request = AUTO
    match what:
        case "model":
            spec = model_spec("qwen2.5-1.5b")
        case "format":
            spec = model_spec("llama-3.2-1b", "w8a16")
        case "wish":
            request = replace(AUTO, context=4096)
        case "backend":
            request = replace(AUTO, npu="ort-cpu")
        case "profile":
            profile.write_text(profile.read_text("utf-8") + "\n", encoding="utf-8")
        case "variable":
            monkeypatch.setenv("POCL_MAX_PTHREAD_COUNT", "1")
        case "cores":
            monkeypatch.setattr(choosing, "every_core_count", lambda: 3)
        case "quota":
            monkeypatch.setattr(choosing, "core_count", lambda: 5)
        case "driver":
            monkeypatch.setattr(choosing, "driver_here", lambda _: "another")
        case "processor":  # another machine with the same home
            monkeypatch.setattr(first_start, "cpu_flags", lambda: frozenset({"avx9"}))
        case "version":
            monkeypatch.setattr(decisions, "hetero_version", lambda: "99")
        case "code":
            monkeypatch.setattr(decisions, "code_stamp", lambda: "another")
    choose(spec, request)
    assert len(times) == 2


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["short", "mode", "reason", "key", "list", "deep"])
def test_a_broken_file_is_decided_anew(
    profile: Path, spec: ModelGraph, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    times = solved(monkeypatch)
    first = choose(spec, AUTO)
    (path,) = decisions.folder().iterdir()
    whole = path.read_text("utf-8")
    content = json.loads(whole)
    match damage:
        case "short":
            path.write_text(whole[:-20], encoding="utf-8")
        case "list":
            path.write_text("[]", encoding="utf-8")
        case "deep":
            path.write_text("[" * 60_000, encoding="utf-8")
        case _:
            path.write_text(json.dumps(content | {damage: "npu"}), encoding="utf-8")
    assert replace(choose(spec, AUTO), cost=first.cost) == first
    assert len(times) == 2
    assert path.read_text("utf-8") == whole


@pytest.mark.full
@pytest.mark.parametrize("damage", [{"more": 1}, {"notes": 7}, {"notes": None}])
def test_what_another_version_has_written_is_decided_anew(
    profile: Path, spec: ModelGraph, damage: dict[str, Any]
) -> None:
    """Though its hash is right."""
    first = choose(spec, AUTO)
    (path,) = decisions.folder().iterdir()
    content = json.loads(path.read_text("utf-8")) | damage
    del content["check"]
    path.write_text(json.dumps(content | {"check": decisions._check(content)}), encoding="utf-8")
    assert replace(choose(spec, AUTO), cost=first.cost) == first
    content.pop("notes")
    path.write_text(json.dumps(content | {"check": decisions._check(content)}), encoding="utf-8")
    assert replace(choose(spec, AUTO), cost=first.cost) == first


@pytest.mark.full
def test_a_cache_that_can_only_be_read_is_read(
    profile: Path, spec: ModelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = solved(monkeypatch)
    choose(spec, AUTO)

    def refuse(*_: Any) -> None:
        raise PermissionError(30, "read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    choose(spec, AUTO)
    assert len(times) == 1


@pytest.mark.parametrize("at_s", [0.0, None])
def test_what_could_not_be_measured_is_tried_again_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_s: float | None
) -> None:
    """And what was decided without is not kept for longer."""
    monkeypatch.setattr(
        first_start.profile_files, "taken_profile_path", lambda: tmp_path / "none.json"
    )
    at_s = time.time() if at_s is None else at_s
    found = FirstStart(machine=Machine.here(), profile="host", at_s=at_s, reason="no time")
    monkeypatch.setattr(FirstStart, "load", lambda _: found)
    monkeypatch.delenv(first_start.SWITCH, raising=False)
    assert (first_start.profile_facts() is None) == (at_s == 0)
    monkeypatch.setattr(FirstStart, "load", lambda _: None)
    assert first_start.profile_facts() is None


@pytest.mark.full
def test_plans_and_what_is_asked_for_by_name_are_not_kept(
    profile: Path, spec: ModelGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(spec, replace(AUTO, profile=str(profile)))
    choose(spec, replace(AUTO, strategy="gpu-only"))
    choose(spec, replace(AUTO, mode="hetero"))
    named(DeviceProfile.load("snapdragon-8-gen-3")).save(profile)
    assert choose(spec, AUTO).mode == "hetero"
    assert not decisions.folder().exists()
    monkeypatch.setattr(decisions, "folder", lambda: Path(os.devnull) / "none")
    named(DeviceProfile.load("snapdragon-8-gen-3"), npu_scale=100.0).save(profile)
    assert choose(spec, AUTO).mode == "gpu"  # a cache that cannot be written


@pytest.mark.full
def test_the_oldest_go(profile: Path, spec: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_DECISIONS", 2)
    for context in (256, 512, 1024):
        choose(spec, replace(AUTO, context=context))
    assert len(list(decisions.folder().iterdir())) == 2

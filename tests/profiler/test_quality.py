"""What is said of a profile: who is faster, how well it predicts, whether it is any good."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from filelock import FileLock

import hetero
from hetero.backends.host.clock import ManualClock
from hetero.errors import UserError
from hetero.measuring.profiling import MIN_BUDGET_S, lock_path
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.pages import COLORS
from hetero.profiler.quality import MAX_ERROR, grade
from hetero.profiler.records import DeviceProfile, Quarantine
from hetero.profiler.report import to_html
from hetero.profiler.session import profile_devices
from tests.profiler.fakes import devices, options
from tests.support.helpers import Command


@pytest.fixture(scope="module")
def host() -> DeviceProfile:
    return DeviceProfile.load("host")


def with_error(profile: DeviceProfile, error: float) -> DeviceProfile:
    """As if the predictors of the NPU were off by so much in prefill."""
    predictors = tuple(
        p.model_copy(
            update={
                "validation": tuple(
                    v.model_copy(update={"mape": error}) if v.phase == "prefill" else v
                    for v in p.validation
                )
            }
        )
        if p.device == "npu"
        else p
        for p in profile.predictors
    )
    return profile.model_copy(update={"predictors": predictors})


def test_who_is_faster_is_what_the_profile_measured(host: DeviceProfile) -> None:
    found = grade(host)
    assert found.good
    n, k = max(((r.n, r.k) for r in host.matmuls), key=lambda pair: pair[0] * pair[1])
    model, form = CostModel(host), host.predictors[0].weight_format
    gpu, npu = (float(model.matmul_s(kind, form, 1, n, k).seconds) for kind in ("gpu", "npu"))
    fast, ratio = ("GPU", npu / gpu) if gpu < npu else ("NPU", gpu / npu)
    assert f"{fast} {ratio:.1f} × the" in found.sentences[0]
    assert [said.split(":")[0] for said in found.sentences] == ["Faster", "Predicts"]


def test_a_profile_that_predicts_badly_is_bad(host: DeviceProfile) -> None:
    assert grade(with_error(host, 0.9 * MAX_ERROR)).good
    assert grade(with_error(host, 1.1 * MAX_ERROR)).problems == (
        "NPU prefill is predicted with a mean error of 33%",
    )
    gpu = tuple(p for p in host.predictors if p.device == "gpu")
    assert (
        "nothing of the NPU was measured"
        in grade(host.model_copy(update={"predictors": gpu})).problems
    )
    few = tuple(p.model_copy(update={"validation": p.validation[:1]}) for p in host.predictors)
    assert "too little of GPU prefill" in " ".join(
        grade(host.model_copy(update={"predictors": few})).problems
    )
    assert grade(DeviceProfile.load("snapdragon-8-gen-3")).good  # simulated: nothing to check


@pytest.mark.parametrize(("quick", "budget_s"), [(True, 29.0), (False, 1.0), (False, 74.0)])
def test_a_budget_too_short_is_refused_with_the_least(quick: bool, budget_s: float) -> None:
    with pytest.raises(UserError, match=f"give at least {MIN_BUDGET_S[quick]:.0f} s"):
        hetero.profile_device(quick=quick, budget_s=budget_s)


def test_a_budget_that_is_used_up_before_the_matmuls_is_refused() -> None:
    """On a slow machine, as soon as that shows; the run can be gone on with."""
    clock = ManualClock()
    with pytest.raises(ProfileError, match=r"too short here: .* took .*--resume --budget \d+0s"):
        profile_devices(devices(clock), options(budget_s=0.01, keep_budget=True), clock=clock)


@pytest.mark.parametrize("way", ["--quick", "--add"])
def test_two_at_once_on_one_file(tmp_path: Path, command: Command, way: str) -> None:
    """It is read by who has it alone, too: what the other writes is not to be lost."""
    out = tmp_path / "p.json"
    with FileLock(lock_path(out)):
        done = command("profile", way, "--out", str(out))
    assert (done.returncode, done.stdout) == (2, "")
    assert "another `hetero profile` is writing" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_finished_profile_is_not_measured_again_by_resume(
    tmp_path: Path, command: Command, host: DeviceProfile
) -> None:
    out = tmp_path / "p.json"
    host.save(out)
    done = command("profile", "--resume", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "is finished, nothing is measured" in done.stderr
    assert f"next: hetero plan MODEL --profile {out}" in " ".join(done.stderr.split())
    assert "Faster: GPU" in done.stderr
    with_error(host, 2.0).save(out)
    done = command("profile", "--resume", "--out", str(out))
    assert (done.returncode, done.stdout.strip()) == (1, str(out))
    assert "this profile is bad" in done.stderr
    found = json.loads(command("profile", "--resume", "--out", str(out), "--json").stdout)
    assert (found["good"], found["verdict"][-1][:4]) == (False, "Bad:")


class Texts(HTMLParser):
    """All that a page says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.said = ""
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.said += data


@pytest.mark.full
def test_the_page_of_a_chip_that_is_not_here_has_nothing_of_measuring() -> None:
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    left_out = [
        Quarantine(
            device="npu", op="MatMul", weight_format="w4a16", shape_class=shape, tolerance=0.0,
            detail="no w4a16 kernel here",
        )
        for shape in ("decode-square", "decode-wide", "decode-square")
    ]  # fmt: skip
    said = Texts(to_html(chip.model_copy(update={"quarantined": tuple(left_out)}))).said
    assert "0 / 0" not in said
    assert "How well it predicts" not in said
    lines = [line for line in said.splitlines() if "no w4a16 kernel" in line]
    assert lines
    assert len(lines) == len(set(lines))


@pytest.mark.full
def test_the_page_shows_the_grade_in_the_colours_of_plans(host: DeviceProfile) -> None:
    page = to_html(host)
    for said in grade(host).sentences:
        assert said in Texts(page).said
    for kind in ("gpu", "npu"):
        assert f"--{kind}: {COLORS[kind]}" in page  # the style's
        assert page.count(COLORS[kind].lower()) > 3  # the charts'
    assert "Bad:" in Texts(to_html(with_error(host, 2.0))).said

"""The first start on a machine without a profile: measured once, kept, and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.backends.registry import open_device
from hetero.errors import UserError
from hetero.models import model_spec
from hetero.placement import first_start, planning
from hetero.placement.choice import PlacementRequest
from hetero.placement.choosing import choose, plan_on
from hetero.placement.comparing import PromptMix, compare
from hetero.placement.device_set import open_devices
from hetero.placement.first_start import FirstStart, Machine, forget_if_other, scaled_here
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.profile_files import shipped_host
from hetero.profiler.records import DeviceProfile, phase_of, typical
from hetero.profiler.scaling import reference_tasks, scaled
from hetero.solver.planner import Planner
from hetero.solver.report.units import duration
from tests.support.helpers import Command

NOTICE = "this machine has no profile yet, so the shipped profile `host` is used"
SLOWED = 4  # times as long limits: other tests use the cores
TIMES = {"gpu": {"prefill": 1.8, "decode": 1.7}, "npu": {"prefill": 0.9, "decode": 1.0}}
SAID = (
    f"{NOTICE}, its times scaled by gpu 1.80/1.70, npu 0.90/1.00 in w4a16 and gpu 1.80/1.70, npu "
    "0.90/1.00 in w4a8 (prefill/decode), measured here in 1.2 s"
)
NO_ANSWER = "the process that times its reference kernels gave no answer"


@pytest.fixture(scope="module")
def host() -> DeviceProfile:
    return DeviceProfile.load("host")


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without anything in it."""
    folder = tmp_path / "cache"
    path = folder / "host.json"
    monkeypatch.setattr("hetero.profiler.profile_files.cached_profile_path", lambda: path)
    monkeypatch.setattr("hetero.profiler.profile_files.own_profile_path", lambda: path)
    monkeypatch.delenv("HETERO_SCALE", raising=False)
    return folder


class Machines:
    """Instead of the process that measures: devices that take `TIMES` the times of the profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.cost, self.starts = CostModel(profile), 0
        self.skews = typical(profile.matmuls, lambda row: row.skew)
        self.error: Exception | None = None

    def measure(self, tasks: Any, backends: Any, cores: Any) -> dict[str, Any]:
        self.starts += 1
        if self.error is not None:
            raise self.error
        assert backends == {"gpu": "opencl", "npu": "ort-cpu"}
        seconds = [
            TIMES[t.device][phase_of(t.m)]
            * float(self.cost.matmul_s(t.device, t.weight_format, t.m, t.n, t.k).seconds)
            / self.skews[t.device, phase_of(t.m), t.weight_format]
            for t in tasks
        ]
        return {"seconds": seconds, "spent_s": 1.23, "devices": {"gpu": "opencl|a", "npu": "ort|b"}}


@pytest.fixture
def machines(host: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(host)
    monkeypatch.setattr(first_start, "_in_process", found.measure)
    monkeypatch.setattr("hetero.placement.planning.profile_files.shipped_host", lambda: "host")
    return found


def the_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_it_is_measured_once_and_said_at_every_start(
    host: DeviceProfile, machines: Machines, folder: Path
) -> None:
    first, said = scaled_here(host, NOTICE)
    assert said == SAID
    assert first.name == "host, scaled here"
    for task in reference_tasks(host):
        sizes = (task.device, task.weight_format, task.m, task.n, task.k)
        ratio = CostModel(first).matmul_s(*sizes).seconds / CostModel(host).matmul_s(*sizes).seconds
        assert ratio == pytest.approx(TIMES[task.device][phase_of(task.m)], rel=1e-12)
    assert (scaled_here(host, NOTICE), machines.starts) == ((first, said), 1)
    assert the_file(folder).stat().st_size < 1 << 13


@pytest.mark.full
def test_a_profile_of_this_machine_or_asked_for_is_as_it_is(
    host: DeviceProfile, spec: ModelGraph, machines: Machines, folder: Path
) -> None:
    assert scaled_here(host, "") == (host, "")
    assert planning.find_profile("host") == host
    assert "(profile host)" in choose(spec, PlacementRequest(mode="auto", profile="host")).reason
    for mode in ("gpu", "npu"):
        choose(spec, PlacementRequest(mode=mode))  # type: ignore[arg-type]
    assert machines.starts == 0
    folder.mkdir()
    host.save(folder / "host.json")
    assert planning.find_profile(None) == host
    assert machines.starts == 0


@pytest.mark.full
def test_auto_compares_the_scaled_times(
    host: DeviceProfile, spec: ModelGraph, machines: Machines
) -> None:
    found = choose(spec, PlacementRequest(mode="auto", expected=(256,)))
    assert found.notes[0].endswith("(prefill/decode), measured here in 1.2 s")
    assert "(profile host, scaled here)" in found.reason
    assert found.solver is not None
    times = {
        profile.name: compare(
            Planner(spec, profile), found.solver, PromptMix((256,)), kinds=("gpu", "npu")
        )
        for profile in (host, scaled_here(host, NOTICE)[0])
    }
    for device in ("gpu", "npu"):
        assert found.seconds[device] == times["host, scaled here"][device].total_s
        assert found.seconds[device] != times["host"][device].total_s
        assert f"{device} {duration(found.seconds[device])}" in found.reason
    assert machines.starts == 1
    hetero_mode = choose(spec, PlacementRequest(mode="hetero"))
    assert hetero_mode.plan is not None
    assert hetero_mode.plan.profile == "host, scaled here"


@pytest.mark.full
def test_plan_without_a_profile_is_of_the_scaled_one(command: Command, machines: Machines) -> None:
    for _ in range(2):
        result = command("plan", "llama-3.2-1b", "--seq-lens", "64", "--json")
        assert result.returncode == 0, result.stderr
        assert "its times scaled by gpu 1.8" in result.stderr
        assert json.loads(result.stdout)["profile"] == "host, scaled here"
    assert machines.starts == 1
    named = command("plan", "llama-3.2-1b", "--seq-lens", "64", "--json", "--profile", "host")
    assert (named.stderr, json.loads(named.stdout)["profile"]) == ("", "host")


@pytest.mark.parametrize("value", ["off", " OFF "])
def test_it_can_be_switched_off(
    host: DeviceProfile, machines: Machines, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HETERO_SCALE", value)
    expected = f"{NOTICE}, its times not scaled to this machine because HETERO_SCALE is off"
    assert scaled_here(host, NOTICE) == (host, expected)
    assert machines.starts == 0
    monkeypatch.setenv("HETERO_SCALE", "on")
    scaled_here(host, NOTICE)
    assert machines.starts == 1


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "hetero": lambda m: m.setattr(first_start, "hetero_version", lambda: "9.9"),
    "processor": lambda m: m.setattr(first_start, "cpu_name", lambda: "another"),
    "instructions": lambda m: m.setattr(first_start, "cpu_flags", lambda: frozenset({"sse"})),
    "cores": lambda m: m.setattr(first_start, "allowed_cores", lambda: [0, 1, 2]),
    "runtime": lambda m: m.setattr(first_start, "package_versions", lambda: {"onnxruntime": "2"}),
    "level": lambda m: m.setenv("HETERO_OPENCL_LEVEL", "avx2"),
    "driver": lambda m: m.setenv("OCL_ICD_VENDORS", "/nowhere"),
}


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_it_depends_on_is_measured_again(
    host: DeviceProfile, machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    scaled_here(host, NOTICE)
    with monkeypatch.context() as patch:
        change(patch)
        scaled_here(host, NOTICE)
        scaled_here(host, NOTICE)
    assert (machines.starts, len(list(folder.iterdir()))) == (2, 2)
    scaled_here(host, NOTICE)  # as it was
    assert machines.starts == 2


@pytest.mark.full
def test_another_shipped_profile_is_measured_again(
    host: DeviceProfile, machines: Machines, folder: Path
) -> None:
    scaled_here(host, NOTICE)
    scaled_here(host.model_copy(update={"created": "later"}), NOTICE)
    assert (machines.starts, len(list(folder.iterdir()))) == (2, 1)


def digit(data: bytes) -> bytes:
    """One digit of a factor changed."""
    return data.replace(b'"value": 1.', b'"value": 2.', 1)


def without_one(data: bytes) -> bytes:
    """A whole file that lacks a factor."""
    found = FirstStart.model_validate_json(data)
    changed = found.model_copy(update={"factors": found.factors[1:]})
    return changed.model_copy(update={"check": changed._hash()}).model_dump_json().encode()


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-40],
    "no fields": lambda _: b"{}",
    "nested": lambda _: b"[" * 50_000,
    "too long": lambda data: data + b" " * (1 << 16),
    "no text": lambda data: data + b"\xff",
    "a digit": digit,
    "a sign": lambda data: data.replace(b'"value": ', b'"value": -'),
    "without one": without_one,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_broken_file_is_made_again(
    host: DeviceProfile, machines: Machines, folder: Path, spoil: Callable[[bytes], bytes]
) -> None:
    expected = scaled_here(host, NOTICE)
    path = the_file(folder)
    good = path.read_bytes()
    path.write_bytes(spoil(good))
    assert path.read_bytes() != good
    assert scaled_here(host, NOTICE) == expected
    assert machines.starts == 2
    assert FirstStart.load(path) is not None
    assert scaled_here(host, NOTICE) == expected
    assert machines.starts == 2


FAILURES = {
    "opencl: looking for platforms failed": UserError("opencl: looking for platforms failed"),
    "no such thing": subprocess.CalledProcessError(1, "python", stderr="Traceback\nno such thing"),
    "timing them ended with -11": subprocess.CalledProcessError(-11, "python", stderr=""),
    "its reference kernels were not timed after 2 s": subprocess.CalledProcessError(3, "python"),
    "its devices were not open after 30 s": subprocess.TimeoutExpired("python", 32),
    f"{sys.executable} cannot be started (no python)": OSError(2, "no python"),
    NO_ANSWER: KeyError("seconds"),
}


@pytest.mark.parametrize(("reason", "error"), FAILURES.items(), ids=FAILURES)
def test_what_fails_is_a_clause_and_tried_again_later(
    host: DeviceProfile, machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch,
    reason: str, error: Exception,
) -> None:  # fmt: skip
    machines.error = error
    expected = (host, f"{NOTICE}, its times not scaled to this machine because {reason}")
    assert scaled_here(host, NOTICE) == expected
    machines.error = None
    assert scaled_here(host, NOTICE) == expected
    assert machines.starts == 1
    now_s = time.time()
    monkeypatch.setattr(first_start.time, "time", lambda: now_s + first_start.LIMITS.retry_s + 1)
    assert scaled_here(host, NOTICE)[0].name == "host, scaled here"
    assert machines.starts == 2


def test_nothing_is_measured_where_it_cannot_be_kept(
    host: DeviceProfile, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Path("/proc/nope/host.json")
    monkeypatch.setattr("hetero.profiler.profile_files.cached_profile_path", lambda: nowhere)
    found, said = scaled_here(host, NOTICE)
    assert (found, machines.starts) == (host, 0)
    assert said.startswith(
        f"{NOTICE}, its times not scaled to this machine because /proc/nope cannot be written ("
    )


def test_a_profile_without_kernels_that_ran_is_not_scaled(machines: Machines) -> None:
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    found, said = scaled_here(chip, NOTICE)
    assert found == chip
    assert said.endswith("because profile snapdragon-8-gen-3 has no times of kernels that ran")
    assert machines.starts == 0


def test_factors_of_other_devices_are_forgotten(
    host: DeviceProfile, spec: ModelGraph, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with open_device("reference", kind="gpu") as gpu, open_device("reference", kind="npu") as npu:
        machines = Machines(host)
        found = {"gpu": gpu.info.fingerprint, "npu": npu.info.fingerprint}
        monkeypatch.setattr(
            first_start, "_in_process", lambda *a: machines.measure(*a) | {"devices": found}
        )
        forget_if_other([gpu, npu])  # nothing to forget
        scaled_here(host, NOTICE)
        forget_if_other([gpu, npu])
        plan_on(choose(spec, PlacementRequest(mode="gpu")), spec, {"gpu": gpu})
        with open_device("null", kind="gpu") as other:
            forget_if_other([other])  # of another backend, of which the file says nothing
        assert the_file(folder)
        updated = open_device("reference", kind="npu")
        updated.info = type(npu.info)(backend="reference", name=npu.info.name, driver="newer")
        plan_on(choose(spec, PlacementRequest(mode="npu")), spec, {"npu": updated})
        assert not list(folder.iterdir())
        forget_if_other([updated])
        scaled_here(host, NOTICE)
        assert machines.starts == 2


def python_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """An interpreter that does this."""
    python = tmp_path / "python"
    python.write_text("\n".join(("#!/bin/sh", "cat >/dev/null", *lines)), encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for the interpreter")
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("echo broken >&2; exit 1",), "broken"),
        (("exit 3",), "its reference kernels were not timed after 2 s"),
        (("echo no JSON",), NO_ANSWER),
        (("true",), NO_ANSWER),
        (("echo 7",), NO_ANSWER),
        (("""echo '{"seconds": [0.001], "spent_s": 1, "devices": {}}'""",), NO_ANSWER),
        (("""echo '{"seconds": [0.001, 9e9], "spent_s": 1, "devices": {}}'""",), "a reference ker"),
        (("""echo '{"reason": "npu: no"}'""",), "npu: no"),
    ],
)
def test_a_process_that_answers_nothing(
    host: DeviceProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    lines: tuple[str, ...], reason: str,
) -> None:  # fmt: skip
    python_that(tmp_path, monkeypatch, *lines)
    found, said = scaled_here(host, NOTICE)
    assert found == host
    assert f"its times not scaled to this machine because {reason}" in said


def test_a_call_that_never_returns_ends_the_process() -> None:
    code = (
        "import time; from hetero.placement.first_start import _at_most\n"
        "with _at_most(5.0): pass\n"
        "print('before', flush=True)\n"
        "with _at_most(0.2): time.sleep(60)\n"
        "print('after')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout) == (first_start.TOO_LATE, "before\n"), done.stderr


@pytest.mark.full
def test_devices_that_cannot_be_opened_say_why(host: DeviceProfile, tmp_path: Path) -> None:
    """In the process itself: its answer is the reason, with exit code 0."""
    request = {"tasks": reference_tasks(host), "backends": {"gpu": "opencl", "npu": "ort-cpu"},
               "cores": sorted(os.sched_getaffinity(0))}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hetero.placement.first_start"],
        input=json.dumps(request),
        env={**os.environ, "OCL_ICD_VENDORS": str(tmp_path / "none"), "OCL_ICD_FILENAMES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "CL_DEVICE_NOT_FOUND" in json.loads(done.stdout)["reason"]


@pytest.fixture(scope="module")
def measured_here(host: DeviceProfile) -> FirstStart:
    """The two real devices of this machine, whose cores other tests use as well."""
    shipped = shipped_host()
    assert shipped is not None
    profile = DeviceProfile.load(shipped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_TIMEOUT_SCALE", str(SLOWED))
        found = first_start._measured(profile, reference_tasks(profile), Machine.here())
    if "busy" in found.reason:
        pytest.skip(found.reason)
    return found


@pytest.mark.full  # by default a model starts with what is measured here, below
def test_the_devices_of_this_machine(measured_here: FirstStart) -> None:
    assert measured_here.reason == ""
    assert 0 < measured_here.spent_s <= SLOWED * first_start.LIMITS.timing_s
    tasks = reference_tasks(DeviceProfile.load(shipped_host() or "host"))
    assert len(measured_here.factors) == len(tasks) >= 8
    assert all(0.02 < factor.value < 50 for factor in measured_here.factors)
    opened = open_devices("hetero")
    fingerprints = {kind: device.info.fingerprint for kind, device in opened.devices.items()}
    opened.close()
    assert measured_here.devices == fingerprints


def test_a_profile_of_a_machine_twice_as_slow_makes_the_same_predictions(
    host: DeviceProfile, machines: Machines
) -> None:
    """The same machine, measured for a profile and for one of twice the times: half the factors."""
    keys = {(t.device, phase_of(t.m), t.weight_format) for t in reference_tasks(host)}
    slow = scaled(host, dict.fromkeys(keys, 2.0))
    once, again = (CostModel(scaled_here(x, NOTICE)[0]) for x in (host, slow))
    assert machines.starts == 2
    for task in reference_tasks(host):
        sizes = (task.device, task.weight_format, task.m, task.n, task.k)
        first, second = (float(cost.matmul_s(*sizes).seconds) for cost in (once, again))
        assert second == pytest.approx(first, rel=1e-9), task


@pytest.mark.full
def test_a_model_starts_with_it(folder: Path) -> None:
    """From Python, on the real devices: the second start does not measure again and says so too."""
    notes = []
    for _ in range(2):
        with hetero.LLM("demo", device="auto", max_seq_len=64) as llm:
            notes.append(llm.choice.notes)
            assert llm.generate("One day", max_tokens=2).text
    assert notes[0] == notes[1]
    assert ", its times " in notes[0][0]
    kept = FirstStart.load(the_file(folder))  # the devices are those that it was made on
    assert kept is not None
    assert kept.clause in notes[0][0]

"""The contenders of `hetero bench`: each computes as if it were alone, and none outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero.backends.host.affinity import allowed_cores, assign_cores, pinned
from hetero.backends.host.json_child import ChildDiedError, JsonChild
from hetero.errors import FallbackWarning, UserError
from hetero.measuring.contender import Contestant
from tests.cli.test_signals import ended, start
from tests.support.helpers import Command

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
two_cores = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
GONE_S = 10.0  # for the system to end a process
# Without OpenCL, whose kernels are checked again after a run that was killed.
LONG = ("bench", "demo", "--device", "npu", "--sync", "fast", "--sync", "event", "-p", "100",
        "-n", "99", "-r", "999")  # fmt: skip


def opened(name: str, gpu: str, prompts: list[int]) -> Contestant:
    contestant = Contestant(name)
    contestant.open("demo", {"device": "gpu", "gpu": gpu, "prompt_lengths": prompts}, print)
    return contestant


@pytest.mark.full
@two_cores
@pytest.mark.parametrize("first", ["opencl", "opencl-cores"])
def test_none_decides_the_threads_of_another(first: str) -> None:
    second = "opencl-cores" if first == "opencl" else "opencl"
    with pinned(assign_cores().control):  # which their processes do not inherit
        entries = {name: opened(name, name, [8]) for name in (first, second)}
    with entries[first], entries[second]:
        cores = {name: entry.opened.cores["decode"] for name, entry in entries.items()}
        assert cores == {"opencl": 1, "opencl-cores": len(allowed_cores())}
        sets = {name: set(entry.opened.device_sets.values()) for name, entry in entries.items()}
        assert sets == {"opencl": {"gpu"}, "opencl-cores": {"opencl-cores"}}


@pytest.mark.full
@two_cores
def test_auto_chooses_as_it_does_alone(command: Command) -> None:
    devices = ("--device", "gpu", "--device", "auto", "--device", "hetero")
    result = command("bench", "demo", *devices, "-p", "8", "-n", "2", "-r", "1", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert "needs a process in which OpenCL does not run yet" not in report["choices"]["auto fast"]
    assert list(report["processes"]) == ["gpu fast", "auto fast", "hetero fast"]
    peaks = [process["peak_rss_bytes"] for process in report["processes"].values()]
    assert report["peak_rss_bytes"] == sum(peaks)
    assert all(process["load_s"] > 0 for process in report["processes"].values())
    assert set(report["processes"]["hetero fast"]["devices"]) == {"gpu", "npu"}


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.full
@linux
@pytest.mark.parametrize("device", ["gpu", "npu", "hetero"])
def test_a_contender_whose_turn_it_is_not_takes_no_processor(device: str) -> None:
    with Contestant(device) as entry:
        entry.open("demo", {"device": device}, print)
        assert entry.round(32, 4).decode.tokens_per_s > 0
        further = entry.round(None, 4)  # behind the last one's tokens
        assert further.decode.tokens_per_s > 0 == further.prefill.tokens_per_s
        spent_s = []
        for _ in range(
            4
        ):  # threads spin a little before they sleep; ones that spin on do so in all
            before_s = cpu_s(entry.child.pid)
            time.sleep(0.3)
            spent_s.append(cpu_s(entry.child.pid) - before_s)
        assert min(spent_s) < 0.025  # two ticks


def children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def contenders_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a bench, when both have had a turn."""
    deadline_s = time.monotonic() + 120
    while len(found := children(process.pid)) < 2 or min(map(cpu_s, found)) < 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


def is_gone(pid: int) -> bool:
    """Return whether a process ends: one that was killed gives its memory back first."""
    give_up_s = time.monotonic() + GONE_S
    while time.monotonic() < give_up_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.full
@linux
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full),
        (signal.SIGKILL, -9),
    ],
)
def test_a_bench_that_is_ended_leaves_no_process(number: int, code: int) -> None:
    process = start(LONG)
    pids = contenders_of(process)
    process.send_signal(number)
    assert ended(process) == (code, b"" if code < 0 else b"\ninterrupted\n")
    assert all(map(is_gone, pids))


@pytest.mark.full
@linux
def test_a_contender_that_is_killed_ends_the_bench_in_a_sentence() -> None:
    process = start(LONG)
    first, second = contenders_of(process)
    os.kill(second, signal.SIGKILL)
    code, errors = ended(process)
    assert (code, errors.count(b"\n")) == (2, 1), errors
    assert b" was ended by SIGKILL: close other programs if memory ran out" in errors
    assert is_gone(first)


def test_an_error_there_is_the_same_error_here() -> None:
    with (
        pytest.raises(UserError, match="unknown device 'tpu': choose gpu, npu, hetero or auto"),
        Contestant("tpu") as entry,
    ):
        entry.open("demo", {"device": "tpu"}, print)


@pytest.mark.full
def test_a_warning_there_is_a_warning_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "none"))
    with Contestant("both") as entry, pytest.warns(FallbackWarning, match="^both: running on npu"):
        assert set(entry.open("demo", {"device": "hetero"}, print).devices) == {"npu"}


def test_a_child_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        pytest.raises(ChildDiedError, match=r"no sign of life for 0\.05 s"),
        JsonChild("silent") as child,
    ):
        child.hear(0.05)
    assert is_gone(child.pid)

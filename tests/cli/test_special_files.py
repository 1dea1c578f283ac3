"""Commands that are given devices, links and pipes: nothing of the system is replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hetero.profiler.profile_files import shipped_path
from hetero.solver.execution_plan import ExecutionPlan
from tests.support.helpers import Command

pytestmark = pytest.mark.skipif(os.name != "posix", reason="devices, links and pipes of POSIX")
PLAN = ("plan", "llama-3.2-1b", "--profile", "host", "--seq-lens", "64", "--out")
WRITERS: dict[str, tuple[str, ...]] = {
    "plan": PLAN,
    "plan's report": (*PLAN[:-1], "--report"),
    "report": ("report", "host", "--out"),
    "trace": ("generate", "demo", "Hi", "--device", "npu", "--max-tokens", "1", "--trace"),
}
# Both reports take seconds to draw, and are written by `write_atomically`.
CASES = [
    pytest.param(words, id=name, marks=[pytest.mark.full] * (name == "report"))
    for name, words in WRITERS.items()
]


@pytest.mark.full
@pytest.mark.parametrize("words", CASES)
def test_a_device_stays_one(words: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except OSError:  # not root
        null.symlink_to("/dev/null")
    done = command(*words, str(null))
    assert done.returncode == 0, done.stderr
    assert stat.S_ISCHR(null.stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.full
@pytest.mark.parametrize("words", CASES)
def test_a_link_stays_one(words: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    (tmp_path / "real").write_text("old", encoding="utf-8")
    (tmp_path / "link").symlink_to("real")
    assert command(*words, str(tmp_path / "link")).returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert len((tmp_path / "real").read_bytes()) > 1000


@pytest.mark.full
@pytest.mark.parametrize("kind", ["profile", "plan"])
def test_a_report_of_what_comes_from_a_pipe(kind: str, tmp_path: Path, command: Command) -> None:
    text = shipped_path("host").read_text(encoding="utf-8")
    if kind == "plan":
        command(*PLAN, str(tmp_path / "plan.json"))
        text = (tmp_path / "plan.json").read_text(encoding="utf-8")
        assert ExecutionPlan.load(tmp_path / "plan.json").ops
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text, "utf-8"))
    writer.start()
    done = command("report", str(pipe), "--out", str(tmp_path / "report.html"))
    writer.join()
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")

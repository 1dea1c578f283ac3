"""Every writer of a file that people name: whole or not at all, on the disk where it matters."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.backends.host import files
from hetero.models import open_model
from hetero.models.quantized import save
from hetero.profiler.journal import Journal, to_line
from hetero.profiler.records import DeviceProfile
from hetero.profiler.report import write_report
from hetero.runtime.trace import Trace
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level
from tests.meta.test_house import modules
from tests.support import tiny_files

OLD = b"what was there before"
Writer = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_files.write_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="npu") as opened:
        opened.generate("hi", max_tokens=2)
        yield opened


@pytest.fixture(scope="module")
def plan(model: Path) -> ExecutionPlan:
    return layer_level(open_model(model).spec())


@pytest.fixture(scope="module")
def writers(model: Path, llm: LLM, plan: ExecutionPlan) -> dict[str, Writer]:
    profile = DeviceProfile.load("snapdragon-8-gen-3")
    return {
        "plan": plan.save,
        "plan's report": plan.report,
        "trace": lambda path: Trace().save(path, about={}),
        "session": llm.save_session,
        "profile": profile.save,
        "profile's report": lambda path: write_report(profile, path),
    }


NAMES = (
    "plan", "plan's report", "trace", "session", "profile", "profile's report",
)  # fmt: skip
DURABLE = tuple(name for name in NAMES if name != "trace")


def test_all_are_tried(writers: dict[str, Writer]) -> None:
    assert tuple(writers) == NAMES


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the disk, in order."""
    found: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        found.append(f"sync {kind}")
        sync(descriptor)

    def replaced(old: Any, new: Any) -> None:
        found.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_replaced_when_it_is_whole(
    name: str, writers: dict[str, Writer], tmp_path: Path, events: list[str]
) -> None:
    writers[name](tmp_path / "out")
    wanted = ["sync file", "replace", "sync folder"] if name in DURABLE else ["replace"]
    assert [e for e in events if e != "sync folder" or name in DURABLE] == wanted


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_leaves_the_old_file_and_nothing_else(
    name: str, writers: dict[str, Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_bytes(OLD)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(
        (ValueError, OSError), match="No space left on device"
    ):  # each room's own sentence
        writers[name](tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_a_journal_is_on_the_disk_line_by_line(tmp_path: Path, events: list[str]) -> None:
    with Journal(tmp_path / "j", {}, resume=False) as journal:
        events.clear()
        for _ in range(3):
            journal.add({"kind": "spent", "spent_s": 1.0})
    assert events == ["sync file"] * 3


def test_a_journal_that_goes_on_is_never_half(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    with Journal(path, {"a": 1}, resume=False) as journal:
        journal.add({"kind": "spent", "spent_s": 1.0})
    with path.open("a", encoding="utf-8") as file:
        file.write(to_line({"kind": "spent", "spent_s": 2.0})[:-5])
    torn = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ValueError, match="cannot write"):
        Journal(path, {"a": 1}, resume=True)
    assert path.read_bytes() == torn
    monkeypatch.undo()
    Journal(path, {"a": 1}, resume=True).close()
    assert path.read_bytes() == b"".join(torn.splitlines(keepends=True)[:-1])


def test_every_file_of_a_quantised_directory_is_on_the_disk_before_its_name(
    model: Path, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    out = save(open_model(model).weights, tmp_path / "out")
    at = events.index("rename")
    assert events[:at].count("sync file") == len(list(out.iterdir()))
    assert events[at - 1 :] == ["sync folder", "rename", "sync folder"]


# Modules that write into a directory of their own which is moved when it is whole, or append, or
# write what is read once to time the disk.
OTHERS = {
    "hetero.backends.host.files",
    "hetero.backends.host.json_child",  # standard output, under another number
    "hetero.backends.qnn.compiler",
    "hetero.backends.qnn.graph_store",
    "hetero.cli.chat",  # makes the empty file of the history
    "hetero.contexts.measured",
    "hetero.models.quantized",
    "hetero.models.tokenizer",
    "hetero.profiler.journal",
    "hetero.serving.engine_process",  # standard output, under another number
}


def writes(call: ast.Call) -> bool:
    """Whether a call opens or replaces a file to write it."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name in ("write_text", "write_bytes", "mkstemp", "NamedTemporaryFile"):
        return True
    modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    constants = [x.value for x in modes if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return name in ("open", "fdopen") and any(mode[:1] in tuple("wax") for mode in constants)


@pytest.mark.full
def test_nothing_else_writes_files() -> None:
    """OpenCL's caches of compiled programs are its own matter."""
    found = {
        name
        for _, name, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and writes(node)
    }
    assert {x for x in found if not x.startswith("hetero.backends.opencl")} == OTHERS


def test_a_full_disk_is_said_before_anything_is_lost(plan: ExecutionPlan, tmp_path: Path) -> None:
    """The helper itself, where a write fails half-way."""
    (tmp_path / "out").write_bytes(OLD)

    def half() -> None:
        with files.atomic_writer(tmp_path / "out") as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        half()
    assert (tmp_path / "out").read_bytes() == OLD
    plan.save(tmp_path / "out")
    assert ExecutionPlan.load(tmp_path / "out") == plan

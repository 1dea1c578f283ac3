"""`hetero cache`: what is kept is found, and goes, but nothing that anybody has."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from hetero import cache
from hetero.backends.host.files import atomic_writer
from hetero.backends.opencl.self_test.run_folder import RunFolder
from hetero.cache import KINDS, OTHER_CODE, OTHER_HERE
from hetero.cli.cache import ago, parse_age
from hetero.errors import UserError
from hetero.measuring.profiling import lock_path
from hetero.models.gguf import packed_store
from hetero.models.packed_file import file_header
from hetero.placement import decisions
from hetero.placement.first_start import FirstStart, Machine
from tests.support.helpers import Command

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty folders of a user; the cache of OpenCL is among them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("POCL_CACHE_DIR", raising=False)
    return tmp_path


def made(path: Path, size: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def entries(kind: str) -> dict[str, str]:
    """Return the reason why each entry is stale, or `held`."""
    return {x.name: "held" if x.held else x.stale for x in KINDS[kind].entries()}


def test_an_empty_home_has_nothing(command: Command, home: Path) -> None:
    assert command("cache").stdout == "hetero keeps nothing on this machine\n"
    assert command("cache", "clear", "--all", "--yes").stdout == "nothing to clear\n"
    assert list(home.iterdir()) == []


def test_decisions_of_other_code_are_stale(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "cache" / "hetero" / "decisions"
    monkeypatch.setattr(decisions, "folder", lambda: folder)
    decisions.keep("a" * 64, decisions.Decision("gpu", "opencl", "why", (), {"gpu": 1.0}))
    assert decisions.load_cached("a" * 64) is not None
    before = json.loads((folder / f"{'a' * 40}.json").read_text())
    made(folder / "old.json").write_text(json.dumps(before | {"code": "another"}))
    made(folder / ".x.json.0123abcd.partial")
    assert entries("decisions") == {
        f"{'a' * 40}.json": "",
        "old.json": OTHER_CODE,
        ".x.json.0123abcd.partial": "left by a process that was killed",
    }


def test_first_starts_of_another_version_are_stale(home: Path) -> None:
    here = Machine.here()
    pinned = here.model_copy(update={"cores": (0,)})
    old = here.model_copy(update={"hetero_version": "0.0.1"})
    for machine in (here, pinned, old):
        FirstStart(machine=machine, profile="p", at_s=0, reason="none").saved(machine.path)
    assert entries("first-starts") == {
        here.path.name: "", pinned.path.name: "", old.path.name: OTHER_HERE,
    }  # fmt: skip


def test_kernels_are_of_drivers_that_are_here(home: Path) -> None:
    reachable = pytest.importorskip("hetero.backends.opencl.self_test.reachable").reachable
    root = home / "cache" / "hetero" / "opencl"
    mine = made(root / "kernels" / f"{min(reachable(root).kernels)}-avx2" / "a.kernels")
    other = made(root / "kernels" / "0123456789abcdef-avx2" / "b.kernels")
    verdict = made(root / "verdicts" / "0.json")
    made(verdict.with_suffix(".lock"))
    lock = FileLock(root / "verdicts" / "trial.lock")
    with lock:
        assert entries("opencl")["trial.lock"] == "held"
    assert entries("opencl")["trial.lock"] == "a lock that no process holds"
    Path(lock.lock_file).unlink(missing_ok=True)
    run = RunFolder(root)
    dead = made(root / "runs" / "hetero-opencl-1-2" / "pocl" / "x").parents[1]
    made(dead.with_name(f"{dead.name}.lock"), 0)
    assert entries("opencl") == {
        mine.name: "", other.name: OTHER_HERE, "0.json": OTHER_HERE,
        run.path.name: "held", dead.name: "its process has ended",
    }  # fmt: skip
    gone = cache.clear(["opencl"], stale=True)
    assert gone.cleared is not None
    assert (gone.cleared[0].entries, gone.cleared[0].held) == (3, 0)
    assert entries("opencl") == {mine.name: "", run.path.name: "held"}
    cleared = cache.clear(["opencl"]).cleared
    assert cleared is not None
    assert (cleared[0].entries, cleared[0].held) == (1, 1)
    assert run.path.is_dir()
    run.remove()
    assert entries("opencl") == {}


def test_packed_copies_of_files_that_are_gone_are_stale(home: Path) -> None:
    folder = home / "cache" / "hetero" / "packed"
    for name, version in (
        ("here", packed_store.VERSION),
        ("gone", packed_store.VERSION),
        ("old", "0"),
    ):
        header = file_header([], {"format": "hetero-packed", "version": version, "content": ""})
        made(folder / f"{name}.safetensors").write_bytes(header)
        (folder / f"{name}.seen").write_text(f"1 2 3\n{home / name}.gguf")
    made(home / "here.gguf")
    assert entries("packed") == {
        "here.safetensors": "", "gone.safetensors": "its GGUF file is gone",
        "old.safetensors": "its GGUF file is gone",
    }  # fmt: skip
    made(home / "old.gguf")
    assert entries("packed")["old.safetensors"] == OTHER_CODE
    reader = packed_store.SafetensorsFile(folder / "here.safetensors", locked=True)
    assert entries("packed")["here.safetensors"] == "held"
    cache.clear(["packed"])
    assert sorted(x.name for x in folder.iterdir()) == ["here.safetensors", "here.seen"]
    del reader
    cache.clear(["packed"])
    assert list(folder.iterdir()) == []


def test_what_is_written_now_stays(home: Path) -> None:
    target = made(home / "cache" / "hetero" / "packed" / "a.safetensors")
    with atomic_writer(target) as file:
        file.write(b"more")
        assert "held" in entries("packed").values()
        cache.clear(everything=True)
    assert target.read_bytes() == b"more"


def test_graphs_of_other_versions_are_stale(home: Path, command: Command) -> None:
    qnn = pytest.importorskip("hetero.backends.qnn.graph_store")
    folder = home / "cache" / "hetero" / "qnn"
    for name, version in (("new", qnn.GRAPHS_VERSION), ("old", 0)):
        made(folder / name / "graph_qnn.bin")
        target = {"chip": "sm8650", "graphs_version": str(version)}
        target["provider"] = str(cache.installed_version("onnxruntime-qnn"))
        entry = {"format": qnn.FORMAT, "target": target}
        made(folder / name / "entry.json").write_text(json.dumps(entry))
    assert entries("qnn") == {"new": "", "old": OTHER_CODE}
    asked = command("cache", "clear", "qnn")
    assert asked.returncode == 2
    assert "refusing to delete Snapdragons' NPU graphs (1 entry" in asked.stderr
    assert command("cache", "clear", "qnn", "--stale").stdout.startswith("freed 0.2 KiB: qnn 1")
    assert entries("qnn") == {"new": ""}


def test_what_is_named_alone_goes_by_its_name(home: Path, command: Command) -> None:
    profile = made(home / "data" / "hetero" / "profiles" / "host.json")
    made(home / "data" / "hetero" / "contexts" / "demo" / "apps" / "a" / "ctx-1.log")
    made(home / "data" / "hetero" / "chat-history")
    made(home / "cache" / "hetero" / "profiles" / "host.json")
    found = {kind.kind: kind.entries for kind in cache.usage().kinds if kind.entries}
    assert found == {"profiles": 2, "contexts": 1, "history": 1}
    for words in (("--all",), ("--stale",), ("--all", "--stale")):
        assert command("cache", "clear", *words, "--yes").stdout == "nothing to clear\n"
    with FileLock(lock_path(profile)):
        done = command("cache", "clear", "profiles", "contexts", "history", "--yes")
    assert "profiles: 1 entry in use by a running process, left" in done.stdout
    assert {x.name for x in (home / "data" / "hetero").rglob("*")} == {
        "profiles", "host.json", "contexts"}  # fmt: skip


def test_contexts_that_are_served_stay(home: Path) -> None:
    folder = made(home / "data" / "hetero" / "contexts" / "demo" / "service.json").parent
    lock = FileLock(folder / "lock")
    with lock:
        assert entries("contexts") == {"demo": "held"}
        cache.clear(["contexts"])
        assert (folder / "service.json").exists()
    cache.clear(["contexts"])
    assert not folder.exists()


def test_old_entries_and_what_links_point_to(home: Path, command: Command) -> None:
    folder = home / "cache" / "hetero" / "qnn-schedules"
    for name, days in (("a", 1), ("b", 40)):
        at_s = time.time() - days * DAY_S
        os.utime(made(folder / name), (at_s, at_s))
    elsewhere = made(home / "elsewhere" / "precious")
    (home / "cache" / "hetero" / "link").symlink_to(elsewhere.parent)
    assert entries("other") == {"link": "unknown to this version of hetero"}
    words = ("cache", "clear", "--all", "--older-than", "30d", "--yes")
    assert "would free 0.1 KiB: qnn-schedules 1" in command(*words, "--dry-run").stdout
    assert len(entries("qnn-schedules")) == 2
    document = json.loads(command(*words, "--json").stdout)
    assert document["cleared"] == [
        {"kind": "qnn-schedules", "entries": 1, "nbytes": 100, "held": 0}]  # fmt: skip
    assert list(entries("qnn-schedules")) == ["a"]
    cache.clear(["other"])
    assert elsewhere.exists()
    assert entries("other") == {}


def test_the_table_and_the_entries(home: Path, command: Command) -> None:
    made(home / "cache" / "hetero" / "locks" / "profile-0.lock", 0)
    made(home / "cache" / "hetero" / "said-no-profile", 0)
    shown = command("cache").stdout
    assert "| locks | locks of profilers | 1 |" in shown
    assert "unused (locks 1): hetero cache clear --stale" in shown
    assert str(home / "cache" / "hetero" / "locks") in shown
    assert "| profile-0.lock |  | 0.0 MiB | just now | a lock that no process holds |" in (
        command("cache", "locks").stdout
    )
    kinds = json.loads(command("cache", "locks", "--json").stdout)["kinds"]
    assert [kind["kind"] for kind in kinds] == list(KINDS)
    assert [len(kind["listed"]) for kind in kinds if kind["listed"] is not None] == [1]


def test_opencl_may_lie_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCL_CACHE_DIR", str(home / "own"))
    made(home / "own" / "hetero" / "runs" / "hetero-opencl-1-2" / "x")
    assert entries("opencl") == {"hetero-opencl-1-2": "its process has ended"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("clear",), "say what to clear: kinds (decisions, "),
        (("clear", "--older-than", "30d"), "say what to clear"),
        (("clear", "pcked"), "did you mean packed?"),
        (("nonsense",), "'nonsense' is not a kind"),
        (("clear", "packed", "--older-than", "soon"), "--older-than is a time such as 90m"),
        (("packed", "--stale"), "`hetero cache clear packed --stale`"),
        (("--all",), "--all is for clearing"),
    ],
)
def test_what_cannot_be(command: Command, words: tuple[str, ...], said: str) -> None:
    done = command("cache", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_times() -> None:
    assert (parse_age("90m"), parse_age("1.5h"), parse_age("2W")) == (5400, 5400, 14 * DAY_S)
    for text in ("", "d", "-1d", "nand", "1e99d", "30"):
        with pytest.raises(UserError, match="--older-than"):
            parse_age(text)
    now = time.time()
    assert [ago(now - x) for x in (-5, 61, 7300, 3 * DAY_S)] == [
        "just now", "1 min ago", "2 h ago", "3 d ago"]  # fmt: skip

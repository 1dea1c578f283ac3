"""Every bad input: exit code 2, one sentence that names it, quickly, nothing left behind."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from hetero import LLM
from hetero.cli import app as cli
from hetero.models import open_model
from hetero.models.quantized import save
from tests.bad_inputs import configs, documents, ggufs, options, texts, weights
from tests.bad_inputs.case import BadInput
from tests.support import tiny_files

MODULES = (configs, weights, ggufs, texts, options, documents)
CASES = [case for module in MODULES for case in module.CASES]
LIMIT_S = 5.0
MEMORY_BYTES = 1 << 30


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good files: a directory, a GGUF file, a quantised directory, a session."""
    work = tmp_path_factory.mktemp("bad-inputs") / "good"
    work.mkdir()
    tiny_files.write_directory(work / "model")
    tiny_files.write_gguf(work / "model.gguf")
    save(open_model(work / "model").weights, work / "quantised")
    (work / "empty").mkdir()
    for name, text in {"nothing": "", "few": "the", "words": "the cat " * 60}.items():
        (work / name).write_text(text, encoding="utf-8")
    return work


@pytest.fixture(scope="module")
def good_session(good: Path) -> Path:
    """A session of the good directory."""
    with LLM(str(good / "model"), device="npu") as llm:
        talk = llm.conversation()
        talk.say("hi", max_tokens=2)
        talk.save(good / "session")
    return good


@pytest.fixture(scope="module")
def app() -> Any:
    """The command line, built once: Typer takes 20 ms to do it for each call."""
    return typer.main.get_command(cli.app)


@contextmanager
def limits(file_bytes: int | None) -> Iterator[None]:
    """At most 1 GB more of address space, and files of at most `file_bytes`."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    wanted = {resource.RLIMIT_AS: pages * resource.getpagesize() + MEMORY_BYTES}
    if file_bytes is not None:
        wanted[resource.RLIMIT_FSIZE] = file_bytes
    before = {kind: resource.getrlimit(kind) for kind in wanted}
    try:
        for kind, value in wanted.items():
            resource.setrlimit(kind, (value, before[kind][1]))
        yield
    finally:
        for kind, value in before.items():
            resource.setrlimit(kind, value)


def files(work: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with sizes and times."""
    return {
        str(x.relative_to(work)): (x.lstat().st_size, x.lstat().st_mtime_ns)
        for x in work.rglob("*")
        if not x.is_dir()
    }


def test_the_corpus_is_large_and_its_names_differ() -> None:
    assert len(CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.skipif(sys.platform != "linux", reason="limits by RLIMIT_AS and /proc")
@pytest.mark.few(80)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_one_sentence(
    case: BadInput, good_session: Path, app: Any, monkeypatch: Any, capfd: Any
) -> None:
    work = good_session.parent / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good_session, work)
    case.change(work)
    before = files(work)
    names = {"{dir}": "model", "{gguf}": "model.gguf", "{quantised}": "quantised",
             "{session}": "session"}  # fmt: skip

    def filled(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, str(work / path))
        return text.replace("{work}", str(work))

    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    monkeypatch.setattr("hetero.backends.host.files.PIPE_WAIT_S", 0.1)
    monkeypatch.setattr(cli, "app", app)
    capfd.readouterr()
    started, worked = time.monotonic(), time.process_time()
    with limits(case.file_limit), pytest.raises(SystemExit) as ended:
        cli.main([filled(word) for word in case.words])
    took, worked = time.monotonic() - started, time.process_time() - worked
    out, errors = capfd.readouterr()
    assert (ended.value.code, out) == (2, ""), errors
    said = [line for line in errors.splitlines() if not line.startswith("hetero: profile=")]
    assert len(said) == 1, errors
    assert said[0].startswith("hetero: ")
    assert filled(case.sentence) in said[0]
    assert len(said[0]) < 2000
    assert worked < LIMIT_S
    assert took < 6 * LIMIT_S, "other programs may have the cores"
    assert files(work) == before

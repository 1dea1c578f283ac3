"""A user's system error is a sentence with a remedy; a driver's fault is a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer

from hetero.cli import app as cli
from hetero.cli.generate import _prompt_text
from hetero.cli.system_errors import system_sentence
from hetero.errors import ModelError
from hetero.models import DEMO_DIRECTORY, default_weights, hub, model_path, open_model
from hetero.models.bundle import find_bundle
from hetero.models.config import ModelConfig
from hetero.models.quantized import save
from hetero.models.tokenizer import HfTokenizer
from hetero.placement.planning import find_profile, spec_of
from tests.support.helpers import Command

DRIVER = "/dev/dri/renderD128"


@pytest.mark.parametrize(
    ("error", "typed", "sentence"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "a.json"),
            (),
            "a.json: Permission den",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/m/x"), (), "name one on a disk that can"),
        (OSError(errno.ENOSPC, "No space left", "/m/x"), (), "make room on the disk"),
        (OSError(errno.EDQUOT, "Quota exceeded"), (), "the output cannot be written: Quota"),
        (OSError(errno.ENOSPC, "No space left"), (), "the output cannot be written: No space"),
        (OSError(errno.ENOENT, "No such file"), (), "the current folder does not exist any more"),
        (OSError(errno.EMFILE, "Too many open files"), (), "ulimit -n"),
        (OSError(errno.EIO, "Input/output error", "/disk/model.gguf"), (), "/disk/model.gguf: Inp"),
        (OSError(errno.EIO, "Input/output error", "/dev/sr0"), ("--file=/dev/sr0",), "/dev/sr0: I"),
        (OSError(errno.EIO, "Input/output error"), (), None),
        (OSError(errno.EIO, "Input/output error", DRIVER), ("generate", "demo"), None),
        (OSError(errno.EACCES, "Permission denied", "/sys/class/x"), (), None),
        (OSError(errno.ENODEV, "No such device"), (), None),
        (OSError(errno.EINVAL, "Invalid argument"), (), None),
        (OSError("a library's own words"), (), None),
    ],
)
def test_whose_fault_an_error_is(
    error: OSError, typed: tuple[str, ...], sentence: str | None
) -> None:
    found = system_sentence(error, typed)
    assert (found is None) if sentence is None else (sentence in str(found))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.EFAULT])
def test_a_drivers_fault_keeps_its_traceback(monkeypatch: Any, capsys: Any, number: int) -> None:
    failing = typer.Typer()

    @failing.command()
    def generate() -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cli, "app", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        cli.main([])
    assert "hetero:" not in capsys.readouterr().err


def test_a_users_fault_is_a_sentence(monkeypatch: Any, capsys: Any) -> None:
    failing = typer.Typer()

    @failing.command()
    def generate() -> None:
        Path("/nowhere/at-all").read_text()

    monkeypatch.setattr(cli, "app", failing)
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    said = "hetero: /nowhere/at-all: No such file or directory; check the name\n"
    assert capsys.readouterr().err == said


LOCKED = "locked"


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder with a model, and one that this user may not enter (which root always may)."""
    shutil.copytree(DEMO_DIRECTORY, tmp_path / "mine")
    (tmp_path / LOCKED).mkdir()
    real = os.stat

    def refused(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(path, str | os.PathLike) and f"/{LOCKED}/" in str(Path(path).absolute()):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_models_lists_the_others_beside_a_folder_that_cannot_be_read(locked: Path) -> None:
    names = [model.name for model in hub.models_here(locked, DEMO_DIRECTORY)]
    assert names[:2] == ["demo", "./mine"]


@pytest.mark.usefixtures("locked")
def test_a_model_that_cannot_be_looked_at_is_named() -> None:
    with pytest.raises(ModelError, match=r"locked: cannot be looked at \(Permission denied\)"):
        open_model(LOCKED)


def test_models_without_a_current_folder(
    command: Command, tmp_path: Path, monkeypatch: Any
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = command("models", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["name"] == "demo"
    assert "the models of the current folder are not listed" in done.stderr
    monkeypatch.chdir(tmp_path)


class TestDemo:
    """`demo` is the bundled model, whatever the current folder holds."""

    @pytest.fixture(autouse=True)
    def folders_of_those_names(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        save(open_model("demo", weights="w8a16").weights, "stored")
        (tmp_path / "stored" / "compiled.json").write_text("{}")
        for name in ("demo", "random:llama-3.2-1b"):
            shutil.copytree("stored", name)

    @pytest.mark.parametrize("model", ["demo", "random:llama-3.2-1b"])
    def test_no_command_reads_a_folder_of_that_name(self, model: str) -> None:
        assert default_weights(model) == "w4a16"
        assert find_bundle(model) is None
        assert spec_of(model).weight_format == "w4a16"
        if model == "demo":
            assert model_path(model) == DEMO_DIRECTORY
            assert open_model(model).source == DEMO_DIRECTORY

    def test_a_path_reads_it(self) -> None:
        assert default_weights("./demo") == "w8a16"
        with pytest.raises(ModelError):
            find_bundle("./demo")


def test_the_shipped_profile_is_not_a_folder_here(tmp_path: Path, monkeypatch: Any) -> None:
    """Where no profile is asked for."""
    from hetero.profiler import profile_files

    name = profile_files.shipped_host()
    if name is None:
        pytest.skip("no profile is shipped for this processor")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_SCALE", "off")
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_profile(None).name == name


BOM = "\ufeff"


@pytest.mark.parametrize("text", ["Once upon", "", "a\n"])
def test_a_prompt_has_no_byte_order_mark(tmp_path: Path, monkeypatch: Any, text: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(BOM + text, encoding="utf-8")
    assert _prompt_text(None, file) == text.removesuffix("\n")
    monkeypatch.setattr("sys.stdin", StringIO(BOM + text))
    assert _prompt_text("-", None) == text.removesuffix("\n")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_models_files_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    """Editors of Windows write one."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, model)

    def read() -> tuple[ModelConfig, list[int]]:
        tokenizer = HfTokenizer.from_directory(model)
        return ModelConfig.from_directory(model), tokenizer.encode("Once upon a time")

    before = read()
    add_mark(model / name)
    assert read() == before


def test_a_manifest_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    save(open_model("demo").weights, tmp_path / "model")
    add_mark(tmp_path / "model" / "hetero.json")
    assert open_model(tmp_path / "model").config == open_model("demo").config


def add_mark(file: Path) -> None:
    file.write_text(BOM + file.read_text(encoding="utf-8"), encoding="utf-8")


def test_serve_says_that_contexts_may_go(monkeypatch: Any, capsys: Any) -> None:
    """A user without a home folder has temporary ones."""
    from hetero.cli.serve import _default_directory

    for temporary in (False, True):
        monkeypatch.setattr("hetero.backends.host.folders.data_is_temporary", lambda t=temporary: t)
        kept_in = _default_directory("demo")
        said = f"contexts are kept in {kept_in}, which the system may empty: name a --directory"
        assert (said in capsys.readouterr().err) == temporary

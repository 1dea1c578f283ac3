"""A directory that somebody downloaded: working in it runs no code of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.measuring.every_core import measure_every_core

MODULES = ("argparse", "hetero", "jinja2", "json", "numpy", "onnxruntime", "re", "statistics")
PLANTED = "import pathlib, sys; pathlib.Path(__file__).with_name('ran').touch(); sys.exit(9)"
COMPILE = """
import pathlib, sys
from hetero.backends.qnn import opening
from hetero.backends.qnn.compiler import GraphCompiler
from hetero.backends.errors import DeviceError
with opening.open(cache=None) as device:
    compiler = GraphCompiler(device.store.target)
    try:
        compiler.compile(b"no model", pathlib.Path(sys.argv[1]) / "out.onnx", "compiling nothing")
    except DeviceError as error:
        print(error)
    compiler.close()
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, full of traps; the file `ran` is there once one was run."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(PLANTED, encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder / "ran"


def test_the_traps_work(planted: Path) -> None:
    subprocess.run([sys.executable, "-c", "import argparse"], check=False)
    assert planted.exists()


@pytest.mark.full
def test_measuring_every_core(planted: Path) -> None:
    assert measure_every_core((), rounds=1) == []  # its processes have imported all
    assert not planted.exists()


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime_qnn") is None, reason="no compiler here")
def test_compiling(planted: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "compiling nothing failed" in done.stdout, done.stderr
    assert not planted.exists()


@pytest.mark.full
def test_a_chat_template(planted: Path) -> None:
    code = (
        "from datetime import datetime\n"
        "from hetero.models.template_sandbox import render\n"
        "print(render('{{ word }}', {'word': 'rendered'}, datetime.now()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "rendered\n", done.stderr
    assert not planted.exists()


@pytest.mark.full
def test_settings_of_matplotlib(planted: Path) -> None:
    Path("matplotlibrc").write_text("text.usetex: True\nxtick.color: red\n", encoding="utf-8")
    code = "from hetero.cli.app import main; main(['report', 'host', '--out', 'r.html'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "#ff0000" not in Path("r.html").read_text(encoding="utf-8")

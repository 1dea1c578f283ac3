"""Fixtures of every folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer

# Before anything imports huggingface_hub: no test asks a network (the hub's tests ask their own).
os.environ["HF_HUB_OFFLINE"] = "1"

from hetero.backends.opencl import driver_reports
from hetero.cli import app as cli
from tests.helpers import Command
from tests.thinning import ALL, thinned


def pytest_configure(config: pytest.Config) -> None:
    """See `tests.thinning`."""
    config.addinivalue_line("markers", "pairwise: the gate runs every pair of values, not all sets")
    config.addinivalue_line("markers", "sampled(n): the gate runs one in n of the parameter sets")
    config.addinivalue_line("markers", "thorough: not run by the gate")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `HETERO_TEST_ALL=1` runs; a test that is named by its id runs."""
    if ALL or any("::" in name for name in config.args):
        return
    items[:], left = thinned(items)
    if left:
        config.hook.pytest_deselected(items=left)


def pytest_sessionstart() -> None:
    """Every OpenCL driver is tried before a test looks at what is said on standard error, and
    before this process loads one: it can use those alone that were proven by then.
    """
    driver_reports()


@pytest.fixture(scope="session", autouse=True)
def programs_are_built_once() -> Iterator[None]:
    """By all devices of this process, in one context: a driver reads a source again to find what
    was compiled of it, which is most of what opening a model takes. Processes that tests start, and
    `HETERO_TEST_ALL=1`, have a context for each device and build every program for each.
    """
    try:
        from hetero.backends.opencl import resources
        from hetero.backends.opencl.proving import compiler
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            patch.setattr(resources, "new_context", cache(resources.new_context))
            patch.setattr(compiler, "_build", lru_cache(maxsize=256)(compiler._build))
        yield


@pytest.fixture(autouse=True)
def one_core_of_opencl(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes OpenCL on every core only where a test asks for it: how many threads it has is
    fixed for the rest of the process, whose other tests open it on one core.
    """
    monkeypatch.setattr("hetero.placement.choosing.every_core_count", lambda: 0)


@pytest.fixture(autouse=True)
def decided_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests replace parts of what decides, which no key knows; some keep decisions themselves."""
    monkeypatch.setattr("hetero.placement.decisions.folder", lambda: Path(os.devnull) / "none")


@pytest.fixture(autouse=True)
def notices_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was said on this machine today."""
    monkeypatch.setenv("HETERO_NOTICES", "always")


@pytest.fixture(scope="session")
def stories() -> Path:
    """The real model for checks; skips where it is not at hand."""
    roots = [Path(__file__).parents[1].parent / "shared" / "models"]
    if "HETERO_TEST_MODELS" in os.environ:
        roots.insert(0, Path(os.environ["HETERO_TEST_MODELS"]))
    for root in roots:
        if (root / "stories260K" / "config.json").is_file():
            return root / "stories260K"
    pytest.skip("stories260K is neither in HETERO_TEST_MODELS nor beside the checkout")


@pytest.fixture(scope="session")
def built() -> Any:
    """The command line, built once."""
    return typer.main.get_command(cli.app)


@pytest.fixture
def command(built: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Command:
    """`hetero ARGUMENTS` in this process."""
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    monkeypatch.setattr(cli, "app", built)

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        code = ended.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(["hetero", *arguments], code, *capsys.readouterr())

    return run

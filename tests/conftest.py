"""Fixtures of every folder."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import settings

# Before anything imports huggingface_hub: no test asks a network (the hub's tests ask their own).
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests compare what a plan's devices answer; those of first texts say so themselves.
os.environ["HETERO_WAIT_FOR_PLAN"] = "1"
# Before numpy: threads of two processes that share the cores would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hetero.backends.opencl import driver_reports
from hetero.cli import app as cli
from tests.support import gate, selection
from tests.support.helpers import Command

OF_KERNELS = ("backends", "compiling", "contexts", "generation", "models", "runtime")


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `tests.support.selection` and `tests.support.gate`."""
    selection.add_options(parser)
    gate.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """See `tests.support.selection` and `tests.support.gate`."""
    selection.configure(config)
    settings.register_profile("level", max_examples=selection.examples(100))
    settings.load_profile("level")
    config.pluginmanager.register(gate.Recorder(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file of which no test runs, unless a test is named by its id."""
    if collection_path.suffix != ".py" or any("::" in name for name in config.args):
        return None
    return selection.is_left_out(collection_path) or None


@pytest.hookimpl(trylast=True)  # the plugin of hypothesis marks its tests first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the level does not run; a test that is named by its id runs."""
    if any("::" in name for name in config.args):
        return
    kept = gate.remaining(config, selection.selected(items))
    kept_set = set(kept)
    left = [item for item in items if item not in kept_set]
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


def pytest_sessionstart() -> None:
    """Every OpenCL driver is tried before a test looks at what is said on standard error, and
    before this process loads one: it can use those alone that were proven by then.
    """
    driver_reports()
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests, which stay, join the oldest generation: few collections scan them."""
    gc.freeze()
    gc.unfreeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def devices_share_programs() -> Iterator[None]:
    """See `tests.support.sharing`."""
    if selection.exhaustive() or importlib.util.find_spec("pyopencl") is None:
        yield
        return
    from tests.support.sharing import shared

    with shared():
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile OpenCL's kernels without optimisation, which is most of what a test of them takes.

    `--full` compiles as users do for tests of backends and for modules marked `optimised`.
    """
    room = request.node.path.relative_to(Path(__file__).parent).parts[0]
    optimised = room == "backends" or request.node.get_closest_marker("optimised") is not None
    quick = room in OF_KERNELS and not (optimised and selection.full())
    if not quick or importlib.util.find_spec("pyopencl") is None:
        yield
        return
    from tests.support.sharing import unoptimised

    with unoptimised():
        yield


@pytest.fixture
def no_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as they are lowered: the program of a chain compiles for seconds for each model, which
    tests of many models leave to those of one.
    """
    if not selection.exhaustive():
        monkeypatch.setattr("hetero.runtime.step.fuse_program", lambda program, *_, **__: program)


@pytest.fixture(autouse=True)
def one_core_of_opencl(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes OpenCL on every core only where a test asks for it: how many threads it has is
    fixed for the rest of the process, whose other tests open it on one core.
    """
    for module in ("by_profile", "choosing"):
        monkeypatch.setattr(f"hetero.placement.{module}.every_core_count", lambda: 0)


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

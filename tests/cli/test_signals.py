"""SIGTERM, Ctrl-C and closed terminals: a clean end, no traceback, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
GENERATE = ("generate", "demo", "One day", "--raw", "--device", "npu", "--max-tokens", "400",
            "--temperature", "2", "--seed", "1")  # fmt: skip
PROFILE = ("profile", "--budget", "90", "--out")
QUANTIZE = ("quantize", "random:qwen2.5-0.5b", "--out")
COMPILE = ("compile", "demo", "--soc", "sm8650", "--out")
compiler = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None, reason="no compiler here"
)


def start(words: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
    """A command in a group of its own, which takes signals even where these tests ignore them."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "hetero.start", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **options,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Until the command has come so far."""
    give_up_s = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Exit code and stderr, of its children too: they hold it open until they end."""
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_command_that_is_ended_says_so(number: int, code: int) -> None:
    process = start(GENERATE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(number)
    assert ended(process) == (code, b"\ninterrupted\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (QUANTIZE, ".out.*.partial/weights.safetensors"),
        (PROFILE, "out.journal.jsonl"),
        pytest.param(COMPILE, "out/graphs/.*.partial", marks=compiler),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_what_was_begun_is_taken_away(words: tuple[str, ...], begun: str, tmp_path: Path) -> None:
    process = start((*words, str(tmp_path / "out")))
    wait_for(lambda: any(tmp_path.glob(begun)), process)
    time.sleep(0.1)
    process.terminate()
    code, errors = ended(process)
    assert code == 143, errors
    assert b"Traceback" not in errors
    assert errors.endswith(b"\ninterrupted\n")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.full
@compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_compilers_process_ends_without_a_word(number: int, tmp_path: Path) -> None:
    """Ctrl-C of a terminal goes to it as well."""
    process = start((*COMPILE, str(tmp_path / "out")))
    wait_for(lambda: any(tmp_path.glob("out/graphs/.*.partial")), process)
    os.killpg(process.pid, number)
    code, errors = ended(process)
    assert code == 128 + number, errors
    assert b"Traceback" not in errors


@pytest.mark.full
@compiler
def test_a_compiler_whose_parent_is_killed_ends_without_a_word(tmp_path: Path) -> None:
    process = start((*COMPILE, str(tmp_path / "out")))
    wait_for(lambda: any(tmp_path.glob("out/graphs/.*.partial/.sources-*")), process)
    process.kill()
    assert b"Traceback" not in ended(process)[1]


@pytest.mark.full
def test_a_signal_that_was_ignored_stays_so() -> None:
    process = start(GENERATE, preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    assert process.stdout is not None
    process.stdout.read(1)
    process.terminate()
    assert ended(process)[0] == 0


def test_ctrl_c_while_the_interpreter_ends_changes_nothing() -> None:
    code = (
        "import atexit, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "from hetero import start\nsys.argv = ['hetero', '--version']\nstart.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")

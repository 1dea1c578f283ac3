"""What files and models say commands no terminal."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.errors import UserError, one_sentence
from hetero.profiler.profile_files import shipped_path
from hetero.terminal import answer_text, json_line, printable
from tests.bad_inputs.case import header
from tests.support import tiny_files
from tests.support.helpers import Command

TITLE = "\x1b]0;PWNED\x07\x1b[2J"  # sets a terminal's title and clears it
SAFE = "\\x1b]0;PWNED\\x07\\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é多😀\tand\nlines", "plain, é多😀\tand\nlines"),
        (TITLE, SAFE),
        ("\x00\x7f\x9b31m\r", "\\x00\\x7f\\x9b31m\\r"),
        ("a\u202egnp.exe", "a\\u202egnp.exe"),
    ],
)
def test_control_characters_are_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(UserError(text)) == one_sentence(text) == shown.replace("\n", " ")


def test_an_answer_is_escaped_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer_text(TITLE) == TITLE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert answer_text(f"a\r\n{TITLE}\u202e") == f"a\n{SAFE}\u202e"
    monkeypatch.setattr(sys, "stdout", None)
    assert answer_text(TITLE) == TITLE


def test_json_stays_the_same_document() -> None:
    document = {"name": "\x7f\x9b", "other": "é"}
    text = json_line(json.dumps(document, ensure_ascii=False))
    assert json.loads(text) == document
    assert text == '{"name": "\\u007f\\u009b", "other": "é"}'


def test_a_tensors_name_in_a_sentence(tmp_path: Path, command: Command) -> None:
    tiny_files.write_directory(tmp_path / "model")
    header(lambda found: found.update({TITLE: {"dtype": "X"}}))(tmp_path)
    done = command("generate", str(tmp_path / "model"), "hi", "--device", "npu")
    assert (done.returncode, "\x1b" in done.stderr) == (2, False)
    assert "PWNED" in done.stderr


@pytest.mark.full
def test_names_of_plans_and_profiles_in_tables(tmp_path: Path, command: Command) -> None:
    """Neither control characters nor Rich's markup (`[/x]` would be a traceback)."""
    named = f"{TITLE}[/x][red]"
    document = json.loads(shipped_path("snapdragon-8-gen-3").read_text(encoding="utf-8"))
    document |= {"name": named, "notes": [named]}
    (tmp_path / "profile.json").write_text(json.dumps(document), encoding="utf-8")
    words = ("plan", "llama-3-8b", "--profile", str(tmp_path / "profile.json"), "--seq-lens", "64")
    plan, again = str(tmp_path / "plan.json"), str(tmp_path / "again.json")
    for more in (("--out", plan), ("--compare", plan), ("--explain", "qkv"), ("--json",)):
        done = command(*words, *more)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
    document = json.loads(Path(plan).read_text(encoding="utf-8"))
    document |= {"model": named, "notes": [named]}
    Path(again).write_text(json.dumps(document), encoding="utf-8")
    done = command(*words, "--compare", again)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_what_is_streamed_to_a_terminal() -> None:
    words = ["generate", "demo", f"Once{TITLE}", "--device", "npu", "--max-tokens", "1", "--echo"]
    shown, terminal = os.openpty()
    command = [sys.executable, "-m", "hetero.start", *words]
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE):
        os.close(terminal)
        text = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(shown, 1000):
                text += piece
    os.close(shown)
    assert text.startswith(f"Once{SAFE}".encode())
    assert b"\x1b" not in text

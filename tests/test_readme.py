"""What the README shows must run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hetero import cli

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_runs(capsys: Any) -> None:
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 60


def commands() -> list[str]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    parts = [part.split("#")[0].strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith("hetero ") and "demo" in part]


@pytest.mark.parametrize("command", commands())
def test_commands_on_the_demo_model_run(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(command)[1:])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()

"""What README and docs show must run: Python blocks, and `hetero` commands.

The Python blocks of a page run one after the other in one namespace; every `hetero` line of a shell
block runs by itself. A block that cannot run says why: `<!-- not run: … -->` in front of it. Blocks
of other languages (`text`, `json`) are not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import app as cli
from hetero.models.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
SHELL, QUIET = ("", "sh", "bash"), ("text", "json")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text[: found.start("code")].count("\n") + 1
        yield Block(page, line, found["language"], found["code"], found["reason"])


def commands() -> list[Any]:
    shown = [b for page in PAGES for b in blocks(page) if b.language in SHELL and not b.reason]
    return [
        pytest.param(
            part,
            id=f"{block.page.name}:{block.line + i}",
            marks=() if block.page.name == "README.md" else pytest.mark.full,
        )
        for block in shown
        for i, line in enumerate(block.code.splitlines())
        for part in (x.split("#")[0].strip() for x in line.split("&&"))
        if part and not part.startswith("pip ")
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to work in, with a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    (tmp_path / "story.txt").write_text("Once upon a time there was a fox. " * 9, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(list(blocks(page)))
    for block in blocks(page):
        assert block.language in (*SHELL, *QUIET, "python"), f"{page.name}:{block.line}"
        if block.reason is not None:
            assert len(block.reason.split()) > 2, f"{page.name}:{block.line}: give the reason"


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(b.language == "python" and not b.reason for b in blocks(p))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_runs(page: Path, folder: Path) -> None:
    known, names = dict(ARCHITECTURES), {"__name__": "docs"}
    try:
        for block in blocks(page):
            if block.language == "python" and not block.reason:
                code = "\n" * (block.line - 1) + block.code  # errors name the page's line
                exec(compile(code, str(page), "exec"), names)
    finally:
        ARCHITECTURES.clear()
        ARCHITECTURES.update(known)


@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, folder: Path, capsys: Any) -> None:
    words = shlex.split(command)
    assert words[0] == "hetero", f"{command}: say why it is not run"
    with pytest.raises(SystemExit) as ended:
        cli.main(words[1:])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()

"""The whole help is pinned: `python -m tests.cli.test_help_text` writes `help.txt` again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hetero.cli.commands import COMMANDS

PINNED = Path(__file__).with_name("help.txt")
SHOW = """
import sys
from hetero.cli.app import main

for name in sys.argv[1:]:
    sys.argv[0] = "hetero"
    try:
        main([*name.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code
    print()
"""


def help_text() -> str:
    """Return the help of `hetero` and of every command, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-P", "-c", SHOW, "", *COMMANDS]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    return done.stdout.decode("utf-8")


def test_the_help_is_the_pinned_one() -> None:
    assert help_text() == PINNED.read_text("utf-8")


if __name__ == "__main__":
    PINNED.write_text(help_text(), "utf-8")

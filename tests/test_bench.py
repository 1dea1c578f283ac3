"""The benches of the simulated chip, which need no device, run and agree with what is shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("command", ["fit_snapdragon.py --check", "paper_reproduction.py"])
def test_what_is_said_of_the_simulated_chip_can_be_made_again(command: str) -> None:
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / name), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]

"""Children end with the process that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero.backends.host.child import child_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")

SLEEPER = "import os, sys, time; print(os.getpid(), *sys.argv[1:], flush=True); time.sleep(60)\n"
PARENT = """
import subprocess, sys
from hetero.backends.host.child import child_command
subprocess.run(child_command("sleeper", "one", "two"))
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that children import from, with a module that says who it is and waits."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("modules")
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().split()[1:] == [b"one", b"two"]
        parent.kill()
        # It holds the other end of the pipe: this returns when it is gone, and not a minute later.
        start_s = time.monotonic()
        assert parent.stdout.read() == b""
        assert time.monotonic() - start_s < 10


@pytest.mark.usefixtures("modules")
def test_a_child_whose_parent_has_ended_does_nothing() -> None:
    command = child_command("sleeper")
    command[command.index(str(os.getpid()))] = str(os.getppid())  # not who starts it
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


WATCHED = """
import os, sys, time
sys.platform = "darwin"
from hetero.backends.host import child
child.die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
STARTER = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid())])
"""


def test_where_the_system_does_not_end_a_child_a_thread_does() -> None:
    """Without the call that macOS lacks."""
    command = [sys.executable, "-c", STARTER, WATCHED]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdigit()
        parent.kill()
        start_s = time.monotonic()
        assert parent.stdout.read() == b""  # the child had the other end, and has ended
        assert time.monotonic() - start_s < 30

"""Child processes of ours that end with the process that started them, however that ends.

`python -P -m hetero.backends.host.child PARENT MODULE …` runs a module as a script. The system is
informed of the parent before anything large is imported: a parent that is killed leaves nothing at
work.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from typing import Final

PR_SET_PDEATHSIG: Final = 1
POLL_S: Final = 0.5  # between two checks of the parent
SYNCHRONIZE: Final = 0x00100000  # of Windows' API, and INFINITE
FOR_EVER: Final = 0xFFFFFFFF


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a script in a child of the calling process.

    The child ends with the *thread* that starts it: that must wait for the child, or outlive it.
    """
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *arguments]


def die_with(parent: int) -> None:
    """End this process when process `parent`, which started it, ends or has ended.

    The system does so on Linux, elsewhere a thread that waits for it.
    """
    if sys.platform != "linux":
        watch = threading.Thread(target=_end_after, args=(parent,), daemon=True)
        watch.start()
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the system knew
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after(parent: int) -> None:
    wait_for_process(parent)
    os._exit(1)


def wait_for_process(parent: int) -> None:
    """Return when the process that started this one has ended."""
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        process = kernel.OpenProcess(SYNCHRONIZE, False, parent)
        if process:
            kernel.WaitForSingleObject(process, FOR_EVER)
        return
    while os.getppid() == parent:  # an orphan gets another
        time.sleep(POLL_S)


def main() -> None:
    """Run the module."""
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

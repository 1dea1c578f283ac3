"""Entry points of the installed commands: Ctrl-C while the imports still run ends cleanly too."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """The `hetero` command."""
    _load_quietly()
    from hetero.cli import app as cli

    try:
        cli.main()
    finally:
        _end_quietly()


def profile_main() -> None:
    """The `hetero-profile` command, short for `hetero profile`."""
    _load_quietly()
    from hetero.cli import app as cli

    try:
        cli.profile_main()
    finally:
        _end_quietly()


def _load_quietly() -> None:
    """Import the command line with a Ctrl-C that ends the process instead of one import.

    An import that is interrupted by an exception may turn it into another (an `ImportError` of an
    extension module), so nothing is raised.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as under nohup: leave it so
    signal.signal(signal.SIGINT, _leave)
    try:
        import hetero.cli.app  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_quietly() -> None:
    """All is done and said: a Ctrl-C while the interpreter ends changes nothing any more."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(_number: int, _frame: FrameType | None) -> None:
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

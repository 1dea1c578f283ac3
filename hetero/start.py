"""Entry points of the installed commands: Ctrl-C while the imports still run ends cleanly too."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
UNWRITTEN = 120  # Python's own code for output that could not be written


def main() -> None:
    """The `hetero` command."""
    _run("main")


def profile_main() -> None:
    """The `hetero-profile` command, short for `hetero profile`."""
    _run("profile_main")


def _run(entry: str) -> None:
    """An entry point of the command line, then the end of the process without taking the
    interpreter apart: that costs 0.1 s, and unloads drivers whose own ends have crashed.

    What was registered to run at the end still does: the first to register is the last to run.
    """
    ended = _Ended()
    atexit.register(ended.leave)
    _load_quietly()
    from hetero.cli import app as cli

    try:
        getattr(cli, entry)()
    except SystemExit as end:
        ended.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        _end_quietly()


class _Ended:
    """How the command ended: an error, until it says otherwise."""

    code = 1

    def leave(self) -> None:
        """End the process now, with all that was said written out."""
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except (OSError, ValueError):  # the reader went away; closed
            self.code = self.code or UNWRITTEN
        os._exit(self.code)


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

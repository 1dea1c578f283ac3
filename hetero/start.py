"""Entry points of the installed commands: Ctrl-C while the imports still run ends cleanly too."""

from __future__ import annotations

import atexit
import os
import signal
import sys

from hetero.sigint import exit_quietly_on_sigint

UNWRITTEN = 120  # Python's own code for output that could not be written


def main() -> None:
    """Run the `hetero` command."""
    _run("main")


def profile_main() -> None:
    """Run the `hetero-profile` command, short for `hetero profile`."""
    _run("profile_main")


def _run(entry: str) -> None:
    """Run an entry point of the command line, then end the process without finalisation.

    Finalising the interpreter costs 0.1 s, and unloads drivers, some of which crash then. Functions
    registered with `atexit` still run: the first to register is the last to run.
    """
    ended = _Ended()
    atexit.register(ended.leave)
    # Else it reads what each installed package says of itself, for plugins that nothing here has.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    with exit_quietly_on_sigint():
        from hetero.cli import app as cli

    try:
        getattr(cli, entry)()
    except SystemExit as end:
        ended.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        _end_quietly()


class _Ended:
    """The exit code of the command: an error until it returns."""

    code = 1

    def leave(self) -> None:
        """Flush the output streams and end the process."""
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except (OSError, ValueError):  # the reader went away; closed
            self.code = self.code or UNWRITTEN
        os._exit(self.code)


def _end_quietly() -> None:
    """Ignore a Ctrl-C from here on: the command has ended."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()

"""The `hetero` command line. Thin: parses, calls the library, prints."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType
from typing import Annotated, Any, cast

import typer

from hetero.backends.errors import DeviceError
from hetero.cli import examples
from hetero.cli.commands import Commands
from hetero.cli.system_errors import system_sentence
from hetero.errors import FallbackWarning, UserError, one_sentence
from hetero.profiler.errors import ProfileWarning
from hetero.terminal import notices

app = typer.Typer(
    name="hetero",
    cls=Commands,
    help="Run language models on the GPU and the NPU of one chip, together.",
    epilog=examples.MAIN,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# Typer carries its own copy of Click or uses the installed one, depending on its version; this is
# the base of every complaint about what was typed, in either.
UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(version("hetero"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and what compilers say.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No notices (also: HETERO_NOTICES=off).")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take the options before the command."""
    _State.debug = debug
    if quiet:
        notices.quiet()
    if debug:  # what compilers say, and other details, on standard error
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        logging.getLogger("hetero").setLevel(logging.DEBUG)


class _State:
    """Options that hold for the whole process."""

    debug = False
    ended_by: int = signal.SIGINT


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Let SIGTERM, and a closed terminal, end a command as Ctrl-C does; the second at once."""
    _State.ended_by = signal.SIGINT
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    _State.ended_by = number
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, and return its exit code.

    0, 1 (doctor), 2 (the user can mend it), 130 (Ctrl-C), 143 (SIGTERM) and 129 (the terminal was
    closed).
    """
    with _ended_cleanly():
        _main(arguments)


def _main(arguments: list[str] | None) -> None:
    warnings.showwarning = _show_warning
    _State.debug = False
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old code page must not end an answer
    try:
        code = app(args=arguments, standalone_mode=False)
        if code == 128 + signal.SIGINT:  # how newer versions of Typer say it
            raise KeyboardInterrupt
    except UsageError as error:
        try:
            _print_usage(error)
        except BrokenPipeError:
            _silence_stdout()
        code = 2
    except BrokenPipeError:
        _silence_stdout()
        code = 0
    except SystemExit as ended:
        # Where the reader went away (`| head`), Typer and Rich end with 1.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        _silence_stdout()
        code = 0 if ended.code == 1 else ended.code
    except (UserError, DeviceError, OSError) as error:
        known = isinstance(error, UserError | DeviceError)
        sentence = str(error) if known else system_sentence(cast("OSError", error), sys.argv)
        if _State.debug or sentence is None:
            raise
        print(f"hetero: {one_sentence(sentence)}", file=sys.stderr)
        code = 2
    except MemoryError as error:
        if _State.debug:
            raise
        why = str(error) or "the system has no more"
        print(
            f"hetero: out of memory: {one_sentence(why)}: close other programs, or ask for less",
            file=sys.stderr,
        )
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        with suppress(OSError):  # the terminal may be gone
            print("\ninterrupted", file=sys.stderr)
        code = 128 + _State.ended_by
    raise SystemExit(code or 0)


def _print_usage(error: Exception) -> None:
    """Print the mistake, and the command whose help to read."""
    message = cast("typer.BadParameter", error).format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, flush=True)
    elif message:
        message = one_sentence(message.replace("Value error, ", "")).removesuffix(".")
        context: Any = getattr(error, "ctx", None)
        name = getattr(context, "info_name", None)
        command = f"hetero {name}" if getattr(context, "parent", None) else "hetero"
        if "unexpected extra arg" in message and name == "generate":
            message += ": a prompt of several words goes in quotes"
        print(f"hetero: {message} (see `{command} --help`)", file=sys.stderr)


def _silence_stdout() -> None:
    """Discard output once the reader has left, so that shutdown prints no second error."""
    sys.stdout = sys.__stdout__
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def profile_main() -> None:
    """Run `hetero-profile`, short for `hetero profile`."""
    main(["profile", *sys.argv[1:]])


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FallbackWarning | ProfileWarning) or _State.debug:
        print(f"hetero: warning: {one_sentence(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Which commands there are; the module of one is imported when it is asked for.

`hetero --help` and a mistyped name answer without loading what a model needs.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

INTERRUPTED: Final = 130


@dataclass(frozen=True)
class Command:
    """A function `<name>_command` of `hetero.cli.<module>` and the first line of its help."""

    name: str
    module: str
    summary: str

    def load(self) -> Any:
        """The command as the group wants it, made by Typer from the function."""
        with importing_quietly():
            module = importlib.import_module(f"hetero.cli.{self.module}")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(self.name)(getattr(module, f"{self.name.replace('-', '_')}_command"))
        return typer.main.get_command(alone)


COMMANDS: Final = {
    command.name: command
    for command in (
        Command("generate", "generate", "Go on from PROMPT; the text streams to stdout."),
        Command("chat", "generate", "Talk with MODEL in the terminal."),
        Command("profile", "profile", "Measure this device once; plans and predictions use it."),
        Command("plan", "plan", "Find the best cut of every matmul between GPU and NPU."),
        Command("report", "profile", "Draw a saved profile or plan as one page."),
        Command("quantize", "quantize", "Quantise MODEL once, into a directory that loads fast."),
        Command("compile", "compile", "Compile every NPU graph of MODEL for a chip."),
        Command("eval", "evaluate", "Perplexity of MODEL over a text, and agreement with float32."),
        Command("bench", "bench", "Measure prefill and decode speed of several devices in turns."),
        Command("sync-bench", "bench", "What a wait costs here: latency and CPU time."),
        Command("devices", "doctor", "List what can compute here."),
        Command("doctor", "doctor", "Run a small operation on every device: PASS or FAIL."),
    )
}


class Commands(TyperGroup):
    """The group of `COMMANDS`, and of those that were added to the Typer itself."""

    _describing = False  # a list of commands is being printed: names and summaries will do

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Their names, in the order of `hetero --help`."""
        return [*COMMANDS, *(name for name in self.commands if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command; without its options while the list of all is printed."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        if self._describing:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)
        if cmd_name not in self.commands:
            self.commands[cmd_name] = COMMANDS[cmd_name].load()
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of commands."""
        self._describing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._describing = False


@contextmanager
def importing_quietly() -> Iterator[None]:
    """A Ctrl-C while modules load ends the process instead of one import.

    An import that is interrupted by an exception may turn it into another (an `ImportError` of an
    extension module), so nothing is raised.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield  # ignored, as under nohup, or the caller's: leave it so
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_number: int, _frame: FrameType | None) -> None:
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)

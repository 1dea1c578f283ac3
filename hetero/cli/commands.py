"""The table of commands; a command's module is imported when it is called.

`hetero --help` and a mistyped name answer without loading what a model needs; so does the help of a
command, whose module imports them inside its functions.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import typer
from typer.core import TyperCommand

from hetero.backends.host.gc_pause import gc_paused
from hetero.cli import examples
from hetero.cli.examples import DECIDE, HERE, PREPARE, USE
from hetero.cli.help import HelpCommand, HelpGroup
from hetero.sigint import exit_quietly_on_sigint


@dataclass(frozen=True)
class Command:
    """One entry of the table.

    A function `<name>_command` of `hetero.cli.<module>`, its panel in `hetero --help`, the first
    line of its help, and the modules that are imported when it runs, not for its help.
    """

    name: str
    module: str
    panel: str
    summary: str
    runs: tuple[str, ...] = ()

    def load(self) -> Any:
        """Return the command, made by Typer from the function."""
        with exit_quietly_on_sigint(), gc_paused():
            module = importlib.import_module(f"hetero.cli.{self.module}")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        options: Any = {"cls": HelpCommand, "epilog": examples.COMMANDS.get(self.name)}
        names = {"help_option_names": ["-h", "--help"]}
        add = alone.command(self.name, context_settings=names, **options)
        function = getattr(module, f"{self.name.replace('-', '_')}_command")

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            with exit_quietly_on_sigint(), gc_paused():
                for needed in self.runs:
                    importlib.import_module(f"hetero.{needed}")
            return function(*arguments, **options)

        add(run)
        command = typer.main.get_command(alone)
        for parameter in command.params:
            _leave_default(parameter)
        return command


def _leave_default(parameter: Any) -> None:
    """Take the default of an option that is not given as it is.

    Typer makes a Pydantic validator for each option, 40 at every start, to check its own default.
    """
    process = parameter.process_value
    checked = parameter.required or parameter.multiple or parameter.callback is not None

    def value_of(ctx: Any, value: Any) -> Any:
        return value if value is parameter.default and not checked else process(ctx, value)

    parameter.process_value = value_of


COMMANDS: Final = {
    command.name: command
    for command in (
        Command("generate", "generate", USE, "Answer PROMPT; the text streams to stdout.",
                ("generation.llm",)),
        Command("chat", "chat", USE, "Talk with MODEL in the terminal.", ("generation.llm",)),
        Command("serve", "serve", USE, "Serve MODEL over HTTP, with contexts that persist."),
        Command("models", "models", PREPARE, "List models that can be opened without a network.",
                ("models.hub",)),
        Command("profile", "profile", DECIDE, "Measure this device once, for plans.",
                ("cli.tables", "measuring.profiling", "measuring.compiler_mode")),
        Command("plan", "plan", DECIDE, "Find the best cut of every matmul between GPU and NPU.",
                ("cli.tables", "placement.planning", "solver.report")),
        Command("report", "profile", DECIDE, "Draw a saved profile or plan as one page.",
                ("placement.planning",)),
        Command("warm", "warm", PREPARE, "Prepare what a first start of MODEL would, once.",
                ("generation.llm", "cache")),
        Command("quantize", "quantize", PREPARE,
                "Quantise MODEL, into a directory that loads fast.",
                ("compiling.calibration", "models.quantized")),
        Command("compile", "compile", PREPARE, "Compile every NPU graph of MODEL for a chip.",
                ("compiling.npu_graphs",)),
        Command("eval", "evaluate", DECIDE, "Perplexity over a text, and agreement with float32.",
                ("cli.tables", "measuring.evaluation")),
        Command("bench", "bench", DECIDE, "Measure prefill and decode speed, devices in turns.",
                ("measuring.benchmark",)),
        Command("reproduce", "reproduce", DECIDE, "HeteroLLM's claims against a simulated chip.",
                ("measuring.reproduction",)),
        Command("serve-key", "serve", PREPARE, "Make a key of an application for --keys."),
        Command("sync-bench", "bench", HERE, "Measure what a wait costs: latency and CPU time.",
                ("measuring.sync_bench",)),
        Command("devices", "doctor", HERE, "List what can compute here.",
                ("measuring.device_checks",)),
        Command("doctor", "doctor", HERE, "Run a small operation on every device: PASS or FAIL.",
                ("measuring.device_checks",)),
        Command("cache", "cache", HERE, "Show the files that hetero caches here, or clear them.",
                ("cache",)),
    )
}  # fmt: skip


class Commands(HelpGroup):
    """The group of `COMMANDS`, and of those that were added to the Typer itself."""

    _describing = False  # a list of commands is being printed: names and summaries will do

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names, in the order of `hetero --help`."""
        return [*COMMANDS, *(name for name in self.commands if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; without its options while the list of all is printed."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        if self._describing:
            known = COMMANDS[cmd_name]
            return TyperCommand(cmd_name, help=known.summary, rich_help_panel=known.panel)
        if cmd_name not in self.commands:
            self.commands[cmd_name] = COMMANDS[cmd_name].load()
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        self._describing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._describing = False

"""The help of commands, laid out for the terminal's width: nothing is cut off at any width.

Typer's own layout gives each option four columns, which at 60 characters cuts the names of options
and takes three times as many lines. This relies on commands and groups of Typer calling
`format_help`, and on parameters having Click's names, texts and defaults. The type of a value is
read from the annotations of the command's function, as Typer itself stores it elsewhere from
version to version.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from typer.core import TyperCommand, TyperGroup

from hetero.errors import UserError

ARGUMENTS, OPTIONS = "Arguments", "Options"
ORDER: Final = (ARGUMENTS, OPTIONS, "Sampling", "Devices and plans", "Output")
MIN_WIDTH, MAX_WIDTH = 40, 100
NAME_WIDTH: Final = 26  # of the column with the options' names
METAVARS: Final[dict[Any, str]] = {int: "N", float: "X", Path: "FILE", str: "TEXT"}
ELSEWHERE: Final = {
    "run": "use `hetero generate MODEL PROMPT` for one answer, `hetero chat MODEL` to talk",
    "pull": "name it as the model, hf:OWNER/NAME[:FILE], or run `hf download OWNER/NAME`",
    "list": "use `hetero models`",
    "complete": "use `hetero generate MODEL PROMPT --raw`",
    "perplexity": "use `hetero eval MODEL --text FILE`",
    "convert": "use `hetero quantize MODEL --out DIR`",
}


class HelpCommand(TyperCommand):
    """A command with this module's help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write("\n".join(_command_help(self, ctx)) + "\n")


class HelpGroup(TyperGroup):
    """A group of commands with this module's help, and a hint for names that others use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `hetero help COMMAND` and `hetero version` as the options of these names."""
        match args:
            case ["help", *rest]:
                args = [*rest[:1], "--help"]
            case ["version"]:
                args = ["--version"]
        return list(super().parse_args(ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve as Click does; raise `UserError` for another tool's name of a command."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise UserError(f"there is no `hetero {args[0]}`: {_instead(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write("\n".join(_group_help(self, ctx)) + "\n")


def _instead(name: str, known: list[str]) -> str:
    """Return what to type in place of an unknown command."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    near = [x for x in known if x.startswith(name)] or get_close_matches(name, known, n=2)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "`hetero --help` lists the commands"


class Row(NamedTuple):
    """A parameter, formatted."""

    name: str
    help: str
    panel: str


def _command_help(command: Any, ctx: Any) -> Iterator[str]:
    width = _width()
    rows = _rows(command, ctx)
    arguments = [row.name for row in rows if row.panel == ARGUMENTS]
    yield from _usage(ctx, " ".join(["[OPTIONS]", *arguments]), command.help, width)
    titles = dict.fromkeys(row.panel for row in rows)
    for title in sorted(titles, key=lambda x: ORDER.index(x) if x in ORDER else 1):
        yield from _panel(title, [(r.name, r.help) for r in rows if r.panel == title], width)
    yield from _examples(command, width)


def _group_help(group: Any, ctx: Any) -> Iterator[str]:
    width = _width()
    yield from _usage(ctx, "[OPTIONS] COMMAND …", group.help, width)
    panels: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is not None and not command.hidden:
            title = getattr(command, "rich_help_panel", None) or "Commands"
            first = inspect.cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ")
            panels.setdefault(title, []).append((name, first))
    for title, listed in panels.items():
        yield from _panel(title, listed, width)
    yield from _panel(OPTIONS, [(row.name, row.help) for row in _rows(group, ctx)], width)
    yield from _examples(group, width)


def _rows(command: Any, ctx: Any) -> list[Row]:
    """Return the parameters in their order, arguments first."""
    function = inspect.unwrap(command.callback)
    hints = get_type_hints(function, include_extras=True)
    rows = []
    for parameter in command.get_params(ctx):
        if getattr(parameter, "hidden", False):
            continue
        hint = hints.get(parameter.name)
        argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None) or (ARGUMENTS if argument else OPTIONS)
        rows.append(Row(_name(parameter, hint), _help(parameter, hint), panel))
    return sorted(rows, key=lambda row: row.panel != ARGUMENTS)


def _usage(ctx: Any, words: str, text: str | None, width: int) -> Iterator[str]:
    yield _styled("Usage: ", "1") + f"{ctx.command_path} {words}"
    yield ""
    for part in inspect.cleandoc(text or "").split("\n\n"):
        yield from textwrap.wrap(part.replace("\n", " "), width)


def _panel(title: str, rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield a titled list in two columns; a name too long for its column has a line of its own."""
    rows = list(rows)
    if not rows:
        return
    yield ""
    yield _heading(title, width)
    left = min(max(len(name) for name, _ in rows) + 2, NAME_WIDTH)
    for name, text in rows:
        lines = textwrap.wrap(text, width - left - 2, break_on_hyphens=False) or [""]
        if len(name) > left - 2:
            yield f"  {_styled(name, '36')}"
        else:
            yield f"  {_styled(name, '36')}{' ' * (left - len(name))}{lines.pop(0)}".rstrip()
        for line in lines:
            yield f"  {' ' * left}{line}"


def _examples(command: Any, width: int) -> Iterator[str]:
    """Yield the lines of the epilog, each a command line, perhaps with `#` and its purpose."""
    if not command.epilog:
        return
    yield ""
    yield _heading("Examples", width)
    for line in command.epilog.strip().splitlines():
        shown, _, about = line.partition("#")
        lines = textwrap.wrap(
            f"  {shown.strip()}", width, subsequent_indent="      ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if about and len(lines[-1]) + len(about) + 3 <= width:
            yield from [*lines[:-1], f"{lines[-1]}  #{about}"]
            continue
        yield from lines
        if about:
            yield from textwrap.wrap(f"      # {about.strip()}", width, subsequent_indent="      ")


def _name(parameter: Any, hint: Any) -> str:
    """Return `--max-tokens N`, `-h, --help`, `--chat/--raw`, `MODEL`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names += "/" + ", ".join(parameter.secondary_opts)
    kind = _kind(hint)
    if kind in (bool, None):
        return names
    value = parameter.metavar or METAVARS.get(kind, "NAME" if _choices(kind) else "TEXT")
    return f"{names} {value}"


def _kind(hint: Any) -> Any:
    """Return the type of one value, None if unknown.

    Of `Annotated[list[Path] | None, …]` it is `Path`.
    """
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        hint = next(x for x in get_args(hint) if x is not type(None))
    return get_args(hint)[0] if get_origin(hint) is list else hint


def _limits(hint: Any) -> tuple[Any, Any]:
    """Return the least and the greatest value of a number."""
    declared = [x for x in get_args(hint)[1:] if hasattr(x, "show_default")]
    return (declared[0].min, declared[0].max) if declared else (None, None)


def _choices(kind: Any) -> list[str]:
    return [x.value for x in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _help(parameter: Any, hint: Any) -> str:
    """Return an option's help, its choices or limits, and its default."""
    parts = [parameter.help or ""]
    if choices := _choices(_kind(hint)):
        parts.append(f"({', '.join(choices)})")
    least, most = _limits(hint)
    if most is not None:
        parts.append(f"({least} to {most})")
    elif least:
        parts.append(f"({least} or more)")
    if default := _default(parameter):
        parts.append(f"[default: {default}]")
    if parameter.required and parameter.param_type_name == "option":
        parts.append("[required]")
    return " ".join(part for part in parts if part)


def _default(parameter: Any) -> str:
    """Return the default that the help shows; empty if there is none."""
    declared = getattr(parameter, "show_default", False)
    if isinstance(declared, str):
        return declared
    value = parameter.default
    if callable(value) or not declared or value is None or parameter.required or value is False:
        return ""
    if value is True:
        return str(parameter.opts[0]).lstrip("-") if parameter.secondary_opts else ""
    value = value.value if isinstance(value, Enum) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def _width() -> int:
    return max(min(shutil.get_terminal_size().columns, MAX_WIDTH), MIN_WIDTH)


def _heading(title: str, width: int) -> str:
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    rule = "─" if encoding.startswith("utf") else "-"
    return _styled(f"{title} {rule * (width - len(title) - 1)}", "1")


def _styled(text: str, style: str) -> str:
    """Return bold (1) or cyan (36) text, where the terminal shows it."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or sys.stdout is None or not sys.stdout.isatty():
        return text
    return f"\x1b[{style}m{text}\x1b[0m"

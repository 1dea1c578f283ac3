"""`hetero devices` and `hetero doctor`: the devices here, and whether they compute correctly."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero.cli.options import JsonOption, stderr
from hetero.terminal import printable
from hetero.terminal.notices import notify

if TYPE_CHECKING:
    from hetero.measuring.device_checks import Finding


def devices_command(as_json: JsonOption = False) -> None:
    """List what can compute here."""
    from hetero.measuring.device_checks import list_devices

    print_findings(list_devices(), as_json, ("found", "missing"))


ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Also benchmark the demo model, and write a report to send: FILE.md and FILE.json, "
        "without names of persons, machines or folders.",
    ),
]


def doctor_command(report: ReportOption = None, as_json: JsonOption = False) -> None:
    """Run a small operation on every device; PASS or FAIL with the reason and the remedy."""
    from hetero.measuring.device_checks import diagnose

    if report is not None:
        from hetero.measuring.doctor_report import report_paths, write_report

        report_paths(report)  # refused before anything is measured
    findings = print_findings(diagnose(), as_json, ("PASS", "FAIL"))
    if report is not None:
        with stderr().status("benchmarking") as status:
            written = write_report(report, findings, note=status.update)
        notify(f"the report is in {written[1]} and {written[0]}: look through it, then send both")
    if not as_json:
        print(next_step(findings))
    if not all(finding.ok for finding in findings if finding.needed):
        raise typer.Exit(1)


def print_findings(
    findings: Iterable[Finding], as_json: bool, words: tuple[str, str]
) -> list[Finding]:
    """Print a line for each finding as soon as it is made, and return all.

    The lines have one word for passed findings and one for others. A crash of a driver later in
    this process does not remove a line.
    """
    if as_json:
        made = list(findings)
        print(json.dumps([vars(finding) for finding in made]))
        return made
    made = []
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 1 << 20
    for finding in findings:
        made.append(finding)
        word = words[0] if finding.ok else words[1]
        line = f"{word:8}{finding.kind:4} {finding.name:12} {printable(finding.detail)}"
        _print_wrapped(line, width)
        if not finding.ok and finding.remedy:
            _print_wrapped(f"{'':13}remedy: {printable(finding.remedy)}", width)
        print(end="", flush=True)
    return made


def next_step(findings: Sequence[Finding]) -> str:
    """Return what to do after `hetero doctor`: the first remedy that a model needs, else a run."""
    failed = [finding for finding in findings if finding.needed and not finding.ok]
    if not failed:
        return 'next: hetero generate demo "Once upon a time"'
    first = failed[0]
    return printable(f"next: {first.name}: {first.remedy or first.detail}")


def _print_wrapped(line: str, width: int) -> None:
    """Print a line, wrapped below its third column where the terminal is narrower."""
    indent = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        line, width, initial_indent=indent, subsequent_indent=" " * 13, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip
    print("\n".join(lines))

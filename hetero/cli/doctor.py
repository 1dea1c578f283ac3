"""`hetero devices` and `hetero doctor`: what is here, and whether it computes correctly."""

from __future__ import annotations

import typer

from hetero.cli.options import JsonOption


def devices_command(as_json: JsonOption = False) -> None:
    """List what can compute here."""
    from hetero.cli.work.doctor import list_devices, print_findings

    print_findings(list_devices(), as_json, ("found", "missing"))


def doctor_command(as_json: JsonOption = False) -> None:
    """Run a small operation on every device; PASS or FAIL with the reason and the remedy."""
    from hetero.cli.work.doctor import diagnose, next_step, print_findings

    findings = print_findings(diagnose(), as_json, ("PASS", "FAIL"))
    if not as_json:
        print(next_step(findings))
    if not all(finding.ok for finding in findings if finding.needed):
        raise typer.Exit(1)

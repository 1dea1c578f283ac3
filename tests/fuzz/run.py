"""Coverage-guided fuzzing of all loaders: `python -m tests.fuzz.run --minutes 30`.

The targets take turns of a minute, each in a process with at most 1 GB beyond its start and 5 s for
an input. Inputs that found something lie in the work folder as `found-TARGET-…`; exit code 1 if
there are any. A finding belongs into `tests/bad_inputs` once it is mended.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

TARGETS = (
    "safetensors", "gguf", "config", "tokenizer", "session", "contexts",
    "plan", "profile", "journal", "bundle", "manifest",
)  # fmt: skip
INPUT_LIMIT_S = 5
MEMORY_LIMIT_MIB = 1024


def fuzz(
    minutes: Annotated[float, typer.Option(help="In all.")] = 30.0,
    work: Annotated[Path, typer.Option(help="Corpora and findings.")] = Path("fuzz-work"),
    only: Annotated[list[str] | None, typer.Option(help="Targets; default all.")] = None,
    slice_s: Annotated[int, typer.Option(help="A turn.")] = 60,
    prefix: Annotated[str, typer.Option(help="Run every turn under this command.")] = "",
) -> None:
    """Fuzz in turns, and print what was done as a table."""
    work.mkdir(parents=True, exist_ok=True)
    names = tuple(only or TARGETS)
    totals = {name: {"runs": 0, "seconds": 0.0, "peak_mib": 0, "slowest_s": 0} for name in names}
    turns = max(1, round(minutes * 60 / slice_s))
    for turn in range(turns):
        name = names[turn % len(names)]
        started = time.monotonic()
        output = run_turn(name, work, slice_s, prefix.split())
        for key, value in statistics(output).items():
            old = totals[name][key]
            totals[name][key] = old + value if key == "runs" else max(old, value)
        totals[name]["seconds"] += time.monotonic() - started
        print(f"{turn + 1}/{turns} {name}: {last_line(output)}", file=sys.stderr, flush=True)
    findings = sorted(x.name for x in work.glob("found-*"))
    print(table(totals, work))
    print(f"findings: {', '.join(findings) or 'none'}")
    raise SystemExit(1 if findings else 0)


def run_turn(name: str, work: Path, seconds: int, prefix: list[str]) -> str:
    """One process; what it printed."""
    command = [*prefix, sys.executable, "-m", "tests.fuzz.worker", name, str(work)]
    command += [f"-max_total_time={seconds}", f"-timeout={INPUT_LIMIT_S}"]
    command += [f"-rss_limit_mb={MEMORY_LIMIT_MIB}", "-max_len=65536", "-print_final_stats=1"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        log = work / f"found-{name}-{int(time.time())}.log"
        # The traceback is on stdout, the engine's words are on stderr.
        log.write_text(done.stdout[-20_000:] + done.stderr[-20_000:], encoding="utf-8")
    return text


def statistics(output: str) -> dict[str, int]:
    """Runs, peak memory and the slowest input of a turn."""
    names = {
        "runs": "number_of_executed_units",
        "peak_mib": "peak_rss_mb",
        "slowest_s": "slowest_unit_time_sec",
    }
    found = {key: re.search(rf"stat::{name}:\s*(\d+)", output) for key, name in names.items()}
    return {key: int(match[1]) for key, match in found.items() if match}


def last_line(output: str) -> str:
    """The engine's last word on coverage."""
    lines = [x for x in output.splitlines() if "cov:" in x]
    return lines[-1][:100] if lines else output[-300:]


def table(totals: dict[str, dict[str, float]], work: Path) -> str:
    """What was done."""
    lines = ["| loader | minutes | inputs | corpus | peak memory MiB | slowest input s |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, x in totals.items():
        kept = len(list((work / name).glob("*")))
        lines.append(
            f"| {name} | {x['seconds'] / 60:.1f} | {x['runs']:.0f} | {kept} | {x['peak_mib']:.0f} "
            f"| {x['slowest_s']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(fuzz)

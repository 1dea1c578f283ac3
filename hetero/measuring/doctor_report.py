"""The report of a machine that a tester can send: `hetero doctor --report`.

One JSON document and a page of Markdown with the same. Nothing in it names a person: the user's
name, the machine's, and paths below the home folder are replaced wherever they stand.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hetero.backends import snapdragon
from hetero.backends.errors import DeviceError
from hetero.backends.host.files import atomic_write
from hetero.backends.host.processor import cpu_name, memory_bytes
from hetero.backends.protocol import KINDS
from hetero.errors import UserError
from hetero.measuring.benchmark import BenchOptions, run_benchmark
from hetero.measuring.device_checks import Finding
from hetero.profiler import profile_files
from hetero.profiler.environment import hetero_version, package_versions
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile
from hetero.profiler.table_data import TableData, markdown_table

SCHEMA_VERSION: Final = 1
BENCH: Final = BenchOptions(prompt_tokens=128, decode_tokens=32, depths=(0, 256), rounds=3)
MODEL: Final = "demo"
SHORTEST_NAME: Final = 3  # characters of a name that is replaced outside of a path as well
NAMES: Final = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")
HOSTS: Final = ("HOSTNAME", "COMPUTERNAME")


def report_paths(path: Path) -> tuple[Path, Path]:
    """Return where the document and the page go.

    Raises `UserError` for a name that ends otherwise, or a folder that is not there.
    """
    if path.suffix.lower() not in ("", ".json", ".md"):
        raise UserError(f"--report {path}: a report is .md, with a .json next to it")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--report {path}: name a file in a folder that is there")
    return path.with_suffix(".json"), path.with_suffix(".md")


def write_report(
    path: Path, findings: Sequence[Finding], note: Callable[[str], None] = lambda _: None
) -> tuple[Path, Path]:
    """Benchmark this machine, and write both files. Raises `UserError`."""
    document_path, page_path = report_paths(path)
    document = anonymous(document_of(findings, note), personal_names())
    texts = {
        document_path: json.dumps(document, indent=1) + "\n",
        page_path: page_of(document, document_path.name),
    }
    for file, text in texts.items():
        try:
            atomic_write(file, text)
        except OSError as error:
            raise UserError(
                f"cannot write {file} ({error.strerror}): choose another --report"
            ) from None
    return document_path, page_path


def document_of(
    findings: Sequence[Finding], note: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return what is known of this machine, names included."""
    profile, problem = _own_profile()
    return {
        "schema_version": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%d"),
        "hetero": hetero_version(),
        "machine": _machine(),
        "versions": package_versions(),
        "checks": [asdict(finding) for finding in findings],
        "profile": None if profile is None else profile.model_dump(mode="json"),
        "profile_problem": problem,
        **_bench(findings, note),
    }


def _machine() -> dict[str, Any]:
    chip = snapdragon.chip_named(snapdragon.reported()) if snapdragon.is_snapdragon() else None
    return {
        "chip": chip.label if chip is not None else snapdragon.reported() or None,
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _own_profile() -> tuple[DeviceProfile | None, str]:
    path = profile_files.taken_profile_path()
    if not path.exists():
        return None, "none was taken: run `hetero profile` first"
    try:
        return DeviceProfile.load(path), ""
    except ProfileError as error:
        return None, str(error)


def _bench(findings: Sequence[Finding], note: Callable[[str], None]) -> dict[str, Any]:
    """Return the rows of a short benchmark of the devices whose checks passed."""
    passed = {finding.kind for finding in findings if finding.ok and finding.needed}
    kinds = [kind for kind in KINDS if kind in passed]
    devices = (*kinds, "hetero") if len(kinds) == len(KINDS) else tuple(kinds)
    if not devices:
        return {"bench": [], "bench_problem": "no device works", "model": MODEL}
    options = BenchOptions(**{**asdict(BENCH), "devices": devices})
    try:
        report = run_benchmark(MODEL, options, note=note)
    except (UserError, DeviceError) as error:
        return {"bench": [], "bench_problem": str(error), "model": MODEL}
    return {"bench": [asdict(row) for row in report.rows], "bench_problem": "", "model": MODEL}


def personal_names() -> dict[str, str]:
    """Return what names this machine's user, and what to write in its place; longer ones first."""
    names = {os.environ.get(name, ""): "USER" for name in NAMES}
    with contextlib.suppress(OSError, KeyError, ImportError):  # no such user
        names[getpass.getuser()] = "USER"
    home = Path.home()
    names[home.name] = "USER"
    hosts = {platform.node(), socket.gethostname(), *(os.environ.get(x, "") for x in HOSTS)}
    names |= {part: "HOST" for host in hosts for part in (host, host.partition(".")[0])}
    names |= {str(x): "~" for x in (home, home.resolve(), os.environ.get("HOME") or home)}
    usable = {x: to for x, to in names.items() if len(x) >= SHORTEST_NAME and x != os.sep}
    return dict(sorted(usable.items(), key=lambda item: -len(item[0])))


def anonymous(value: Any, names: Mapping[str, str]) -> Any:
    """Return a document with every name replaced in its texts, as whole words in any case."""
    match value:
        case str():
            for name, instead in names.items():
                form = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
                value = re.sub(form, instead, value, flags=re.IGNORECASE)
            return value
        case dict():
            return {key: anonymous(item, names) for key, item in value.items()}
        case list() | tuple():
            return [anonymous(item, names) for item in value]
    return value


def page_of(document: Mapping[str, Any], attached: str) -> str:
    """Return the page of a document, whose file is `attached` next to it."""
    machine = document["machine"]
    lines = [
        f"# hetero {document['hetero']} on {machine['chip'] or machine['processor']}",
        "",
        f"{document['created']}; all numbers are in `{attached}`.",
    ]
    for table in _tables(document):
        lines += ["", f"## {table.title}", "", *([table.note, ""] if table.note else [])]
        lines += [markdown_table(table)] if table.rows else []
    return "\n".join(lines) + "\n"


def _tables(document: Mapping[str, Any]) -> Iterator[TableData]:
    facts = {**document["machine"], **document["versions"]}
    rows = tuple((name, str(value)) for name, value in facts.items() if value is not None)
    yield TableData("Machine", ("what", "value"), rows)
    checks = tuple(
        ("PASS" if x["ok"] else "FAIL" if x["needed"] else "missing", x["kind"], x["name"],
         x["detail"], x["remedy"])
        for x in document["checks"]
    )  # fmt: skip
    yield TableData("Checks", ("result", "kind", "name", "detail", "remedy"), checks)
    bench = tuple(
        (x["test"], x["device"], f"{x['tokens_per_s_median']:.1f}", f"{x['tokens_per_s_min']:.1f}",
         f"{x['tokens_per_s_max']:.1f}")
        for x in document["bench"]
    )  # fmt: skip
    speeds = ("tokens/s", "min", "max")
    yield TableData(
        f"Speed of {document['model']}", ("test", "device", *speeds), bench,
        document["bench_problem"], 2, speeds,
    )  # fmt: skip
    yield _profile_table(document)


def _profile_table(document: Mapping[str, Any]) -> TableData:
    """Return the errors of the profile's predictors."""
    head = ("device", "weights", "phase", "mean error", "memory, GB/s", "arithmetic, GFLOP/s")
    profile = document["profile"]
    if profile is None:
        return TableData("Profile", head, (), document["profile_problem"])
    rows = []
    for predictor in profile["predictors"]:
        speeds = (predictor["regimes"][name] for name in ("bytes_per_s", "flops_per_s"))
        shown = tuple("" if speed is None else f"{speed / 1e9:.1f}" for speed in speeds)
        for entry in predictor["validation"]:
            named = (predictor["device"], predictor["weight_format"], entry["phase"])
            rows.append((*named, f"{entry['mape']:.1%}", *shown))
    return TableData("Profile", head, tuple(rows), f"Taken {profile['created']}.", 3, head[3:])

"""Run llama.cpp's own server tests against `hetero serve`; say what fails, and why.

pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
python bench/llama_tests.py llama_cpp_python-0.3.36.tar.gz --model stories260K

The tests (`tools/server/tests` of llama.cpp) are taken from its source or from an archive that has
it, run unchanged, and need `requests`, `openai`, `filelock` and `prometheus-client`. `--model` is a
directory of their model, stories260K. A small proxy maps llama-server's options and its
`/completion` on those of `hetero serve` (`parts/llama_shim.py`). What fails is run again with
sampled text, fingerprints and the first delta counted as equal; what still fails has its reason in
`data/llama_tests.csv`, or is a fault.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Final
from xml.etree import ElementTree

import typer
from common import DATA, finish, one_command, table

PARTS: Final = Path(__file__).parent / "parts"
TESTS, TEMPLATES = "tools/server/tests", "models/templates"
# What `hetero serve` has an equivalent of; the others need models or features that it lacks.
FILES: Final = (
    *("tokenize", "completion", "chat_completion", "template", "security", "compat_anthropic"),
    *("slot_save", "compat_oai_responses", "basic", "ctx_shift", "ignore_eos", "metrics"),
    *("tool_call", "kv_keep_only_active", "sleep", "proxy", "compat_gcp"),
)
SPELLING: Final = "sampled text, fingerprint or first delta"


def unpack(source: Path, into: Path) -> Path:
    """Return a folder with llama.cpp's server tests and templates, copied from a tree or archive.

    Raises `typer.BadParameter` where the source has none.
    """
    if source.is_dir():
        trees = (x for x in (source, *source.rglob("llama.cpp")) if (x / TESTS).is_dir())
        if (tree := next(trees, None)) is not None:
            for part in (TESTS, TEMPLATES):
                shutil.copytree(tree / part, into / part)
    elif source.is_file():
        with tarfile.open(source) as archive:
            for member in archive:
                at = re.search(rf"(?:^|/)((?:{TESTS}|{TEMPLATES})/.*)", member.name)
                if at is not None and member.isfile():
                    member.name = at[1]
                    archive.extract(member, into, filter="data")
    if not (into / TESTS).is_dir():
        raise typer.BadParameter(f"{source} has no {TESTS}: give llama.cpp's source or an archive")
    return into


def run(tests: Path, names: list[str], *, model: Path, lenient: bool) -> dict[str, str]:
    """Return the outcome of each test, `passed`, `skipped`, or the assertion that failed."""
    report, chosen = tests / f"report-{lenient}.xml", tests / "chosen"
    chosen.write_text("\n".join(names), encoding="utf-8")
    paths = os.pathsep.join([str(PARTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"MODEL": str(model.resolve()), "TEMPLATES": str(tests.parents[2] / TEMPLATES)}
    own |= {"LENIENT": "1" if lenient else "0", "PORT": "18480", "PYTHONPATH": paths}
    options = ["-q", "-p", "llama_shim", "-p", "no:cacheprovider", "--tb=short", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", f"@{chosen}"]
    subprocess.run(command, cwd=tests, env={**os.environ, **own}, check=False, stdout=sys.stderr)
    if not report.exists():
        raise SystemExit("pytest did not run: see its message above")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        outcomes[name] = "passed"
        for kind in ("failure", "error", "skipped"):
            for result in case.findall(kind):
                said = re.search(r"^E +(.*)", result.text or "", re.MULTILINE)
                outcomes[name] = kind if kind == "skipped" else said[1] if said else kind
    return outcomes


def reasons() -> list[tuple[re.Pattern[str], str]]:
    """Return which tests may fail (`file::test`, a pattern), and why."""
    with (DATA / "llama_tests.csv").open(encoding="utf-8", newline="") as file:
        return [(re.compile(row["tests"]), row["reason"]) for row in csv.DictReader(file)]


def llama_tests(
    source: Annotated[Path, typer.Argument(help="llama.cpp's source, or an archive with it")],
    model: Annotated[Path, typer.Option(help="directory of stories260K")],
    only: Annotated[str, typer.Option(help="files of tests, such as basic,metrics")] = "",
) -> None:
    """Run llama.cpp's server tests against `hetero serve`; exit 1 where one fails for no reason
    that is known.
    """
    with tempfile.TemporaryDirectory(prefix="llama-tests-") as folder:
        tests = unpack(source, Path(folder)) / TESTS
        files = only.split(",") if only else FILES
        first = run(tests, [f"unit/test_{x}.py" for x in files], model=model, lenient=False)
        failed = [name for name, said in first.items() if said not in ("passed", "skipped")]
        again = run(tests, failed, model=model, lenient=True) if failed else {}
    known, faults = reasons(), []
    why: dict[str, Counter[str]] = {}
    for name in failed:
        reason = SPELLING if again.get(name) == "passed" else None
        short = name.removeprefix("unit/test_").replace(".py::", "::")
        reason = reason or next((text for test, text in known if test.match(short)), None)
        if reason is None:
            faults.append(f"{short}: {again.get(name, first[name])}")
        why.setdefault(short.partition("::")[0], Counter())[reason or "fault"] += 1
    rows = []
    for file in files:
        ends = [said for name, said in first.items() if name.startswith(f"unit/test_{file}.py")]
        counts = Counter(x if x in ("passed", "skipped") else "failed" for x in ends)
        texts = [f"{reason} ({n})" for reason, n in why.get(file, Counter()).most_common()]
        cells = [counts["passed"], counts["failed"], counts["skipped"], "; ".join(texts)]
        rows.append([file, *cells])
    sums = [sum(row[i] for row in rows) for i in (1, 2, 3)]
    table("tests|passed|failed|skipped|why", [*rows, ["all", *sums, ""]])
    print("", *(faults or ["no test fails without a reason"]), sep="\n")
    finish()
    if faults:
        raise typer.Exit(1)


app = one_command(llama_tests)

if __name__ == "__main__":
    app()

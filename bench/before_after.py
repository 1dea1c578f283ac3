"""Any bench at another commit and in this tree, in turns: what a change did to its numbers.

python bench/before_after.py --rounds 3 HEAD~10 control_plane.py --weights w4a8 --profile host
"""

from __future__ import annotations

import io
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from common import DATA, finish, one_command, table

ROOT = DATA.parents[1]
ROOMS = ("backends", "profiler", "solver")  # whose folders are not where their import paths say
NUMBER = re.compile(r"\d+\.\d+")
Figures = dict[tuple[str, str], float]  # (what a line is about, its column) -> number


def unpacked(commit: str, folder: Path) -> Path:
    """The tree of a commit."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def importable(tree: Path, site: Path) -> Path:
    """A folder to import a tree's `hetero` from, whatever is installed."""
    (site / "hetero").mkdir(parents=True)
    for entry in [*(tree / "hetero").iterdir(), *(tree / room for room in ROOMS)]:
        (site / "hetero" / entry.name).symlink_to(entry)
    return site


def figures(text: str) -> Iterator[tuple[tuple[str, str], float]]:
    """Numbers with a decimal point of all lines, but of the last one (the environment).

    A line of a table is named by its other cells, another line by its text.
    """
    names: list[str] = []
    for line in text.splitlines()[:-1]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            names, what = [], NUMBER.sub("#", line).strip()
            yield from (((what, str(i)), float(x)) for i, x in enumerate(NUMBER.findall(line), 1))
        elif not names:
            names = cells
        else:
            what = " ".join(cell for cell in cells if not NUMBER.search(cell))
            for name, cell in zip(names, cells, strict=True):
                if (found := NUMBER.search(cell)) is not None:
                    yield (what, name), float(found.group())


def before_after(
    commit: str,
    bench: Annotated[list[str], typer.Argument(help="the script in bench/ and its options")],
    rounds: Annotated[int, typer.Option(help="before and after take turns")] = 3,
    same_bench: Annotated[
        bool, typer.Option("--same-bench", help="run this tree's script with both packages")
    ] = False,
) -> None:
    """Run a bench of a commit's own tree and of this one in turns, each in its own processes.

    Figures that only one of them prints are left out, and a bench that the commit lacks is this
    tree's. Both use what is installed here but for `hetero` itself.
    """
    seen: dict[str, list[Figures]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as name:
        trees = {"before": unpacked(commit, Path(name) / "tree"), "after": ROOT}
        script = trees["before"] / "bench" / bench[0]
        if same_bench or not script.exists():
            script.write_bytes((ROOT / "bench" / bench[0]).read_bytes())
        sites = {who: importable(tree, Path(name) / who) for who, tree in trees.items()}
        for _ in range(rounds):
            for who, tree in trees.items():
                command = [sys.executable, str(tree / "bench" / bench[0]), *bench[1:]]
                environ = {**os.environ, "PYTHONPATH": str(sites[who])}
                out = subprocess.run(
                    command, env=environ, check=True, stdout=subprocess.PIPE, text=True
                ).stdout
                seen[who].append(dict(figures(out)))
    rows = []
    for key in seen["after"][0]:
        pairs = [(a.get(key), b.get(key)) for a, b in zip(*seen.values(), strict=True)]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not known:
            continue
        before, after = (statistics.median(side) for side in zip(*known, strict=True))
        ratios = [b / a for a, b in known if a]
        shown = [f"{f(ratios):.3f}" for f in (statistics.median, min, max)] if ratios else [""] * 3
        rows.append([*key, f"{before:.3f}", f"{after:.3f}", *shown])
    if not rows:
        raise SystemExit(f"{bench[0]} of {commit} prints none of these figures: use --same-bench")
    print(f"{commit} and this tree, {rounds} rounds in turns; {' '.join(bench)}\n")
    table("line|figure|before (median)|after|after / before (median)|min|max", rows)
    finish()


app = one_command(before_after, allow_interspersed_args=False)  # options behind are the bench's

if __name__ == "__main__":
    app()

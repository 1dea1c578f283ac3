"""`hetero warm`: prepare what the first start of a model would."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from hetero.cli.options import (
    EngineFlags,
    JsonOption,
    ModelArgument,
    WholeOption,
    expanded,
    open_llm,
)
from hetero.errors import UserError
from hetero.terminal import json_line, printable

PREPARED: Final = ("opencl", "first-starts", "decisions", "packed", "qnn", "qnn-schedules")


class Made(NamedTuple):
    """Files of a kind that were made, their bytes, and the folder that they are in."""

    kind: str
    what: str
    files: int
    nbytes: int
    path: str


@expanded
def warm_command(
    model: ModelArgument,
    *,
    engine: EngineFlags,
    whole_caches: WholeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prepare what a first start of MODEL would: kernels, times, decision, packed weights.

    With the options that MODEL is then run with; `serve` runs it with --whole-caches.
    """
    from hetero.placement.decisions import can_note, folder

    if not can_note():
        raise UserError(
            f"{folder()} cannot be written, so that nothing could be kept for later starts: name "
            "another folder in XDG_CACHE_HOME"
        )
    before, start_s = _files(), time.perf_counter()
    opening = {**engine.arguments(), "whole_caches": whole_caches, "wait_for_plan": True}
    with open_llm(model, **opening) as llm:
        opened: dict[str, Any] = {
            "model": llm.model.name,
            "choice": llm.choice.reason,
            "gpu": llm.devices.name("gpu"),
            "npu": llm.devices.name("npu"),
        }
    seconds = time.perf_counter() - start_s  # closing has waited for the packed copy
    made = _made(before)
    if as_json:
        rows = [entry._asdict() for entry in made]
        print(
            json_line(json.dumps({**opened, "seconds": seconds, "ready": not made, "made": rows}))
        )
    else:
        _show(opened, seconds, made)


def _files() -> dict[Path, int]:
    """Return the bytes of each cached file, but for what only a running process has."""
    from hetero.cache import kinds_of

    sizes = {}
    for kind in kinds_of(PREPARED):
        for path in kind.folder().rglob("*"):
            passing = path.suffix in (".lock", ".born", ".partial") or "runs" in path.parts
            with suppress(OSError):
                if not passing and path.is_file():
                    sizes[path] = path.stat().st_size
    return sizes


def _made(before: dict[Path, int]) -> list[Made]:
    """Return what was added or grew since then, by kind."""
    from hetero.cache import kinds_of

    grown = {x: size - before.get(x, 0) for x, size in _files().items()}
    made = []
    for kind in kinds_of(PREPARED):
        folder = kind.folder()
        sizes = [size for path, size in grown.items() if size > 0 and folder in path.parents]
        if sizes:
            made.append(Made(kind.name, kind.what, len(sizes), sum(sizes), str(folder)))
    return made


def _show(opened: dict[str, Any], seconds: float, made: list[Made]) -> None:
    from hetero.solver.report.units import size

    done = "prepared" if made else "all is ready, opened"
    print(printable(f"{opened['model']}: {done} in {seconds:.1f} s; {opened['choice']}"))
    for kind in made:
        files = f"{kind.files} file{'' if kind.files == 1 else 's'}, {size(kind.nbytes)}"
        print(printable(f"{kind.kind} ({kind.what}): {files} in {kind.path}"))

"""The kinds of things that hetero keeps, where they lie, and which of them are of no more use.

What a scan needs of other modules is imported when there is something to look at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hetero.backends.host.extras import is_here
from hetero.backends.host.folders import cache_folder, data_folder
from hetero.backends.host.versions import installed_version
from hetero.cache.entries import Entry, Kind, entry_of, leftovers, listed

OTHER_CODE: Final = "of another state or version of hetero"
OTHER_HERE: Final = "of another driver, processor, setting or version of hetero"
UNKNOWN: Final = "unknown to this version of hetero"
ENDED: Final = "its process has ended"
KEPT_BY_NOBODY: Final = "a lock that nobody has"
LARGEST_BYTES: Final = 1 << 24  # of a document that is looked into
POCL_CACHE: Final = "POCL_CACHE_DIR"
STAMP: Final = "said-no-profile"
HOST: Final = "host.json"


def _opencl_folder() -> Path:
    named = os.environ.get(POCL_CACHE)
    return Path(named) / "hetero" if named else cache_folder() / "opencl"


def _decisions(folder: Path) -> Iterator[Entry]:
    whole, others = leftovers(listed(folder))
    yield from others
    if not whole:
        return
    from hetero.placement.decisions import is_reachable

    for path in whole:
        document = _document(path)
        of = f"{document.get('gpu') or document.get('mode', '')}"
        yield entry_of(path, of=of, stale="" if is_reachable(path) else OTHER_CODE)


def _first_starts(folder: Path) -> Iterator[Entry]:
    whole, others = leftovers(listed(folder))
    yield from (entry for entry in others if not entry.name.startswith(f".{HOST}"))
    mine = [path for path in whole if path.name.startswith("first-start-")]
    if not mine:
        return
    from hetero.placement.first_start import Machine

    here = Machine.here()
    # Held to other cores, or asked for another driver, it is the same machine.
    told = here.model_dump(include={"hetero_version", "processor", "flags", "packages"})
    for path in mine:
        machine = _document(path).get("machine")
        known = machine if isinstance(machine, dict) else {}
        same = {name: known.get(name) for name in told} == told
        cores = known.get("cores")
        of = f"{len(cores)} cores" if isinstance(cores, list) else ""
        yield entry_of(path, of=of, stale="" if same else OTHER_HERE)


def _opencl(folder: Path) -> Iterator[Entry]:
    yield from _runs(folder / "runs")
    verdicts, others = leftovers(listed(folder / "verdicts"))
    yield from others
    programs = listed(folder / "kernels")
    if not verdicts and not programs:
        return
    known: frozenset[Path] = frozenset()
    prefixes: frozenset[str] = frozenset()
    if is_here("pyopencl"):
        from hetero.backends.opencl.self_test.reachable import reachable

        known, prefixes = reachable(folder)
    for path in verdicts:
        lock = path.with_suffix(".lock")
        if path.suffix == ".json":
            stale = "" if path in known else OTHER_HERE
            yield entry_of(path, lock, of="a driver's self-test", stale=stale, lock=lock)
        elif not path.with_suffix(".json").exists():
            yield entry_of(path, stale=KEPT_BY_NOBODY, lock=path)
    for level in programs:
        found, others = leftovers(listed(level))
        yield from others
        prefix, _, name = level.name.partition("-")
        stale = "" if prefix in prefixes else OTHER_HERE
        yield from (entry_of(path, of=name, stale=stale) for path in found)


def _runs(folder: Path) -> Iterator[Entry]:
    """Folders of processes; each has a lock beside it."""
    for path in listed(folder):
        lock = path.with_name(f"{path.name}.lock")
        if path.suffix in (".lock", ".born"):
            if not path.with_suffix("").exists():
                yield entry_of(path, stale=KEPT_BY_NOBODY, lock=path)
        elif lock.exists():
            found = entry_of(path, lock, of="a running process", lock=lock)
            yield found if found.held else replace(found, of="", stale=ENDED)
        else:
            yield entry_of(path, stale=ENDED)


def _packed(folder: Path) -> Iterator[Entry]:
    whole, others = leftovers(listed(folder))
    yield from others
    if not whole:
        return
    from hetero.backends.host.files import is_held
    from hetero.models.gguf.store import origin_of

    for path in whole:
        note = path.with_suffix(".seen")
        if path.suffix != ".safetensors":
            if not path.with_suffix(".safetensors").exists():
                yield entry_of(path, stale=UNKNOWN)
            continue
        file, readable = origin_of(path)
        stale = "" if readable else OTHER_CODE
        if file is not None and not file.exists():
            stale = "its GGUF file is gone"
        of = "" if file is None else str(file)
        yield entry_of(path, note, of=of, stale=stale, held=is_held(path))


def _graphs(folder: Path) -> Iterator[Entry]:
    """Compiled graphs; what the chip's libraries are now is known where they are installed."""
    whole, others = leftovers(listed(folder))
    yield from others
    if not whole:
        return
    from hetero.backends.qnn.store import ENTRY, FORMAT, GRAPHS_VERSION

    provider = installed_version("onnxruntime-qnn")
    for path in whole:
        document = _document(path / ENTRY)
        target = document.get("target")
        target = target if isinstance(target, dict) else {}
        made = (document.get("format"), target.get("graphs_version"))
        stale = "" if made == (FORMAT, str(GRAPHS_VERSION)) else OTHER_CODE
        if not stale and provider is not None and target.get("provider") != provider:
            stale = f"of onnxruntime-qnn {target.get('provider')}, here is {provider}"
        found = entry_of(path, of=str(target.get("chip", "")), stale=stale)
        yield replace(found, used_s=max([_read_at(x) for x in listed(path)], default=0.0))


def _read_at(path: Path) -> float:
    """Of a file that whoever uses it reads, and a look at the folder does not."""
    try:
        state = path.stat()
    except OSError:
        return 0.0
    return max(state.st_mtime, state.st_atime if path.suffix == ".bin" else 0.0)


def _files(folder: Path) -> Iterator[Entry]:
    whole, others = leftovers(listed(folder))
    yield from others
    yield from map(entry_of, whole)


def _locks(folder: Path) -> Iterator[Entry]:
    for path in listed(folder):
        yield entry_of(path, stale=KEPT_BY_NOBODY, lock=path)


def _profiles(folder: Path) -> Iterator[Entry]:
    """The profiles of this machine, with the journals of runs that were interrupted."""
    paths = [
        path
        for place in dict.fromkeys((folder, cache_folder() / "profiles"))
        for path in listed(place)
        if not path.name.startswith("first-start-")
    ]
    if not paths:
        return
    from hetero.measuring.profiling import lock_path
    from hetero.profiler.records import SCHEMA_VERSION

    for path in paths:
        if path.name.endswith(".journal.jsonl"):
            profile = path.with_name(path.name.removesuffix(".journal.jsonl"))
            yield entry_of(path, of="an interrupted run", lock=lock_path(profile))
            continue
        known = _document(path)
        version = known.get("schema_version")
        stale = "" if version in (None, SCHEMA_VERSION) else OTHER_CODE
        yield entry_of(path, of=str(known.get("name", "")), stale=stale, lock=lock_path(path))


def _contexts(folder: Path) -> Iterator[Entry]:
    """A folder for each model that was served."""
    for path in listed(folder):
        found = entry_of(path, of=path.name, lock=path / "lock")
        inside = [x for part in listed(path) for x in (part, *listed(part))]
        yield replace(found, used_s=max((x.lstat().st_mtime for x in inside), default=0.0))


def _history(path: Path) -> Iterator[Entry]:
    if path.is_file():
        yield entry_of(path)


def _others(folder: Path) -> Iterator[Entry]:
    """What no kind of this version has."""
    known = {kind.folder().name for kind in KINDS.values() if kind.folder().parent == folder}
    for path in listed(folder):
        if path.name not in known | {"opencl", "profiles"}:
            yield entry_of(path, stale=UNKNOWN)


def _document(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("decisions", "what auto chose", "a moment",
             lambda: cache_folder() / "decisions", _decisions),
        Kind("first-starts", "times of a first start", "2 s",
             lambda: cache_folder() / "profiles", _first_starts),
        Kind("opencl", "OpenCL kernels", "seconds to a minute", _opencl_folder, _opencl),
        Kind("packed", "packed GGUF files", "seconds for each file",
             lambda: cache_folder() / "packed", _packed),
        Kind("qnn", "Snapdragons' NPU graphs", "minutes to hours",
             lambda: cache_folder() / "qnn", _graphs, guarded=True),
        Kind("qnn-schedules", "graphs' schedules", "minutes to hours",
             lambda: cache_folder() / "qnn-schedules", _files, guarded=True),
        Kind("locks", "locks of profilers", "nothing", lambda: cache_folder() / "locks", _locks),
        Kind("notices", "when it was said", "nothing",
             lambda: cache_folder() / STAMP, _history),
        Kind("profiles", "what was measured here", "ten minutes each",
             lambda: data_folder() / "profiles", _profiles, guarded=True, named=True),
        Kind("contexts", "served conversations", "cannot be made again",
             lambda: data_folder() / "contexts", _contexts, guarded=True, named=True),
        Kind("history", "lines typed in a chat", "cannot be made again",
             lambda: data_folder() / "chat-history", _history, guarded=True, named=True),
        Kind("other", "not of this version", "unknown", cache_folder, _others),
    )
}  # fmt: skip

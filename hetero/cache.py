"""The files that hetero caches on a machine: kernels, packed files, graphs, profiles, contexts.

    from hetero import cache

    for kind in cache.usage().kinds:
        print(kind.kind, kind.nbytes)
    cache.clear(["packed"], older_than_s=30 * 86400)

The command is `hetero cache`. Everything but profiles, contexts and history is made again when it
is needed. Modules that a scan needs are imported only if there are files to look at.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from hetero.backends.host.extras import is_here
from hetero.backends.host.files import is_in_use, remove_unused
from hetero.backends.host.folders import cache_folder, data_folder
from hetero.backends.host.versions import installed_version
from hetero.errors import UserError

KILLED: Final = "left by a process that was killed"
OTHER_CODE: Final = "of another state or version of hetero"
OTHER_HERE: Final = "of another driver, processor, setting or version of hetero"
UNKNOWN: Final = "unknown to this version of hetero"
ENDED: Final = "its process has ended"
UNUSED_LOCK: Final = "a lock that no process holds"
WRITING_S: Final = 3600.0  # an unlocked file that is being written is stale after this long
LARGEST_BYTES: Final = 1 << 24  # of a document that is read
FIRST_START: Final = "first-start-"
_PARTIAL: Final = re.compile(r"\..+\.[0-9a-f]{8}\.(partial|previous)")
_WRITING: Final = ".writing-"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EntryUsage(_Record):
    """One entry, which can be removed alone.

    `of` is its source, empty if unknown; `used_at_s` the time of its last use, in seconds since
    1970; `stale` the reason why nothing here would use it again, empty if something may; `held`
    whether a running process uses it.
    """

    name: str
    path: str
    of: str
    nbytes: int
    used_at_s: float
    stale: str
    held: bool


class KindUsage(_Record):
    """All entries of a kind.

    `stale` of the `entries` have `stale_nbytes` of the `nbytes`, `held` are in use. `again` is the
    cost of making them again; `listed` are the entries of a named kind.
    """

    kind: str
    what: str
    again: str
    path: str
    entries: int
    nbytes: int
    stale: int
    stale_nbytes: int
    held: int
    used_at_s: float | None
    listed: tuple[EntryUsage, ...] | None = None


class ClearedKind(_Record):
    """Removed entries of a kind (or, with `dry_run`, those that would be); `held` were in use."""

    kind: str
    entries: int
    nbytes: int
    held: int


class CacheUsage(_Record):
    """The document of `hetero cache --json`: after `hetero cache clear` the rest, and `cleared`."""

    schema_version: Literal[1] = 1
    kinds: tuple[KindUsage, ...]
    nbytes: int
    cleared: tuple[ClearedKind, ...] | None = None
    freed_nbytes: int = 0
    dry_run: bool = False


class CacheEntry(EntryUsage):
    """An entry with the `paths` that are removed together, under `lock` if there is one."""

    paths: tuple[Path, ...]
    lock: Path | None = None


Scan: TypeAlias = Callable[[list[Path]], Iterable[CacheEntry]]


class CacheKind(NamedTuple):
    """Entries of one kind, in a folder (or the one file that it is).

    what     description, for people
    again    what making the entries again takes
    scan     entries of the paths in the folder, without unfinished files of writers
    guarded  clearing asks first: making them again takes long, or is impossible
    named    cleared only by its own name
    """

    name: str
    what: str
    again: str
    folder: Callable[[], Path]
    scan: Scan
    guarded: bool = False
    named: bool = False

    def entries(self) -> list[CacheEntry]:
        """Return all entries, the last used first."""
        folder = self.folder()
        paths, entries = _split_partial([folder] if folder.is_file() else _listed(folder))
        entries += self.scan(paths)
        return sorted(entries, key=lambda entry: -entry.used_at_s)


def usage(listed: Iterable[str] = ()) -> CacheUsage:
    """Return sizes of all kinds, with the entries of those that are `listed`."""
    named = [kind.name for kind in kinds_of(listed)]
    kinds = tuple(_usage_of(kind, kind.name in named) for kind in KINDS.values())
    return CacheUsage(kinds=kinds, nbytes=sum(kind.nbytes for kind in kinds))


def kinds_of(names: Iterable[str]) -> list[CacheKind]:
    """Return kinds by their names. Raises `UserError`."""
    kinds = []
    for name in names:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{name!r} is not a kind: {hint}there are {', '.join(KINDS)}")
        kinds.append(KINDS[name])
    return kinds


def select(
    kinds: Iterable[str] = (),
    *,
    everything: bool = False,
    stale: bool = False,
    older_than_s: float | None = None,
) -> dict[str, list[CacheEntry]]:
    """Return the entries that `clear` would remove, by kind.

    They are those of the named kinds, or of `everything` but kinds that are only cleared by name.
    Raises `UserError` if neither is given.
    """
    selected = kinds_of(kinds)
    if not selected and not everything and not stale:
        raise UserError(
            f"say what to clear: kinds ({', '.join(KINDS)}), --stale for unused leftovers, or --all"
        )
    if everything or not selected:
        selected += [x for x in KINDS.values() if not x.named and x not in selected]
    before_s = None if older_than_s is None else time.time() - older_than_s
    return {
        kind.name: [
            entry
            for entry in kind.entries()
            if (entry.stale or not stale) and (before_s is None or entry.used_at_s < before_s)
        ]
        for kind in selected
    }


def clear(
    kinds: Iterable[str] = (),
    *,
    everything: bool = False,
    stale: bool = False,
    older_than_s: float | None = None,
) -> CacheUsage:
    """Remove the entries that `select` returns, except those that a running process uses.

    Raises `UserError`, `OSError`.
    """
    return remove(select(kinds, everything=everything, stale=stale, older_than_s=older_than_s))


def remove(entries: Mapping[str, list[CacheEntry]], *, dry_run: bool = False) -> CacheUsage:
    """Remove these entries, and return the rest and what was removed. Raises `OSError`."""
    cleared = []
    for kind, listed in entries.items():
        gone = [x for x in listed if (not x.held if dry_run else _remove(x))]
        size, held = sum(x.nbytes for x in gone), len(listed) - len(gone)
        if listed:
            cleared.append(ClearedKind(kind=kind, entries=len(gone), nbytes=size, held=held))
    freed = sum(kind.nbytes for kind in cleared)
    update = {"cleared": tuple(cleared), "freed_nbytes": freed, "dry_run": dry_run}
    return usage().model_copy(update=update)


def _usage_of(kind: CacheKind, listed: bool) -> KindUsage:
    entries = kind.entries()
    old = [entry for entry in entries if entry.stale]
    return KindUsage(
        kind=kind.name,
        what=kind.what,
        again=kind.again,
        path=str(kind.folder()),
        entries=len(entries),
        nbytes=sum(entry.nbytes for entry in entries),
        stale=len(old),
        stale_nbytes=sum(entry.nbytes for entry in old),
        held=sum(entry.held for entry in entries),
        used_at_s=max((entry.used_at_s for entry in entries), default=None),
        listed=tuple(entries) if listed else None,
    )


# --- entries --------------------------------------------------------------------------------


def _entry(
    path: Path,
    *others: Path,
    of: str = "",
    stale: str = "",
    held: bool = False,
    lock: Path | None = None,
    used_at_s: float | None = None,
) -> CacheEntry:
    """Return the entry of a path and the `others` that belong to it; one in use is not stale."""
    held = held or (lock is not None and _is_locked(lock))
    paths = (path, *(other for other in others if other.exists()))
    return CacheEntry(
        name=path.name,
        path=str(path),
        of=of,
        nbytes=sum(map(_size_of, paths)),
        used_at_s=_modified_s(path) if used_at_s is None else used_at_s,
        stale="" if held else stale,
        held=held,
        paths=paths,
        lock=lock,
    )


def _listed(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted; empty if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _split_partial(paths: list[Path]) -> tuple[list[Path], list[CacheEntry]]:
    """Return complete files, and entries of files that writers have not finished."""
    complete, entries = [], []
    for path in paths:
        if _PARTIAL.fullmatch(path.name):
            entries.append(_entry(path, held=is_in_use(path), stale=KILLED))
        elif path.name.startswith(_WRITING):
            recent = time.time() - _modified_s(path) < WRITING_S
            entries.append(_entry(path, held=recent, stale=KILLED))
        else:
            complete.append(path)
    return complete, entries


def _size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; links count as themselves."""
    try:
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode):
            return state.st_size
        with os.scandir(path) as inside:
            return sum(_size_of(Path(x.path)) for x in inside)
    except OSError:  # removed meanwhile
        return 0


def _modified_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _is_locked(lock: Path) -> bool:
    """Return whether a process holds a `FileLock`."""
    if not lock.is_file():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # not ours to lock
        return False


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry unless a process uses it; return whether it is gone. Raises `OSError`."""
    if entry.lock is None:
        return all(map(_remove_unused, entry.paths))  # the first one is what is held
    new, lock = not entry.lock.exists(), FileLock(entry.lock, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return False
    inside = [path for path in entry.paths if path != entry.lock]
    folders = [path for path in inside if _is_folder(path)]
    try:
        for path in [x for x in inside if x not in folders] + [
            x for folder in folders for x in _listed(folder) if x != entry.lock
        ]:
            shutil.rmtree(path) if _is_folder(path) else path.unlink(missing_ok=True)
    finally:
        lock.release()
    if new or entry.lock in entry.paths:
        entry.lock.unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder)
    return True


def _remove_unused(path: Path) -> bool:
    try:
        return remove_unused(path)
    except FileNotFoundError:  # another process removed it
        return True


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _document(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= LARGEST_BYTES:
            document = json.loads(path.read_bytes())
            return document if isinstance(document, dict) else {}
    return {}


# --- kinds ----------------------------------------------------------------------------------


def _each(entry_of: Callable[[Path], CacheEntry | None]) -> Scan:
    """Return the scan of a kind whose paths are an entry each; None of a path that is none."""
    return lambda paths: [entry for path in paths if (entry := entry_of(path)) is not None]


def _decision(path: Path) -> CacheEntry:
    from hetero.placement.decisions import is_reachable

    document = _document(path)
    of = f"{document.get('gpu') or document.get('mode', '')}"
    return _entry(path, of=of, stale="" if is_reachable(path) else OTHER_CODE)


def _first_start(path: Path) -> CacheEntry | None:
    if not path.name.startswith(FIRST_START):
        return None
    from hetero.placement.first_start import Machine

    # With other cores, or another driver asked for, it is the same machine.
    here = Machine.here().model_dump(include={"hetero_version", "processor", "flags", "packages"})
    machine = _document(path).get("machine")
    known = machine if isinstance(machine, dict) else {}
    same = {name: known.get(name) for name in here} == here
    cores = known.get("cores")
    of = f"{len(cores)} cores" if isinstance(cores, list) else ""
    return _entry(path, of=of, stale="" if same else OTHER_HERE)


def _opencl_folder() -> Path:
    named = os.environ.get("POCL_CACHE_DIR")
    return Path(named) / "hetero" if named else cache_folder() / "opencl"


def _opencl(_paths: list[Path]) -> Iterator[CacheEntry]:
    folder = _opencl_folder()
    yield from filter(None, map(_opencl_run, _listed(folder / "runs")))
    results, partial = _split_partial(_listed(folder / "verdicts"))
    yield from partial
    levels = _listed(folder / "kernels")
    known, prefixes = frozenset[Path](), frozenset[str]()
    if (results or levels) and is_here("pyopencl"):
        from hetero.backends.opencl.self_test.reachable import reachable

        known, prefixes = reachable(folder)
    for path in results:
        lock = path.with_suffix(".lock")
        if path.suffix == ".json":
            stale = "" if path in known else OTHER_HERE
            yield _entry(path, lock, of="a driver's self-test", stale=stale, lock=lock)
        elif not path.with_suffix(".json").exists():
            yield _lock(path)
    for level in levels:
        kernels, partial = _split_partial(_listed(level))
        yield from partial
        prefix, _, name = level.name.partition("-")
        stale = "" if prefix in prefixes else OTHER_HERE
        yield from (_entry(path, of=name, stale=stale) for path in kernels)


def _opencl_run(path: Path) -> CacheEntry | None:
    """Return the folder of a process, with its lock."""
    if path.suffix in (".lock", ".born"):
        return None if path.with_suffix("").exists() else _lock(path)
    lock = path.with_name(f"{path.name}.lock")
    of = "a running process" if _is_locked(lock) else ""
    return _entry(path, lock, of=of, stale=ENDED, lock=lock if lock.exists() else None)


def _packed(path: Path) -> CacheEntry | None:
    from hetero.models.gguf.packed_store import origin_of

    if path.suffix != ".safetensors":
        orphan = not path.with_suffix(".safetensors").exists()
        return _entry(path, stale=UNKNOWN) if orphan else None
    file, readable = origin_of(path)
    stale = "" if readable else OTHER_CODE
    if file is not None and not file.exists():
        stale = "its GGUF file is gone"
    of, note = "" if file is None else str(file), path.with_suffix(".seen")
    return _entry(path, note, of=of, stale=stale, held=is_in_use(path))


def _graph(path: Path) -> CacheEntry:
    """Return compiled graphs.

    The versions of the chip's libraries are known where they are installed.
    """
    from hetero.backends.qnn.graph_store import ENTRY, FORMAT, GRAPHS_VERSION

    provider, document = installed_version("onnxruntime-qnn"), _document(path / ENTRY)
    target = document.get("target")
    target = target if isinstance(target, dict) else {}
    made = (document.get("format"), target.get("graphs_version"))
    stale = "" if made == (FORMAT, str(GRAPHS_VERSION)) else OTHER_CODE
    if not stale and provider is not None and target.get("provider") != provider:
        stale = f"of onnxruntime-qnn {target.get('provider')}, here is {provider}"
    used_s = max(map(_read_at, _listed(path)), default=0.0)
    return _entry(path, of=str(target.get("chip", "")), stale=stale, used_at_s=used_s)


def _read_at(path: Path) -> float:
    """Return when a graph was last read, which listing its folder does not change."""
    try:
        state = path.stat()
    except OSError:
        return 0.0
    return max(state.st_mtime, state.st_atime if path.suffix == ".bin" else 0.0)


def _lock(path: Path) -> CacheEntry:
    return _entry(path, stale=UNUSED_LOCK, lock=path)


def _profiles(paths: list[Path]) -> Iterator[CacheEntry]:
    """Yield this machine's profiles, with the journals of interrupted runs."""
    earlier = _split_partial(_listed(cache_folder() / "profiles"))[0]
    for path in dict.fromkeys((*paths, *earlier)):
        if not path.name.startswith(FIRST_START):
            yield _profile(path)


def _profile(path: Path) -> CacheEntry:
    from hetero.measuring.profiling import lock_path
    from hetero.profiler.records import SCHEMA_VERSION

    if path.name.endswith(".journal.jsonl"):
        profile = path.with_name(path.name.removesuffix(".journal.jsonl"))
        return _entry(path, of="an interrupted run", lock=lock_path(profile))
    document = _document(path)
    version = document.get("schema_version")
    stale = "" if version in (None, SCHEMA_VERSION) else OTHER_CODE
    return _entry(path, of=str(document.get("name", "")), stale=stale, lock=lock_path(path))


def _served(path: Path) -> CacheEntry:
    """Return the folder of a model that was served."""
    inside = [x for part in _listed(path) for x in (part, *_listed(part))]
    used_s = max((x.lstat().st_mtime for x in inside), default=0.0)
    return _entry(path, of=path.name, lock=path / "lock", used_at_s=used_s)


def _other(path: Path) -> CacheEntry | None:
    """Return a file of no kind of this version."""
    folders = [kind.folder() for kind in KINDS.values()]
    known = {"opencl", "profiles", *(x.name for x in folders if x.parent == cache_folder())}
    return None if path.name in known else _entry(path, stale=UNKNOWN)


KINDS: Final = {
    kind.name: kind
    for kind in (
        CacheKind("decisions", "what auto chose", "a moment",
             lambda: cache_folder() / "decisions", _each(_decision)),
        CacheKind("first-starts", "times of a first start", "2 s",
             lambda: cache_folder() / "profiles", _each(_first_start)),
        CacheKind("opencl", "OpenCL kernels", "seconds to a minute", _opencl_folder, _opencl),
        CacheKind("packed", "packed GGUF files", "seconds for each file",
             lambda: cache_folder() / "packed", _each(_packed)),
        CacheKind("qnn", "Snapdragons' NPU graphs", "minutes to hours",
             lambda: cache_folder() / "qnn", _each(_graph), guarded=True),
        CacheKind("qnn-schedules", "graphs' schedules", "minutes to hours",
             lambda: cache_folder() / "qnn-schedules", _each(_entry), guarded=True),
        CacheKind("locks", "locks of profilers", "nothing",
             lambda: cache_folder() / "locks", _each(_lock)),
        CacheKind("notices", "times of notices", "nothing",
             lambda: cache_folder() / "said-no-profile", _each(_entry)),
        CacheKind("profiles", "measurements of this machine", "ten minutes each",
             lambda: data_folder() / "profiles", _profiles, guarded=True, named=True),
        CacheKind("contexts", "served conversations", "cannot be made again",
             lambda: data_folder() / "contexts", _each(_served), guarded=True, named=True),
        CacheKind("history", "lines typed in a chat", "cannot be made again",
             lambda: data_folder() / "chat-history", _each(_entry), guarded=True, named=True),
        CacheKind("other", "not of this version", "unknown", cache_folder, _each(_other)),
    )
}  # fmt: skip

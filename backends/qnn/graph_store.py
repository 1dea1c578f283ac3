"""Compiled graphs on disk: keyed by what they depend on, verified before the provider sees them.

The provider loads a graph that was compiled for another chip, by another SDK, or whose weights are
damaged, and computes wrong numbers with it (measured, `docs: qnn.md`). Everything is therefore
checked here against metadata of our own. An entry is a directory that appears all at once:

    KEY/graph.onnx   the node that refers to the binary      KEY/entry.json   `GraphEntry`
    KEY/graph_qnn.bin   QNN's context binary

A shared entry holds `graph32.onnx`, `graph128.onnx`, … around one binary.

Compiling happens in a child process, whose memory returns to the system (`compiler`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from hetero.backends.errors import DeviceError
from hetero.backends.host.files import (
    LONGEST_DOCUMENT_BYTES,
    read_file,
    replace_directory,
    scratch_directory,
    try_room,
)
from hetero.backends.qnn.compiler import SHARE_CONFIG, GraphCompiler
from hetero.backends.qnn.library import BACKEND
from hetero.backends.qnn.session import Target, new_session
from hetero.backends.weights import PackedWeight

log = logging.getLogger(__name__)
FORMAT = 1
# Part of every key: raised whenever `graphs` changes what it builds.
GRAPHS_VERSION = 3
MODEL, BINARY, ENTRY = "graph.onnx", "graph_qnn.bin", "entry.json"
COMPATIBILITY = "ep_compatibility_info.QNNExecutionProvider"


@dataclass(frozen=True)
class GraphIdentity:
    """Properties that a compiled graph depends on, besides the target.

    `operation` is the record of the operation, `tokens` and `context` the static sizes, `weights`
    the digest of the weights ("" without).
    """

    operation: str
    tokens: int
    context: int = 0
    weights: str = ""


@dataclass(frozen=True)
class GraphEntry:
    """Our metadata of a compiled graph. `files` maps names to SHA-256; `graphs` is their number."""

    identity: dict[str, Any]
    target: dict[str, str]
    files: dict[str, str]
    nbytes: int
    graphs: int = 1
    format: int = FORMAT


@dataclass
class StoreCounts:
    """Counts of a store since it was opened; `rebuilt` says why entries were not used."""

    compiled: int = 0
    loaded: int = 0
    rebuilt: list[str] = field(default_factory=list)


class DamagedEntryError(Exception):
    """An entry that must not be opened, with the reason."""


class GraphStore:
    """Sessions by identity. Without a directory graphs are compiled in this process, every time."""

    def __init__(self, target: Target, directory: Path | None) -> None:
        self.target = target
        self.directory = directory and directory.absolute()  # the compiler works in others
        self.counts = StoreCounts()
        self._about = describe_target(target)
        self._compiler = GraphCompiler(target)
        self._sessions: dict[GraphIdentity, ort.InferenceSession] = {}
        self._is_full = False  # the directory takes no further graphs

    def session(self, identity: GraphIdentity, build: Callable[[], bytes]) -> ort.InferenceSession:
        """Return a new session of a graph, from disk or compiled now.

        `build` gives the ONNX model. Raises `DeviceError`.
        """
        what = f"{identity.operation} for {identity.tokens} tokens"
        shared = self._find_shared(identity)
        path = shared or self._compiled(identity, build)
        if path is None:
            self.counts.compiled += 1
            return new_session(self.target, build(), f"compiling {what}")
        self.counts.loaded += 1
        return new_session(
            self.target, path, f"loading {what}", config=SHARE_CONFIG if shared else None
        )

    def shared(self, identity: GraphIdentity, build: Callable[[], bytes]) -> ort.InferenceSession:
        """Return the one session of a graph that has no weights, kept until the store is closed."""
        if identity not in self._sessions:
            self._sessions[identity] = self.session(identity, build)
        return self._sessions[identity]

    def compile(self, identity: GraphIdentity, build: Callable[[], bytes]) -> Path:
        """Return the directory of the compiled graph, made now unless a sound one is there."""
        assert self.directory is not None, "compiling ahead needs a directory"
        path = self.directory / entry_key(identity, self._about)
        if path.exists():
            try:
                self._verify(path, identity)
                return path
            except DamagedEntryError as error:
                self.counts.rebuilt.append(f"{path.name}: {error}")
        self._write(path, identity, {MODEL: build()})
        return path

    def compile_shared(self, graphs: Sequence[tuple[GraphIdentity, Callable[[], bytes]]]) -> Path:
        """Return the directory of graphs around one copy of weights.

        They differ in their token counts only.

        For a device: the emulator crashes when it opens such a file, so it is never given one.
        """
        assert self.directory is not None, "compiling ahead needs a directory"
        group = group_of(graphs[0][0])
        path = self.directory / entry_key(group, self._about)
        names = [shared_name(identity.tokens) for identity, _ in graphs]
        if path.exists():
            try:
                if set(names) <= set(self._verify(path, group, opening=False).files):
                    return path
                reason = "it lacks token counts"
            except DamagedEntryError as error:
                reason = str(error)
            self.counts.rebuilt.append(f"{path.name}: {reason}")
        models = dict(zip(names, (build() for _, build in graphs), strict=True))
        self._write(path, group, models)
        return path

    def _find_shared(self, identity: GraphIdentity) -> Path | None:
        """Return the graph's file in a sound shared entry, where the device can open one."""
        if self.target.library.emulated or not identity.weights or self.directory is None:
            return None
        group = group_of(identity)
        path = self.directory / entry_key(group, self._about)
        if not path.exists():
            return None
        try:
            files = self._verify(path, group).files
        except DamagedEntryError as error:
            self.counts.rebuilt.append(f"{path.name}: {error}")
            return None
        name = shared_name(identity.tokens)
        return path / name if name in files else None

    def _compiled(self, identity: GraphIdentity, build: Callable[[], bytes]) -> Path | None:
        """Return the compiled graph's file.

        None without a directory that takes one: a cache may be full, or not be writable, and is
        then done without.
        """
        if self.directory is None or self._is_full:
            return None
        try:
            return self.compile(identity, build) / MODEL
        except (OSError, DeviceError):
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                try_room(self.directory)
            except OSError as error:
                self._is_full = True
                log.warning("%s keeps no compiled graphs: %s", self.directory, error)
                return None
            raise

    def close(self) -> None:
        """Drop the shared sessions and end the child process; idempotent."""
        self._sessions.clear()
        self._compiler.close()

    def _verify(self, path: Path, identity: GraphIdentity, *, opening: bool = True) -> GraphEntry:
        """Raise `DamagedEntryError` unless the entry is whole, for this target, and opens here."""
        entry = read_entry(path)
        if entry.identity != asdict(identity):
            raise DamagedEntryError("it belongs to another graph")
        if entry.target != self._about:
            raise DamagedEntryError("it was compiled for another chip or by another SDK")
        if opening and entry.graphs != 1 and self.target.library.emulated:
            raise DamagedEntryError("it holds several graphs, which the emulator cannot open")
        check_files(path, entry)
        return entry

    def _write(self, path: Path, identity: GraphIdentity, models: Mapping[str, bytes]) -> None:
        """Compile next to the final place, then move the whole entry there at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(path) as scratch:
            what = f"compiling {identity.operation} for {identity.tokens or 'several'} tokens"
            outputs = {scratch / name: model for name, model in models.items()}
            if len(outputs) == 1:
                ((output, model),) = outputs.items()
                self._compiler.compile(model, output, what)
            else:
                self._compiler.compile_shared(outputs, what)
            self.counts.compiled += len(outputs)
            for output in outputs:
                _check_compiled_for(output, self.target, what)
            files = {file.name: file_digest(file) for file in sorted(scratch.iterdir())}
            nbytes = sum(file.stat().st_size for file in scratch.glob("*.bin"))
            entry = GraphEntry(asdict(identity), self._about, files, nbytes, len(models))
            (scratch / ENTRY).write_text(json.dumps(asdict(entry), indent=1), encoding="utf-8")
            _move_into_place(scratch, path)


def group_of(identity: GraphIdentity) -> GraphIdentity:
    """Return the identity of the graphs of all token counts of the same weights."""
    return replace(identity, tokens=0)


def shared_name(tokens: int) -> str:
    """Return ONNX file of one token count in a shared entry."""
    return f"graph{tokens}.onnx"


def describe_target(target: Target) -> dict[str, str]:
    """Return what of the target a compiled graph depends on."""
    chip = target.chip
    options = {k: v for k, v in target.options().items() if k != "backend_path"}
    return {
        "chip": chip.name,
        "soc_model": str(chip.soc_model),
        "htp_arch": str(chip.htp_arch),
        "sdk": target.library.sdk,
        "provider": target.library.wheel,
        "graphs_version": str(GRAPHS_VERSION),
        "options": ",".join(f"{key}={value}" for key, value in sorted(options.items())),
    }


def entry_key(identity: GraphIdentity, target: Mapping[str, str]) -> str:
    """Name of an entry's directory: the digest of everything that it depends on."""
    text = json.dumps([asdict(identity), dict(target)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def weight_digest(*weights: Any) -> str:
    """Return SHA-256 of packed weights and vectors, dtypes and shapes included."""
    digest = hashlib.sha256()
    for value in weights:
        parts = (value.data, value.scales) if isinstance(value, PackedWeight) else (value,)
        for array in parts:
            if array is not None:
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_entry(path: Path) -> GraphEntry:
    """Return the metadata of an entry. Raises `DamagedEntryError`."""
    try:
        fields = json.loads(read_file(path / ENTRY, LONGEST_DOCUMENT_BYTES))
        entry = GraphEntry(**fields)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedEntryError(f"its metadata cannot be read ({type(error).__name__})") from error
    if entry.format != FORMAT or not isinstance(entry.files, dict):
        raise DamagedEntryError(f"its format is {entry.format}, not {FORMAT}")
    names = [name for name in entry.files if re.fullmatch(r"graph\d{0,6}\.onnx", name)]
    binaries = [name for name in entry.files if re.fullmatch(r"graph\d{0,6}_qnn\.bin", name)]
    sound = len(names) == entry.graphs and len(binaries) == 1
    if not sound or len(entry.files) != entry.graphs + 1:
        raise DamagedEntryError("its metadata names other files")
    return entry


def check_files(path: Path, entry: GraphEntry) -> None:
    """Raise `DamagedEntryError` unless every file has the bytes that were written."""
    for name, digest in entry.files.items():
        try:
            actual = file_digest(path / name)
        except OSError as error:
            raise DamagedEntryError(f"{name} is missing") from error
        if actual != digest:
            raise DamagedEntryError(f"{name} is damaged")


def _check_compiled_for(model: Path, target: Target, what: str) -> None:
    """Raise `DeviceError` unless the provider's stamp names our chip: bad options are ignored.

    The stamp is `v2:backend:sdk:blob:htp_arch:soc_model:…`.
    """
    stamps = {p.key: p.value for p in onnx.load(model, load_external_data=False).metadata_props}
    stamp = stamps.get(COMPATIBILITY, "")
    parts = stamp.split(":")
    wanted = [str(target.chip.htp_arch), str(target.chip.soc_model)]
    if parts[4:6] != wanted:
        raise DeviceError(
            BACKEND,
            what,
            f"WRONG_TARGET: the compiler made {stamp!r}, expected architecture and chip {wanted}",
            "the installed onnxruntime-qnn does not know this chip; update it",
        )


def _move_into_place(scratch: Path, path: Path) -> None:
    """Replace whatever is at `path`; another process may do the same at the same time."""
    for _ in range(3):
        with contextlib.suppress(OSError):
            replace_directory(scratch, path)
            return
    raise DeviceError(
        BACKEND, f"storing {path.name}", "CACHE_BUSY", "another process keeps writing this entry"
    )

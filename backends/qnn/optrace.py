"""Reads the compiler's schedule of a graph: the text that `profiling_level=optrace` writes.

For every operation of the finished graph it lists the bytes read from and written to DRAM and VTCM,
and whether it uses the matrix unit (HMX), the vector units (HVX) or DMA. It is deterministic and
computed by the compiler of the real chip; there are no times in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hetero.backends.errors import DeviceError
from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_file
from hetero.backends.qnn.compiler import GraphCompiler
from hetero.backends.qnn.graph_store import GraphIdentity, describe_target, entry_key
from hetero.backends.qnn.library import BACKEND
from hetero.backends.qnn.session import Target

# Part of every key: raised whenever `read_schedule` answers differently.
SCHEDULE_VERSION = 1
UNITS = ("hmx", "hvx", "dma")
_TRAFFIC = re.compile(
    r'\{"opid" : 0x([0-9a-f]{1,16}) , "dram_read": (\d{1,18}) , "dram_write": (\d{1,18}) , '
    r'"vtcm_read": (\d{1,18}) , "vtcm_write": (\d{1,18}), "is_dma": [01]\}'
)
_FLAGS = re.compile(r"0x([0-9a-f]{1,16}): ?\{\s*'flags' ?: ?\(([^)]{0,200})\)")
_LONGEST_TEXT = 1 << 30


@dataclass(frozen=True)
class UnitWork:
    """Work of one unit's operations: how many there are, bytes moved to and from VTCM."""

    ops: int = 0
    vtcm_bytes: int = 0


@dataclass(frozen=True)
class Schedule:
    """The whole graph. An operation that uses several units counts for the first of `UNITS`.

    `prepare_s` is the time that the compiler took on this machine.
    """

    dram_read_bytes: int
    dram_write_bytes: int
    hmx: UnitWork
    hvx: UnitWork
    dma: UnitWork
    prepare_s: float = 0.0

    @property
    def dram_bytes(self) -> int:
        """Read and written."""
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def vtcm_bytes(self) -> int:
        """Return the bytes that the computing units move."""
        return self.hmx.vtcm_bytes + self.hvx.vtcm_bytes


def read_schedule(text: str) -> Schedule:
    """Parse the schematic of a compiled graph. Raises `ValueError` for anything else."""
    if len(text) > _LONGEST_TEXT:
        raise ValueError("a schematic of more than 1 GiB is none")
    flags = {int(op, 16): text_of for op, text_of in _FLAGS.findall(_section(text, "graph_flag0"))}
    if not flags:
        raise ValueError("the schematic lists no operations")
    traffic = [(int(row[0], 16), *map(int, row[1:])) for row in _traffic(text)]
    if not traffic:
        raise ValueError("the schematic lists no traffic")
    bytes_of = dict.fromkeys(UNITS, 0)
    for op, _, _, read, write in traffic:
        bytes_of[_unit(flags.get(op, ""))] += read + write
    counts = [_unit(text_of) for text_of in flags.values() if "uses_" in text_of]
    hmx, hvx, dma = (UnitWork(counts.count(unit), bytes_of[unit]) for unit in UNITS)
    return Schedule(sum(row[1] for row in traffic), sum(row[2] for row in traffic), hmx, hvx, dma)


def _traffic(text: str) -> Iterator[tuple[str, ...]]:
    start = text.find("bandwidth_information = [")
    if start < 0:
        raise ValueError("the schematic has no bandwidth_information")
    stop = text.find("\n]", start)
    if stop < 0:
        raise ValueError("the schematic ends inside bandwidth_information")
    part = text[start:stop]
    rows = [match.groups() for match in _TRAFFIC.finditer(part)]
    if len(rows) != part.count('{"opid"'):
        raise ValueError("the schematic's bandwidth_information has a form that is not known")
    yield from rows


def _section(text: str, name: str) -> str:
    start = text.find(f"# :::BEGIN:{name}:::")
    stop = text.find(f"# :::END:{name}:::")
    if not 0 <= start < stop:
        raise ValueError(f"the schematic has no {name}")
    return text[start:stop]


def _unit(flags: str) -> str:
    """Return an operation without a unit of its own only moves data."""
    return next((unit for unit in UNITS if f"uses_{unit}" in flags), "dma")


class ScheduleStore:
    """Schedules by graph, kept as JSON files; weights' values do not matter to them."""

    def __init__(self, target: Target, directory: Path) -> None:
        self.target = target
        self.directory = directory
        self._about = describe_target(target) | {"schedule_version": str(SCHEDULE_VERSION)}
        self._compiler = GraphCompiler(target)

    def find(self, identity: GraphIdentity, build: Callable[[], bytes]) -> Schedule:
        """Return the schedule of a graph, from the file or from the compiler.

        Raises `DeviceError`.
        """
        path = self.directory / f"{entry_key(identity, self._about)}.json"
        known = _load(path)
        if known is not None:
            return known
        schedule = self._compile(identity, build())
        self.directory.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(asdict(schedule)), durable=False)
        return schedule

    def close(self) -> None:
        """End the child process; idempotent."""
        self._compiler.close()

    def _compile(self, identity: GraphIdentity, model: bytes) -> Schedule:
        what = f"scheduling {identity.operation} for {identity.tokens} tokens"
        with TemporaryDirectory(prefix="hetero-qnn-") as folder:
            output = Path(folder) / "graph.onnx"
            options = {
                "profiling_level": "optrace",
                "profiling_file_path": str(Path(folder) / "profile.csv"),
            }
            seconds = self._compiler.compile(model, output, what, options=options)
            texts = list(Path(folder).glob("*_schematic.bin"))
            if len(texts) != 1:
                raise DeviceError(
                    BACKEND, what, f"NO_SCHEMATIC: the compiler wrote {len(texts)} schematics"
                )
            try:
                schedule = read_schedule(texts[0].read_text(encoding="utf-8", errors="replace"))
            except ValueError as error:
                raise DeviceError(BACKEND, what, f"BAD_SCHEMATIC: {error}") from error
        return Schedule(**{**schedule.__dict__, "prepare_s": seconds})


def _load(path: Path) -> Schedule | None:
    """Return a stored schedule; None if there is none or it cannot be read."""
    try:
        fields = json.loads(read_file(path, LONGEST_DOCUMENT_BYTES))
        for unit in UNITS:
            fields[unit] = UnitWork(**fields[unit])
        return Schedule(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None

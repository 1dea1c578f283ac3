"""`hetero bench`: prefill and decode speeds of several devices, interleaved in one run."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple

from hetero.backends.host.processor import cpu_name
from hetero.errors import UserError
from hetero.measuring.contender import Contestant, Sample
from hetero.placement.device_set import DeviceMode
from hetero.profiler.table_data import TableData
from hetero.runtime.schedule import Order
from hetero.runtime.waits import SyncMethod
from hetero.solver.names import NamedStrategy

WARMUP_DECODE_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One test on one device. Speeds in tokens/s, measured; `copied_bytes` by a token.

    `devices` compute the test: `gpu`, `npu`, `opencl-cores`, `tensor level` or `layer level`.
    `cores` of the processor compute (a GPU or NPU of its own is none); `fastest` of all rows of the
    test. `depth` tokens are before it (None: none before a prompt, the prompt before decoding).
    """

    test: str
    device: str
    strategy: str
    sync: str
    tokens_per_s_median: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    copied_bytes: int = 0
    cores: int = 0
    fastest: bool = False
    devices: str = ""
    depth: int | None = None


@dataclass(frozen=True, kw_only=True)
class BenchProcess:
    """The process of one contender: its load, its largest resident memory, its devices."""

    load_s: float
    peak_rss_bytes: int
    devices: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything that `hetero bench` measured, with the machine that it was measured on.

    `choices` are each contender's device or plan and the reason, `processes` the resources of its
    process. `peak_rss_bytes` is of all processes together.
    """

    model: str
    rows: tuple[BenchRow, ...]
    load_cold_s: float
    load_warm_s: float
    peak_rss_bytes: int
    environment: dict[str, Any]
    choices: dict[str, str]
    processes: dict[str, BenchProcess]
    HEAD: ClassVar = (
        "test", "device", "strategy", "on", "sync", "cores", "tokens/s", "min", "max",
        "copied B/token",
    )  # fmt: skip

    def to_json(self) -> str:
        """Return one line of JSON (docs/reference/json.md)."""
        return json.dumps(asdict(self))

    def to_jsonl(self) -> str:
        """Return a line of JSON for each row, with the model and the machine in it."""
        shared = {"model": self.model, "environment": self.environment}
        return "\n".join(json.dumps(asdict(row) | shared) for row in self.rows)

    def to_csv(self) -> str:
        """Return a header and one line per row."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(BenchRow.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return out.getvalue().rstrip("\n")

    def table(self) -> TableData:
        """Return a line for each row."""
        numbers = ("cores", "tokens/s", "min", "max", "copied B/token")
        return TableData("", self.HEAD, tuple(map(_cells, self.rows)), lead=5, numbers=numbers)

    @property
    def title(self) -> str:
        """Return the model and the machine."""
        return f"model {self.model}, {self.environment['numbers']} on {self.environment['cpu']}"

    def remarks(self) -> list[str]:
        """Return the lines under the table: the winners, loading and memory, the contenders."""
        peaks = ((who, process.peak_rss_bytes / 2**20) for who, process in self.processes.items())
        loads = ((who, process.load_s) for who, process in self.processes.items())
        best = ", ".join(f"{row.test}: {_device_of(row)}" for row in self.rows if row.fastest)
        return [
            f"fastest (**): {best}; cores: of the processor, that compute",
            f"load {self.load_cold_s:.2f} s cold, {self.load_warm_s:.2f} s warm; each in a process "
            f"of its own: {_joined(loads, '.2f', 's')}; peak memory {_joined(peaks, '.0f', 'MiB')}",
            *(f"{who}: {why}" for who, why in self.choices.items()),
        ]


def _cells(row: BenchRow) -> tuple[str, ...]:
    """Return the cells of `BenchReport.HEAD`."""
    mark = "**" if row.fastest else ""
    median = f"{mark}{row.tokens_per_s_median:.2f}{mark}"
    spread = (f"{row.tokens_per_s_min:.2f}", f"{row.tokens_per_s_max:.2f}")
    names = (row.test, row.device, row.strategy, row.devices, row.sync, str(row.cores))
    return (*names, median, *spread, str(row.copied_bytes))


def _joined(values: Iterable[tuple[str, float]], form: str, unit: str) -> str:
    return ", ".join(f"{who} {value:{form}} {unit}" for who, value in values)


def _device_of(row: BenchRow) -> str:
    return f"{row.device} ({row.strategy}, {row.sync})"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark: prompt and decode lengths in tokens, rounds, contenders side by side.

    With `depths` prompts and decoding are measured after so many tokens each, as by llama-bench.
    Every device runs with every way of synchronising; strategies are for `hetero`, in place of its
    own plan. `profile` is what strategies are planned with; `plan` and the others are those of
    `LLM`, for all contenders.
    """

    prompt_tokens: int = 256
    decode_tokens: int = 64
    depths: tuple[int, ...] = ()
    rounds: int = 5
    devices: tuple[DeviceMode, ...] = ("auto",)
    strategies: tuple[NamedStrategy, ...] = ()
    syncs: tuple[SyncMethod, ...] = ("fast",)
    profile: str | None = None
    gpu: str = "auto"
    npu: str = "auto"
    cpu: str = "auto"
    weights: str | None = None
    kv: str | None = None
    plan: str | None = None
    max_gpu_share: float = 1.0
    memory_budget: str | None = None
    adapt: bool = True
    order: Order = "best"
    whole_caches: bool = False


class Contender(NamedTuple):
    """One row of the table for each test."""

    device: DeviceMode
    strategy: NamedStrategy | None
    sync: SyncMethod

    def __str__(self) -> str:
        return " ".join(filter(None, (self.device, self.strategy, self.sync)))


def contenders(options: BenchOptions) -> list[Contender]:
    """Return all meaningful combinations. Raises `UserError` for a strategy without `hetero`."""
    if options.strategies and "hetero" not in options.devices:
        if options.devices == ("auto",):  # the default
            return contenders(replace(options, devices=("hetero",)))
        raise UserError("--strategy says how both devices share the work: add --device hetero")
    return [
        Contender(device, strategy, sync)
        for device in options.devices
        for strategy in (options.strategies if device == "hetero" else ()) or (None,)
        for sync in options.syncs
    ]


def run_benchmark(
    model: str, options: BenchOptions, note: Callable[[str], None] = lambda _: None
) -> BenchReport:
    """Measure `model`.

    Each contender has a process of its own, as it would have alone; rounds visit them in turn, so
    that drift hits all alike. One is idle while another computes. `load_cold_s` is the first
    contender's load, `load_warm_s` a second one in its process. Raises `UserError` for what a
    contender cannot do, and where its process ends.
    """
    with ExitStack() as stack:
        entries = {}
        for who in contenders(options):
            entries[who] = stack.enter_context(Contestant(str(who)))
            entries[who].open(model, _llm_options(who, options), note)
        samples = _measure(entries, options, note)
        first = next(iter(entries.values()))
        load_warm_s = first.reopen_s()
    rows = [_row(test, who, entries[who], values) for (test, who), values in samples.items()]
    best = {t: max(r.tokens_per_s_median for r in rows if r.test == t) for t in _names(rows)}
    rows = [replace(r, fastest=r.tokens_per_s_median == best[r.test]) for r in rows]
    kinds = {entry.opened.numbers for entry in entries.values()}
    return BenchReport(
        model=model,
        rows=tuple(rows),
        load_cold_s=first.opened.load_s,
        load_warm_s=load_warm_s,
        peak_rss_bytes=sum(entry.peak_rss_bytes for entry in entries.values()),
        environment=environment()
        | {
            "devices": first.opened.devices,
            "weights": first.opened.weights,
            "numbers": "emulated" if "emulated" in kinds else "measured",
        },
        choices={entry.name: entry.opened.choice for entry in entries.values()},
        processes={entry.name: _process(entry) for entry in entries.values()},
    )


def _process(entry: Contestant) -> BenchProcess:
    opened = entry.opened
    return BenchProcess(
        load_s=opened.load_s, peak_rss_bytes=entry.peak_rss_bytes, devices=opened.devices
    )


def environment() -> dict[str, Any]:
    """Return the machine and the versions that a measurement depends on."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for package in ("hetero", "numpy", "onnxruntime", "pyopencl"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts


def _llm_options(who: Contender, options: BenchOptions) -> dict[str, Any]:
    """Return the contender's options of `LLM`."""
    names = ("gpu", "npu", "cpu", "weights", "profile", "kv", "plan", "max_gpu_share",
             "memory_budget", "adapt", "order", "whole_caches")  # fmt: skip
    own = {"device": who.device, "strategy": who.strategy, "sync": who.sync}
    shared = {name: getattr(options, name) for name in names}
    return {**own, **shared, "prompt_lengths": [options.prompt_tokens]}


class BenchTest(NamedTuple):
    """A test in the vocabulary of llama-bench: `pp256`, or `tg64 @ d4096`."""

    kind: Literal["pp", "tg"]
    tokens: int
    depth: int | None

    @property
    def name(self) -> str:
        """Return the name."""
        at = "" if self.depth is None else f" @ d{self.depth}"
        return f"{self.kind}{self.tokens}{at}"


def _names(rows: Iterable[BenchRow]) -> dict[str, None]:
    return dict.fromkeys(row.test for row in rows)


def _measure(
    entries: Mapping[Contender, Contestant], options: BenchOptions, note: Callable[[str], None]
) -> dict[tuple[BenchTest, Contender], list[Sample]]:
    _check_room(min(entry.opened.max_seq_len for entry in entries.values()), options)
    samples: dict[tuple[BenchTest, Contender], list[Sample]] = {}
    prompt, decode = options.prompt_tokens, options.decode_tokens
    depths: Sequence[int | None] = options.depths or (None,)
    for entry in entries.values():
        entry.round(prompt, WARMUP_DECODE_TOKENS)
    for turn, depth in product(range(options.rounds), depths):
        note(f"round {turn + 1} of {options.rounds}")
        for who, entry in entries.items():
            measured = entry.round(prompt, decode, depth)
            if prompt:
                samples.setdefault((BenchTest("pp", prompt, depth), who), []).append(
                    measured.prefill
                )
            if decode:
                samples.setdefault((BenchTest("tg", decode, depth), who), []).append(
                    measured.decode
                )
    return dict(sorted(samples.items(), key=lambda item: (item[0][0].kind, item[0][0].depth or 0)))


def _check_room(room: int, options: BenchOptions) -> None:
    prompt, decode = options.prompt_tokens, max(options.decode_tokens, WARMUP_DECODE_TOKENS)
    needed, deepest = prompt + decode, max(options.depths, default=None)
    if needed > room:
        raise UserError(
            f"-p {prompt} and -n {options.decode_tokens} need a context of {needed} tokens, this "
            f"model's has {room}: choose a smaller -p or -n"
        )
    if deepest is not None and (needed := deepest + max(prompt, decode)) > room:
        raise UserError(
            f"-d {deepest} with -p {prompt} and -n {options.decode_tokens} needs a context of "
            f"{needed} tokens, this model's has {room}: choose a smaller -d"
        )


def _row(test: BenchTest, who: Contender, entry: Contestant, samples: Sequence[Sample]) -> BenchRow:
    values = [sample.tokens_per_s for sample in samples]
    phase = "prefill" if test.name.startswith("pp") else "decode"
    return BenchRow(
        test=test.name,
        device=who.device,
        strategy=who.strategy or entry.opened.strategy,
        sync=who.sync,
        tokens_per_s_median=statistics.median(values),
        tokens_per_s_min=min(values),
        tokens_per_s_max=max(values),
        copied_bytes=max(sample.copied_bytes for sample in samples),
        cores=entry.opened.cores[phase],
        devices=entry.opened.device_sets[phase],
        depth=test.depth,
    )

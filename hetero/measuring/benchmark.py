"""`hetero bench`: prefill and decode speeds of several devices, interleaved in one run."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hetero.backends.host.processor import cpu_name
from hetero.errors import UserError
from hetero.generation.llm import LLM
from hetero.placement.device_set import DeviceMode
from hetero.profiler.tables import TableData
from hetero.runtime.schedule import Order
from hetero.runtime.waits import SyncMethod
from hetero.solver.names import NamedStrategy

WARMUP_DECODE_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One test on one device. Speeds in tokens/s, measured; `copied_bytes` by a token. `cores` of
    the processor compute (a GPU or NPU of its own is none); `fastest` of all rows of the test.
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


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything `hetero bench` measured, with the machine it was measured on; `choices` says what
    each contender was and why.
    """

    model: str
    rows: tuple[BenchRow, ...]
    load_cold_s: float
    load_warm_s: float
    peak_rss_bytes: int
    environment: dict[str, Any]
    choices: dict[str, str]
    HEAD: ClassVar = (
        "test", "device", "strategy", "sync", "cores", "tokens/s", "min", "max", "copied B/token",
    )  # fmt: skip

    def to_json(self) -> str:
        """One line of JSON (docs/json.md)."""
        return json.dumps(asdict(self))

    def to_csv(self) -> str:
        """A header and one line per row."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(BenchRow.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return out.getvalue().rstrip("\n")

    def table(self) -> TableData:
        """A line for each row."""
        numbers = ("cores", "tokens/s", "min", "max", "copied B/token")
        return TableData("", self.HEAD, tuple(map(_cells, self.rows)), lead=4, numbers=numbers)

    @property
    def title(self) -> str:
        """Model and machine."""
        return f"model {self.model}, {self.environment['numbers']} on {self.environment['cpu']}"

    def remarks(self) -> list[str]:
        """Lines under the table: the winners, loading and memory, what each contender was."""
        peak_mib = self.peak_rss_bytes / 2**20
        best = ", ".join(f"{row.test}: {_who(row)}" for row in self.rows if row.fastest)
        return [
            f"fastest (**): {best}; cores: of the processor, that compute",
            f"load {self.load_cold_s:.2f} s cold, {self.load_warm_s:.2f} s warm; "
            f"peak memory {peak_mib:.0f} MiB (all devices of the run together)",
            *(f"{who}: {why}" for who, why in self.choices.items()),
        ]


def _cells(row: BenchRow) -> tuple[str, ...]:
    """As `BenchReport.HEAD` names them."""
    mark = "**" if row.fastest else ""
    median = f"{mark}{row.tokens_per_s_median:.2f}{mark}"
    spread = (f"{row.tokens_per_s_min:.2f}", f"{row.tokens_per_s_max:.2f}")
    names = (row.test, row.device, row.strategy, row.sync, str(row.cores))
    return (*names, median, *spread, str(row.copied_bytes))


def _who(row: BenchRow) -> str:
    return f"{row.device} ({row.strategy}, {row.sync})"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure: prompt and decode lengths in tokens, rounds, contenders side by side.

    Every device runs with every way of synchronising; strategies are for `hetero`, in place of its
    own plan. `profile` is what strategies are planned with; `plan` and the others are those of
    `LLM`, for all contenders.
    """

    prompt_tokens: int = 256
    decode_tokens: int = 64
    rounds: int = 5
    devices: tuple[DeviceMode, ...] = ("auto",)
    strategies: tuple[NamedStrategy, ...] = ()
    syncs: tuple[SyncMethod, ...] = ("fast",)
    profile: str | None = None
    gpu: str = "auto"
    npu: str = "auto"
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
    """All combinations that mean something. Raises `UserError` for a strategy without `hetero`."""
    if options.strategies and "hetero" not in options.devices:
        if options.devices == ("auto",):  # nobody asked for another
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
    """Measure `model`. Rounds visit the devices in turn, so that drift hits all alike.

    `load_cold_s` is the first load in this process, `load_warm_s` a later one of the same device.
    """
    wanted = contenders(options)
    first = wanted[0]
    start = time.perf_counter()
    models = {first: _open(model, first, options)}
    load_cold_s = time.perf_counter() - start
    for contender in wanted[1:]:
        note(f"loading {contender}")
        models[contender] = _open(model, contender, options)
    try:
        samples = _measure(models, options, note)
    finally:
        for llm in models.values():
            llm.close()
    start = time.perf_counter()
    _open(model, first, options).close()
    load_warm_s = time.perf_counter() - start
    rows = [_row(test, who, models[who], values) for (test, who), values in samples.items()]
    best = {t: max(r.tokens_per_s_median for r in rows if r.test == t) for t, _ in samples}
    rows = [replace(r, fastest=r.tokens_per_s_median == best[r.test]) for r in rows]
    return BenchReport(
        model=model,
        rows=tuple(rows),
        load_cold_s=load_cold_s,
        load_warm_s=load_warm_s,
        peak_rss_bytes=peak_rss_bytes(),
        environment=environment(models[first])
        | {"weights": _weights(models.values()), "numbers": _numbers(models.values())},
        choices={str(who): llm.choice.reason for who, llm in models.items()},
    )


def _numbers(models: Iterable[LLM]) -> str:
    """`emulated` if any device's times are those of an emulator."""
    kinds = {model.devices.numbers for model in models}
    return "emulated" if "emulated" in kinds else "measured"


def _weights(models: Iterable[LLM]) -> str:
    """The formats that a model is stored in: `generate` computes prompts and answers in those that
    its plan says.
    """
    stored = next(iter(models)).model.weights
    return ",".join((stored.weight_format, *stored.also))


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def environment(llm: LLM | None = None) -> dict[str, Any]:
    """The machine and the versions that a measurement depends on."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for package in ("hetero", "numpy", "onnxruntime", "pyopencl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if llm is not None:
        found["devices"] = {
            kind: device.info.fingerprint for kind, device in llm.devices.devices.items()
        }
    return found


def _open(model: str, who: Contender, options: BenchOptions) -> LLM:
    return LLM(
        model,
        device=who.device,
        gpu=options.gpu,
        npu=options.npu,
        weights=options.weights,
        sync=who.sync,
        strategy=who.strategy,
        profile=options.profile,
        kv=options.kv,
        plan=options.plan,
        max_gpu_share=options.max_gpu_share,
        memory_budget=options.memory_budget,
        adapt=options.adapt,
        order=options.order,
        whole_caches=options.whole_caches,
        prompt_lengths=(options.prompt_tokens,),
    )


class Sample(NamedTuple):
    """One test of one round."""

    tokens_per_s: float
    copied_bytes: int


def _measure(
    models: dict[Contender, LLM], options: BenchOptions, note: Callable[[str], None]
) -> dict[tuple[str, Contender], list[Sample]]:
    _check_room(models.values(), options)
    samples: dict[tuple[str, Contender], list[Sample]] = {}
    prompt = _prompt(next(iter(models.values())), options.prompt_tokens)
    for llm in models.values():
        _round(llm, prompt, WARMUP_DECODE_TOKENS)
    for turn in range(options.rounds):
        note(f"round {turn + 1} of {options.rounds}")
        for who, llm in models.items():
            prefill, decode = _round(llm, prompt, options.decode_tokens)
            if prompt:
                samples.setdefault((f"pp{len(prompt)}", who), []).append(prefill)
            if options.decode_tokens:
                samples.setdefault((f"tg{options.decode_tokens}", who), []).append(decode)
    return dict(sorted(samples.items(), key=lambda item: item[0][0]))


def _check_room(models: Iterable[LLM], options: BenchOptions) -> None:
    needed = options.prompt_tokens + max(options.decode_tokens, WARMUP_DECODE_TOKENS)
    room = min(llm.max_seq_len for llm in models)
    if needed > room:
        raise UserError(
            f"-p {options.prompt_tokens} and -n {options.decode_tokens} need a context of {needed} "
            f"tokens, this model's has {room}: choose a smaller -p or -n"
        )


def _round(llm: LLM, prompt: Sequence[int], decode_tokens: int) -> tuple[Sample, Sample]:
    """Prefill and decode of one round; decode follows the prompt."""
    engine, context = llm.engine, llm.context
    context.truncate(0)
    before, start = engine.copied_bytes, time.perf_counter()
    logits = engine.prefill(context, prompt if prompt else [0])
    between, middle = engine.copied_bytes, time.perf_counter()
    for _ in range(decode_tokens):
        logits = engine.decode(context, int(np.argmax(logits)))
    after, end = engine.copied_bytes, time.perf_counter()
    return (
        Sample(len(prompt) / (middle - start), (between - before) // max(len(prompt), 1)),
        Sample(decode_tokens / (end - middle), (after - between) // max(decode_tokens, 1)),
    )


def _prompt(llm: LLM, count: int) -> list[int]:
    random = np.random.default_rng(0)
    return [int(token) for token in random.integers(3, llm.model.config.vocab_size, count)]


def _row(test: str, who: Contender, llm: LLM, samples: Sequence[Sample]) -> BenchRow:
    values = [sample.tokens_per_s for sample in samples]
    if len(llm.plan.devices()) < 2:
        planned = f"{llm.devices.mode}-only"
    else:  # by the solver, or by rule
        planned = "layer" if llm.choice.solver is None else "auto"
    return BenchRow(
        test=test,
        device=who.device,
        strategy=who.strategy or planned,
        sync=who.sync,
        tokens_per_s_median=statistics.median(values),
        tokens_per_s_min=min(values),
        tokens_per_s_max=max(values),
        copied_bytes=max(sample.copied_bytes for sample in samples),
        cores=processor_cores(llm),
    )


def processor_cores(llm: LLM) -> int:
    """Cores of the processor that a model's devices compute on: one for a device that is a core,
    all for OpenCL on every core, none for a GPU or an NPU of its own.
    """
    count = 0
    for device in llm.devices.devices.values():
        details = device.info.details
        on_core = "cpu" in details or "emulated" in details
        if on_core or device.info.backend in ("ort-cpu", "reference"):
            count += int(details.get("cores", "1"))
    return count

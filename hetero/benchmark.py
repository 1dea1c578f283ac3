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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from hetero.device_set import DeviceMode
from hetero.llm import LLM

WARMUP_DECODE_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One test on one device. Speeds in tokens/s, measured."""

    test: str
    device: str
    strategy: str
    sync: str
    tokens_per_s_median: float
    tokens_per_s_min: float
    tokens_per_s_max: float


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything `hetero bench` measured, with the machine it was measured on."""

    model: str
    rows: tuple[BenchRow, ...]
    load_cold_s: float
    load_warm_s: float
    peak_rss_bytes: int
    environment: dict[str, Any]

    def to_json(self) -> str:
        """One line with the keys of INTERFACES."""
        return json.dumps(asdict(self))

    def to_csv(self) -> str:
        """A header and one line per row."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(BenchRow.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return out.getvalue().rstrip("\n")

    def to_markdown(self) -> str:
        """A table and a line on the machine."""
        lines = [
            f"model {self.model}, measured on {self.environment['cpu']}",
            "",
            "| test | device | strategy | sync | tokens/s (median) | min | max |",
            "|---|---|---|---|---:|---:|---:|",
        ]
        lines += [
            f"| {r.test} | {r.device} | {r.strategy} | {r.sync} | {r.tokens_per_s_median:.2f} "
            f"| {r.tokens_per_s_min:.2f} | {r.tokens_per_s_max:.2f} |"
            for r in self.rows
        ]
        peak_mib = self.peak_rss_bytes / 2**20
        lines += [
            "",
            f"load {self.load_cold_s:.2f} s cold, {self.load_warm_s:.2f} s warm; "
            f"peak memory {peak_mib:.0f} MiB (all devices of the run together)",
        ]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure: prompt and decode lengths in tokens, rounds, devices side by side."""

    prompt_tokens: int = 256
    decode_tokens: int = 64
    rounds: int = 5
    devices: tuple[DeviceMode, ...] = ("hetero",)
    gpu: str = "auto"
    npu: str = "auto"
    weights: str = "w4a16"


def run_benchmark(
    model: str, options: BenchOptions, note: Callable[[str], None] = lambda _: None
) -> BenchReport:
    """Measure `model`. Rounds visit the devices in turn, so that drift hits all alike.

    `load_cold_s` is the first load in this process, `load_warm_s` a later one of the same device.
    """
    start = time.perf_counter()
    models = {options.devices[0]: _open(model, options.devices[0], options)}
    load_cold_s = time.perf_counter() - start
    for device in options.devices[1:]:
        note(f"loading on {device}")
        models[device] = _open(model, device, options)
    try:
        samples = _measure(models, options, note)
    finally:
        for llm in models.values():
            llm.close()
    first = options.devices[0]
    start = time.perf_counter()
    _open(model, first, options).close()
    load_warm_s = time.perf_counter() - start
    rows = [
        _row(test, device, models[device], values) for (test, device), values in samples.items()
    ]
    return BenchReport(
        model=model,
        rows=tuple(rows),
        load_cold_s=load_cold_s,
        load_warm_s=load_warm_s,
        peak_rss_bytes=peak_rss_bytes(),
        environment=environment(models[first]) | {"weights": options.weights},
    )


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


def cpu_name() -> str:
    """Processor name for people."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _open(model: str, device: DeviceMode, options: BenchOptions) -> LLM:
    return LLM(model, device=device, gpu=options.gpu, npu=options.npu, weights=options.weights)


def _measure(
    models: dict[DeviceMode, LLM], options: BenchOptions, note: Callable[[str], None]
) -> dict[tuple[str, DeviceMode], list[float]]:
    samples: dict[tuple[str, DeviceMode], list[float]] = {}
    prompt = _prompt(next(iter(models.values())), options.prompt_tokens)
    for llm in models.values():
        _round(llm, prompt, WARMUP_DECODE_TOKENS)
    for turn in range(options.rounds):
        note(f"round {turn + 1} of {options.rounds}")
        for device, llm in models.items():
            prefill, decode = _round(llm, prompt, options.decode_tokens)
            if prompt:
                samples.setdefault((f"pp{len(prompt)}", device), []).append(prefill)
            if options.decode_tokens:
                samples.setdefault((f"tg{options.decode_tokens}", device), []).append(decode)
    return dict(sorted(samples.items(), key=lambda item: item[0][0]))


def _round(llm: LLM, prompt: Sequence[int], decode_tokens: int) -> tuple[float, float]:
    """Prefill and decode speed of one round, tokens/s; decode follows the prompt."""
    engine = llm.engine
    engine.truncate(0)
    start = time.perf_counter()
    logits = engine.prefill(prompt if prompt else [0])
    middle = time.perf_counter()
    for _ in range(decode_tokens):
        logits = engine.decode(int(np.argmax(logits)))
    end = time.perf_counter()
    return len(prompt) / (middle - start), decode_tokens / (end - middle) if decode_tokens else 0.0


def _prompt(llm: LLM, count: int) -> list[int]:
    random = np.random.default_rng(0)
    return [int(token) for token in random.integers(3, llm.model.config.vocab_size, count)]


def _row(test: str, device: str, llm: LLM, values: Sequence[float]) -> BenchRow:
    both = len(llm.plan.devices()) == 2
    return BenchRow(
        test=test,
        device=device,
        strategy="layer" if both else f"{llm.devices.mode}-only",
        sync="event",
        tokens_per_s_median=statistics.median(values),
        tokens_per_s_min=min(values),
        tokens_per_s_max=max(values),
    )

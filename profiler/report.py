"""The report of a profile: one HTML page without network, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hetero.profiler import profile_files
from hetero.profiler.errors import ProfileError
from hetero.profiler.pages import render
from hetero.profiler.quality import grade
from hetero.profiler.records import DeviceProfile, MatMulPredictor
from hetero.profiler.table_data import TableData


def write_report(profile: DeviceProfile, path: str | Path) -> None:
    """Write the page. Raises `ProfileError` if the file cannot be written, or is to be no page."""
    if Path(path).suffix.lower() not in (".html", ".htm", ""):
        raise ProfileError(f"the report of a profile is a page ({path}): choose .html")
    profile_files.write_atomically(path, to_html(profile))


def to_html(profile: DeviceProfile) -> str:
    """Return the page as text; the same profile always gives the same page."""
    from hetero.profiler.charts import all_charts  # matplotlib takes a second

    kinds = sorted({record.numbers for record in profile.devices.values()})
    quality = grade(profile)
    return render(
        "profile.html",
        title=f"Profile {profile.name}",
        name=profile.name,
        taken=f"{profile.created}, hetero {profile.hetero_version}, numbers are "
        f"{' and '.join(kinds)}",
        devices=[
            f"{kind.upper()}: {record.name} ({record.backend}, {record.driver}), {record.numbers}"
            for kind, record in profile.devices.items()
        ],
        conclusion=quality.sentences,
        good=quality.good,
        numbers=_numbers(profile),
        wrong=list(
            dict.fromkeys(
                f"{entry.device} {entry.op} {entry.shape_class}: {entry.detail}"
                for entry in profile.quarantined
            )
        ),
        charts=all_charts(profile),
        validation=_validation(profile.predictors),
        details=_details(profile),
    )


def _numbers(profile: DeviceProfile) -> list[tuple[str, str]]:
    coverage = profile.coverage
    numbers = []
    if coverage.grid_tasks:  # nothing ran on a simulated chip
        numbers.append(
            (f"{coverage.measured_tasks} / {coverage.grid_tasks}", f"matmuls {profile.numbers}")
        )
        numbers.append((f"{coverage.spent_s:.0f} s", "taken for that"))
    for kind, predictor in _main_predictors(profile).items():
        if predictor.regimes.bytes_per_s:
            speed = f"{predictor.regimes.bytes_per_s / 1e9:.1f} GB/s"
            numbers.append((speed, f"{kind.upper()} decode"))
        if predictor.regimes.flops_per_s:
            flops = f"{predictor.regimes.flops_per_s / 1e9:.0f} GFLOP/s"
            numbers.append((flops, f"{kind.upper()} prefill"))
    for entry in profile.contention:
        times = f"{entry.gpu:.2f}× / {entry.npu:.2f}×"
        form = f" {entry.weight_format.value}" if entry.weight_format else ""
        numbers.append(
            (times, f"time of GPU / NPU while the other computes too, {entry.phase}{form}")
        )
    return numbers


def _main_predictors(profile: DeviceProfile) -> dict[str, MatMulPredictor]:
    predictors: dict[str, MatMulPredictor] = {}
    for predictor in profile.predictors:
        predictors.setdefault(predictor.device, predictor)
    return predictors


def _validation(predictors: Iterable[MatMulPredictor]) -> TableData:
    rows = tuple(
        (
            p.device,
            p.weight_format.value,
            p.order,
            v.phase,
            f"{v.mape:.1%}",
            f"{v.p95:.1%}",
            str(v.rows),
            f"{len(p.trees)} trees" if p.trees else "piecewise linear",
        )
        for p in predictors
        for v in p.validation
    )
    heads = ("device", "weights", "order", "phase", "mean error", "95 %", "rows", "predictor")
    note = "Each (n, k) pair predicted by a fit that has not seen it."
    return TableData("", heads, rows, note, numbers=heads[4:7])


def _details(profile: DeviceProfile) -> list[TableData]:
    others = [
        (row.device, row.op, _sizes(row.sizes), str(row.m), str(row.context), _us(row.seconds))
        for row in profile.others
    ]
    preparation = [
        (r.device, r.weight_format.value, f"{r.n} × {r.k}", _us(r.cold_s), _us(r.cached_s))
        for r in profile.preparation
    ]
    sleeps = [
        (
            _us(row.requested_s),
            "default" if row.timer_slack_ns is None else f"{row.timer_slack_ns} ns",
            _us(row.late_median_s),
            _us(row.late_p99_s),
        )
        for row in profile.host_sync.sleep
    ]
    machine = [
        (name, str(value))
        for name, value in profile.environment.model_dump().items()
        if value not in (None, "", {}) and name != "packages"
    ]
    machine += sorted(profile.environment.packages.items())
    machine.append(("power", "absent" if profile.power is None else str(profile.power)))
    notes: list[tuple[str, str]] = [
        (kind, f"{name}: {note}")
        for kind, sync in profile.sync.items()
        for name, note in sync.notes.items()
    ]
    notes += [("", note) for note in profile.notes]
    return [
        _table("Other kernels", ("device", "operation", "sizes", "m", "context", "µs"), others),
        _table("Preparation", ("device", "weights", "n × k", "cold µs", "again µs"), preparation),
        _table("Sleep", ("requested µs", "timer slack", "late µs", "99 % µs"), sleeps),
        _table("Machine", ("what", "value"), machine),
        _table("Notes", ("device", "note"), notes),
    ]


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> TableData:
    numbers = tuple(head for head in heads if head.endswith("µs") or head in ("m", "context"))
    return TableData(title, heads, tuple(rows), numbers=numbers)


def _sizes(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"

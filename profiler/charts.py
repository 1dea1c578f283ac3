"""The charts of a profile's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.pages import COLORS, LINES
from hetero.profiler.pages.figures import Chart, log_log, new_axes, own_style, svg_of
from hetero.profiler.records import DeviceProfile, MatMulRow


def all_charts(profile: DeviceProfile) -> list[Chart]:
    """Return every chart that the profile has data for."""
    makers: tuple[Callable[[DeviceProfile], Chart | None], ...] = (
        gpu_regimes, npu_stages, shape_sensitivity, order_sensitivity, phase_speeds,
        bandwidth, synchronisation, accuracy, drift,
    )  # fmt: skip
    with own_style():
        return [chart for chart in (make(profile) for make in makers) if chart is not None]


def gpu_regimes(profile: DeviceProfile) -> Chart | None:
    """Time against tokens: flat while memory-bound, a line when compute-bound (paper figure 2)."""
    note = "Dots are measured, lines predicted."
    predictor = next((p for p in profile.predictors if p.device == "gpu"), None)
    if predictor is not None and predictor.regimes.knee_m:
        note += f" Memory-bound up to about {predictor.regimes.knee_m:.0f} tokens."
    return _time_by_tokens(profile, "gpu", "GPU: time against size", note)


def npu_stages(profile: DeviceProfile) -> Chart | None:
    """Time against tokens: a step at each graph size (paper figure 4)."""
    record = profile.devices.get("npu")
    if record is None:
        return None
    sizes = record.capabilities.graph_sizes
    steps = (
        f"graphs of {', '.join(map(str, sizes))} tokens"
        if sizes
        else (f"stages of {record.token_stage} tokens")
    )
    note = f"Between steps tokens are padded: {steps}; rows in stages of {record.row_stage}."
    return _time_by_tokens(profile, "npu", "NPU: stages", note)


def _time_by_tokens(
    profile: DeviceProfile, kind: DeviceKind, title: str, note: str
) -> Chart | None:
    rows = _main_rows(profile, kind)
    if not rows:
        return None
    model, axes = CostModel(profile), new_axes()
    tokens = np.unique(np.geomspace(min(r.m for r in rows), max(r.m for r in rows), 200).round())
    for color, (n, k) in zip((COLORS[kind], *LINES), _some_pairs(rows), strict=False):
        predicted = model.matmul_s(kind, rows[0].weight_format, tokens, n, k, rows[0].order)
        axes.plot(tokens, predicted.seconds * 1e3, color=color, lw=1.3, label=f"{n} × {k}")
        shown = [row for row in rows if (row.n, row.k) == (n, k)]
        axes.plot([r.m for r in shown], [r.seconds * 1e3 for r in shown], "o", color=color, ms=4)
    log_log(axes, "tokens m", "ms")
    axes.legend(title="rows × features", loc="upper left")
    return Chart(title, note, svg_of(axes, title))


def shape_sensitivity(profile: DeviceProfile) -> Chart | None:
    """Return speed against the aspect of the weight (paper figure 5)."""
    axes, drawn = new_axes(), False
    for kind in profile.devices:
        rows = _main_rows(profile, kind)
        large = [row for row in rows if row.m == _near({row.m for row in rows}, 256)]
        large = [row for row in large if row.n * row.k >= 1 << 20]
        if large:
            drawn = True
            aspects = [row.n / row.k for row in large]
            speeds = [2e-9 * row.m * row.n * row.k / row.seconds for row in large]
            axes.plot(aspects, speeds, "o", color=COLORS[kind], label=f"{kind}, m={large[0].m}")
    if not drawn:
        return None
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("rows n / features k (tall ← → wide)")
    axes.set_ylabel("GFLOP/s")
    axes.legend()
    title = "Shape sensitivity"
    return Chart(
        title, "The same work in other shapes; a flat line is insensitive.", svg_of(axes, title)
    )


def order_sensitivity(profile: DeviceProfile) -> Chart | None:
    """Time of the transposed operand order over the plain one (paper figure 5)."""
    times = {row.key: row.seconds for row in profile.matmuls}
    pairs = [
        (row, times[(*row.key[:2], "plain", *row.key[3:])] / row.seconds)
        for row in profile.matmuls
        if row.order == "transposed" and (*row.key[:2], "plain", *row.key[3:]) in times
    ]
    if not pairs:
        return None
    axes = new_axes()
    axes.plot([row.m for row, _ in pairs], [gain for _, gain in pairs], "o", color=COLORS["npu"])
    axes.axhline(1, color="#888", lw=1)
    log_log(axes, "tokens m", "plain / transposed time")
    title = "Order sensitivity"
    return Chart(title, "Above 1 the transposed order is faster.", svg_of(axes, title))


def phase_speeds(profile: DeviceProfile) -> Chart | None:
    """Return arithmetic speed against tokens for the largest weight, both devices."""
    axes = new_axes()
    for kind in profile.devices:
        rows = _main_rows(profile, kind)
        if rows:
            n, k = max(((row.n, row.k) for row in rows), key=lambda pair: pair[0] * pair[1])
            shown = sorted((r for r in rows if (r.n, r.k) == (n, k)), key=lambda r: r.m)
            speed = [2e-9 * r.m * r.n * r.k / r.seconds for r in shown]
            axes.plot(
                [r.m for r in shown], speed, "o-", color=COLORS[kind], label=f"{kind} {n}×{k}"
            )
    if not axes.lines:
        return None
    log_log(axes, "tokens m", "GFLOP/s")
    axes.legend()
    title = "The faster device by size"
    return Chart(
        title,
        "The largest weight; where curves cross, the faster one changes.",
        svg_of(axes, title),
    )


def bandwidth(profile: DeviceProfile) -> Chart | None:
    """Return weight bytes per second alone and together (paper figure 6)."""
    speeds = profile.bandwidth
    bars = [
        ("GPU alone", speeds.gpu_alone_bytes_per_s, None, "gpu"),
        ("NPU alone", speeds.npu_alone_bytes_per_s, None, "npu"),
        ("together", speeds.gpu_together_bytes_per_s, speeds.npu_together_bytes_per_s, "gpu"),
    ]
    if speeds.gpu_alone_bytes_per_s is None and speeds.npu_alone_bytes_per_s is None:
        return None
    axes = new_axes()
    for label, first, second, color in bars:
        if first is not None:
            axes.bar(label, first / 1e9, color=COLORS[color], width=0.6)
            total = first + (second or 0.0)
            if second is not None:
                axes.bar(label, second / 1e9, bottom=first / 1e9, color=COLORS["npu"], width=0.6)
            axes.annotate(f"{total / 1e9:.1f}", (label, total / 1e9), ha="center", va="bottom")
    axes.set_ylabel("GB/s of weights")
    axes.grid(axis="x", visible=False)
    title = "Memory bandwidth in decode"
    return Chart(title, "One token, weights out of cache.", svg_of(axes, title))


def synchronisation(profile: DeviceProfile) -> Chart | None:
    """Return costs around kernels, in microseconds."""
    costs: list[tuple[str, float, str]] = []
    for kind, sync in profile.sync.items():
        if profile.devices[kind].capabilities.asynchronous:
            costs += [
                (f"{kind}: submit, busy queue", sync.submit_busy_s, kind),
                (f"{kind}: submit, empty queue", sync.submit_empty_s, kind),
                *((f"{kind}: wait by {m}", s, kind) for m, s in sync.wait_s.items() if m != "fast"),
            ]
            costs += [
                (f"{kind}: more after {1e3 * x.gap_s:g} ms idle", x.slower_s, kind)
                for x in sync.idle
            ]
        costs.append((f"{kind}: blocking call", sync.call_s, kind))
        costs.append(
            (f"{kind}: copy of 1 MiB", sync.copy_fixed_s + 2**20 * sync.copy_s_per_byte, kind)
        )
        costs.append((f"{kind}: mapped again", sync.map_s, kind))
    for row in profile.host_sync.sleep:
        if row.requested_s < 1e-4:
            slack = "default slack" if row.timer_slack_ns is None else "1 ns slack"
            costs.append((f"sleep is late ({slack})", row.late_median_s, "both"))
    if profile.host_sync.thread_wake_s is not None:
        costs.append(("thread wake-up", profile.host_sync.thread_wake_s, "both"))
    if profile.host_sync.step_s is not None:
        costs.append(("a step besides its launches", profile.host_sync.step_s, "both"))
    if not costs:
        return None
    axes = new_axes(height=0.8 + 0.25 * len(costs))
    labels = [label for label, _, _ in costs]
    min_us = 0.05  # shorter bars cannot be seen on a logarithmic axis
    values = [max(seconds * 1e6, min_us) for _, seconds, _ in costs]
    axes.barh(labels, values, color=[COLORS[color] for _, _, color in costs], height=0.6)
    for label, value in zip(labels, values, strict=True):
        said = f" {value:.3g}" if value > min_us else f" below {min_us}"
        axes.annotate(said, (value, label), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(right=max(values) * 4)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("µs")
    title = "What synchronising costs"
    return Chart(title, "Microseconds, logarithmic.", svg_of(axes, title))


def accuracy(profile: DeviceProfile) -> Chart | None:
    """Return predicted against measured times."""
    if not profile.matmuls:
        return None
    model, axes = CostModel(profile), new_axes()
    for kind in profile.devices:
        rows = [row for row in profile.matmuls if row.device == kind]
        predicted = [_predicted(model, row) for row in rows]
        axes.plot(
            [row.seconds * 1e3 for row in rows], [1e3 * value for value in predicted],
            "o", ms=3, alpha=0.6, color=COLORS[kind], label=kind,
        )  # fmt: skip
    ends = [
        min(r.seconds for r in profile.matmuls) * 1e3,
        max(r.seconds for r in profile.matmuls) * 1e3,
    ]
    axes.plot(ends, ends, color="#888", lw=1)
    log_log(axes, "measured, ms", "predicted, ms")
    axes.legend()
    title = "Predicted against measured"
    note = (
        "Rows that the predictors were fitted to, which is why they are on the line; how well it "
        "predicts others is in the table below."
    )
    return Chart(title, note, svg_of(axes, title))


def drift(profile: DeviceProfile) -> Chart | None:
    """Return reference kernels over the run."""
    if not profile.references:
        return None
    axes = new_axes()
    for kind in profile.devices:
        for phase, style in (("decode", ":"), ("prefill", "-")):
            points = [p for p in profile.references if (p.device, p.phase) == (kind, phase)]
            if points:
                middle = float(np.median([p.seconds for p in points]))
                axes.plot(
                    [p.at_s for p in points], [p.seconds / middle for p in points],
                    style, color=COLORS[kind], lw=1, label=f"{kind} {phase}",
                )  # fmt: skip
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("reference time / median")
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    title = "Drift of the machine"
    return Chart(
        title, "Rows are scaled by these; a flat line at 1 is a calm machine.", svg_of(axes, title)
    )


def _predicted(model: CostModel, row: MatMulRow) -> float:
    cost = model.matmul_s(row.device, row.weight_format, row.m, row.n, row.k, row.order)
    return float(cost.seconds)


def _main_rows(profile: DeviceProfile, kind: DeviceKind) -> list[MatMulRow]:
    """Return the rows of the format and order that the device has most rows of."""
    counts: dict[tuple[WeightFormat, str], int] = {}
    for row in profile.matmuls:
        if row.device == kind:
            key = (row.weight_format, row.order)
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return []
    main = max(counts, key=lambda key: counts[key])
    return [r for r in profile.matmuls if r.device == kind and (r.weight_format, r.order) == main]


def _some_pairs(rows: Sequence[MatMulRow]) -> list[tuple[int, int]]:
    """Return up to four (n, k) from the smallest weight to the largest."""
    pairs = sorted({(row.n, row.k) for row in rows}, key=lambda pair: pair[0] * pair[1])
    at = np.unique(np.linspace(0, len(pairs) - 1, 4).round().astype(int))
    return [pairs[i] for i in at]


def _near(values: set[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted), default=0)

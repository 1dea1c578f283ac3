"""The simulated Snapdragon 8 Gen 3: fitted to component timings, written as shipped profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from common import DATA, table

import hetero
from hetero.backends.formats import WeightFormat
from hetero.backends.host.files import atomic_write
from hetero.backends.opencl import gpu_capabilities
from hetero.backends.qnn import npu_capabilities
from hetero.backends.snapdragon import find_chip
from hetero.models import model_spec
from hetero.profiler.device_model import GpuShader, NpuArray
from hetero.profiler.records import CapabilityRecord, DeviceProfile
from hetero.solver.baselines import layer_level
from hetero.solver.layer_dp import walk
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario, Solution

CALIBRATION = DATA / "snapdragon_8_gen_3_calibration.json"
ROOT = DATA.parents[1]
NAME, SOC = "snapdragon-8-gen-3", "sm8650"
BYTES_PER_WEIGHT = 0.5 + 2 / 128  # the paper's: 4 bits, one fp16 scale for each group of 128
STRONG_CALL_S = 10e-6  # a blocking call of the stronger kernels: an assumption
FAST_WAIT_S = 5e-6  # polling a flag for "a few microseconds"
US = 1e-6
# Points are exact to three or four digits, ends of ranges to one or two. So points decide, and
# ranges only settle what the points leave open (the GPU beyond 256 tokens).
RANGE_WEIGHT = 0.01
NARROWEST_K = 4096  # a narrower k was never timed, so no gain is claimed for it


class Row(NamedTuple):
    """One timing: sizes, device, seconds."""

    m: int
    n: int
    k: int
    device: str
    seconds: float
    weight: float = 1.0


class Fit(NamedTuple):
    """Fitted models, and what explains stand-alone GPU timings beside them."""

    npu: NpuArray
    gpu: GpuShader
    cold_latency_s: float
    cold_bandwidth: float

    def seconds(self, row: Row) -> float:
        """Stand-alone time of one operator."""
        m, n, k = (np.asarray([float(x)]) for x in (row.m, row.n, row.k))
        if row.device == "npu":
            return float(self.npu.seconds(m, n, k)[0])
        cold = self.gpu.model_copy(update={"bandwidth_bytes_per_s": self.cold_bandwidth})
        return self.cold_latency_s + float(cold.seconds(m, n, k)[0])


def read_rows(data: dict[str, Any], range_weight: float) -> list[Row]:
    """Points; and of ranges both ends: the first token count takes the first time."""
    rows = [
        Row(r["m"], r["n"], r["k"], d, r[d] * US)
        for r in data["operator_latency_us"]
        for d in ("gpu", "npu")
    ]
    for r in data["operator_latency_range_us"]:
        for d in ("gpu", "npu"):
            ends = zip(r["m"], r[d], strict=True)
            rows += [Row(m, r["n"], r["k"], d, us * US, range_weight) for m, us in ends]
    # The file's first remark: on 4096 × 4096 the GPU takes 53.5 µs per token up to 128 tokens.
    rows.append(Row(64, 4096, 4096, "gpu", (511 + 63 * 53.5) * US, range_weight))
    return rows


def models(v: npt.NDArray[np.float64], gpu_bandwidth: float) -> Fit:
    """Parameters to models."""
    setup, stream, flops, resident, direct, tiled, unpack, cold_s, cold_bandwidth = map(float, v)
    npu = NpuArray(
        setup_s=setup, bytes_per_weight=BYTES_PER_WEIGHT, bandwidth_bytes_per_s=stream,
        flops_per_s=flops, resident_k=resident,
    )  # fmt: skip
    gpu = GpuShader(
        bytes_per_weight=BYTES_PER_WEIGHT, bandwidth_bytes_per_s=gpu_bandwidth,
        direct_flops_per_s=direct, tiled_flops_per_s=tiled, unpack_s_per_weight=unpack,
    )  # fmt: skip
    return Fit(npu, gpu, cold_s, cold_bandwidth)


def fit_models(rows: list[Row], gpu_bandwidth: float) -> Fit:
    """Least squares on relative errors."""
    from scipy.optimize import least_squares

    start = np.log([2e-4, 2e10, 4e12, 5e3, 6e11, 1e12, 2e-10, 3e-4, 4e10])

    def errors(x: npt.NDArray[np.float64]) -> list[float]:
        fit = models(np.exp(x), gpu_bandwidth)
        return [row.weight * float(np.log(fit.seconds(row) / row.seconds)) for row in rows]

    lower = np.full(len(start), -np.inf)
    lower[3] = np.log(NARROWEST_K)
    close = {"x_scale": 0.1, "xtol": 1e-10, "ftol": 1e-10}
    found = least_squares(errors, start, bounds=(lower, np.inf), **close)
    # Rounded last: logarithms differ in their last bits from one processor to the next.
    return models(np.asarray([float(f"{v:.5g}") for v in np.exp(found.x)]), gpu_bandwidth)


class Chip(NamedTuple):
    """What a variant of the chip states: models, and bytes per second of both at once."""

    npu: NpuArray
    gpu: GpuShader
    together: float
    about: str

    @property
    def contention(self) -> float:
        """How much longer both take at once, where both stream."""
        alone = self.npu.bandwidth_bytes_per_s + self.gpu.bandwidth_bytes_per_s
        return max(1.0, alone / self.together)


def build_profile(
    name: str, chip: Chip, data: dict[str, Any], power: dict[str, Any] | None
) -> DeviceProfile:
    """The document: constants of `snapdragon_8_gen_3_chip.json`, models, costs between devices."""
    document = json.loads((DATA / "snapdragon_8_gen_3_chip.json").read_text())["profile"]
    slower, gpu = chip.contention, chip.gpu
    speeds = {"gpu": gpu.bandwidth_bytes_per_s, "npu": chip.npu.bandwidth_bytes_per_s}
    bandwidth = {f"{kind}_alone_bytes_per_s": speed for kind, speed in speeds.items()}
    bandwidth |= {f"{kind}_together_bytes_per_s": x / slower for kind, x in speeds.items()}
    sync, finish_s = data["sync_us"], data["sync_us"]["copy_or_finish"] * US
    document |= {
        "name": name,
        "hetero_version": hetero.__version__,
        "bandwidth": bandwidth,
        "contention": [{"phase": "decode", "gpu": slower, "npu": slower}],
        "sync": {
            "gpu": {
                "submit_busy_s": sum(sync["gpu_submit"]) / 2 * US,
                "submit_empty_s": sum(sync["gpu_submit_empty_queue"]) / 2 * US,
                "wait_s": {"fast": FAST_WAIT_S, "finish": finish_s},
                "copy_fixed_s": finish_s,
            },
            "npu": {"call_s": chip.npu.setup_s},
        },
        "power": power,
        "notes": [chip.about],
    }
    for kind, capabilities in declared().items():
        document["devices"][kind]["capabilities"] = capabilities.model_dump(mode="json")
    regimes = {"bytes_per_s": gpu.bandwidth_bytes_per_s, "flops_per_s": gpu.tiled_flops_per_s}
    for found in document["predictors"]:
        model: NpuArray | GpuShader = gpu if found["device"] == "gpu" else chip.npu
        stored = WeightFormat(found["weight_format"]).storage.bytes_per_weight
        found["model"] = model.model_dump() | {"bytes_per_weight": stored} | found["model"]
        found.update({"regimes": regimes} if model is gpu else {})
    for found in document["other_predictors"]:
        byte, flop = 1 / gpu.bandwidth_bytes_per_s, 1 / gpu.tiled_flops_per_s
        found["coefficients"] = {name: count * flop for name, count in found.pop("flops").items()}
        found["coefficients"] |= {name: count * byte for name, count in found.pop("bytes").items()}
    fixed_s, token_s = preparation(data)
    for found in document["preparation_predictors"]:
        each = 1 / data["graph_preparation_ms"]["graphs"]
        found.update({"fixed_s": fixed_s * each, "s_per_token": token_s * each})
    return DeviceProfile.model_validate(document)


def declared() -> dict[str, CapabilityRecord]:
    """Return the capabilities that the backends declare for this chip: bundles share weights."""
    sizes = npu_capabilities.STANDARD_GRAPH_SIZES
    npu = npu_capabilities.capabilities_of(find_chip(SOC), sizes, shared_weights=True)
    known = (gpu_capabilities.capabilities_of(), npu)
    return {x.kind: CapabilityRecord.of(x) for x in known}


def preparation(data: dict[str, Any]) -> tuple[float, float]:
    """Seconds to prepare all graphs: fixed, and for each token."""
    known = data["graph_preparation_ms"]
    per_token = (known["1000"] - known["135"]) / (1000 - 135) * 1e-3
    return known["135"] * 1e-3 - 135 * per_token, per_token


def fit_power(profile: DeviceProfile, data: dict[str, Any]) -> dict[str, Any]:
    """Watts of GPU, NPU and both from three mean powers of a prefill and each plan's busy times."""
    facts = data["power_W_prefill_llama_8b_256"]
    layer_w = facts["hetero_layer"]
    tensor_w = layer_w * facts["hetero_tensor_over_layer"]
    gpu_w = tensor_w / (1 - facts["hetero_tensor_below_gpu_only"])
    planner, scenario = Planner(model_spec("llama-3-8b"), profile), Scenario("prefill", 256)
    gpu, npu, _ = shares(layer_level(planner, scenario))
    npu_w = (layer_w - gpu * gpu_w) / npu
    gpu, npu, both = shares(planner.solve(scenario))
    both_w = (tensor_w - gpu * gpu_w - npu * npu_w) / both
    watts = {"gpu_w": round(gpu_w, 4), "npu_w": round(npu_w, 4), "both_w": round(both_w, 4)}
    source = "fitted to mean power of prefill; idle is contained in the others"
    return {"source": source} | watts


def shares(solution: Solution) -> tuple[float, float, float]:
    """Fractions of a step in which the GPU alone, the NPU alone, both work."""
    gpu = npu = both = 0.0
    for option, _, count in walk(solution.path).steps:
        together = max(option.gpu_s + option.npu_s - option.elapsed_s, 0.0)
        both += count * together
        gpu += count * (option.gpu_s - together)
        npu += count * (option.npu_s - together)
    return gpu / solution.seconds, npu / solution.seconds, both / solution.seconds


def residuals(fit: Fit, rows: list[Row]) -> list[list[str]]:
    """Each timing, what the models say, and the error."""
    return [
        [
            f"{row.n} × {row.k}", str(row.m), row.device, f"{row.seconds / US:.0f}",
            f"{fit.seconds(row) / US:.0f}", f"{100 * (fit.seconds(row) / row.seconds - 1):+.1f} %",
        ]
        for row in rows
    ]  # fmt: skip


def written(data: dict[str, Any], range_weight: float) -> tuple[list[list[str]], dict[str, str]]:
    """Residuals, and the contents of every file that a fit gives by its path in the repository."""
    rows, bandwidth = read_rows(data, range_weight), data["bandwidth_GB_per_s"]
    fit = fit_models(rows, bandwidth["gpu_only"] * 1e9)
    # The page's earlier path: a shipped profile is identified by its bytes.
    about = "fitted to component timings; see docs/snapdragon.md"
    chip = Chip(fit.npu, fit.gpu, bandwidth["gpu_and_npu"] * 1e9, about)
    power = fit_power(build_profile(NAME, chip, data, None), data)
    # NPU kernels as later work reports them: 55 GB/s alone, calls included, any k.
    changes = {"bandwidth_bytes_per_s": 55e9, "resident_k": None, "setup_s": STRONG_CALL_S}
    about = "stronger NPU kernels: 55 GB/s alone, 10 µs a call, no FFN-down penalty"
    strong = Chip(
        fit.npu.model_copy(update=changes), fit.gpu, bandwidth["achievable_max"] * 1e9, about
    )
    variants = {NAME: chip, f"{NAME}-strong-npu": strong}
    files = {
        f"profiler/profiles/{name}.json": build_profile(name, x, data, power).to_json()
        for name, x in variants.items()
    }
    told, fixed = residuals(fit, rows), preparation(data)
    cells = "\n".join(f"| {' | '.join(row)} |" for row in told)
    assert fit.npu.resident_k is not None
    template = (DATA / "snapdragon.md.in").read_text(encoding="utf-8")
    files["docs/reference/simulated-snapdragon.md"] = template.format(
        setup=fit.npu.setup_s / US, npu_bw=fit.npu.bandwidth_bytes_per_s / 1e9,
        npu_tf=fit.npu.flops_per_s / 1e12, resident=fit.npu.resident_k,
        gpu_bw=fit.gpu.bandwidth_bytes_per_s / 1e9, direct=fit.gpu.direct_flops_per_s / 1e12,
        tiled=fit.gpu.tiled_flops_per_s / 1e12, unpack=fit.gpu.unpack_s_per_weight * 1e12,
        cold=fit.cold_latency_s / US, cold_bw=fit.cold_bandwidth / 1e9,
        bytes=WeightFormat.W4A16.storage.bytes_per_weight, domains=find_chip(SOC).domains,
        contention=chip.contention, prepare=fixed[0] * 1e3, prepare_token=fixed[1] * 1e3,
        table=f"| {HEAD.replace('|', ' | ')} |\n|{'---|' * 6}\n{cells}", **power,
    )  # fmt: skip
    return told, files


HEAD = "n × k|m|device|paper, µs|model, µs|error"


def fit(
    check: Annotated[bool, typer.Option(help="exit 1 if the files are not a fit's")] = False,
    range_weight: Annotated[float, typer.Option(help="of both ends of ranges")] = RANGE_WEIGHT,
    out: Annotated[Path | None, typer.Option(help="folder for files, not the shipped ones")] = None,
) -> None:
    """Fit the simulated Snapdragon 8 Gen 3 to component timings, and write the shipped profiles.

    Reads `bench/data/snapdragon_8_gen_3_calibration.json` and nothing else of the paper; writes the
    profile, the variant with stronger NPU kernels, and the residuals
    (docs/reference/simulated-snapdragon.md).
    """
    if range_weight != RANGE_WEIGHT and out is None:
        raise typer.BadParameter("another reading of the ranges needs --out")
    told, contents = written(json.loads(CALIBRATION.read_text("utf-8")), range_weight)
    print("simulated; models fitted to the paper's component timings\n")
    table(HEAD, told)
    paths = {(out / Path(x).name if out else ROOT / x): text for x, text in contents.items()}
    if check:
        stale = [str(p) for p, text in paths.items() if p.read_text(encoding="utf-8") != text]
        print("stale: " + ", ".join(stale) if stale else "files are up to date")
        raise typer.Exit(bool(stale))
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)

"""From device models of a simulated chip to a `DeviceProfile` (used by `fit_snapdragon.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hetero
from hetero.backends.ops import OperandOrder, WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler import grid
from hetero.profiler.device_model import GpuShader, NpuArray
from hetero.profiler.records import (
    Bandwidth,
    CapabilityRecord,
    Contention,
    DeviceProfile,
    DeviceRecord,
    DeviceSync,
    Environment,
    Knots,
    MatMulPredictor,
    OtherPredictor,
    Power,
    PreparationPredictor,
    Quarantine,
    Regimes,
    ShapeRange,
)

BYTES_PER_WEIGHT = 0.5 + 2 / 128  # 4 bits, one fp16 scale for each group of 128
ORDER_SLOWDOWN = 6.0  # operand order that keeps the large tensor stationary
STRONG_CALL_S = 10e-6  # a blocking call of the stronger kernels: an assumption
FAST_WAIT_S = 5e-6  # polling a flag for "a few microseconds"
CREATED = "2026-11-21"
US = 1e-6


@dataclass(frozen=True)
class Chip:
    """Everything that the profile of a simulated chip states."""

    npu: NpuArray
    gpu: GpuShader
    contention: float
    submit_busy_s: float
    submit_empty_s: float
    finish_s: float
    prepare_fixed_s: float
    prepare_s_per_token: float
    graphs: int
    graph_sizes: tuple[int, ...]
    row_alignment: int
    token_alignment: int
    together: float
    about: str

    @classmethod
    def of(cls, npu: NpuArray, gpu: GpuShader, data: dict[str, Any]) -> Chip:
        """With the costs between the devices from the calibration data."""
        sync = data["sync_us"]
        prepare = data["graph_preparation_ms"]
        per_token = (prepare["1000"] - prepare["135"]) / (1000 - 135) * 1e-3
        together = data["bandwidth_GB_per_s"]["gpu_and_npu"] * 1e9
        return cls(
            npu=npu,
            gpu=gpu,
            contention=_contention(npu, gpu, together),
            submit_busy_s=sum(sync["gpu_submit"]) / 2 * US,
            submit_empty_s=sum(sync["gpu_submit_empty_queue"]) / 2 * US,
            finish_s=sync["copy_or_finish"] * US,
            prepare_fixed_s=prepare["135"] * 1e-3 - 135 * per_token,
            prepare_s_per_token=per_token,
            graphs=prepare["graphs"],
            graph_sizes=(1, *data["standard_graph_sizes"]),
            row_alignment=data["alignment"]["rows"],
            token_alignment=data["alignment"]["tokens"],
            together=together,
            about="fitted to component timings; see docs/snapdragon.md",
        )

    def with_strong_npu(self, data: dict[str, Any]) -> Chip:
        """NPU kernels as later work reports them: 55 GB/s alone, calls included, no penalty for
        wide k.
        """
        npu = self.npu.model_copy(
            update={"bandwidth_bytes_per_s": 55e9, "resident_k": None, "setup_s": STRONG_CALL_S}
        )
        together = data["bandwidth_GB_per_s"]["achievable_max"] * 1e9
        return replace(
            self,
            npu=npu,
            contention=_contention(npu, self.gpu, together),
            together=together,
            about="stronger NPU kernels: 55 GB/s alone, 10 µs a call, no FFN-down penalty",
        )


def _contention(npu: NpuArray, gpu: GpuShader, together: float) -> float:
    return max(1.0, (npu.bandwidth_bytes_per_s + gpu.bandwidth_bytes_per_s) / together)


def build_profile(name: str, chip: Chip, power: Power | None) -> DeviceProfile:
    """The document."""
    return DeviceProfile(
        name=name,
        created=CREATED,
        hetero_version=hetero.__version__,
        environment=Environment(system="simulated", processor="Snapdragon 8 Gen 3 (simulated)"),
        devices={"gpu": _gpu(), "npu": _npu(chip)},
        quarantined=_no_float_decode(),
        bandwidth=_bandwidth(chip),
        contention=(Contention(phase="decode", gpu=chip.contention, npu=chip.contention),),
        sync=_sync(chip),
        power=power,
        predictors=_predictors(chip),
        other_predictors=_others(chip),
        preparation_predictors=_preparation(chip),
        notes=(chip.about,),
    )


def _gpu() -> DeviceRecord:
    return DeviceRecord(
        numbers="simulated",
        backend="simulated",
        name="Adreno 750 (simulated)",
        driver="none",
        fingerprint="simulated|gpu",
        capabilities=CapabilityRecord(
            asynchronous=True, weight_formats=(WeightFormat.W4A16,), row_alignment=16
        ),
    )


def _npu(chip: Chip) -> DeviceRecord:
    return DeviceRecord(
        numbers="simulated",
        backend="simulated",
        name="Hexagon (simulated)",
        driver="none",
        fingerprint="simulated|npu",
        capabilities=CapabilityRecord(
            static_shapes=True,
            graph_sizes=chip.graph_sizes,
            weight_formats=(WeightFormat.W4A16, WeightFormat.W4A8),
            row_alignment=chip.row_alignment,
            token_alignment=chip.token_alignment,
            operand_orders=("plain", "transposed"),
            per_graph_size="graph",
        ),
    )


def _no_float_decode() -> tuple[Quarantine, ...]:
    detail = "no w4a16 kernel for decoding on this NPU (section 5.1: it decodes in integers)"
    return tuple(
        Quarantine(
            device="npu",
            op="MatMul",
            weight_format=WeightFormat.W4A16,
            order=order,
            shape_class=grid.shape_class(1, n, k),
            tolerance=0.0,
            detail=detail,
        )
        for order in _ORDERS
        for n, k in ((1, 1), (2, 1), (1, 2))
    )


_ORDERS: tuple[OperandOrder, ...] = ("plain", "transposed")


def _bandwidth(chip: Chip) -> Bandwidth:
    gpu, npu = chip.gpu.bandwidth_bytes_per_s, chip.npu.bandwidth_bytes_per_s
    return Bandwidth(
        gpu_alone_bytes_per_s=gpu,
        npu_alone_bytes_per_s=npu,
        gpu_together_bytes_per_s=gpu / chip.contention,
        npu_together_bytes_per_s=npu / chip.contention,
    )


def _sync(chip: Chip) -> dict[DeviceKind, DeviceSync]:
    gpu = DeviceSync(
        submit_busy_s=chip.submit_busy_s,
        submit_empty_s=chip.submit_empty_s,
        wait_s={"fast": FAST_WAIT_S, "finish": chip.finish_s},
        copy_fixed_s=chip.finish_s,
    )
    return {"gpu": gpu, "npu": DeviceSync(call_s=chip.npu.setup_s)}


def _predictors(chip: Chip) -> tuple[MatMulPredictor, ...]:
    measured = ShapeRange(m=(1, 1024), n=(4096, 28672), k=(4096, 14336))
    unused = Knots(tokens=(1,), coefficients=((0.0, 0.0, 0.0, 0.0),))
    regimes = Regimes(
        bytes_per_s=chip.gpu.bandwidth_bytes_per_s, flops_per_s=chip.gpu.tiled_flops_per_s
    )
    gpu = MatMulPredictor(
        device="gpu",
        weight_format=WeightFormat.W4A16,
        knots=unused,
        model=chip.gpu,
        measured=measured,
        regimes=regimes,
    )
    npu = [
        MatMulPredictor(
            device="npu",
            weight_format=weight_format,
            order=order,
            knots=unused,
            model=chip.npu.model_copy(
                update={"order_slowdown": ORDER_SLOWDOWN if order == "plain" else 1.0}
            ),
            measured=measured,
        )
        for weight_format in (WeightFormat.W4A16, WeightFormat.W4A8)
        for order in _ORDERS
    ]
    return (gpu, *npu)


def _others(chip: Chip) -> tuple[OtherPredictor, ...]:
    """fp16 activations at the GPU's bandwidth; attention also computes; one submission each."""
    byte = 1 / chip.gpu.bandwidth_bytes_per_s
    flop = 1 / chip.gpu.tiled_flops_per_s
    terms = {
        "Embed": {"elements": (2 + BYTES_PER_WEIGHT) * byte},
        "RMSNorm": {"elements": 4 * byte},
        "RMSNorm+add": {"elements": 8 * byte},
        "Rope": {"elements": 4 * byte},
        "GatedAct": {"elements": 6 * byte},
        "Attention": {"pairs": 4 * flop, "cached": 4 * byte, "elements": 2 * byte},
    }
    return tuple(
        OtherPredictor(
            device="gpu",
            op=op,
            coefficients=found,
            max_m=1024,
            max_context=4096,
        )
        for op, found in terms.items()
    )


def _preparation(chip: Chip) -> tuple[PreparationPredictor, ...]:
    each = 1 / chip.graphs
    return tuple(
        PreparationPredictor(
            device="npu",
            weight_format=weight_format,
            fixed_s=chip.prepare_fixed_s * each,
            s_per_byte=0.0,
            cached_fixed_s=0.0,
            cached_s_per_byte=0.0,
            s_per_token=chip.prepare_s_per_token * each,
            layers_share=True,  # four graphs in all (section 5.2.2)
        )
        for weight_format in (WeightFormat.W4A16, WeightFormat.W4A8)
    )

"""`DeviceProfile`: everything that was measured on one machine, and what was fitted to it.

Units are in the names: seconds `_s`, bytes `_bytes`, `_per_s`. Notation as in
`hetero.backends.ops`: m tokens, n output features (rows of the weight), k input features.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, get_args

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import OperandOrder
from hetero.backends.protocol import Capabilities, Device, DeviceKind, PerGraphSize
from hetero.backends.registry import EVERY_CORE
from hetero.profiler import profile_files
from hetero.profiler.device_model import DeviceModel
from hetero.profiler.errors import ProfileError, ProfileWarning

SCHEMA_VERSION: Final = 1
DECODE_TOKENS: Final = 8  # largest token count of the decode phase (speculative verification)
MIN_SAMPLES: Final = 5  # of a row that says how its kind varies

Phase: TypeAlias = Literal["prefill", "decode"]
Numbers: TypeAlias = Literal["measured", "emulated", "compiler-predicted", "simulated", "fitted"]
Flag: TypeAlias = Literal["unconverged", "drifted", "disturbed"]
UnitKind: TypeAlias = Literal["cpu", "gpu", "npu"]
Kind: TypeAlias = tuple[DeviceKind, Phase, WeightFormat]  # of matmul kernels
# Values beyond these are no time, speed or size of anything, and would overflow somewhere.
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(ge=1e-30, le=1e30)]
Quantity = Annotated[float, Field(ge=0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Watts = Annotated[float, Field(ge=0, le=1e6)]
PerByte = Annotated[float, Field(ge=0, le=1e-3)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]
# Most tokens of one launch of a matmul, from so many input features k on.
LaunchTokens = Annotated[tuple[tuple[Count, Tokens], ...], Field(min_length=1, max_length=16)]


def phase_of(m: int) -> Phase:
    """Decode up to 8 tokens, prefill above."""
    return "decode" if m <= DECODE_TOKENS else "prefill"


class Record(BaseModel):
    """Base of all: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="null"
    )


class CapabilityRecord(Record):
    """`hetero.backends.protocol.Capabilities` as measured devices declared them."""

    unified_memory: bool = True
    coherent: bool = True
    asynchronous: bool = False
    static_shapes: bool = False
    graph_sizes: Annotated[tuple[Tokens, ...], Field(max_length=64)] = ()
    weight_formats: tuple[WeightFormat, ...] = ()
    row_alignment: Count = 16
    token_alignment: Count = 1
    fused_groups: tuple[str, ...] = ()
    operand_orders: tuple[OperandOrder, ...] = ("plain",)
    early_visibility: bool | None = None
    memory_limit_bytes: Whole | None = None
    weight_bytes: dict[WeightFormat, Positive] = {}
    per_graph_size: PerGraphSize = "nothing"
    attention_heads: bool = False
    launch_tokens: dict[WeightFormat, LaunchTokens] = {}
    experts: bool = False

    @model_serializer(mode="wrap")
    def _without_experts(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `experts` where there are none: fingerprints of profiles stay as they were."""
        document: dict[str, Any] = serialise(self)
        if not self.experts:
            document.pop("experts", None)
        return document

    @classmethod
    def of(cls, capabilities: Capabilities) -> Self:
        """Copy from an open device."""
        return cls.model_validate(
            {name: getattr(capabilities, name) for name in cls.model_fields}, strict=False
        )

    def on(self, kind: DeviceKind) -> Capabilities:
        """Return the capabilities as an open device declares them, which plays this role."""
        return Capabilities(kind=kind, **dict(self))


class DeviceRecord(Record):
    """Identity of one device and what it can do.

    numbers       how the times of this device came about; `emulated`: by running the chip's code on
                  another processor, whose time they are
    fingerprint   `DeviceInfo.fingerprint` at measuring time
    row_stage      weights whose rows pad to the same multiple take the same time; 1: no stages
    token_stage    the same for prefill's token counts (more than 8); 1: no stages
    """

    numbers: Numbers = "measured"
    backend: str
    name: str
    driver: str
    details: dict[str, str] = {}
    fingerprint: str
    capabilities: CapabilityRecord
    row_stage: Count = 1
    token_stage: Count = 1

    @property
    def on_processor(self) -> bool:
        """Return whether it computes on cores of the processor."""
        return "cpu" in self.details or self.backend == "ort-cpu"

    @classmethod
    def of(cls, device: Device, *, row_stage: int = 1, token_stage: int = 1) -> Self:
        """Describe an open device."""
        info = device.info
        return cls(
            numbers="emulated" if "emulated" in info.details else "measured",
            backend=info.backend,
            name=info.name,
            driver=info.driver,
            details=dict(info.details),
            fingerprint=info.fingerprint,
            capabilities=CapabilityRecord.of(device.capabilities),
            row_stage=row_stage,
            token_stage=token_stage,
        )


class Environment(Record):
    """The machine at measuring time; what the platform does not report is None."""

    system: str = ""
    processor: str = ""
    cores: Whole | None = None
    memory_bytes: Whole | None = None
    cache_bytes: Whole | None = None
    clock_hz: Number | None = None
    governor: str | None = None
    temperature_c: Number | None = None
    gpu_core: Whole | None = None
    control_core: Whole | None = None
    load_average: Number | None = None
    packages: dict[str, str] = {}


class TimingStats(Record):
    """Summary of raw samples.

    Median, relative half-width of its 95 % confidence interval, samples, relative spread (1.4826 ·
    median absolute deviation / median).
    """

    seconds: Positive
    ci: Quantity | None = None
    spread: Quantity = 0.0
    samples: Count = 1


class MatMulRow(TimingStats):
    """Time of one matmul kernel.

    `seconds` is normalised by the reference kernel: `reference` is reference time during the row /
    its median over the run (1: no drift). `skew` is mean / median of the samples; `seconds`
    contains that of all kernels of its kind (`measure.to_means`).
    """

    device: DeviceKind
    weight_format: WeightFormat
    order: OperandOrder = "plain"
    m: Count
    n: Count
    k: Count
    reference: Positive = 1.0
    skew: Positive = 1.0
    block: Whole = 0
    flags: tuple[Flag, ...] = ()

    @property
    def phase(self) -> Phase:
        """Return the phase of the row's token count."""
        return phase_of(self.m)

    @property
    def key(self) -> tuple[str, str, str, int, int, int]:
        """Return what identifies the kernel and size."""
        return (self.device, self.weight_format.value, self.order, self.m, self.n, self.k)

    @property
    def kind(self) -> Kind:
        """Return device, phase and format: rows that vary alike."""
        return self.device, self.phase, self.weight_format


def typical(rows: Iterable[MatMulRow], of: Callable[[MatMulRow], float]) -> dict[Kind, float]:
    """Return the median of the samples' variation by kind, without rows of few samples."""
    values_of: dict[Kind, list[float]] = {}
    for row in rows:
        if row.samples >= MIN_SAMPLES:
            values_of.setdefault(row.kind, []).append(of(row))
    return {kind: float(np.median(values)) for kind, values in values_of.items()}


class NonMatmulRow(TimingStats):
    """Time of an operation that is not a matmul.

    `op` is the record's class name, `sizes` its sizes by name, `context` the tokens in the KV
    cache before the call.
    """

    device: DeviceKind
    op: str
    sizes: dict[str, Whole]
    m: Count
    context: Annotated[int, Field(ge=0, lt=2**31)] = 0
    flags: tuple[Flag, ...] = ()


class PreparationRow(Record):
    """Time to prepare one matmul graph or kernel: the first time, and again with warm caches."""

    device: DeviceKind
    weight_format: WeightFormat
    n: Count
    k: Count
    cold_s: Seconds
    cached_s: Seconds


class ShapeRange(Record):
    """Measured range; outside it a prediction is an extrapolation."""

    m: tuple[Count, Count]
    n: tuple[Count, Count]
    k: tuple[Count, Count]


class Validation(Record):
    """Error of predicting (n, k) pairs that were left out of the fit, whole, as fractions.

    mape      mean |predicted - measured| / measured
    p95       95th percentile of the same
    folds     groups of pairs that were left out in turn; 0: too few pairs to leave any out
    """

    phase: Phase
    mape: Number
    p95: Number
    folds: Whole
    rows: Whole


class Knots(Record):
    """seconds(m, n, k): for each m in `tokens` linear in (1, n, k, n·k), linear in m between them.

    `coefficients[i]` are seconds per feature at `tokens[i]`, all of them non-negative. Before the
    first and after the last knot the outer segment continues.
    """

    tokens: tuple[Count, ...]
    coefficients: tuple[tuple[Number, Number, Number, Number], ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.tokens or len(self.tokens) != len(self.coefficients):
            raise ValueError("knots need as many tokens as coefficients, and at least one")
        if list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"tokens of knots must rise, got {self.tokens}")
        return self


class Tree(Record):
    """A regression tree as arrays over its nodes.

    Node i goes to `left[i]` if feature `feature[i]` is ≤ `threshold[i]`, else to `right[i]`; a leaf
    has `feature[i] = -1` and answers `value[i]`. `spread[i]` is the relative standard deviation of
    what the leaf's rows were off by when they were left out (empty: not known).
    """

    feature: tuple[int, ...]
    threshold: tuple[Number, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[Number, ...]
    spread: tuple[Quantity, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        count = len(self.feature)
        arrays = [self.threshold, self.left, self.right, self.value]
        arrays += [self.spread] if self.spread else []
        if count == 0 or any(len(array) != count for array in arrays):
            raise ValueError("the arrays of a tree have one entry for each node")
        for i, feature in enumerate(self.feature):
            children = (self.left[i], self.right[i])
            if feature >= 0 and not all(i < child < count for child in children):
                raise ValueError(f"node {i} of a tree must point forward to nodes of the tree")
        return self


class Regimes(Record):
    """A device's times as a person reads them.

    Memory-bound up to `knee_m` tokens at `bytes_per_s`, then compute-bound at `flops_per_s`.
    """

    bytes_per_s: Positive | None = None
    flops_per_s: Positive | None = None
    knee_m: Positive | None = None


class MatMulPredictor(Record):
    """Predicts matmuls of one device, format and order: knots · exp(mean of the trees' answers).

    Knots are of one launch where a call runs several (`Capabilities.launch_tokens`). `features`
    names the trees' columns (`hetero.profiler.features.FEATURES`); without trees the knots are the
    whole answer (piecewise linear, the GPU). A `model`, where there is one, answers
    instead of both (simulated chips). `scale` multiplies the answers of a phase where a machine is
    slower or faster than the one that was measured (`hetero.profiler.scaling`; 1 where it is not
    there).
    """

    device: DeviceKind
    weight_format: WeightFormat
    order: OperandOrder = "plain"
    knots: Knots
    model: DeviceModel | None = None
    features: tuple[str, ...] = ()
    trees: tuple[Tree, ...] = ()
    scale: dict[Phase, Positive] = {}
    measured: ShapeRange
    regimes: Regimes = Regimes()
    validation: tuple[Validation, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        used = {feature for tree in self.trees for feature in tree.feature}
        if used and max(used) >= len(self.features):
            raise ValueError(f"a tree uses column {max(used)} of {len(self.features)} features")
        return self


class NonMatmulPredictor(Record):
    """seconds = Σ coefficient · work, with the work terms of `hetero.profiler.predict.work`.

    Up to `DECODE_TOKENS` tokens the coefficients are those of `decode` where there are some: what
    few tokens touch stays in the caches. `max_m` and `max_context` bound what was measured.
    """

    device: DeviceKind
    op: str
    coefficients: dict[str, Number]
    decode: dict[str, Number] | None = None
    max_m: Count
    max_context: Annotated[int, Field(ge=0, lt=2**31)] = 0
    mape: Number = 0.0


class PreparationPredictor(Record):
    """seconds = fixed_s + s_per_byte · packed bytes of the weight + s_per_token · graph size.

    layers_share    one graph serves that matmul of all layers: weights are its inputs
    """

    device: DeviceKind
    weight_format: WeightFormat
    fixed_s: Seconds
    s_per_byte: PerByte
    cached_fixed_s: Seconds
    cached_s_per_byte: PerByte
    s_per_token: Seconds = 0.0
    layers_share: bool = False


class Bandwidth(Record):
    """Weight bytes per second of one-token matmuls, out of cache (paper section 3.3)."""

    gpu_alone_bytes_per_s: Positive | None = None
    npu_alone_bytes_per_s: Positive | None = None
    gpu_together_bytes_per_s: Positive | None = None
    npu_together_bytes_per_s: Positive | None = None

    @property
    def together_bytes_per_s(self) -> float | None:
        """Sum of both while both run."""
        if self.gpu_together_bytes_per_s is None or self.npu_together_bytes_per_s is None:
            return None
        return self.gpu_together_bytes_per_s + self.npu_together_bytes_per_s


class Contention(Record):
    """Factor by which each device is slower while the other runs a kernel.

    Both kernels have the same phase and weight format (None: any format).
    """

    phase: Phase
    weight_format: WeightFormat | None = None
    gpu: Factor
    npu: Factor


class Sleep(Record):
    """Lateness of `time.sleep(requested_s)`, with the system's or a 1 ns timer slack."""

    requested_s: Seconds
    timer_slack_ns: Whole | None = None
    late_median_s: Seconds
    late_p99_s: Seconds


class IdleCost(Record):
    """Extra time of a burst of launches after an idle gap, compared with one right after another.

    Beyond `DeviceSync.submit_empty_s`, which any launch to an empty queue costs. A device whose
    clock falls while it waits (Adreno) has more with longer gaps.
    """

    gap_s: Seconds
    slower_s: Seconds


class DeviceSync(Record):
    """Costs around a kernel on one device.

    submit_busy_s, submit_empty_s    host time of `submit` after another launch; and how much more
                                     a launch takes from submission to end in an empty queue
    idle       what idle gaps cost beyond that, by rising gap; none where nothing was found
    ring_s     from a signal (`SupportsSignals`) until the call after its wait starts
    chain_s    how much less a launch takes in a fused launch (`SupportsFusedLaunch`) than in a full
               queue
    wait_s     method -> time from the kernel's end to the caller knowing; methods are `finish`
               (blocking call), `event` (its status polled), `flag` (a completion flag polled),
               `fast` (the best usable)
    call_s     fixed cost of a blocking call
    restart_s  how much longer one takes if its thread submitted to the GPU and polled it before
    copy_fixed_s, copy_s_per_byte    buffer copy; map_s: mapping a buffer that is mapped already
    """

    submit_busy_s: Seconds = 0.0
    submit_empty_s: Seconds = 0.0
    idle: tuple[IdleCost, ...] = ()
    ring_s: Seconds | None = None
    chain_s: Seconds | None = None
    wait_s: dict[str, Seconds] = {}
    call_s: Seconds = 0.0
    restart_s: Seconds = 0.0
    copy_fixed_s: Seconds = 0.0
    copy_s_per_byte: PerByte = 0.0
    map_s: Seconds = 0.0
    notes: dict[str, str] = {}


class HostSync(Record):
    """Costs of a thread of the host for sleeping and waking, and for a step.

    `step_s` is a step's besides its launches, before the first and after the last (None: not
    measured).
    """

    sleep: tuple[Sleep, ...] = ()
    thread_wake_s: Seconds | None = None
    step_s: Seconds | None = None


class Storage(Record):
    """Reading a mapped file whose pages are not in memory, in pieces of so many bytes."""

    read_bytes_per_s: Positive
    piece_bytes: Count


class EveryCore(Record):
    """Times of steps where the GPU that is played by one core of a processor has all `cores`.

    They are those of one core / speedup + layers · layer_s (`hetero.measuring.every_core`).
    """

    weight_format: WeightFormat
    phase: Phase
    cores: Count
    speedup: Factor
    layer_s: Seconds

    def seconds(self, one_s: float, layers: int) -> float:
        """Return the time of a step that takes `one_s` on one core."""
        return one_s / self.speedup + layers * self.layer_s


class FittedUnit(Record):
    """A processor as seven numbers, fitted to an engine's rates of whole models (`fitted_units`).

    It predicts whole models on that processor alone; plans ask the predictors of `devices`.

    engine                      that reached the rates, such as `llama.cpp`
    bytes_per_weight            of the rates' models; call_tokens: of one call of a prompt
    bandwidth_bytes_per_s       weights and activations
    flops_per_s                 of matmuls
    attention_flops_per_s       of scores and their sums
    cache_bytes_per_s           cached keys and values
    call_s                      each operation, whatever its size
    state_flops_per_s           of a gated delta rule; state_call_s: each, beyond `call_s`
    validation                  of models that were left out of the fit, whole
    """

    device: UnitKind
    engine: str
    bytes_per_weight: Positive
    call_tokens: Tokens
    bandwidth_bytes_per_s: Positive
    flops_per_s: Positive
    attention_flops_per_s: Positive
    cache_bytes_per_s: Positive
    call_s: Seconds
    state_flops_per_s: Positive
    state_call_s: Seconds = 0.0
    validation: tuple[Validation, ...] = ()


class Power(Record):
    """Mean power while the device works, and energy source; what cannot be read is absent."""

    source: str
    idle_w: Watts | None = None
    gpu_w: Watts | None = None
    npu_w: Watts | None = None
    both_w: Watts | None = None


class Quarantine(Record):
    """A kernel that computes wrongly here; the solver may not use it.

    `shape_class` as `hetero.profiler.grid.shape_class`; empty: every shape.
    """

    device: DeviceKind
    op: str
    weight_format: WeightFormat | None = None
    order: OperandOrder = "plain"
    shape_class: str = ""
    error: Number | None = None
    tolerance: Number
    detail: str


class ReferencePoint(Record):
    """One timing of a reference kernel: when (since the start), and how long."""

    device: DeviceKind
    phase: Phase
    at_s: Seconds
    seconds: Positive


class StageCheck(Record):
    """A pruned size that was measured after all, with the size that stands for it."""

    device: DeviceKind
    m: Count
    n: Count
    k: Count
    measured_s: Positive
    stage_s: Positive


class Coverage(Record):
    """Coverage of the grid, and the settings of measuring."""

    quick: bool = False
    budget_s: Seconds = 0.0
    spent_s: Seconds = 0.0
    grid_tasks: Whole = 0
    measured_tasks: Whole = 0
    pruned_tasks: Whole = 0
    finished: bool = False
    seed: Whole = 0


class DeviceProfile(Record):
    """See the module's docstring and docs/explanation/profiler.md."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    created: str
    hetero_version: str
    environment: Environment = Environment()
    coverage: Coverage = Coverage()
    devices: dict[DeviceKind, DeviceRecord]
    quarantined: tuple[Quarantine, ...] = ()
    bandwidth: Bandwidth = Bandwidth()
    contention: tuple[Contention, ...] = ()
    sync: dict[DeviceKind, DeviceSync] = {}
    host_sync: HostSync = HostSync()
    every_core: tuple[EveryCore, ...] = ()
    units: tuple[FittedUnit, ...] = ()
    storage: Storage | None = None
    power: Power | None = None
    predictors: tuple[MatMulPredictor, ...] = ()
    other_predictors: tuple[NonMatmulPredictor, ...] = ()
    preparation_predictors: tuple[PreparationPredictor, ...] = ()
    matmuls: tuple[MatMulRow, ...] = ()
    others: tuple[NonMatmulRow, ...] = ()
    preparation: tuple[PreparationRow, ...] = ()
    references: tuple[ReferencePoint, ...] = ()
    stage_checks: tuple[StageCheck, ...] = ()
    notes: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _as_before(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was added later where there is none: fingerprints stay as they were."""
        document: dict[str, Any] = serialise(self)
        for name in ("units", "storage"):
            if not getattr(self, name):
                document.pop(name, None)
        return document

    def __repr__(self) -> str:
        """Return which profile it is; its document is `model_dump_json()`."""
        devices = ", ".join(f"{kind}={r.name!r}" for kind, r in self.devices.items())
        return f"DeviceProfile({self.name!r}, {devices}, {len(self.matmuls)} matmuls)"

    __str__ = __repr__

    @property
    def numbers(self) -> Numbers:
        """Return how the times of matmuls came about: the least real ones."""
        timed = {row.device for row in self.matmuls} or set(self.devices)
        return max((self.devices[kind].numbers for kind in timed), key=get_args(Numbers).index)

    @property
    def fingerprint(self) -> str:
        """Return twelve hexadecimal digits that change with any number of the profile."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def differences(self, devices: Iterable[Device]) -> list[str]:
        """Return how open devices differ from those measured; empty if the profile is theirs.

        A profile of one core has the speed of every core of it, too (`every_core`).
        """
        differences = []
        for device in devices:
            kind = device.capabilities.kind
            measured, info = self.devices.get(kind), device.info
            if measured is None:
                differences.append(f"it has no {kind}")
            elif measured.fingerprint != info.fingerprint and not (
                info.backend == EVERY_CORE
                and (measured.name, measured.driver) == (info.name, info.driver)
            ):
                differences.append(
                    f"its {kind} is {measured.name} ({measured.backend}, {measured.driver}), "
                    f"here is {info.name} ({info.backend}, {info.driver})"
                )
        return differences

    def warn_if_foreign(self, devices: Iterable[Device]) -> None:
        """Warn once if the profile was not taken on these devices.

        The warning is a `ProfileWarning`.
        """
        differences = self.differences(devices)
        if differences:
            warnings.warn(
                f"profile {self.name} was taken elsewhere ({'; '.join(differences)}): "
                "predictions may be off, take one here with `hetero profile`",
                ProfileWarning,
                stacklevel=2,
            )

    def to_json(self) -> str:
        """Return the document that `save` writes."""
        return profile_files.to_text(self.model_dump(mode="json"))

    def save(self, path: str | Path) -> None:
        """Write atomically. Raises `ProfileError` if that is not possible."""
        profile_files.write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file, or a shipped profile by its name. Raises `ProfileError`."""
        if (
            isinstance(path, str)
            and path in profile_files.shipped_names()
            and not os.path.exists(path)
        ):
            path = profile_files.shipped_path(path)
        return cls.parse(profile_files.read_profile(path), path)

    @classmethod
    def parse(cls, text: str, path: str | Path) -> Self:
        """Return the profile that was read from `path`. Raises `ProfileError`."""
        document = profile_files.parse_document(text, path, SCHEMA_VERSION)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ProfileError(
                f"profile {path} is damaged at {where or 'the top'} ({first['msg']}): take it "
                "again with `hetero profile`"
            ) from error
        except RecursionError as error:
            raise ProfileError(f"profile {path} is nested too deeply: it is not one") from error

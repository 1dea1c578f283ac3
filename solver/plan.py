"""`Plan`: which device computes which rectangle of every matmul. A JSON file for people.

A plan may be written by hand. Entries with `m: null` hold for every token count of their phase;
open ranges (`[0, null]`) then end at the token count of the call. An entry for an exact token count
goes before one for any.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from hetero.backends.formats import WeightFormat
from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_text
from hetero.backends.ops import (
    OperandOrder,
)
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.model_graph import MAX_LAYERS, ModelGraph, OpName
from hetero.solver.errors import PlanError
from hetero.solver.names import NamedStrategy
from hetero.solver.prompt_calls import split
from hetero.solver.quality_points import Quality

Phase: TypeAlias = Literal["prefill", "decode"]
Strategy: TypeAlias = Literal[
    "gpu-only", "npu-only", "row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut"
]
FusedGroup: TypeAlias = Literal["feed_forward", "static", "block"]
PrefillMode: TypeAlias = Literal["cut", "whole", "both"]  # of a prompt's calls (`InFlight`)
REPORT_KEY = "report"  # of a report's tables in JSON, next to the plan's own keys
PHASES: tuple[Phase, ...] = ("prefill", "decode")
STEP_TOKENS = 512  # of a call, where a plan holds for any token count
ABSENT_IF_EMPTY: Final = (
    "counts", "fastest", "experts", "npu_experts", "phases", "bands",
    "fastest_answers", "quality",
)  # fmt: skip
# Sizes are int32 on devices; what is beyond these is no time and no size of anything.
Start = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[int, Field(ge=1, lt=2**31)]
MAX_EXPERTS: Final = 4096  # of a layer
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(ge=1e-30, le=1e30)]
Quantity = Annotated[float, Field(ge=0, le=1e30)]


def _also(name: str, old: str) -> Any:
    """Return a field that is also read under its name of earlier plans."""
    return Field(validation_alias=AliasChoices(name, old))


class _Record(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class _OfThree(_Record):
    """A record with a CPU's numbers, which documents of plans for two devices leave out."""

    @model_serializer(mode="wrap")
    def _without_cpu(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: x for k, x in serialise(self).items() if x or not k.startswith("cpu_")}


class Tile(_Record):
    """Rectangle tokens × rows of one matmul's output and the device that computes it.

    Ranges are half open; `None` as the end of `tokens` means the call's last token. `graph_size` is
    the NPU graph's token count (padding included), `None` on a GPU or where any graph serves.
    `order` is the NPU's operand order, `precision` the kernel's format (None: the model's).
    """

    device: DeviceKind
    tokens: tuple[Start, Stop | None]
    rows: tuple[Start, Stop]
    graph_size: Stop | None = None
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None

    @model_validator(mode="after")
    def _fits_its_graph(self) -> Self:
        start, stop = self.tokens
        if self.graph_size is not None and stop is not None and stop - start > self.graph_size:
            raise ValueError(
                f"tile tokens {self.tokens} do not fit its graph of {self.graph_size} tokens"
            )
        return self

    def resolved(self, m: int) -> Tile:
        """Return the same tile with an open token range ended at m."""
        start, stop = self.tokens
        return self.model_copy(update={"tokens": (start, m if stop is None else stop)})

    def clipped(self, m: int) -> Tile:
        """Return the same tile without the tokens from m on; its graph is padded."""
        start, stop = self.tokens
        return self.model_copy(update={"tokens": (start, m if stop is None else min(stop, m))})


class Candidate(_Record):
    """The best tiling of one strategy: its time, and why it lost (or that it was chosen)."""

    strategy: Strategy
    predicted_s: Positive | None
    reason: str
    detail: str = ""


class OpPlan(_OfThree):
    """The partition of one matmul (all layers alike) for a phase and token count.

    `pipe` marks the paper's NPU-only comparison of that name, which alone may give the NPU more
    than two tiles along tokens.
    """

    phase: Phase
    m: Stop | None
    op: OpName
    n: Stop
    k: Stop
    strategy: Strategy
    tiles: Annotated[tuple[Tile, ...], Field(max_length=1024)]
    predicted_s: Positive | None = None
    gpu_s: Quantity | None = None
    npu_s: Quantity | None = None
    cpu_s: Quantity | None = None
    energy_j: Quantity | None = None
    candidates: tuple[Candidate, ...] = ()
    pipe: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.m is None and len({tile.device for tile in self.tiles}) > 1 and self._cuts_tokens():
            raise ValueError(f"{self.phase} {self.op}: a cut along tokens needs an exact m")
        what = f"{self.phase} {self.op}" + (f" at {self.m} tokens" if self.m else "")
        check_cover(self.tiles, m=self.m or 1, n=self.n, what=what)
        if not self.pipe:
            check_npu_tiles(self.tiles, what=what)
        return self

    def clipped(self, m: int) -> OpPlan:
        """Return the same partition with the outputs of the first m tokens only.

        m is at most the entry's. Its times are those of the longer call.
        """
        tiles = (tile.clipped(m) for tile in self.tiles if tile.tokens[0] < m)
        return self.model_copy(update={"m": m, "tiles": tuple(tiles)})

    def _cuts_tokens(self) -> bool:
        return any(tile.tokens != (0, None) for tile in self.tiles)


class HeadCounts(_Record):
    """Key/value heads of an attention that each device has: the NPU the first ones."""

    gpu: Annotated[int, Field(ge=0, lt=2**16)]
    npu: Annotated[int, Field(ge=0, lt=2**16)]

    @property
    def shared(self) -> bool:
        """Return whether both have some."""
        return self.gpu > 0 and self.npu > 0


class AttentionShare(_Record):
    """The heads of attention that each device has in a prompt's calls of m tokens.

    None of m: of any number; all heads on one device mean that of the other operators. Predicted
    seconds are of a layer.
    """

    phase: Literal["prefill"]
    m: Stop | None
    heads: HeadCounts
    predicted_s: Positive | None = None
    gpu_s: Quantity | None = None
    npu_s: Quantity | None = None


class LayerExperts(_Record):
    """The routed experts of a layer that the NPU has, by rising numbers; the GPU has the others."""

    layer: Annotated[int, Field(ge=0, lt=MAX_LAYERS)]
    npu: Annotated[tuple[Start, ...], Field(min_length=1, max_length=MAX_EXPERTS)]

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if list(self.npu) != sorted(set(self.npu)):
            raise ValueError(f"layer {self.layer}: the numbers of the NPU's experts rise")
        return self


class InFlight(_Record):
    """The matmuls of calls of a prompt that are in flight together, for any token count.

    `whole` has none cut ("Fast On-device LLM Inference with NPUs", section 3.4), `both` some, so
    that both devices have as much to do in all, whatever each matmul takes. The mode `cut` is that
    of the plan's own entries.
    """

    mode: Annotated[Literal["whole", "both"], _also("mode", "form")]
    ops: Annotated[tuple[OpPlan, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _holds_for_any_count(self) -> Self:
        if any(x.m is not None or x.phase != "prefill" for x in self.ops):
            raise ValueError("entries of calls in flight are for prompts of any token count")
        return self


class Total(_Record):
    """Predicted time of a prompt, or of a decode step.

    Every layer, attention, norms and the output head.

    `steps` are the token counts of the calls that a prompt of m tokens runs in, each after the
    tokens of those before it. `single_devices` are the times of the plans with all matmuls on one
    device, by its kind; `non_matmul_s` those of the other operators in the first call, each time:
    `head` before the layers, then by what they do (`steps.seconds_by_kind`). `modes` are predicted
    seconds of the prompt's modes, with calls in flight together, of which the runtime takes `mode`.
    `devices` work in it, the output head aside.
    """

    phase: Phase
    m: Stop
    predicted_s: Positive
    tokens_per_s: Positive
    best_single_device_s: Positive
    single_devices: dict[DeviceKind, Positive] = {}
    context: Start = 0
    steps: tuple[Stop, ...] = ()
    energy_j: Quantity | None = None
    best_single_device_j: Quantity | None = None
    non_matmul_s: Annotated[dict[str, Quantity], _also("non_matmul_s", "rest_s")] = {}
    mode: Annotated[PrefillMode, _also("mode", "form")] = "cut"
    modes: Annotated[dict[PrefillMode, Positive], _also("modes", "forms")] = {}
    devices: tuple[DeviceKind, ...] = ()

    @model_validator(mode="after")
    def _steps_are_the_prompt(self) -> Self:
        if self.steps and sum(self.steps) != self.m:
            raise ValueError(f"calls of {self.steps} tokens are no prompt of {self.m}")
        return self


class PlannedPhase(_Record):
    """The devices that compute a phase from a depth of the context on, the output head aside.

    `predicted_s` is of a decode step, or of the longest prompt.
    """

    phase: Phase
    depth_from: Start = 0
    devices: tuple[DeviceKind, ...]
    predicted_s: Positive


class DecodeBand(_Record):
    """Decode steps from a depth of the context on: their matmuls and the `device` of all else.

    `devices` work in them, the output head aside, which is computed where the plan says. A step
    takes `predicted_s` at that depth, and `before_s` by what decodes before it. `more_bytes` are
    weights that no other step needs on these devices.
    """

    depth_from: Stop
    device: DeviceKind
    devices: tuple[DeviceKind, ...]
    predicted_s: Positive | None = None
    before_s: Positive | None = None
    more_bytes: Bytes = 0
    ops: Annotated[tuple[OpPlan, ...], Field(min_length=1, max_length=64)]

    @property
    def gain(self) -> float | None:
        """Return the seconds of what decodes before it over its own, at its depth."""
        known = self.before_s is not None and self.predicted_s is not None
        return self.before_s / self.predicted_s if known else None  # type: ignore[operator]

    @model_validator(mode="after")
    def _decodes(self) -> Self:
        if any(x.phase != "decode" or x.m not in (1, None) for x in self.ops):
            raise ValueError("a band's entries are for decoding one token")
        return self


class PredictedRun(_Record):
    """A prompt, or a decode step, on these devices: `gpu`, `npu`, `cpu`, or several that share it.

    `error` is the mean relative error of such predictions, where the profile says it.
    """

    devices: tuple[str, ...]
    predicted_s: Positive
    tokens_per_s: Positive
    error: Quantity | None = None


class FastestDevices(_Record):
    """The `devices` on which a prompt of `depth` tokens, or a token after them, is fastest.

    `candidates` are all predictions, the fastest first; `gain` is the next one's seconds over the
    fastest one's, `over` its devices, and `confidence` the probability that their order is right,
    by the errors of both.
    """

    phase: Phase
    depth: Stop
    devices: tuple[str, ...]
    predicted_s: Positive
    tokens_per_s: Positive
    over: tuple[str, ...] = ()
    gain: Quantity | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    candidates: tuple[PredictedRun, ...]


class FastestAnswers(_Record):
    """The `devices` on which tokens after at least `depth_from` others are fastest.

    `gain` is the seconds of those before over theirs at that depth: more than the error of either
    prediction. None for the first.
    """

    depth_from: Start
    devices: tuple[str, ...]
    predicted_s: Positive
    gain: Quantity | None = None


class NonMatmulDevices(_Record):
    """Device of everything that is not a matmul (embedding, norms, RoPE, attention, …)."""

    prefill: DeviceKind
    decode: DeviceKind


class CurvePoint(_Record):
    """Prefill time of one strategy at one length; None where it cannot run."""

    m: Stop
    seconds: Positive | None
    energy_j: Quantity | None = None


class Curve(_Record):
    """Prefill time by length under a named strategy (the paper's figure 14)."""

    strategy: str
    points: tuple[CurvePoint, ...]


class FrontPoint(_Record):
    """One point of the latency-energy front at m tokens; `energy_weight` from 0 to 1."""

    phase: Phase
    m: Stop
    energy_weight: Annotated[float, Field(ge=0, le=1)]
    seconds: Positive
    energy_j: Quantity


class Memory(_OfThree):
    """Weight bytes: of each device in its own layout, and of rows that several have (in all).

    `graphs_bytes` is the part of `npu_bytes` that the same rows take again in graphs of other
    sizes, where each has its own copy.
    """

    gpu_bytes: Bytes
    npu_bytes: Bytes
    cpu_bytes: Bytes = 0
    twice_bytes: Bytes
    graphs_bytes: Bytes = 0
    budget_bytes: Bytes | None = None

    @property
    def total_bytes(self) -> int:
        """Return all devices together."""
        return self.gpu_bytes + self.npu_bytes + self.cpu_bytes


class Residency(_OfThree):
    """Rows of one matmul by device: [0, npu_rows) on the NPU, [gpu_from, n) on the GPU.

    `cpu_rows` are the first and the end of a CPU's.
    `cuts` are the row cuts of the plan's tilings: the ends of segments to prepare.
    """

    cuts: tuple[Stop, ...]
    npu_rows: Start
    gpu_from: Start
    cpu_rows: tuple[Start, Stop] | None = None


class Plan(_Record):
    """The decisions of the solver, which the runtime executes (docs/reference/json.md).

    `strategy` is what was requested: `auto` is the solver's choice, the others are for comparison.
    `graph_sizes` are the token counts whose NPU graphs are prepared ahead; a tile with another
    `graph_size` is prepared while the prompt waits (`online-prepare`). `step_tokens` is the longest
    call that the plan is meant for; longer prompts run in several (`steps`). `step_sizes` are token
    counts that calls should have because others are padded to them (None: those of the entries).
    `fused` are groups of operations that run as one graph where the plan has all of them, whole, on
    an NPU that can: gate, up, activation and product (`feed_forward`), all of a layer between
    attentions (`static`), or a whole block. `attention` says which device computes which heads;
    none means the device of the other operators, all. `in_flight` are other modes of a prompt's
    calls, for lengths at which they are faster. `counts` are how many layers have each matmul,
    where layers differ (else all have it). `prompt_layers`, where these are not all of the
    `layers`, see all tokens of a prompt; its last token alone passes through the others. `experts`
    is the device of routed experts, in both phases; none means the GPU, if there is one.
    `npu_experts` are layers of which the NPU has some experts, or all. `errors`
    are mean relative errors of the profile's predictions of matmuls that it left out, of the device
    whose are larger. `fastest` says where prompts and decode steps are fastest by their depth,
    single devices included, `phases` which devices compute them by this plan. `bands` are decode
    steps that move to other devices from a depth on, the depths rising, and `fastest_answers` where
    they are fastest by depth. `quality` is what `--quality` buys.
    """

    schema_version: Literal[1] = 1
    model: str
    strategy: NamedStrategy = "auto"
    step_tokens: Stop | None = None
    step_sizes: tuple[Stop, ...] | None = None
    profile: str | None = None
    objective: Literal["latency", "energy"] = "latency"
    solve_s: Quantity | None = None
    ops: tuple[OpPlan, ...]
    non_matmul: Annotated[NonMatmulDevices, _also("non_matmul", "rest")]
    totals: tuple[Total, ...] = ()
    graph_sizes: tuple[Stop, ...] = ()
    memory_bytes: Bytes | None = None
    memory: Memory | None = None
    residency: dict[OpName, Residency] = {}
    numbers: Literal["measured", "emulated", "predicted", "simulated", "fitted"] | None = None
    precision: Literal["auto", "a16", "a8", "any"] = "auto"
    weight_format: WeightFormat | None = None
    layers: Stop | None = None
    max_gpu_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    margin: Annotated[float, Field(ge=0, le=1)] | None = None
    profile_fingerprint: str | None = None
    model_fingerprint: str | None = None
    errors: dict[Phase, Quantity] = {}
    notes: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    fused: tuple[FusedGroup, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    attention: Annotated[tuple[AttentionShare, ...], Field(max_length=1024)] = ()
    counts: dict[OpName, Stop] = {}
    fastest: Annotated[tuple[FastestDevices, ...], Field(max_length=64)] = ()
    experts: DeviceKind | None = None
    npu_experts: Annotated[tuple[LayerExperts, ...], Field(max_length=MAX_LAYERS)] = ()
    phases: Annotated[tuple[PlannedPhase, ...], Field(max_length=64)] = ()
    prompt_layers: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    bands: Annotated[tuple[DecodeBand, ...], Field(max_length=16)] = ()
    fastest_answers: Annotated[tuple[FastestAnswers, ...], Field(max_length=16)] = ()
    quality: Quality | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what only models have whose layers differ, and `fastest` where it is empty."""
        document: dict[str, Any] = serialise(self)
        for key in ABSENT_IF_EMPTY:
            if not document.get(key):
                document.pop(key, None)
        if self.prompt_layers is None:
            document.pop("prompt_layers", None)
        return document

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({tuple(point.m for point in curve.points) for curve in self.curves}) > 1:
            raise ValueError("the curves have points at other lengths than each other")
        if len({x.mode for x in self.in_flight}) < len(self.in_flight):
            raise ValueError("each mode of calls in flight is there once")
        if len({x.m for x in self.attention}) < len(self.attention):
            raise ValueError("attention's heads are shared in one way at each token count")
        if self.shares_attention and self.non_matmul.prefill != "gpu":
            raise ValueError("attention's heads are shared where the GPU has the other operators")
        if len({x.layer for x in self.npu_experts}) < len(self.npu_experts):
            raise ValueError("each layer's experts are shared in one way")
        if "cpu" in {*self.other_devices, self.experts}:
            raise ValueError("a CPU takes rows of matmuls and computes nothing else")
        depths = [band.depth_from for band in self.bands]
        if depths != sorted(set(depths)):
            raise ValueError("the depths of decode's bands rise")
        return self

    @property
    def plan_id(self) -> str:
        """Return the short name of the placement.

        Equal tiles have an equal one, whatever was predicted of them, and other tiles another.
        """
        what = {"phase", "m", "op", "n", "k", "tiles"}
        ops = sorted(op.model_dump_json(include=what) for op in self.all_ops)
        head = self.model_dump_json(include={"model", "non_matmul", "graph_sizes", "fused"})
        heads = [f"{x.m} {x.heads}" for x in self.attention] if self.shares_attention else []
        heads += [f"experts {self.experts}"] if self.experts is not None else []
        heads += [f"experts {x.layer} {x.npu}" for x in self.npu_experts]
        heads += [f"{x.depth_from} {x.device}" for x in self.bands]
        return hashlib.sha256("\n".join([head, *ops, *sorted(heads)]).encode()).hexdigest()[:12]

    def partition(self, phase: Phase, m: int, op: str) -> tuple[Tile, ...]:
        """Return the tiles of one matmul at m tokens.

        Raises `PlanError` if the plan says nothing of it.
        """
        return tuple(tile.resolved(m) for tile in self.entry(phase, m, op).tiles)

    def entry(self, phase: Phase, m: int, op: str) -> OpPlan:
        """Return the entry for one matmul at m tokens.

        It is the one for exactly m, else for any m, else the next longer one without the tokens
        that are not there. Raises `PlanError` if there is none.
        """
        known: dict[int | None, OpPlan] = {}
        for planned in self.ops:
            if (planned.phase, planned.op) == (phase, op):
                known.setdefault(planned.m, planned)
        if (entry := entry_at(known, m)) is None:
            raise no_entry(op, phase, m, known)
        return entry

    def steps(self, tokens: int, longest: int | None = None) -> tuple[int, ...]:
        """Return the token counts of the calls, at most `longest` each, of a prompt of `tokens`.

        They are as `totals` name them, else as many of the longest as fit and a rest
        (`prompt_calls.split`).
        """
        limit = min([x for x in (self.step_tokens, longest) if x is not None], default=tokens)
        named = [t.steps or (t.m,) for t in self.totals if (t.phase, t.m) == ("prefill", tokens)]
        if named and max(named[0]) <= limit:
            return named[0]
        sizes = self.listed_tokens if self.step_sizes is None else self.step_sizes
        return split(tokens, sizes, limit)

    @property
    def listed_tokens(self) -> tuple[int, ...]:
        """Return the token counts of prompts' calls that have entries of their own, rising."""
        return tuple(sorted({o.m for o in self.ops if o.phase == "prefill" and o.m is not None}))

    def for_graphs(
        self, graphs: Mapping[DeviceKind, Sequence[int]], *, solved: bool = False
    ) -> Self:
        """Return the same with `steps` that devices with these NPU graphs can run.

        None of them: any token count.

        `solved`: a solver answers for token counts that the plan does not list. Where the plan says
        nothing itself, calls are of up to `STEP_TOKENS` (of the longest entry, where all entries
        are for exact counts), and whole matmuls on an NPU make them fit its graphs.
        """
        listed = () if solved else self.listed_tokens
        limits = [self.step_tokens or (listed[-1] if listed else STEP_TOKENS), *listed[-1:]]
        if not listed and not solved:  # a tile of all tokens is one graph
            limits += [max(sizes) for sizes in graphs.values() if sizes]
        limits += sorted(graphs.get(self.non_matmul.prefill, ()))[-1:]
        longest = min(limits)
        sizes = self.step_sizes
        if sizes is None:
            sizes = listed or (() if solved else self._graphs_of_all(graphs))
        if (longest, sizes) == (self.step_tokens, self.step_sizes):
            return self
        return self.model_copy(update={"step_tokens": longest, "step_sizes": sizes})

    def _graphs_of_all(self, graphs: Mapping[DeviceKind, Sequence[int]]) -> tuple[int, ...]:
        """Return the graphs that every device of a prompt's matmuls has.

        None where one takes any count.
        """
        tiles = (t for o in self.ops if o.phase == "prefill" and o.op != "lm_head" for t in o.tiles)
        kinds = {tile.device for tile in tiles} & set(graphs)
        return tuple(sorted(set.intersection(*(set(graphs[k]) for k in kinds)))) if kinds else ()

    @property
    def shares_attention(self) -> bool:
        """Return whether both devices have heads of some attention."""
        return any(x.heads.shared for x in self.attention)

    @property
    def expert_devices(self) -> frozenset[DeviceKind]:
        """Return the devices that the plan names for routed experts."""
        npu: tuple[DeviceKind, ...] = ("npu",) if self.npu_experts else ()
        return frozenset({*npu, *(() if self.experts is None else (self.experts,))})

    def heads(self, m: int) -> HeadCounts | None:
        """Return which device has which heads of attention in a prompt's call of m tokens.

        It is as the plan says for exactly m, else for any, else for the next longer call; None
        where nothing is said.
        """
        known = {x.m: x.heads for x in self.attention}
        longer = [count for count in known if count is not None and count > m]
        return known.get(m) or known.get(None) or (known[min(longer)] if longer else None)

    @property
    def all_ops(self) -> tuple[OpPlan, ...]:
        """Return the entries of all modes and bands."""
        groups = (*(x.ops for x in self.in_flight), *(x.ops for x in self.bands))
        return (*self.ops, *(op for group in groups for op in group))

    def in_phase(self, phase: Phase) -> list[OpPlan]:
        """Return the entries of a phase in all modes; of decoding, those of the first tokens."""
        flights = (op for flight in self.in_flight for op in flight.ops)
        return [op for op in (*self.ops, *flights) if op.phase == phase]

    def in_band(self, band: DecodeBand) -> Self:
        """Return the plan whose decode steps are those of a band, at any depth."""
        names = {op.op for op in band.ops}
        kept = (op for op in self.ops if op.phase != "decode" or op.op not in names)
        devices = self.non_matmul.model_copy(update={"decode": band.device})
        update = {"ops": (*kept, *band.ops), "non_matmul": devices, "bands": (), "fused": ()}
        return self.model_copy(update=update)

    @property
    def other_devices(self) -> frozenset[DeviceKind]:
        """Return the devices of what is no matmul, in all phases and bands."""
        bands = (band.device for band in self.bands)
        return frozenset({self.non_matmul.prefill, self.non_matmul.decode, *bands})

    def devices(self) -> frozenset[DeviceKind]:
        """Return the device kinds that the plan uses."""
        tiles = {tile.device for op in self.all_ops for tile in op.tiles}
        both = KINDS if self.shares_attention else ()
        return self.other_devices.union(tiles, both, self.expert_devices)

    def devices_of(self, phase: Phase) -> frozenset[DeviceKind]:
        """Return the device kinds that work in a phase, but for an output head that is not cut.

        In decoding they are those of the first tokens (`bands`).
        """
        ops = self.in_phase(phase)
        parts = [{tile.device for tile in op.tiles} for op in ops if op.op != "lm_head"]
        heads = [{tile.device for tile in op.tiles} for op in ops if op.op == "lm_head"]
        other = self.non_matmul.prefill if phase == "prefill" else self.non_matmul.decode
        both = KINDS if phase == "prefill" and self.shares_attention else ()
        known = frozenset({other, *both}) | self.expert_devices
        return known.union(*parts, *(x for x in heads if len(x) > 1))

    @property
    def apart(self) -> bool:
        """Return whether the devices never compute at once: each phase and band has one."""
        bands = (band.devices for band in self.bands)
        return all(len(x) == 1 for x in (*map(self.devices_of, PHASES), *bands))

    def check_fits(self, spec: ModelGraph) -> None:
        """Raise `PlanError` unless every matmul of the plan has the model's shape.

        Every tile must compute with weights as the model stores them. Names are not compared: a
        quantised copy of a model may be called otherwise.
        """
        check_heads(self, spec)
        shapes: dict[str, tuple[int, int]] = {m.name: (m.n, m.k) for m in spec.matmuls}
        stored = {x.storage for x in (spec.weight_format, *spec.also)}
        for op in self.all_ops:
            if shapes.get(op.op, (op.n, op.k)) != (op.n, op.k):
                n, k = shapes[op.op]
                raise PlanError(
                    f"the plan is for {self.model}, whose {op.op} is {op.n}×{op.k}; in {spec.name} "
                    f"it is {n}×{k}: make a plan for this model"
                )
            for tile in op.tiles:
                if tile.precision is not None and tile.precision.storage not in stored:
                    raise PlanError(
                        f"the plan computes {op.op} in {tile.precision}, which takes "
                        f"{tile.precision.storage} weights; {spec.name} has "
                        f"{' and '.join(sorted(stored))} ({spec.weight_format}): make a plan for "
                        "these --weights"
                    )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically. Raises `PlanError` where it cannot be written."""
        write(path, self.model_dump_json(indent=1) + "\n", "plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and validate a plan file. Raises `PlanError` with one sentence."""
        try:
            text = read_text(path, LONGEST_DOCUMENT_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise PlanError(f"cannot read the plan {path} ({why}): pass another file") from None
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: str | os.PathLike[str]) -> Self:
        """Validate the text of a plan file. Raises `PlanError` with one sentence."""
        try:
            return cls.model_validate_json(_without_report(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise PlanError(f"the plan {path} is not valid: {where}: {first['msg']}") from None


def check_heads(plan: Plan, spec: ModelGraph) -> None:
    """Raise `PlanError` unless the plan shares as many heads of attention as the model has."""
    counts = {x.heads.gpu + x.heads.npu for x in plan.attention}
    if counts and counts != {spec.kv_heads}:
        raise PlanError(
            f"the plan shares {min(counts)} key/value heads of attention; {spec.name} has "
            f"{spec.kv_heads}: make a plan for this model"
        )


def entry_at(known: Mapping[int | None, OpPlan], m: int) -> OpPlan | None:
    """Return the entry for m tokens among one matmul's entries by token count.

    That for exactly m, else that for any, else the next longer one cut off at m; None if there is
    none.
    """
    exact = known.get(m) or known.get(None)
    longer = [count for count in known if count is not None and count > m]
    return known[min(longer)].clipped(m) if exact is None and longer else exact


def no_entry(op: str, phase: Phase, m: int, known: Iterable[int | None]) -> PlanError:
    """Return what is raised where a plan has entries of a matmul for these token counts alone."""
    longest = max((count for count in known if count is not None), default=None)
    hint = "" if longest is None else f", only for up to {longest}"
    return PlanError(f"the plan has no entry for {op} in {phase} at {m} tokens{hint}")


def write(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Replace a file by its new contents. Raises `PlanError` where it cannot be written."""
    try:
        atomic_write(path, text)
    except OSError as error:
        raise PlanError(
            f"cannot write the {what} {path} ({error.strerror}): choose another path"
        ) from None


def _without_report(text: str) -> str:
    """Return a plan's document, without the tables that a report adds."""
    if f'"{REPORT_KEY}"' not in text:
        return text
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text  # the model says what is wrong
    if not isinstance(document, dict):
        return text
    return json.dumps({key: value for key, value in document.items() if key != REPORT_KEY})


def check_cover(tiles: tuple[Tile, ...], *, m: int, n: int, what: str) -> None:
    """Check that every output of [0, m) × [0, n) is in exactly one tile (invariant 2).

    Raises ValueError.
    """
    spans: list[tuple[int, int, int, int]] = []
    area = 0
    for tile in tiles:
        (t0, end), (r0, r1) = tile.tokens, tile.rows
        t1 = m if end is None else end
        if not (0 <= t0 < t1 <= m and 0 <= r0 < r1 <= n):
            raise ValueError(f"{what}: tile tokens {(t0, t1)} rows {tile.rows} is outside {m}×{n}")
        for a, b, c, d in spans:  # a loop: `any` takes twice as long, and plans are made in queries
            if t0 < b and a < t1 and r0 < d and c < r1:
                raise ValueError(
                    f"{what}: tile tokens {(t0, t1)} rows {tile.rows} overlaps another"
                )
        spans.append((t0, t1, r0, r1))
        area += (t1 - t0) * (r1 - r0)
    if area != m * n:
        raise ValueError(f"{what}: the tiles cover {area} of {m * n} outputs")


def check_npu_tiles(tiles: tuple[Tile, ...], *, what: str) -> None:
    """Check that the NPU computes at most two tiles along tokens per row range.

    Raises ValueError.
    """
    counts: dict[tuple[int, int], int] = {}
    for tile in tiles:
        if tile.device == "npu":
            counts[tile.rows] = counts.get(tile.rows, 0) + 1
    for rows, count in counts.items():
        if count > 2:
            raise ValueError(
                f"{what}: the NPU computes rows {list(rows)} in {count} tiles along tokens, at "
                "most 2 are allowed"
            )

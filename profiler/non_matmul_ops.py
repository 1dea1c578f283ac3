"""The kernels of models that are not matmuls: checked, timed, and fitted to their work."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import INT8_STATIC, CacheFormat, StorageFormat, WeightFormat
from hetero.backends.host.clock import Clock
from hetero.backends.kv_rows import cache_rows, random_rows
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.ops import OUTPUT_PORTS, Op, weight_names
from hetero.backends.optional import SupportsCompaction
from hetero.backends.protocol import (
    CACHE_PORTS,
    BoundCall,
    Device,
    DeviceKind,
    Kernel,
    WeightValue,
    port_dtype,
    port_shape,
    prepared_sizes,
)
from hetero.backends.reference.compute import program
from hetero.backends.weights import ROW_BLOCK
from hetero.profiler import canary
from hetero.profiler.features import padded_tokens, weight_bytes
from hetero.profiler.fit import DEFAULT as DEFAULT_FITTING
from hetero.profiler.fit import Fitting, fit_nonnegative
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.predict import op_name, work
from hetero.profiler.records import (
    DECODE_TOKENS,
    DeviceRecord,
    NonMatmulPredictor,
    NonMatmulRow,
    Quarantine,
)
from hetero.profiler.stats import relative_errors, summarize
from hetero.profiler.timing import TimingPolicy, time_after, time_calls
from hetero.profiler.workload import WeightPool

TOKENS: Final = (1, 8, 64, 256, 1024)
QUICK_TOKENS: Final = (1, 256)
CONTEXTS: Final = (0, 256, 1000)
CACHES: Final = (CacheFormat.F16, CacheFormat.Q8, CacheFormat.F32)  # the default first
CAPACITY: Final = 2048  # tokens of the caches that attention is timed with
EXPERTS: Final = 8  # of a layer that is timed, of which a token takes
EXPERTS_CHOSEN: Final = 2
EXPERT_TOKENS: Final = 256  # at most, with them


@dataclass(frozen=True, kw_only=True)
class NonMatmulPolicy:
    """Policy of timing operations that are not matmuls. Seconds where a name ends in `_s`.

    samples          of a case,
    batched_s        and how long the launches of one take, where they are batched
    min_s          no launch takes less
    checked_tokens   the larger token count that a kernel is checked at
    own_caches       pairs of key and value caches that attention of few tokens takes turns with

    Calls of a blocking device, and calls of many tokens, are timed after another one:

    warm_up_width       its width,
    leads            and how many of it keep a queue at work before them

    Calls of few tokens of a queue are timed by what they lengthen a row of matmuls by:

    matmul_bytes     of the weight of such a matmul, at most
    matmul_features  k of it
    turns            calls in a row
    warm_up_s           how long matmuls run before it, while it is submitted
    pairs            of rows with the calls and without
    attention_pairs  of attention, before which all is read each time
    """

    samples: int = 9
    batched_s: float = 2e-3
    min_s: float = 3e-7
    checked_tokens: int = 32
    own_caches: int = 8

    warm_up_width: int = 64
    warm_ups: int = 64

    matmul_bytes: int = 200_000
    matmul_features: int = 512
    turns: int = 32
    warm_up_s: float = 1e-3
    pairs: int = 15
    attention_pairs: int = 5


DEFAULT: Final = NonMatmulPolicy()


class ReferenceBlock(NamedTuple):
    """Sizes of a decoder block, as in `hetero.backends.ops`."""

    d: int
    f: int
    heads: int
    kv_heads: int
    head_dim: int


BLOCKS: Final = (ReferenceBlock(2048, 8192, 32, 8, 64), ReferenceBlock(896, 4864, 14, 2, 64))


class OpCase(NamedTuple):
    """One operation at one size; `layer_bytes` are read from one such call to the next layer's."""

    op: Op
    m: int
    context: int
    layer_bytes: int


class Matmuls(NamedTuple):
    """Matmuls one after the other until the first is out of cache.

    Of a small model all are read, each with a quarter of a layer's weights or less. `warm_ups`
    of them take the policy's `warm_up_s`.
    """

    calls: Iterator[BoundCall]
    warm_ups: int


def reference_ops(
    block: ReferenceBlock, weight_format: WeightFormat, *, outliers: bool = False
) -> list[Op]:
    """Return every kind of operation that some architecture has between matmuls.

    They have the block's sizes.

    With `outliers` their shadows, as with a format of static activations.
    """
    h, g, d, eps = block.heads, block.kv_heads, block.head_dim, 1e-5
    shadows = [ops.Outliers(n=block.d, k=block.f, hot=block.f // x, excess=True) for x in (64, 256)]
    return [
        *(shadows if outliers or weight_format.activations.static else ()),
        ops.RMSNorm(d=block.d, eps=eps),
        ops.RMSNorm(d=block.d, eps=eps, add=True),
        ops.LayerNorm(d=block.d, eps=eps),
        ops.LayerNorm(d=block.d, eps=eps, add=True),
        ops.Rope(heads=h, kv_heads=g, head_dim=d, theta=1e4, max_position=CAPACITY),
        *(ops.Attention(heads=h, kv_heads=g, head_dim=d, capacity=CAPACITY, kv=x) for x in CACHES),
        ops.ShortConv(d=block.d, taps=3, gated=True),
        ops.ShortConv(d=block.d, taps=4, activation="silu"),
        ops.GatedDelta(k_heads=g, v_heads=h, k_dim=128, v_dim=128, eps=eps),
        ops.GatedAct(f=block.f),
        ops.SigmoidGate(d=block.d, first=block.d, width=3 * block.d),
        ops.GatedInput(d=block.d, first=block.d, width=3 * block.d),
        ops.Act(f=block.f, activation="gelu_tanh"),
        ops.Add(d=block.d),
        ops.GatedAdd(d=block.d),
        ops.Experts(
            experts=EXPERTS,
            chosen=EXPERTS_CHOSEN,
            d=block.d,
            f=max(block.f // 128, 1) * 16,
            weight_format=weight_format,
        ),
        ops.AddPositions(d=block.d, rows=CAPACITY),
        ops.Embed(vocab=4096, d=block.d, weight_format=weight_format),
    ]


def graph_ops(graph: ModelGraph) -> list[Op]:
    """Return a model's operations between its matmuls, as they are timed.

    With caches of `CAPACITY` tokens (whose windows are none where they are as long) and a
    vocabulary of 4096 tokens at most.
    """
    timed: dict[Op, None] = {}
    for op in graph.with_capacity(CAPACITY).others:
        match op:
            case ops.Attention() if op.window >= CAPACITY:
                timed[replace(op, window=0)] = None
            case ops.MatMul() | ops.Router() | ops.Experts():  # as matmuls
                pass
            case ops.Embed():
                timed[replace(op, vocab=min(op.vocab, 4096))] = None
            case _:
                timed[op] = None
    return list(timed)


def wanted_ops(
    weight_format: WeightFormat,
    *,
    quick: bool,
    blocks: Sequence[ReferenceBlock],
    graph: ModelGraph | None,
    outliers: bool = False,
) -> list[tuple[Op, int]]:
    """Return the operations to time, each with the bytes of a layer.

    Those of `graph` first, then those of the reference blocks that have other sizes; of a quick
    profile every kind at one size.
    """
    wanted: dict[tuple[str, frozenset[tuple[str, int]]], tuple[Op, int]] = {}

    def add(op: Op, nbytes: int) -> None:
        wanted.setdefault((op_name(op), frozenset(sizes_of(op).items())), (op, nbytes))

    if graph is not None:
        every, layers = graph.shapes, graph.layers
        sizes = ((stage.name, *every[stage.name]) for stage in graph.block)
        nbytes = _rounded(  # of a layer on average
            weight_bytes(weight_format, n, k) * (graph.counts[name] / layers)
            for name, n, k in sizes
        )
        for op in graph_ops(graph.with_weight_format(weight_format)):
            add(op, nbytes)
    for block in blocks[:1] if quick else blocks:
        known = {name for name, _ in wanted} if quick else set()
        for op in reference_ops(block, weight_format, outliers=outliers):
            if op_name(op) not in known:
                add(op, layer_bytes(block, weight_format))
    return list(wanted.values())


def layer_bytes(block: ReferenceBlock, weight_format: WeightFormat) -> int:
    """Return the weights of a decoder block: a multiple of 8 bytes."""
    heads = block.heads * block.head_dim
    kv_heads = block.kv_heads * block.head_dim
    outputs = 2 * heads + 2 * kv_heads + 3 * block.f  # q and o, k and v, gate, up and down
    return _rounded([weight_bytes(weight_format, outputs, block.d)])


def _rounded(sizes: Iterable[float]) -> int:
    return int(sum(sizes)) // 8 * 8


def cases(
    device: DeviceRecord,
    weight_format: WeightFormat,
    *,
    quick: bool,
    blocks: Sequence[ReferenceBlock],
    graph: ModelGraph | None = None,
    outliers: bool = False,
) -> list[OpCase]:
    """Return what to time on a device; `graph` is the one model that the profile is for."""
    wanted = np.asarray(QUICK_TOKENS if quick else TOKENS, dtype=np.float64)
    graphs = prepared_sizes(device.capabilities)
    padded = dict.fromkeys(int(m) for m in padded_tokens(device, wanted))
    tokens = [m for m in padded if not graphs or m in graphs]
    cases = []
    ops_wanted = wanted_ops(
        weight_format, quick=quick, blocks=blocks, graph=graph, outliers=outliers
    )
    for op, nbytes in ops_wanted:
        contexts = CONTEXTS if isinstance(op, ops.Attention) else (0,)
        cases += [
            OpCase(op, m, context, nbytes)
            for m in tokens
            for context in contexts
            if context + m <= CAPACITY and not (m > 256 and context)
            if m <= EXPERT_TOKENS or not isinstance(op, ops.Experts)
        ]
    return cases


class NonMatmulMeter:
    """Times cases on one device; wrong kernels are returned for quarantine instead.

    They are timed as in a step, after other reading of up to `cold` bytes (0: in a loop).
    Attention of a few tokens finds its caches in memory, as far as a model of `model_bytes` pushes
    them there, and routed experts their weights. Other calls come one by one: of a blocking device
    and few tokens, or in a model that fits into the caches, after the reading of a layer's weights,
    else after all. A queue's calls of few tokens take turns with matmuls of other weights (of
    `weight_format`), which push code out of the caches: what they lengthen those by is theirs,
    because in a loop they would take what it takes to submit them. A queue's of more tokens, in a
    model that fits into the caches, find all there.
    """

    def __init__(
        self,
        kind: DeviceKind,
        device: Device,
        clock: Clock,
        seed: int = 0,
        *,
        cold: int = 0,
        model_bytes: int | None = None,
        weight_format: WeightFormat = WeightFormat.F32,
        pool: WeightPool | None = None,
        policy: NonMatmulPolicy = DEFAULT,
    ) -> None:
        self.kind, self.device, self.clock = kind, device, clock
        self.policy = policy
        self._rng = np.random.default_rng(seed)
        # Repeated through the tensors; so many, a prime, that rows differ.
        self._noise = self._rng.standard_normal(1048573, dtype=np.float32)
        self._pool = pool or WeightPool(1 << 24, seed)
        self._format = weight_format
        self._matmuls: dict[tuple[int, int], Matmuls] = {}
        self._weights: dict[Op, dict[str, WeightValue]] = {}
        self._kernel: tuple[Op, Kernel] | None = None  # the last one of `_bind`
        self._buffers: dict[tuple[str, tuple[int, ...], np.dtype[Any]], Tensor] = {}
        self._cold = HostBuffer(cold) if cold else None
        self._model_bytes = model_bytes
        self._next_cold = 0

    def check(self, op: Op) -> Quarantine | None:
        """Compare with the float64 reference at the smallest and a larger token count."""
        most = self.policy.checked_tokens
        sizes = self.device.capabilities.graph_sizes or (1, most)
        for m in {min(sizes), max([s for s in sizes if s <= most] or [min(sizes)])}:
            try:
                problem = self._compare(op, m)
            except DeviceError as error:
                return Quarantine(
                    device=self.kind,
                    op=op_name(op),
                    tolerance=canary.OTHER_TOLERANCE,
                    detail=str(error),
                )
            if problem is not None:
                return problem
        return None

    def time(self, case: OpCase) -> NonMatmulRow:
        """Return the median of a few batches of launches.

        Where a step has one call at a time, calls are timed.
        """
        call, tensors = self._bind(case.op, case.m, case.context)
        call.run()
        summary = summarize(self._samples(case, call, tensors))
        return NonMatmulRow(
            device=self.kind,
            op=op_name(case.op),
            sizes=sizes_of(case.op),
            m=case.m,
            context=case.context,
            seconds=summary.median,
            ci=summary.ci,
            spread=summary.spread,
            samples=summary.samples,
        )

    def _samples(self, case: OpCase, call: BoundCall, tensors: Mapping[str, Tensor]) -> list[float]:
        """Return the seconds of a launch, several times."""
        policy, samples = self.policy, range(self.policy.samples)
        count = int(min(max(policy.batched_s / max(self._batch([call]), 1e-9), 1), 64))
        attends = isinstance(case.op, ops.Attention)
        few = case.m <= DECODE_TOKENS and not isinstance(case.op, ops.Experts)
        queues = self.device.capabilities.asynchronous
        cheap = queues and not self.device.capabilities.static_shapes  # matmuls by the hundred
        if self._cold is not None and few and (attends or cheap):
            calls = self._with_own_caches(case, tensors) if attends else [call] * policy.turns
            if cheap:
                pairs = range(policy.attention_pairs if attends else policy.pairs)
                return [self._lengthened_by(calls, case, read=attends) for _ in pairs]
            return [self._cold_batch(call, count, calls) for _ in samples]
        if self._cold is not None and not attends:
            if not queues:
                nbytes = None if self._leaves_caches(case) else case.layer_bytes
                return [self._call_among_others(call, nbytes) for _ in samples]
            if self._leaves_caches(case) and self._other is not None:
                return [self._cold_batch(self._other, policy.warm_ups, [call]) for _ in samples]
        return [self._batch([call] * count) for _ in samples]

    def _leaves_caches(self, case: OpCase) -> bool:
        """Return whether tensors have left the caches by the next layer.

        Tensors of many tokens do, and experts, except in a model that fits into them.
        """
        large = case.m > DECODE_TOKENS or isinstance(case.op, ops.Experts)
        return large and not self._small

    @property
    def _small(self) -> bool:
        """Return whether the whole model fits into the caches."""
        cold_bytes = 0 if self._cold is None else self._cold.nbytes
        return self._model_bytes is not None and self._model_bytes < cold_bytes

    def _call_among_others(self, call: BoundCall, nbytes: int | None) -> float:
        """Return the seconds of one call as a step has it.

        Since the last one so much else was read (None: all), and its own code may have left the
        caches; what all calls share is not.
        """
        self._read(nbytes)
        if self._other is not None:
            self._other.run()
        return self._batch([call])

    def _read(self, nbytes: int | None = None) -> None:
        """Read so many bytes of `cold` (all), each time the ones that were read longest ago."""
        assert self._cold is not None
        whole = self._cold.nbytes
        nbytes = min(nbytes or whole, whole)
        start = self._next_cold if self._next_cold + nbytes <= whole else 0
        self._next_cold = start + nbytes
        self._cold.bytes[start : self._next_cold].view(np.uint64).max()

    @cached_property
    def _other(self) -> BoundCall | None:
        """Return something else that the device computes."""
        op = ops.Add(d=self.policy.warm_up_width)
        m = min(self.device.capabilities.graph_sizes, default=1)
        return self._bind(op, m, 0)[0] if self.device.accepts(op) else None

    def _batch(self, calls: Sequence[BoundCall]) -> float:
        return time_calls(calls, self.device, self.clock) / len(calls)

    def _with_own_caches(self, case: OpCase, tensors: Mapping[str, Tensor]) -> list[BoundCall]:
        """Return the same call on several caches."""
        kernel = self.device.prepare(case.op, self._weights_of(case.op))
        calls = []
        for _ in range(self.policy.own_caches):
            own = dict(tensors)
            for port in CACHE_PORTS:
                shape = tensors[port].shape
                own[port] = Tensor(
                    self.device.allocate(tensors[port].nbytes), shape, tensors[port].dtype
                )
                own[port].array[...] = tensors[port].array
            calls.append(kernel.bind(own, case.m))
        return calls

    def _lengthened_by(self, calls: Sequence[BoundCall], case: OpCase, *, read: bool) -> float:
        """Return by how much each call lengthens a queue of matmuls between two of which it goes.

        With `read` the calls' tensors were last used long ago.
        """
        matmuls = self._matmuls_of(case)
        seconds = {True: 0.0, False: 0.0}
        for whole in (True, False, False, True):  # so that what drifts cancels
            between = [[call] if whole else [] for call in calls]
            if read:
                self._read(self._model_bytes)
            warm_up = [next(matmuls.calls) for _ in range(matmuls.warm_ups)]
            queue = [x for each in between for x in (*each, next(matmuls.calls))]
            seconds[whole] += time_after(warm_up, queue, self.clock)[0] / 2
        return max((seconds[True] - seconds[False]) / len(calls), self.policy.min_s)

    def _matmuls_of(self, case: OpCase) -> Matmuls:
        """Return the matmuls that calls of the case's token count go between."""
        policy = self.policy
        size = min(case.layer_bytes / 4, policy.matmul_bytes)
        key = (case.m, int(size))
        if key not in self._matmuls:
            assert self._cold is not None
            k = policy.matmul_features
            n = max(int(size / weight_bytes(self._format, 1, k)) // ROW_BLOCK, 1) * ROW_BLOCK
            op = ops.MatMul(n=n, k=k, weight_format=self._format)
            whole = min(self._model_bytes or self._cold.nbytes, self._cold.nbytes)
            count = max(int(whole / weight_bytes(self._format, n, k)), 1)
            tensors = {port: self._tensor(op, port, case.m) for port in op.ports}
            calls = []
            for _ in range(count):
                kernel = self.device.prepare(op, self._pool.weights(op))
                calls.append(kernel.bind(tensors, case.m))
            if isinstance(self.device, SupportsCompaction):
                self.device.compact_weights()
            calls[0].run()
            each_s = max(self._batch(calls[: policy.turns]), policy.min_s)
            warm_ups = TimingPolicy().warm_ups(policy.warm_up_s, each_s)
            self._matmuls[key] = Matmuls(itertools.cycle(calls), warm_ups)
        return self._matmuls[key]

    def _cold_batch(self, warm_up: BoundCall, count: int, calls: Sequence[BoundCall]) -> float:
        """Do the same as `_batch`, each call on tensors that were last used long ago.

        After `count` warm-up launches, so that the device is awake (and has the code, if they are
        the same).
        """
        self._read(self._model_bytes)
        if not self.device.capabilities.asynchronous:
            warm_up.run()
            return self._batch(calls)
        return time_after([warm_up] * count, calls, self.clock)[0] / len(calls)

    def _bind(self, op: Op, m: int, context: int) -> tuple[BoundCall, dict[str, Tensor]]:
        tensors = {port: self._tensor(op, port, m) for port in op.ports}
        if "position" in tensors:
            tensors["position"].array[0] = context
        if isinstance(op, ops.Embed):  # tables of several models share the tokens
            tensors["tokens"].array[...] %= op.vocab
        if self._kernel is None or self._kernel[0] != op:
            self._kernel = op, self.device.prepare(op, self._weights_of(op))
        return self._kernel[1].bind(tensors, m), tensors

    def _compare(self, op: Op, m: int) -> Quarantine | None:
        call, tensors = self._bind(op, m, 0)
        reference = {port: tensor.array.copy() for port, tensor in tensors.items()}
        program(op, self._weights_of(op))[0](reference)
        outputs = [port for port in op.ports if port in OUTPUT_PORTS]
        for port in outputs:
            tensors[port].array[...] = np.nan
        call.run()
        wanted = {port: reference[port].astype(np.float64) for port in outputs}
        return canary.check_other(self.kind, op, tensors, wanted)

    def _tensor(self, op: Op, port: str, m: int) -> Tensor:
        shape, dtype = port_shape(op, port, m), port_dtype(op, port)
        if (port, shape, dtype) not in self._buffers:
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            buffer = self.device.allocate(nbytes, huge=port not in CACHE_PORTS)  # as the runtime
            tensor = Tensor(buffer, shape, dtype)
            if port in CACHE_PORTS:
                rows = cache_rows(op, tensor.array)
                random_rows(rows, rows.tokens, self._rng, keys=port == "k_cache")
            else:
                tensor.array[...] = self._values(op, port, shape)
            self._buffers[port, shape, dtype] = tensor
        return self._buffers[port, shape, dtype]

    def _values(self, op: Op, port: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if isinstance(op, ops.Experts) and port == "routes":
            order = self._rng.random((shape[0], op.experts)).argsort(axis=1)[:, : op.chosen]
            return np.concatenate([order, np.full(order.shape, 1 / op.chosen)], axis=1)
        if port == "tokens":
            return self._rng.integers(0, 4096, shape)
        if port == "position":
            return np.zeros(shape)
        return np.resize(self._noise, shape)

    def _weights_of(self, op: Op) -> Mapping[str, WeightValue]:
        if op not in self._weights:
            self._weights[op] = {name: self._weight(op, name) for name in weight_names(op)}
        return self._weights[op]

    def _weight(self, op: Op, name: str) -> WeightValue:
        width = op.head_dim if isinstance(op, ops.Rope) else getattr(op, "d", 1)
        match op, name:
            case ops.Embed() | ops.Experts(), _:
                return self._pool.table(op.weight_format.storage, *_table_sizes(op, name))
            case ops.Outliers(), "hot":
                return np.linspace(0, op.k - 1, op.hot).astype(np.int32)
            case ops.Outliers(), "hot_weight":
                return self._pool.weight(StorageFormat.F16, op.n, op.hot)
            case ops.Outliers(), "weight":
                return self._pool.weight(StorageFormat.Q8R, op.n, op.k)
            case ops.Outliers(), _:  # of which the noise has a few in a million in excess
                return np.full(1, 5 / INT8_STATIC.largest, np.float32)
            case ops.AddPositions(), _:
                width *= op.rows
            case ops.ShortConv(), "taps":
                width *= op.taps
            case ops.Add(), _:
                width = 1
            case ops.Attention(), _:
                width = op.heads
            case ops.AttentionHeads(), _:
                width = op.attention.heads
            case ops.GatedDelta(), _:
                width = op.v_dim if name == "norm" else op.v_heads
        values = self._rng.uniform(0.5, 1.5, width).astype(np.float32)
        return -values if name == "decay" else values


def _table_sizes(op: ops.Embed | ops.Experts, name: str) -> tuple[int, int]:
    """Return rows and features of an embedding, or of a matrix of all experts."""
    if isinstance(op, ops.Embed):
        return op.vocab, op.d
    matmul = op.matmuls[name]
    return op.experts * matmul.n, matmul.k


def sizes_of(op: Op) -> dict[str, int]:
    """Return the integer fields of a record by name."""
    return {
        name: value
        for name, value in vars(op).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def fit_non_matmul(
    rows: Iterable[tuple[NonMatmulRow, Op]],
    own: Iterable[Op] = (),
    fitting: Fitting = DEFAULT_FITTING,
) -> tuple[NonMatmulPredictor, ...]:
    """Fit one predictor for each device and kind of operation: non-negative weights of its work.

    `own` are the operations of the one model that the profile is for: others, whose tensors may be
    in other caches (attention of eight times as many heads), say little about its times.
    """
    groups: dict[tuple[DeviceKind, str], list[tuple[NonMatmulRow, Op]]] = {}
    for row, op in rows:
        groups.setdefault((row.device, row.op), []).append((row, op))
    known = [sizes_of(op) for op in own]
    return tuple(
        _fit_one(kind, name, group, known, fitting)
        for (kind, name), group in sorted(groups.items())
    )


def _fit_one(
    kind: DeviceKind,
    name: str,
    rows: list[tuple[NonMatmulRow, Op]],
    own: Sequence[dict[str, int]],
    fitting: Fitting,
) -> NonMatmulPredictor:
    terms = [work(op, row.m, row.context) for row, op in rows]
    columns = np.asarray([list(term.values()) for term in terms])
    seconds = np.asarray([row.seconds for row, _ in rows])
    few = np.asarray([row.m <= DECODE_TOKENS for row, _ in rows])
    sides = [few, ~few]
    enough = min(side.sum() for side in sides) >= columns.shape[1]  # rows for two fits
    if not (fitting.few_separate and enough):
        sides = [np.ones_like(few)]
    weight = np.asarray([fitting.own_weight if row.sizes in own else 1.0 for row, _ in rows])
    fits = [fit_nonnegative(columns[side], seconds[side], weight[side]) for side in sides]
    named = [dict(zip(terms[0], coefficients.tolist(), strict=True)) for coefficients in fits]
    predicted = np.empty_like(seconds)
    for side, coefficients in zip(sides, fits, strict=True):
        predicted[side] = columns[side] @ coefficients
    return NonMatmulPredictor(
        device=kind,
        op=name,
        coefficients=named[-1],
        decode=named[0] if len(named) > 1 else None,
        max_m=max(row.m for row, _ in rows),
        max_context=max(row.context for row, _ in rows),
        mape=relative_errors(list(predicted), list(seconds))[0],
    )

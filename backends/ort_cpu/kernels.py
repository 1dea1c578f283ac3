"""One kernel class for each way of feeding a graph: what is bound to which input, and when."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import onnxruntime as ort

from hetero.backends import checks, kv_codes, ops, rope_tables
from hetero.backends.kv_rows import CacheRows
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.onnx_common.binding import (
    NATIVE_ERRORS,
    Argument,
    Array,
    Copied,
    Launch,
    SessionLaunch,
    argument,
    io_binding,
    rows_argument,
    rows_between,
)
from hetero.backends.onnx_common.head_tensors import HeadTensors, Rooms
from hetero.backends.ops import OUTPUT_PORTS, STATE_PORTS, Op, describe
from hetero.backends.ort_cpu.session import BACKEND, OrtCall, device_error
from hetero.backends.protocol import (
    CACHE_PORTS,
    FIXED_PORTS,
    BoundCall,
    Capabilities,
    Kernel,
    Operand,
    check_tensors,
    tensors_of,
)

# Graphs to run, what to compute before each run, and what to keep alive.
Prepared: TypeAlias = tuple[Sequence[Launch], Callable[[], None] | None, object]

CACHE_FRIENDLY_BYTES = 1 << 18
ATTENTION_ROWS = 64
WIDEN_FROM = 16  # tokens of a call from which caches are widened first


class OrtHost(NamedTuple):
    """Services of the device to its kernels."""

    health: checks.Health
    capabilities: Capabilities


class OrtKernel(Kernel):
    """Checks a binding and names the call; `launches` does the rest."""

    def __init__(self, host: OrtHost, op: Op, *, nbytes: int = 0) -> None:
        self.op = op
        self.nbytes = nbytes
        self._host = host
        self._calls: weakref.WeakSet[OrtCall] = weakref.WeakSet()

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self._host.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m)
        checks.check_token_count(self._host.capabilities, self.op, m, own=self.graph)
        name = self.call_name(m)
        try:
            launches, before, keep = self.launches(tensors_of(tensors), m)
        except NATIVE_ERRORS as error:
            raise device_error(error, f"binding {name}") from error
        call = OrtCall(name, m, self._host.health, launches, keep=(tensors, keep), before=before)
        self._calls.add(call)
        return call

    def call_name(self, m: int) -> str:
        """Return the name of calls in traces and errors."""
        return f"{describe(self.op)} m={m}"

    @abstractmethod
    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        """Bind the graphs of one call."""

    def release(self) -> None:
        """Drop every session; only a closed device does this."""
        for call in self._calls:
            call.release()


class MatMulPath(NamedTuple):
    """A session for up to `limit` tokens, run in chunks of `chunk` tokens."""

    limit: int
    chunk: int
    session: ort.InferenceSession


class OrtMatMulKernel(OrtKernel):
    """One packed weight; the first of `paths` that takes the token count computes it.

    `extra` is bound like activations: the bias, the scale of x.
    """

    def __init__(
        self,
        host: OrtHost,
        op: ops.MatMul,
        paths: Sequence[MatMulPath],
        extra: Mapping[str, Array],
        *,
        nbytes: int,
        keep: object,
    ) -> None:
        super().__init__(host, op, nbytes=nbytes)
        self._paths = list(paths)
        self._extra = dict(extra)
        self._keep = keep

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        path = self._path(m)
        chunks = _chunks(path.session, tensors, m, min(path.chunk, m), self._extra)
        return chunks, None, (self._extra, self._keep)

    def _path(self, m: int) -> MatMulPath:
        return next((path for path in self._paths if m <= path.limit), self._paths[-1])

    def product(self, x: Array) -> Array:
        """Return y of x [m, k], of any m."""
        path = self._path(len(x))
        parts = [
            path.session.run(None, {"x": x[start : start + path.chunk], **self._extra})[0]
            for start in range(0, len(x), path.chunk)
        ]
        return np.concatenate(parts)

    def release(self) -> None:
        super().release()
        self._paths.clear()
        self._keep = None


class OrtGraphKernel(OrtKernel):
    """A graph whose weights are bound like activations (`extra`).

    `row_bytes`: memory that a token touches, given if the graph has intermediate results: tokens
    are then run in chunks that stay in the cache.
    """

    def __init__(
        self,
        host: OrtHost,
        op: Op,
        session: ort.InferenceSession,
        extra: Mapping[str, Array],
        *,
        row_bytes: int = 0,
    ) -> None:
        super().__init__(host, op)
        self._session = session
        self.extra = dict(extra)
        self._chunk = max(1, CACHE_FRIENDLY_BYTES // row_bytes) if row_bytes else 0

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        chunks = _chunks(self._session, tensors, m, self._chunk or m, self.extra)
        return chunks, None, self.extra


class RopeKernel(OrtKernel):
    """Gives the graph the position as the int64 that RotaryEmbedding wants."""

    def __init__(
        self,
        host: OrtHost,
        op: ops.Rope,
        session: ort.InferenceSession,
        extra: Mapping[str, Array],
    ) -> None:
        super().__init__(host, op)
        self._rope = op
        self._session = session
        self._extra = dict(extra)

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        first = np.zeros(1, dtype=np.int64)
        position, limit = tensors["position"].array, self._rope.max_position
        name = self.call_name(m)

        def before() -> None:
            first[0] = checks.first_position(BACKEND, name, position, m, limit)

        inputs = {key: argument(array) for key, array in self._extra.items()}
        inputs |= {"first": argument(first), "qkv": _batch_of_one(tensors["qkv"], m)}
        binding = io_binding(self._session, inputs, {"out": _batch_of_one(tensors["out"], m)})
        return [SessionLaunch(self._session, binding)], before, (first, self._extra)


class PositionsKernel(OrtKernel):
    """Learned positions: gives the graph the position as int64."""

    def __init__(
        self, host: OrtHost, op: ops.AddPositions, session: ort.InferenceSession, table: Array
    ) -> None:
        super().__init__(host, op)
        self._session = session
        self._table = np.ascontiguousarray(table)

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        first = np.zeros(1, dtype=np.int64)
        position = tensors["position"].array

        def before() -> None:
            first[0] = position[0]

        inputs = {"first": argument(first), "table": argument(self._table)}
        inputs["x"] = rows_argument(tensors["x"], m)
        binding = io_binding(self._session, inputs, {"y": rows_argument(tensors["y"], m)})
        return [SessionLaunch(self._session, binding)], before, (first, self._table)


class FusedAttentionKernel(OrtKernel):
    """GroupQueryAttention with past and present caches at one address: it appends in place.

    Tokens run in chunks of `ATTENTION_ROWS`, because the operator computes scores above the
    diagonal too and allocates them all: 1.3 to 1.6 times as fast for 256 tokens and more.
    """

    def __init__(
        self,
        host: OrtHost,
        op: ops.Attention,
        session: ort.InferenceSession,
        sinks: Mapping[str, Array],
    ) -> None:
        super().__init__(host, op)
        self._attention = op
        self._session = session
        self._sinks = sinks

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        starts = range(0, m, ATTENTION_ROWS)
        stops = np.array([min(start + ATTENTION_ROWS, m) for start in starts], dtype=np.int32)
        lengths, lasts = np.zeros_like(stops), np.zeros((len(stops), 1), dtype=np.int32)
        position, capacity = tensors["position"].array, self._attention.capacity
        name = self.call_name(m)

        def before() -> None:
            lengths[:] = stops + checks.first_position(BACKEND, name, position, m, capacity)
            lasts[:, 0] = lengths - 1

        chunks = [
            self._chunk(
                rows_between(tensors, start, stop), lasts[i], lengths[i : i + 1].reshape(())
            )
            for i, (start, stop) in enumerate(zip(starts, stops.tolist(), strict=True))
        ]
        return chunks, before, (lasts, lengths)

    def _chunk(self, tensors: Mapping[str, Tensor], last: Array, length: Array) -> SessionLaunch:
        rows = tensors["qkv"].shape[0]
        caches = {
            key: _batch_of_one(tensors[f"{key}_cache"], self._attention.kv_heads)
            for key in ("k", "v")
        }
        inputs = {name: argument(value) for name, value in self._sinks.items()}
        inputs |= {f"past_{key}": cache for key, cache in caches.items()}
        inputs |= {"last": argument(last), "length": argument(length)}
        inputs["qkv"] = _batch_of_one(tensors["qkv"], rows)
        outputs = {f"present_{key}": cache for key, cache in caches.items()}
        outputs["out"] = _batch_of_one(tensors["out"], rows)
        return SessionLaunch(self._session, io_binding(self._session, inputs, outputs))


class ComposedAttentionKernel(OrtKernel):
    """Appends with numpy, then runs the graph on chunks of tokens, which bounds the scores."""

    def __init__(
        self,
        host: OrtHost,
        op: ops.Attention,
        session: ort.InferenceSession,
        sinks: Mapping[str, Array],
    ) -> None:
        super().__init__(host, op)
        self._attention = op
        self._session = session
        self._sinks = sinks

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        op = self._attention
        starts = np.arange(0, m, ATTENTION_ROWS, dtype=np.int64)
        firsts = np.zeros((len(starts), 1), dtype=np.int64)
        heads = tensors["qkv"].array[:m].reshape(m, -1, op.head_dim).transpose(1, 0, 2)
        keys, values = heads[op.heads : op.heads + op.kv_heads], heads[op.heads + op.kv_heads :]
        k_cache, v_cache = tensors["k_cache"].array, tensors["v_cache"].array
        k_rows, v_rows = (CacheRows(array, op.kv, op.head_dim) for array in (k_cache, v_cache))
        position = tensors["position"].array
        name = self.call_name(m)

        def before() -> None:
            first = checks.first_position(BACKEND, name, position, m, op.capacity)
            if not op.reads:
                k_rows.write(first, keys)
                v_rows.write(first, values)
            firsts[:, 0] = starts + first

        chunks = []
        for i, start in enumerate(starts.tolist()):
            rows = rows_between(tensors, start, m)
            count = min(ATTENTION_ROWS, m - start)
            inputs = {"first": argument(firsts[i]), "qkv": rows_argument(rows["qkv"], count)}
            inputs |= {name: argument(value) for name, value in self._sinks.items()}
            inputs |= {"k_cache": argument(k_cache), "v_cache": argument(v_cache)}
            if op.kv.coded:
                inputs["k_words"] = argument(k_cache.view(np.float32))
                inputs["v_words"] = argument(v_cache.view(np.float32))
            output = {"out": rows_argument(rows["out"], count)}
            chunks.append(SessionLaunch(self._session, io_binding(self._session, inputs, output)))
        return chunks, before, firsts


class AttentionHeadsKernel(OrtKernel):
    """Some heads of an attention, by the kernel `inner` of an attention that has no others.

    `rooms` has the room for their columns, one for all layers (`HeadTensors`).
    """

    def __init__(
        self,
        host: OrtHost,
        op: ops.AttentionHeads,
        inner: OrtKernel,
        rooms: Rooms,
    ) -> None:
        super().__init__(host, op)
        self._heads, self._inner, self._rooms = op, inner, rooms

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        heads = HeadTensors.of(self._heads, tensors, m, self._rooms)
        chunks, before, keep = self._inner.launches(heads.own, m)

        def prepare() -> None:
            heads.gather()
            if before is not None:
                before()

        steps: list[Launch] = []
        for i, chunk in enumerate(chunks):
            rows = slice(i * ATTENTION_ROWS, (i + 1) * ATTENTION_ROWS)
            steps += [chunk, Copied(heads.wanted[rows], heads.own["out"].array[rows])]
        return steps, prepare, (keep, heads.own)


class WidenedAttentionKernel(OrtKernel):
    """Caches that the fused operator does not read.

    From `WIDEN_FROM` tokens on they are widened into `scratch`, one pair for all layers, and it
    works on that; few tokens are composed.
    """

    def __init__(
        self,
        host: OrtHost,
        op: ops.Attention,
        composed: ComposedAttentionKernel,
        fused: FusedAttentionKernel,
        scratch: Mapping[str, Tensor],
    ) -> None:
        super().__init__(host, op)
        self._attention, self._composed, self._fused = op, composed, fused
        self._scratch = scratch

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        if m < WIDEN_FROM:
            return self._composed.launches(tensors, m)
        op, position, name = self._attention, tensors["position"].array, self.call_name(m)
        own = new_tensor((m, op.width), np.dtype(np.float32))
        given, rounded = tensors["qkv"].array[:m], own.array
        heads = rounded.reshape(m, -1, op.head_dim).transpose(1, 0, 2)
        parts = heads[op.heads : op.heads + op.kv_heads], heads[op.heads + op.kv_heads :]
        caches = [CacheRows(tensors[port].array, op.kv, op.head_dim) for port in CACHE_PORTS]
        wide = [self._scratch[port].array for port in CACHE_PORTS]
        chunks, before_chunks, keep = self._fused.launches(
            {**tensors, **self._scratch, "qkv": own}, m
        )

        def before() -> None:
            first = checks.first_position(BACKEND, name, position, m, op.capacity)
            rounded[:] = given
            for rows, part, into in zip(caches, parts, wide, strict=True):
                rows.write(first, part)
                into[:, : first + m] = rows.read(0, first + m)
                part[:] = into[:, first : first + m]  # as they are read back
            assert before_chunks is not None
            before_chunks()

        return chunks, before, (keep, own, self._scratch)


class StateKernel(OrtKernel):
    """Graphs that replace a state: `sessions` are that of one token and that of several.

    Any number of tokens runs, as padding would change the state: in chunks of `chunk` (0: all at
    once). The graph writes `next_state` into the memory of the state, which it has in `shape`
    (None: as it is). `extra` is bound like activations.
    """

    def __init__(
        self,
        host: OrtHost,
        op: Op,
        sessions: tuple[ort.InferenceSession, ort.InferenceSession],
        extra: Mapping[str, Array],
        chunk: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(host, op)
        self._sessions, self._extra, self._chunk, self._shape = sessions, dict(extra), chunk, shape

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        chunk, later = self._chunk or m, np.ones(1, np.int32)  # a position that is not 0
        launches = []
        for start in range(0, m, chunk):
            stop = min(start + chunk, m)
            launches.append(self._launch(rows_between(tensors, start, stop), stop - start))
            if start:
                launches[-1].binding.bind_input(
                    "position", "cpu", 0, np.int32, later.shape, later.ctypes.data
                )
        return launches, None, (self._extra, later)

    def _launch(self, tensors: Mapping[str, Tensor], m: int) -> SessionLaunch:
        session = self._sessions[m > 1]
        inputs = {key: argument(array) for key, array in self._extra.items()}
        outputs = {}
        for port, tensor in tensors.items():
            if port in OUTPUT_PORTS:
                outputs[port] = rows_argument(tensor, m)
            elif port in STATE_PORTS:
                shape = self._shape or tensor.shape
                inputs[port] = Argument(tensor.address, tensor.dtype, shape)
                outputs["next_state"] = inputs[port]
            else:
                whole = port in FIXED_PORTS
                inputs[port] = argument(tensor.array) if whole else rows_argument(tensor, m)
        return SessionLaunch(session, io_binding(session, inputs, outputs))


class DecodeChunksKernel(OrtKernel):
    """On the host: a graph of such operations on integers takes longer than numpy."""

    def __init__(self, host: OrtHost, op: ops.DecodeChunks, channels: Array) -> None:
        super().__init__(host, op)
        self._chunks, self._channels = op, channels

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        arrays = {port: tensor.array for port, tensor in tensors.items()}
        arrays["table"] = arrays["table"][:m]
        return [], partial(kv_codes.decode_chunks, self._chunks, self._channels, arrays), None


def rope_inputs(op: ops.Rope) -> dict[str, Array]:
    """Return the tables of cos and sin, rounded once from float64; for scaled queries their own."""
    cos, sin = rope_tables.tables(op)
    tables = {"cos": cos, "sin": sin}
    if op.scales_queries:
        scale = rope_tables.query_scale(op)[:, None]
        tables |= {"query_cos": cos * scale, "query_sin": sin * scale}
    return {name: table.astype(np.float32) for name, table in tables.items()}


def _launch(
    session: ort.InferenceSession,
    tensors: Mapping[str, Tensor],
    m: int,
    extra: Mapping[str, Array],
) -> SessionLaunch:
    """Return every port bound under its own name, m tokens of each."""
    inputs = {key: argument(array) for key, array in extra.items()}
    outputs: dict[str, Argument] = {}
    for port in tensors:
        (outputs if port in OUTPUT_PORTS else inputs)[port] = rows_argument(tensors[port], m)
    return SessionLaunch(session, io_binding(session, inputs, outputs))


def _chunks(
    session: ort.InferenceSession,
    tensors: Mapping[str, Tensor],
    m: int,
    step: int,
    extra: Mapping[str, Array],
) -> list[SessionLaunch]:
    """Return launches of up to `step` tokens each."""
    return [
        _launch(session, rows_between(tensors, start, m), min(step, m - start), extra)
        for start in range(0, m, step)
    ]


def _batch_of_one(tensor: Tensor, rows: int) -> Argument:
    return Argument(tensor.address, tensor.dtype, (1, rows, *tensor.shape[1:]))

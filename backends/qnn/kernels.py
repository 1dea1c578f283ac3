"""One kernel class for each way of feeding a graph: what is bound to which input, and when."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import onnxruntime as ort

from hetero.backends import checks, ops, rope_tables
from hetero.backends.errors import DeviceError
from hetero.backends.memory import Tensor
from hetero.backends.onnx_common.binding import (
    NATIVE_ERRORS,
    Argument,
    Array,
    argument,
    rows_argument,
    rows_between,
)
from hetero.backends.onnx_common.head_tensors import HeadTensors, Rooms
from hetero.backends.ops import OUTPUT_PORTS, Op, describe
from hetero.backends.protocol import (
    BoundCall,
    Capabilities,
    Kernel,
    Operand,
    WeightValue,
    check_tensors,
    tensors_of,
)
from hetero.backends.qnn import integer, ranges, rounding
from hetero.backends.qnn.catalog import chunk_rows, contexts, integer_chunk_rows
from hetero.backends.qnn.graph_store import GraphStore
from hetero.backends.qnn.library import BACKEND
from hetero.backends.qnn.session import device_error
from hetero.backends.qnn.shared_memory import io_binding

NEVER = np.iinfo(np.int64).max  # position of a key that nothing sees
Run: TypeAlias = Callable[[], None]
Sessions: TypeAlias = Callable[[int], ort.InferenceSession]


class QnnHost(NamedTuple):
    """Services of the device to its kernels."""

    health: checks.Health
    capabilities: Capabilities
    store: GraphStore


class QnnCall(BoundCall):
    """Runs on the calling thread; the interpreter lock is released inside the graphs."""

    def __init__(self, name: str, m: int, health: checks.Health, runs: list[Run]) -> None:
        self.name, self.m = name, m
        self._health = health
        self._runs = runs

    def run(self) -> None:
        self._health.check(self.name)
        try:
            for run in self._runs:
                run()
        except DeviceError:
            raise
        except NATIVE_ERRORS as error:
            raise device_error(error, self.name) from error

    def release(self) -> None:
        """Drop the sessions; only a closed device does this."""
        self._runs.clear()


class QnnKernel(Kernel):
    """Checks a binding and cuts it into chunks; `chunk` binds one."""

    def __init__(self, host: QnnHost, op: Op, *, nbytes: int = 0) -> None:
        self.op = op
        self.nbytes = nbytes
        self.host = host
        self._step = chunk_rows(op)
        self._calls: weakref.WeakSet[QnnCall] = weakref.WeakSet()

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self.host.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m)
        plain = tensors_of(tensors)
        checks.check_token_count(self.host.capabilities, self.op, m, own=self.graph)
        runs = [
            self.chunk(rows_between(plain, start, min(start + self._step, m)), start)
            for start in range(0, m, self._step)
        ]
        call = QnnCall(self.call_name(m), m, self.host.health, runs)
        self._calls.add(call)
        return call

    def call_name(self, m: int) -> str:
        """Return the name of calls in traces and errors."""
        return f"{describe(self.op)} m={m}"

    @abstractmethod
    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        """Bind one graph to tensors of its own token count, `offset` tokens into the call."""

    def release(self) -> None:
        """Drop every session; only a closed device does this."""
        for call in self._calls:
            call.release()


class QnnMatMulKernel(QnnKernel):
    """One packed weight, one graph for each token count, all made on first binding."""

    def __init__(self, host: QnnHost, op: ops.MatMul, sessions: Sessions, *, nbytes: int) -> None:
        super().__init__(host, op, nbytes=nbytes)
        self._matmul = op
        self._sessions = sessions

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:  # noqa: ARG002
        rows = tensors["x"].shape[0]
        return ranges.ScaledProduct(
            self._sessions(rows),
            tensors["x"].array,
            tensors["y"].array,
            bias=self._matmul.bias,
            capped=self._matmul.softcap > 0,
            name=self.call_name(rows),
        ).run


class IntegerKernel(QnnKernel):
    """A matmul whose activations are integers (`integer`)."""

    def __init__(
        self,
        host: QnnHost,
        op: ops.MatMul,
        sessions: Sessions,
        weights: Mapping[str, WeightValue],
        activations: integer.Activations,
    ) -> None:
        weight = checks.packed(weights)
        super().__init__(host, op, nbytes=weight.nbytes)
        groups = not integer.has_row_scales(weight)
        self._step = integer_chunk_rows(op, activations, groups=groups)
        self._matmul, self._sessions = op, sessions
        self._coding = integer.CODINGS[activations]
        self._units = integer.row_units(weight)
        self._bias = checks.vector(weights, "bias") if op.bias else None
        static = op.weight_format.activations.static
        self._x_scale = float(checks.vector(weights, "x_scale")[0]) if static else None

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:  # noqa: ARG002
        x, y = tensors["x"], tensors["y"]
        product = rounding.IntegerProduct(
            self._sessions(x.shape[0]),
            self._matmul,
            x.array,
            y.array,
            coding=self._coding,
            units=self._units,
            bias=self._bias,
            x_scale=self._x_scale,
        )
        return product.run


class QnnGraphKernel(QnnKernel):
    """A graph whose ports and vectors are bound under their own names."""

    def __init__(
        self, host: QnnHost, op: Op, sessions: Sessions, vectors: Mapping[str, Array]
    ) -> None:
        super().__init__(host, op)
        self._sessions = sessions
        self._vectors = dict(vectors)

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:  # noqa: ARG002
        rows = next(iter(tensors.values())).shape[0]
        session = self._sessions(rows)
        inputs = {key: argument(array) for key, array in self._vectors.items()}
        outputs: dict[str, Argument] = {}
        for port, tensor in tensors.items():
            (outputs if port in OUTPUT_PORTS else inputs)[port] = rows_argument(tensor, rows)
        binding = io_binding(session, inputs, outputs)
        checked = ranges.RangeGuard(
            self.call_name(rows),
            [t.array for port, t in tensors.items() if port not in (*OUTPUT_PORTS, "tokens")],
            [t.array for port, t in tensors.items() if port in OUTPUT_PORTS],
            keep=(tensors, self._vectors),
        )

        def run() -> None:
            checked.before()
            session.run_with_iobinding(binding)
            checked.after()

        return run


class Rows:
    """Rows of tables at a call's positions, for the graph's inputs of those names."""

    def __init__(self, tables: Mapping[str, Array], m: int, shift: int = 0) -> None:
        self._tables = dict(tables)
        self._places = shift + np.arange(m)
        self.arrays = {
            name: np.zeros((m, table.shape[1]), np.float32) for name, table in tables.items()
        }

    def at(self, first: int) -> None:
        """Set for a call whose first token is at position `first`; after the end is the last."""
        for name, table in self._tables.items():
            np.take(table, first + self._places, axis=0, mode="clip", out=self.arrays[name])


def float_rope_tables(op: ops.Rope) -> dict[str, Array]:
    """Return `cos` and `sin`, each [max_position, R / 2], and of scaled queries their own."""
    cos, sin = rope_tables.tables(op)
    tables = {"cos": cos, "sin": sin}
    if op.scales_queries:
        scale = rope_tables.query_scale(op)[:, None]
        tables |= {"query_cos": cos * scale, "query_sin": sin * scale}
    return {name: table.astype(np.float32) for name, table in tables.items()}


class PositionKernel(QnnKernel):
    """Gives the graph the rows of tables at the call's positions.

    `limit` bounds position + m; `shift` is added to positions.
    """

    def __init__(
        self,
        host: QnnHost,
        op: ops.Rope | ops.AddPositions,
        sessions: Sessions,
        vectors: Mapping[str, Array],
        tables: Mapping[str, Array],
        *,
        limit: int,
        shift: int = 0,
    ) -> None:
        super().__init__(host, op)
        self._sessions, self._vectors, self._tables = sessions, dict(vectors), dict(tables)
        self._limit, self._shift = limit, shift

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        data, result = ("qkv", "out") if isinstance(self.op, ops.Rope) else ("x", "y")
        m, limit = tensors[data].shape[0], self._limit
        session, name = self._sessions(m), self.call_name(m)
        here = Rows(self._tables, m, self._shift)
        extra = here.arrays | self._vectors
        inputs = {key: argument(array) for key, array in extra.items()}
        inputs[data] = rows_argument(tensors[data], m)
        binding = io_binding(session, inputs, {result: rows_argument(tensors[result], m)})
        position = tensors["position"].array
        guard = ranges.RangeGuard(
            name, [tensors[data].array], [tensors[result].array], keep=(tensors, extra)
        )

        def run() -> None:
            here.at(checks.first_position(BACKEND, name, position, m + offset, limit) + offset)
            guard.before()
            session.run_with_iobinding(binding)
            guard.after()

        return run


class ConvKernel(QnnGraphKernel):
    """A short convolution: the graph computes rows, the host keeps the state.

    Its calls are of any number of tokens, for padded ones would change the state. Graphs are of
    powers of two of them; rows behind a call's last are zeros.
    """

    def __init__(
        self, host: QnnHost, op: Op, sessions: Sessions, vectors: Mapping[str, Array]
    ) -> None:
        super().__init__(host, op, sessions, vectors)
        assert isinstance(op, ops.ShortConv)
        self._conv = op
        gains = np.abs(vectors["taps"].reshape(op.taps, op.d)).sum(axis=0)
        self._gain = max(float(gains.max()), 1.0)  # of the largest sum over the largest row

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        op, own, target = self._conv, tensors["x"].array, tensors["y"].array
        m, name = len(own), self.call_name(len(own))
        rows = 1 << (m - 1).bit_length()
        session, state = self._sessions(rows), tensors["conv_state"].array
        before = np.zeros((op.taps - 1, op.d), np.float32)
        x, y = own, target
        if rows > m:
            x = np.zeros((rows, own.shape[1]), np.float32)
            y = np.empty((rows, op.d), np.float32)
        inputs = {key: argument(array) for key, array in self._vectors.items()}
        inputs |= {"x": argument(x), "before": argument(before)}
        binding = io_binding(session, inputs, {"y": argument(y)})
        used, position = own[:, : op.columns], tensors["position"].array
        keep = (tensors, x, y, before)
        guard = ranges.RangeGuard(name, [used, before], [y[:m]], keep=keep)

        def run() -> None:
            before[...] = 0 if position[0] + offset == 0 else state
            guard.before()
            self._check_sums(used, name)
            last = self._rows(used[-(op.taps - 1) :])
            if rows > m:
                x[:m, : op.columns] = used
            session.run_with_iobinding(binding)
            guard.after()
            if rows > m:
                target[...] = y[:m]
            state[...] = np.concatenate([before, last])[-len(before) :]

        return run

    def _rows(self, used: Array) -> Array:
        """Return what is convolved."""
        d = self._conv.d
        return used[:, :d] * used[:, 2 * d :] if self._conv.gated else used[:, :d].copy()

    def _check_sums(self, used: Array, name: str) -> None:
        """Raise `DeviceError` where a sum inside the graph may leave fp16."""
        d, gated = self._conv.d, self._conv.gated
        parts = (used[:, :d], used[:, 2 * d :]) if gated else (used[:, :d],)
        bound = self._gain
        for part in parts:
            bound *= max(float(part.max()), -float(part.min()))
        if bound >= ranges.LARGEST:
            exact = self._gain * float(np.abs(self._rows(used)).max())
            if exact >= ranges.LARGEST:
                raise ranges.overflow(name)


class AttentionKernel(QnnKernel):
    """Appends keys and values on the host, then attends with the graph that holds the context."""

    def __init__(
        self,
        host: QnnHost,
        op: ops.Attention,
        sessions: Callable[[int, int], ort.InferenceSession],
        masks: Masks,
    ) -> None:
        super().__init__(host, op)
        self._attention = op
        self._sessions = sessions
        self._masks = masks

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        op, m = self._attention, tensors["qkv"].shape[0]
        name = self.call_name(m)
        heads = tensors["qkv"].array.reshape(m, -1, op.head_dim).transpose(1, 0, 2)
        keys, values = heads[op.heads : op.heads + op.kv_heads], heads[op.heads + op.kv_heads :]
        k_cache, v_cache = tensors["k_cache"].array, tensors["v_cache"].array
        position = tensors["position"].array
        launches = [self._launch(tensors, m, context) for context in contexts(op.capacity, m)]
        guard = ranges.RangeGuard(
            name, [tensors["qkv"].array], [tensors["out"].array], keep=(tensors, launches)
        )

        def run() -> None:
            last = m + offset
            first = checks.first_position(BACKEND, name, position, last, op.capacity) + offset
            guard.before()
            k_cache[:, first : first + m] = keys
            v_cache[:, first : first + m] = values
            launch = next(candidate for candidate in launches if first + m <= candidate.context)
            launch.mask.at(first)
            launch.session.run_with_iobinding(launch.binding)
            guard.after()

        return run

    def _launch(self, tensors: Mapping[str, Tensor], m: int, context: int) -> AttentionLaunch:
        op = self._attention
        session = self._sessions(m, context)
        mask = self._masks.find(m, context, op.window)
        inputs = {
            "qkv": rows_argument(tensors["qkv"], m),
            "visible": argument(mask.visible),
            "written": argument(mask.written),
        }
        for kind in "kv":
            for head, cache in enumerate(tensors[f"{kind}_cache"].array):
                inputs[f"{kind}{head}"] = argument(cache[:context])
        binding = io_binding(session, inputs, {"out": rows_argument(tensors["out"], m)})
        return AttentionLaunch(context, session, binding, mask)


class QnnHeadsKernel(QnnKernel):
    """Some heads of an attention, by the graphs of an attention that has no others.

    `rooms` has the room for their columns, one for all layers (`HeadTensors`).
    """

    def __init__(
        self,
        host: QnnHost,
        op: ops.AttentionHeads,
        inner: AttentionKernel,
        rooms: Rooms,
    ) -> None:
        super().__init__(host, op)
        self._heads, self._inner, self._rooms = op, inner, rooms

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        heads = HeadTensors.of(self._heads, tensors, tensors["qkv"].shape[0], self._rooms)
        attend, out = self._inner.chunk(heads.own, offset), heads.own["out"].array

        def run() -> None:
            heads.gather()
            attend()
            np.copyto(heads.wanted, out)

        return run


class Mask:
    """Positions that a call may see; shared by all layers, renewed when the position moves."""

    def __init__(self, m: int, context: int, window: int, *, appends: bool = False) -> None:
        self.visible = np.zeros((m, context + m if appends else context), np.bool_)
        self.written = np.zeros((context, 1), np.bool_)
        self._window = window
        self._appends = appends
        self._first = -1

    def at(self, first: int) -> None:
        """Set for a call whose first token is at position `first`."""
        if first == self._first:
            return
        m, context = len(self.visible), len(self.written)
        self._first = first
        keys = np.arange(context)
        self.written[:, 0] = keys < (first if self._appends else first + m)
        if self._appends:  # after the cached keys come the call's own
            keys = np.append(np.where(keys < first, keys, NEVER), first + np.arange(m))
        queries = np.arange(first, first + m)[:, None]
        np.less_equal(keys, queries, out=self.visible)
        if self._window:
            self.visible &= keys > queries - self._window


class Masks:
    """The masks of a device."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int, bool], Mask] = {}

    def find(self, m: int, context: int, window: int, *, appends: bool = False) -> Mask:
        """Return the mask of these sizes.

        With `appends` for graphs that add the call's own keys.
        """
        key = (m, context, window, appends)
        if key not in self._masks:
            self._masks[key] = Mask(m, context, window, appends=appends)
        return self._masks[key]


class AttentionLaunch(NamedTuple):
    """A graph for one context length, bound."""

    context: int
    session: ort.InferenceSession
    binding: ort.IOBinding
    mask: Mask

"""The device: sessions by operation, kernels by weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from hetero.backends import checks, ops
from hetero.backends.formats import GROUP_SIZE, CacheFormat, StorageFormat, WeightFormat
from hetero.backends.host import hugepages
from hetero.backends.host.processor import cpu_name, is_arm64
from hetero.backends.memory import HostBuffer, Tensor, new_tensor
from hetero.backends.onnx_common import staging as weight_staging
from hetero.backends.onnx_common.binding import NATIVE_ERRORS
from hetero.backends.onnx_common.head_tensors import Rooms
from hetero.backends.ops import Op, describe
from hetero.backends.optional import SupportsCompaction
from hetero.backends.ort_cpu import delta_graph, graphs, integers, kernels, mixed, routing
from hetero.backends.ort_cpu.session import BACKEND, device_error, new_session
from hetero.backends.protocol import (
    CACHE_PORTS,
    Acceptance,
    Capabilities,
    Device,
    DeviceInfo,
    DeviceKind,
    Kernel,
    WeightValue,
)
from hetero.backends.weights import PackedWeight, pack, stacked

DEFAULT_GRAPH_SIZES = (1, 2, 4, 8, 32, 64, 128, 256, 512, 1024)
REVISION = "2"  # of the graphs: another one where their times change, for profiles taken before
ROW_ALIGNMENT = 32
COMPACT_S = 1.5  # the packs of a 1B model, nearly all: 0.7 s of loading for 2 to 3 % of each token
SPLIT_PAYS_UP_TO = 16  # tokens; measured, see `open`
SPLIT_CHUNK = 64  # tokens; longer chunks are no faster and their planes take more memory


# Graphs of operations, by their records.
_PLAIN: Final[Mapping[type[Op], Callable[[Any], bytes]]] = {
    ops.SigmoidGate: graphs.sigmoid_gate,
    ops.GatedInput: graphs.gated_input,
    ops.Act: graphs.act,
    ops.Add: graphs.add,
}


class OrtCpuDevice(Device, SupportsCompaction):
    """Sessions run on whatever thread calls them.

    As `cpu` it takes any token count up to the last of its sizes.
    """

    def __init__(
        self,
        *,
        graph_sizes: tuple[int, ...],
        w4a16: graphs.ActivationPath,
        kind: DeviceKind = "npu",
    ) -> None:
        if not graph_sizes or min(graph_sizes) < 1:
            raise ValueError(f"graph sizes are token counts of at least 1, got {graph_sizes}")
        if w4a16 not in get_args(graphs.ActivationPath):
            raise ValueError(f"w4a16 is one of {get_args(graphs.ActivationPath)}, got {w4a16!r}")
        ort.disable_telemetry_events()
        self._w4a16 = w4a16
        self._sizes = tuple(sorted(graph_sizes))
        exact = bool(integers.acceptance())
        formats = tuple(x for x in WeightFormat if exact or not x.activations.static)
        self.info = DeviceInfo(
            backend=BACKEND,
            name=cpu_name(),
            driver=f"onnxruntime {ort.__version__}",
            details={"w4a16": w4a16, "graphs": REVISION},
        )
        self.capabilities = Capabilities(
            kind=kind,
            static_shapes=kind == "npu",
            graph_sizes=self._sizes if kind == "npu" else (),
            weight_formats=formats,
            row_alignment=ROW_ALIGNMENT,
            early_visibility=False,
            attention_heads=True,
            experts=True,
            weight_bytes={
                known: _own_bytes(known, [split for _, split in self._paths(known)])
                for known in formats
            },
        )
        self._health = checks.Health(BACKEND)
        self._host = kernels.OrtHost(self._health, self.capabilities)
        self._sessions: dict[Any, ort.InferenceSession] = {}
        self._rope_tables: dict[Op, dict[str, npt.NDArray[Any]]] = {}
        self._kernels: weakref.WeakSet[kernels.OrtKernel] = weakref.WeakSet()
        self._rooms = Rooms()
        self._widened: dict[tuple[int, ...], dict[str, Tensor]] = {}
        self._packed_inputs: dict[tuple[Any, ...], frozenset[str]] = {}

    def map(self, buffer: HostBuffer) -> int:
        """Return the address: sessions work on the pages in place."""
        self._health.check("map")
        return buffer.address

    def accepts(self, op: Op) -> Acceptance:
        """Return everything that is in `graphs`; integer sums only where they are exact."""
        if isinstance(op, ops.MatMul | ops.Embed) and op.weight_format.activations.static:
            return integers.acceptance()
        if isinstance(op, ops.SumScores):
            return Acceptance(False, "columns of attention are added up by the caller (numpy)")
        return checks.accept_format(self.capabilities, op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Build the graph and its session, or take the session of the same operation."""
        self._health.check(f"preparing {describe(op)}")
        checks.check_weights(op, weights)
        try:
            kernel = self._prepare(op, weights)
        except NATIVE_ERRORS as error:
            raise device_error(error, f"preparing {describe(op)}") from error
        self._kernels.add(kernel)
        return kernel

    def compact_weights(self) -> None:
        """Move ONNX Runtime's packs of the weights into huge pages."""
        if sum(kernel.nbytes for kernel in self._kernels) >= hugepages.SMALLEST_BYTES:
            hugepages.collapse(COMPACT_S)

    def state(self) -> str:
        """See `Device.state`."""
        return self._health.state

    def close(self) -> None:
        """Release every session, also of kernels and calls that are still referred to."""
        self._health.lose("closed")
        for kernel in list(self._kernels):
            kernel.release()
        self._sessions.clear()
        self._rope_tables.clear()

    def _prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> kernels.OrtKernel:  # noqa: PLR0911, PLR0912
        match op:
            case ops.MatMul():
                return self._prepare_matmul(op, weights)
            case ops.Embed():
                return self._prepare_embed(op, weights)
            case ops.RMSNorm() | ops.LayerNorm():
                session = self._session(op, graphs.norm)
                return kernels.OrtGraphKernel(self._host, op, session, _vectors(weights))
            case ops.Rope():
                session = self._session(op, graphs.rotate)
                tables = self._rope_tables.setdefault(op, kernels.rope_inputs(op))
                return kernels.RopeKernel(self._host, op, session, tables | _vectors(weights))
            case ops.Attention():
                return self._prepare_attention(op, _vectors(weights))
            case ops.AttentionHeads():
                own = {name: value[op.queries] for name, value in _vectors(weights).items()}
                inner = self._prepare_attention(op.alone, own)
                return kernels.AttentionHeadsKernel(self._host, op, inner, self._rooms)
            case ops.SumScores():
                raise ValueError(f"{describe(op)}: {self.accepts(op).reason}")
            case ops.DecodeChunks():
                return kernels.DecodeChunksKernel(
                    self._host, op, checks.vector(weights, "channels")
                )
            case ops.GatedDelta():
                return self._prepare_delta(op, weights)
            case ops.ShortConv():
                session = self._session(op, graphs.short_conv)
                inputs = _vectors(weights)
                inputs["taps"] = inputs["taps"].reshape(op.taps, op.d)
                return kernels.StateKernel(self._host, op, (session, session), inputs)
            case ops.GatedAct():
                session = self._session(op, graphs.gated_act)
                return kernels.OrtGraphKernel(self._host, op, session, {}, row_bytes=8 * op.f)
            case ops.SigmoidGate() | ops.GatedInput() | ops.Act() | ops.Add():
                session = self._session(op, _PLAIN[type(op)])
                return kernels.OrtGraphKernel(self._host, op, session, _vectors(weights))
            case ops.AddPositions():
                session = self._session(op, graphs.add_positions)
                table = checks.vector(weights, "table").reshape(op.rows, op.d)
                return kernels.PositionsKernel(self._host, op, session, table)
            case ops.Outliers():
                session = self._session(op, graphs.outliers)
                inputs = _outlier_inputs(op, weights)
                kernel = kernels.OrtGraphKernel(self._host, op, session, inputs)
                kernel.nbytes = sum(array.nbytes for array in inputs.values())
                return kernel
            case ops.GatedAdd():
                inputs = {"weight": checks.vector(weights, "weight").reshape(op.d, 1)}
                session = self._session(op, graphs.gated_add)
                return kernels.OrtGraphKernel(self._host, op, session, inputs)
            case ops.Router():
                inputs = _vectors(weights)
                inputs["router"] = inputs["router"].reshape(op.experts, op.d)
                session = self._session(op, routing.router)
                return kernels.OrtGraphKernel(self._host, op, session, inputs)
            case ops.Experts():
                return self._prepare_experts(op, weights)

    def _prepare_attention(
        self, op: ops.Attention, sinks: Mapping[str, npt.NDArray[Any]]
    ) -> kernels.OrtKernel:
        floats = replace(op, kv=CacheFormat.F32)
        if op.head_dim % 8 or op != floats or op.reads:
            session = self._session(op, graphs.composed_attention)
            composed = kernels.ComposedAttentionKernel(self._host, op, session, sinks)
            if op.head_dim % 8 or op.reads:
                return composed
        session = self._session(floats, graphs.fused_attention)
        fused = kernels.FusedAttentionKernel(self._host, floats, session, sinks)
        if op == floats:
            return fused
        shape = op.kv_heads, op.capacity, op.head_dim
        if shape not in self._widened:
            self._widened[shape] = {
                port: new_tensor(shape, np.dtype(np.float32)) for port in CACHE_PORTS
            }
        scratch = self._widened[shape]
        return kernels.WidenedAttentionKernel(self._host, op, composed, fused, scratch)

    def _prepare_delta(
        self, op: ops.GatedDelta, weights: Mapping[str, WeightValue]
    ) -> kernels.StateKernel:
        sessions = []
        for one in (True, False):
            if (op, one) not in self._sessions:
                self._sessions[op, one] = new_session(delta_graph.gated_delta(op, one=one))
            sessions.append(self._sessions[op, one])
        group = op.v_heads // op.k_heads
        inputs = {
            name: value if name == "norm" else value.reshape(group, op.k_heads, 1)
            for name, value in _vectors(weights).items()
        }
        shape = group, op.k_heads, op.k_dim, op.v_dim
        both = sessions[0], sessions[1]
        return kernels.StateKernel(self._host, op, both, inputs, delta_graph.CHUNK, shape)

    def _prepare_embed(
        self, op: ops.Embed, weights: Mapping[str, WeightValue]
    ) -> kernels.OrtGraphKernel:
        _, table = next(checks.packed(weights).spans())
        storage = table.storage
        if (op, storage) not in self._sessions:
            build = mixed.embed if storage.scales == "block" else graphs.embed
            self._sessions[op, storage] = new_session(build(op, storage))
        inputs = mixed.embed_inputs(table) if storage.scales == "block" else _flat(table)
        return kernels.OrtGraphKernel(self._host, op, self._sessions[op, storage], inputs)

    def _session(self, op: Any, build: Callable[[Any], bytes]) -> ort.InferenceSession:
        """Return one session for each operation without a packed weight.

        Whatever its other weights are.
        """
        if op not in self._sessions:
            self._sessions[op] = new_session(build(op))
        return self._sessions[op]

    def _prepare_matmul(
        self, op: ops.MatMul, weights: Mapping[str, WeightValue]
    ) -> kernels.OrtMatMulKernel:
        weight = checks.packed(weights)
        staged, parts = _staged(weight), mixed.parts_of(weight)
        arrays = {name: value.array for name, value in staged.items()}
        wanted = self._paths(op.weight_format, parts)
        paths = [
            kernels.MatMulPath(
                limit,
                SPLIT_CHUNK if split else limit,
                new_session(_matmul_graph(op, split, parts), arrays),
            )
            for limit, split in wanted
        ]
        splits = [split for _, split in wanted]
        for name in frozenset.intersection(*(self._packed(op, split, parts) for split in splits)):
            staged[name].release()
        kernel_bytes = sum(staging.nbytes for staging in staged.values())
        kernel_bytes += round(sum(_kept_bytes(op, parts, split) for split in splits))
        extra = _vectors(weights)
        return kernels.OrtMatMulKernel(
            self._host, op, paths, extra, nbytes=kernel_bytes, keep=staged
        )

    def _prepare_experts(
        self, op: ops.Experts, weights: Mapping[str, WeightValue]
    ) -> routing.ExpertsKernel:
        products = {
            name: [
                self._prepare_matmul(matmul, own)
                for own in checks.expert_weights(op, name, weights)
            ]
            for name, matmul in op.matmuls.items()
        }
        key = routing.ExpertActivation(op.f, op.activation)
        session = self._session(key, routing.activation)
        return routing.ExpertsKernel(self._host, op, products, session)

    def _paths(
        self, weight_format: WeightFormat, parts: tuple[mixed.WeightPart, ...] = ()
    ) -> list[tuple[int, bool]]:
        """(largest token count, whether the activations are split), see `graphs.matmul`.

        Parts of 8 bits have one path, which would take twice their memory in two sessions.
        """
        least, most = self._sizes[0], self._sizes[-1]
        if weight_format is WeightFormat.GGUF_A16 and all(part.bits == 4 for part in parts):
            weight_format = WeightFormat.W4A16
        match weight_format, self._w4a16:
            case (WeightFormat.W8A16, _) | (WeightFormat.W4A16, "split"):
                return [(most, True)]
            case WeightFormat.W4A16, "both":
                limits = {SPLIT_PAYS_UP_TO: True, most: most <= SPLIT_PAYS_UP_TO}
                return [(limit, split) for limit, split in limits.items() if least <= limit]
            case _:
                return [(most, False)]

    def _packed(
        self, op: ops.MatMul, split: bool, parts: tuple[mixed.WeightPart, ...]
    ) -> frozenset[str]:
        """Return initializers that ONNX Runtime has packed and reads no more.

        Tried on a small weight.
        """
        key = (op.weight_format.value, split, *(part.storage for part in parts))
        if key not in self._packed_inputs:
            storages = tuple(part.storage for part in parts)
            self._packed_inputs[key] = _probe_packed(op.weight_format, split, storages)
        return self._packed_inputs[key]


def _probe_packed(
    weight_format: WeightFormat, split: bool, storages: tuple[StorageFormat, ...]
) -> frozenset[str]:
    """Return the initializers that may be erased once the session is made.

    Without changing a result.
    """
    op = ops.MatMul(n=96 * len(storages), k=172, weight_format=weight_format)
    rng = np.random.default_rng(0)
    parts = [pack(rng.standard_normal((96, op.k), dtype=np.float32), x) for x in storages]
    whole = stacked(parts) if weight_format.of_file else parts[0]
    feeds = [{"x": rng.standard_normal((m, op.k), dtype=np.float32)} for m in (1, 2, 64)]
    if weight_format.activations.static:
        feeds = [feed | {"x_scale": np.full(1, 0.03, np.float32)} for feed in feeds]
    staged = _staged(whole)
    session = new_session(
        _matmul_graph(op, split, mixed.parts_of(whole)),
        {name: value.array for name, value in staged.items()},
    )

    def results() -> list[npt.NDArray[Any]]:
        return [session.run(None, feed)[0] for feed in feeds]

    before, erasable = results(), set()
    for name, staging in staged.items():
        original = staging.padded.copy()
        staging.padded[...] = 0
        if all(np.array_equal(a, b) for a, b in zip(before, results(), strict=True)):
            erasable.add(name)
        staging.padded[...] = original
    return frozenset(erasable)


def _staged(weight: PackedWeight) -> dict[str, weight_staging.Staging]:
    """Return the weight as the initializers of `_matmul_graph`."""
    if weight.parts:
        return mixed.staged(weight)
    if weight.storage.scales == "row":
        return weight_staging.stage_by_feature(weight, integers.exact_codes())
    return weight_staging.stage(weight)


def _matmul_graph(op: ops.MatMul, split: bool, parts: tuple[mixed.WeightPart, ...]) -> bytes:
    if op.weight_format.of_file:
        return mixed.graph(op, parts, split=split)
    if op.weight_format.activations.static:
        return graphs.static_matmul(op, integers.exact_codes())
    return graphs.matmul(op, split=split)


def int8_pack_bytes() -> float:
    """Return the bytes of a 4-bit weight in the int8 kernels' pack.

    Codes, scales and block sums; on Arm (without KleidiAI) codes alone.
    """
    return 0.5 if is_arm64() else 0.75


def scale_bytes(weight_format: WeightFormat, *, split: bool) -> float:
    """Return the bytes of a weight's scales in our memory, where the kernel reads those."""
    if weight_format.storage is not StorageFormat.Q4:
        return 0.0
    int8 = split or weight_format is WeightFormat.W4A8
    return 4 / GROUP_SIZE if is_arm64() or not int8 else 0.0


def _pack_bytes(weight_format: WeightFormat, *, split: bool) -> float:
    """Return what ONNX Runtime's own pack holds of each weight, measured for large ones."""
    match weight_format.storage:
        case StorageFormat.Q4 if split or weight_format is WeightFormat.W4A8:
            return int8_pack_bytes()
        case StorageFormat.Q4:
            return 0.5
        case StorageFormat.Q8:
            return 1.25
        case StorageFormat.Q8R:
            return 1.0
        case StorageFormat.MIXED:
            return 1.0  # about a third of the weights have 8 bits
        case _:
            return 4.0


def _kept_bytes(op: ops.MatMul, parts: tuple[mixed.WeightPart, ...], split: bool) -> float:
    """Return the bytes of ONNX Runtime's packs of a whole weight."""
    if not op.weight_format.of_file:
        return op.n * op.k * _pack_bytes(op.weight_format, split=split)
    rounds = not op.weight_format.activations.are_floats
    each = {4: int8_pack_bytes() if split or rounds else 0.5, 8: 1.25, 0: 4.0}
    return op.k * sum(part.n * each[part.bits] for part in parts)


def _own_bytes(weight_format: WeightFormat, splits: Sequence[bool]) -> float:
    """Return the bytes of a weight in all packs, with the scales that some kernel reads."""
    packs = sum(_pack_bytes(weight_format, split=split) for split in splits)
    return packs + max(scale_bytes(weight_format, split=split) for split in splits)


def _flat(weight: PackedWeight) -> dict[str, npt.NDArray[Any]]:
    arrays = {"data": weight.data.reshape(-1)}
    if weight.scales is not None:
        arrays["scales"] = weight.scales.reshape(-1)
    return arrays


def _outlier_inputs(
    op: ops.Outliers, weights: Mapping[str, WeightValue]
) -> dict[str, npt.NDArray[Any]]:
    """Return copies: the packed layouts are the GPU's."""
    inputs: dict[str, npt.NDArray[Any]] = {}
    if op.hot:
        hot, columns = checks.slab(weights)
        inputs |= {"hot": hot, "slab": np.ascontiguousarray(columns.dequantize().T)}
    if op.excess:
        whole = checks.packed(weights)
        assert whole.scales is not None
        scale = checks.vector(weights, "x_scale")
        scales = whole.scales.reshape(-1)[: op.n]
        inputs |= {
            "codes": np.ascontiguousarray(whole.codes().T),
            "scales": scales,
            "x_scale": scale,
        }
    return inputs


def _vectors(weights: Mapping[str, WeightValue]) -> dict[str, npt.NDArray[Any]]:
    vectors = {name for name, value in weights.items() if not isinstance(value, PackedWeight)}
    return {name: np.ascontiguousarray(checks.vector(weights, name)) for name in vectors}

"""The device: graphs by operation and token count, kernels by weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort

from hetero.backends import checks, ops
from hetero.backends.formats import CacheFormat
from hetero.backends.groups import Group
from hetero.backends.memory import HostBuffer
from hetero.backends.onnx_common.head_tensors import Rooms
from hetero.backends.ops import Op, describe
from hetero.backends.optional import SupportsGroups
from hetero.backends.protocol import (
    Acceptance,
    Device,
    DeviceInfo,
    Kernel,
    WeightValue,
)
from hetero.backends.qnn import catalog, delta_kernel, expert_kernel, graphs, kernels
from hetero.backends.qnn.graph_store import GraphStore
from hetero.backends.qnn.group_kernel import GroupKernel
from hetero.backends.qnn.integer import ACTIVATIONS, Activations, has_row_scales
from hetero.backends.qnn.library import BACKEND, Library
from hetero.backends.qnn.npu_capabilities import capabilities_of
from hetero.backends.qnn.session import Target
from hetero.backends.qnn.shared_memory import SharedMemory, SharedMemoryError
from hetero.backends.snapdragon import Chip

UNBOUNDED = 1 << 30  # positions of a table whose last row stands for all after it


class QnnDevice(Device, SupportsGroups):
    """One Hexagon, real or emulated. Graphs run on whatever thread calls them."""

    def __init__(
        self,
        library: Library,
        chip: Chip,
        *,
        graph_sizes: tuple[int, ...],
        directory: Path | None,
        activations: Activations = "float16",
        shared_weights: bool = False,
    ) -> None:
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations {activations!r} are not one of {', '.join(ACTIVATIONS)}")
        if not graph_sizes or min(graph_sizes) < 1:
            raise ValueError(f"graph sizes are token counts of at least 1, got {graph_sizes}")
        self.on_host = library.emulated
        where = "emulated on this processor" if library.emulated else "Hexagon NPU"
        self.info = DeviceInfo(
            backend=BACKEND,
            name=f"{chip.label}, {where}",
            driver=library.version,
            details={"emulated": "yes"} if library.emulated else {},
        )
        able = capabilities_of(
            chip,
            graph_sizes,
            activations,
            shared_weights=shared_weights and not library.emulated,
        )
        # With integer activations the launches depend on the weights.
        launches = {
            x: catalog.launch_tokens(x)
            for x in able.weight_formats
            if activations == "float16" or x.activations.static
        }
        self.capabilities = replace(able, launch_tokens=launches)
        self._activations = activations
        self.store = GraphStore(Target(library, chip), directory)
        self._health = checks.Health(BACKEND)
        self._host = kernels.QnnHost(self._health, self.capabilities, self.store)
        self._masks = kernels.Masks()
        self._rooms = Rooms()
        self._expert_rooms: expert_kernel.Rooms = {}
        self._kernels: weakref.WeakSet[kernels.QnnKernel] = weakref.WeakSet()

    def allocate(self, nbytes: int, *, huge: bool = False) -> HostBuffer:
        """Return the memory that the Hexagon works on in place, where there is some.

        Else ordinary pages.
        """
        shared = self.shared_memory
        if isinstance(shared, str):
            return super().allocate(nbytes, huge=huge)
        return shared.allocate(nbytes)

    @functools.cached_property
    def shared_memory(self) -> SharedMemory | str:
        """Return the memory shared with the Hexagon, or why there is none."""
        try:
            return SharedMemory(self.store.target)
        except SharedMemoryError as error:
            return str(error)

    def map(self, buffer: HostBuffer) -> int:
        """Return the address: graphs work on the pages in place."""
        self._health.check("map")
        return buffer.address

    def accepts(self, op: Op) -> Acceptance:
        """Accept every operation but outliers and routing, and matmuls of the declared formats.

        Outliers are there to be computed elsewhere meanwhile; attention on caches in f32; experts
        with float16 activations.
        """
        if isinstance(op, ops.Outliers):
            return Acceptance(
                False,
                "outliers are floating-point sums for a GPU",
                "use --device hetero, or quantise with --outliers none",
            )
        if isinstance(op, ops.Experts) and not self.capabilities.experts:
            return Acceptance(
                False,
                f"its graphs of experts have float16 activations, not {self._activations}",
                "use --device hetero, where the GPU computes routed experts",
            )
        if lacks := _lacks(op):
            elsewhere = ops.has_state(op) or isinstance(op, ops.Router | ops.GatedAdd)
            return Acceptance(False, lacks, "use --device hetero" if elsewhere else "")
        if ops.has_sinks(op):
            return Acceptance(
                False,
                "its graphs have no sinks of attention",
                "use --device hetero, where the GPU computes attention with sinks",
            )
        whole = op.attention if isinstance(op, ops.AttentionHeads) else op
        if isinstance(whole, ops.Attention) and whole.kv is not CacheFormat.F32:
            return Acceptance(
                False, f"its graphs read keys and values in f32, not {whole.kv}", "use --kv f32"
            )
        return checks.accept_format(self.capabilities, op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Fix the weights. Graphs are opened, or compiled, when a token count is first bound."""
        self._health.check(f"preparing {describe(op)}")
        checks.check_weights(op, weights)
        accepted = self.accepts(op)
        if not accepted:
            raise ValueError(f"{describe(op)} cannot run on {self.info.name}: {accepted.reason}")
        kernel = self._prepare(op, weights)
        self._kernels.add(kernel)
        return kernel

    def prepare_group(self, group: Group, weights: Sequence[Mapping[str, WeightValue]]) -> Kernel:
        """Prepare one graph for each token count and context, when first bound.

        Compiled or opened then.
        """
        self._health.check(f"preparing {group.name}")
        for step, values in zip(group.steps, weights, strict=True):
            checks.check_weights(step.op, values)
            accepted = self.accepts(step.op)
            if not accepted:
                raise ValueError(f"{describe(step.op)} cannot run here: {accepted.reason}")
        digest = catalog.group_digest(weights) if self.store.directory else ""
        sessions: dict[tuple[int, int], ort.InferenceSession] = {}

        def session(m: int, context: int) -> ort.InferenceSession:
            if (m, context) not in sessions:
                made = catalog.group_graph(group, m, weights, digest, context)
                sessions[m, context] = self.store.session(*made)
            return sessions[m, context]

        nbytes = sum(value.nbytes for values in weights for value in values.values())
        kernel = GroupKernel(self._host, group, session, self._masks, nbytes=nbytes)
        self._kernels.add(kernel)
        return kernel

    def close(self) -> None:
        """Release every graph, also of kernels and calls that are still referred to."""
        self._health.lose("closed")
        for kernel in list(self._kernels):
            kernel.release()
        self.store.close()

    def _prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> kernels.QnnKernel:  # noqa: PLR0911
        match op:
            case ops.MatMul() if self._activations != "float16" or graphs.is_static(op):
                return self._prepare_integer(op, weights)
            case ops.MatMul():
                nbytes = checks.packed(weights).nbytes
                return kernels.QnnMatMulKernel(
                    self._host, op, self._sessions(op, weights), nbytes=nbytes
                )
            case ops.Rope():
                return kernels.PositionKernel(
                    self._host,
                    op,
                    self._sessions(op, weights),
                    graphs.vectors_of(op, weights),
                    kernels.float_rope_tables(op),
                    limit=op.max_position,
                )
            case ops.AddPositions():
                table = checks.vector(weights, "table").reshape(op.rows, op.d)
                return kernels.PositionKernel(
                    self._host,
                    op,
                    self._sessions(op, weights),
                    {},
                    {"rows": table},
                    limit=UNBOUNDED,
                    shift=op.offset,
                )
            case ops.Attention() | ops.AttentionHeads():
                return self._prepare_attention(op)
            case ops.Experts():
                return self._prepare_experts(op, weights)
            case ops.GatedDelta():
                vectors = graphs.vectors_of(op, weights)
                sessions = self._sessions(op, weights)
                return delta_kernel.DeltaKernel(self._host, op, sessions, vectors)
            case _:
                vectors = graphs.vectors_of(op, weights)
                conv = isinstance(op, ops.ShortConv)
                kind = kernels.ConvKernel if conv else kernels.QnnGraphKernel
                return kind(self._host, op, self._sessions(op, weights), vectors)

    def _prepare_attention(self, op: ops.Attention | ops.AttentionHeads) -> kernels.QnnKernel:
        whole = op.alone if isinstance(op, ops.AttentionHeads) else op
        sessions = self._attention_sessions(whole)
        kernel = kernels.AttentionKernel(self._host, whole, sessions, self._masks)
        if isinstance(op, ops.AttentionHeads):
            return kernels.QnnHeadsKernel(self._host, op, kernel, self._rooms)
        return kernel

    def _prepare_experts(
        self, op: ops.Experts, weights: Mapping[str, WeightValue]
    ) -> kernels.QnnKernel:
        each = catalog.each_expert(op, weights)
        of_experts = [self._sessions(catalog.alone(op), own) for own in each]
        return expert_kernel.QnnExpertsKernel(
            self._host,
            op,
            lambda i, m: of_experts[i](m),
            self._expert_rooms,
            nbytes=sum(value.nbytes for own in each for value in own.values()),
        )

    def _prepare_integer(
        self, op: ops.MatMul, weights: Mapping[str, WeightValue]
    ) -> kernels.QnnKernel:
        kind: Activations = "int8" if graphs.is_static(op) else self._activations
        weight = checks.packed(weights)
        if kind == "int8" and not has_row_scales(weight):
            raise ValueError(
                f"{describe(op)}: 8-bit activations take a weight with one scale for each row"
            )
        digest = catalog.constants_digest(op, weights) if self.store.directory else ""
        sessions: dict[int, ort.InferenceSession] = {}

        def session(m: int) -> ort.InferenceSession:
            if m not in sessions:
                made = catalog.integer_graph(op, m, weights, digest, kind)
                sessions[m] = self.store.session(*made)
            return sessions[m]

        return kernels.IntegerKernel(self._host, op, session, weights, kind)

    def _sessions(self, op: Op, weights: Mapping[str, WeightValue]) -> kernels.Sessions:
        """Return sessions by token count: graphs with constant weights belong to the kernel."""
        if not catalog.has_constants(op):
            return lambda m: self.store.shared(*catalog.graph(op, m, {}, ""))
        digest = catalog.constants_digest(op, weights) if self.store.directory else ""
        sessions: dict[int, ort.InferenceSession] = {}

        def session(m: int) -> ort.InferenceSession:
            if m not in sessions:
                sessions[m] = self.store.session(*catalog.graph(op, m, weights, digest))
            return sessions[m]

        return session

    def _attention_sessions(self, op: ops.Attention) -> Callable[[int, int], ort.InferenceSession]:
        return lambda m, context: self.store.shared(*catalog.attention_graph(op, m, context))


def _lacks(op: Op) -> str:
    """Return why no graph has an operation, "" where one may."""
    match op:
        case ops.SumScores() | ops.DecodeChunks():
            return "what contexts as a service need is computed on the host"
        case ops.Router():
            return "its graphs round to float16, which would choose other experts"
        case ops.GatedAdd():
            return "its graphs have no gate of a shared expert"
        case ops.Attention(reads=True) | ops.Rope(kv_heads=0):
            return "its attention reads the caches that it appends to"
        case _:
            return ""

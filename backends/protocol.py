"""The four interfaces of every backend.

A `Device` owns one processor. `prepare` compiles one operation on one set of weights into a
`Kernel`; `Kernel.bind` fixes addresses and token count into a `BoundCall`, the only thing that the
hot loop touches; launching one on an asynchronous device returns a `Completion`.

Threads: a device, its kernels and calls are used from one thread at a time (the model's control
thread). `close` may be called from any thread once no call is running.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.host.closing import Closing
from hetero.backends.memory import HostBuffer, Panels, Tensor
from hetero.backends.ops import Op
from hetero.backends.weights import PackedWeight

DeviceKind: TypeAlias = Literal["gpu", "npu", "cpu"]
EVERY_KIND: Final[tuple[DeviceKind, ...]] = get_args(DeviceKind)
# Those that compute whole models; a CPU only takes rows of their matmuls.
KINDS: Final[tuple[Literal["gpu", "npu"], ...]] = ("gpu", "npu")
PerGraphSize: TypeAlias = Literal["nothing", "graph", "weights"]
WeightValue: TypeAlias = PackedWeight | npt.NDArray[np.float32] | npt.NDArray[np.int32]
Operand: TypeAlias = Tensor | Panels

DEFAULT_DEADLINE_S = 60.0


def other_kind(kind: DeviceKind) -> DeviceKind:
    """Return the other of the two processors."""
    return "npu" if kind == "gpu" else "gpu"


class Acceptance(NamedTuple):
    """Answer of `Device.accepts`.

    `reason` is empty when accepted, `remedy` where only another device or weight format would help.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a device, as data that is read before planning.

    kind                 which of the roles it plays
    unified_memory       kernels work on `HostBuffer` memory in place; else copies are real work
    coherent             host and device see each other's writes when a call is complete; else each
                         tensor that another processor wrote or reads is handed over
                         (`SupportsHandovers`)
    own_memory           that is so in memory that this device allocates, and not in other memory
    asynchronous         calls are submitted (`submit`); else they block (`run`)
    static_shapes        token counts must be one of `graph_sizes`; others are refused by `bind`
    graph_sizes          token counts that were prepared ahead of time (empty: any)
    weight_formats       formats that `MatMul` takes
    row_alignment        rows of a segment of a cut weight are a multiple of this
    token_alignment      tokens of a tile of a cut sequence are a multiple of this
    fused_groups         groups that it takes as one graph beyond single operations
    operand_orders       orders of `MatMul` that differ in speed here
    early_visibility     a flag and the data written before it are seen by the host while the kernel
                         still runs: True or False as probed, None when not probed yet
    memory_limit_bytes   memory the device can hold, None when it is the host's
    max_allocation_bytes largest single buffer, None when it is not limited
    weight_bytes         what each weight of a prepared matmul takes in the device's own layout, by
                         format; formats that are not listed are kept as stored
    per_graph_size       what each graph size of a matmul has for itself: nothing (one graph serves
                         all), a graph that shares its weights, or a graph with weights of its own
    every_core           it computes on the control thread's core as well: polling slows it down
    attention_heads      it computes some heads of an attention while a device has the others
                         (`ops.AttentionHeads`)
    experts              it computes routed experts (`ops.Experts`)
    launch_tokens        (k, tokens) by format: from k input features on a launch of a matmul takes
                         so many tokens at most, and a call of more runs several; formats that are
                         not listed run one launch
    reads_panels         operations that follow a matmul take its output as `Panels`
                         (`takes_panels`); elsewhere the caller gathers them into one tensor
    """

    kind: DeviceKind
    unified_memory: bool = True
    coherent: bool = True
    own_memory: bool = False
    asynchronous: bool = False
    static_shapes: bool = False
    graph_sizes: tuple[int, ...] = ()
    weight_formats: tuple[WeightFormat, ...] = ()
    row_alignment: int = 16
    token_alignment: int = 1
    fused_groups: tuple[str, ...] = ()
    operand_orders: tuple[str, ...] = ("plain",)
    early_visibility: bool | None = None
    memory_limit_bytes: int | None = None
    max_allocation_bytes: int | None = None
    weight_bytes: Mapping[WeightFormat, float] = field(default_factory=dict)
    per_graph_size: PerGraphSize = "nothing"
    every_core: bool = False
    attention_heads: bool = False
    launch_tokens: Mapping[WeightFormat, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    reads_panels: bool = False
    experts: bool = False

    @property
    def prepares_rows(self) -> bool:
        """Return whether rows of matmuls are prepared ahead, for they are in its own layout.

        Elsewhere kernels of any rows are made when asked for, on the weights as they are stored.
        """
        return self.static_shapes or bool(self.weight_bytes)


class Graphs(Protocol):
    """Arguments of `prepared_sizes`: capabilities of an open device, or of one in a profile."""

    @property
    def static_shapes(self) -> bool:
        """See `Capabilities`."""

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """See `Capabilities`."""


def prepared_sizes(capabilities: Graphs) -> tuple[int, ...]:
    """Return the token counts of a device's graphs, rising; none where it takes any."""
    return tuple(sorted(capabilities.graph_sizes)) if capabilities.static_shapes else ()


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Identity of an opened device, for reports and cache keys. All strings are for people."""

    backend: str
    name: str
    driver: str
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Return one line that changes whenever timings or compiled kernels may change."""
        extra = ";".join(f"{key}={value}" for key, value in sorted(self.details.items()))
        return f"{self.backend}|{self.name}|{self.driver}|{extra}"


class Completion(ABC):
    """One submitted launch."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the launch and everything before it has completed; never blocks.

        Raises `DeviceError` when the launch failed.
        """

    @abstractmethod
    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Block until done. Raises `WaitTimeoutError` after `deadline_s`, `DeviceError` on failure.

        When it returns, every write of the launch is visible to the host and to other devices.
        """

    def block(self) -> None:
        """Wait as the driver does, which has no deadline either; for comparisons."""
        self.wait()

    def span(self) -> tuple[float, float] | None:
        """Return when a completed launch ran, in seconds of `time.perf_counter`.

        None if not known (`SupportsQueueControl.set_timing`).
        """
        return None


class BoundCall(ABC):
    """A pre-bound launch. Holds references to everything that it uses.

    `name` is for traces and errors; `m` the token count it computes (the graph size on a device
    with static shapes); `fusible`: whether its device may fuse it with others.
    """

    name: str
    m: int
    fusible: bool = False

    def finish_binding(self) -> None:  # noqa: B027
        """Do now what the first run would do before it computes; idempotent.

        A step does so for all its calls before it runs any: that may wait for the device.
        """

    @abstractmethod
    def run(self) -> None:
        """Execute and return when the result is visible to the host.

        Releases the GIL meanwhile. Has no deadline: where it hangs `hetero.runtime.watchdog` says
        so.
        """

    def submit(self) -> Completion:
        """Enqueue and flush; asynchronous devices only. Calls complete in submission order."""
        raise TypeError(f"{self.name}: a blocking device has no submit(), use run()")

    def enqueue(self) -> Completion:
        """Do the same as `submit`, but the driver may wait until something else is submitted."""
        return self.submit()


class Kernel(ABC):
    """One operation on one set of weights, compiled. Several token counts may share it.

    `nbytes` counts weight memory that the kernel holds beyond the `PackedWeight` it was given.
    `graph` is the token count that `prepare_graph` prepared it for.
    """

    op: Op
    nbytes: int = 0
    graph: int | None = None

    @abstractmethod
    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        """Fix the tensors (named by `op.ports`) and the token count.

        `Panels` are taken for the ports that `takes_panels` names where the device reads them.

        Every [m, …] tensor has at least m rows; a row of `tensors` has exactly the record's width.
        Raises `ValueError` for a missing or misshapen tensor, or for a token count that a device
        with static shapes has no graph for.
        """


class Device(Closing):
    """One processor of a kind: its queue or sessions, compiled-kernel cache, share of the pool.

    What only some devices can do is in the interfaces of `hetero.backends.optional`. Opening may
    raise `DeviceUnavailableError`. After a failure that the device cannot recover from,
    every later call raises `DeviceLostError` with the first failure's reason.
    """

    info: DeviceInfo
    capabilities: Capabilities
    note: str = ""  # what it would have in a process of its own, and lacks in this one
    on_host: bool = True  # it computes on cores of this machine's processor

    def allocate(self, nbytes: int, *, huge: bool = False) -> HostBuffer:
        """Return the pool memory that this device and every mapping device can use in place.

        `huge` as in `HostBuffer`, where the memory is the host's own.
        """
        return HostBuffer(nbytes, huge=huge)

    @abstractmethod
    def map(self, buffer: HostBuffer) -> Any:
        """Make pool memory usable by this device; idempotent. Returns the native handle, if any."""

    @abstractmethod
    def accepts(self, op: Op) -> Acceptance:
        """Return whether `prepare` would succeed, decided from data alone."""

    @abstractmethod
    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Compile `op` on `weights` (`ops.weight_names`). Raises `DeviceError` or `ValueError`."""

    def prepare_graph(self, op: Op, weights: Mapping[str, WeightValue], m: int) -> Kernel:
        """Do the same as `prepare`, for a kernel that also takes calls of exactly m tokens.

        Whatever the graph sizes: a prompt of an unexpected length waits for it (the paper's
        online-prepare).
        """
        kernel = self.prepare(op, weights)
        kernel.graph = m
        return kernel

    def drain(self, deadline_s: float) -> None:
        """Return when everything submitted is complete.

        That includes launches of which an interrupted caller has no completion; a blocking device
        has none. Raises `WaitTimeoutError` after `deadline_s`.
        """

    def state(self) -> str:
        """Return one word or sentence on whether the device takes calls, for error messages."""
        return "open"

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent. Later calls raise `DeviceLostError`."""


def check_tensors(
    op: Op, tensors: Mapping[str, Operand], m: int, *, reads_panels: bool = False
) -> None:
    """Validate names, widths, row counts and dtypes of a binding. Raises `ValueError`."""
    if m < 1:
        raise ValueError(f"a call needs at least one token, got m={m}")
    missing = [port for port in op.ports if port not in tensors]
    unknown = [port for port in tensors if port not in op.ports]
    if missing or unknown:
        raise ValueError(
            f"{type(op).__name__} takes the tensors {op.ports}, missing {missing}, "
            f"unknown {unknown}"
        )
    for port in op.ports:
        tensor, what = tensors[port], type(op).__name__
        if isinstance(tensor, Panels) and not (reads_panels and takes_panels(op, port)):
            raise ValueError(f"{what} takes {port} as one tensor here, got panels")
        expected, dtype = port_shape(op, port, m), port_dtype(op, port)
        check_shape(what, port, tensor, expected, dtype, fixed=port in FIXED_PORTS)


def check_shape(
    what: str,
    name: str,
    tensor: Operand,
    expected: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    fixed: bool = False,
) -> None:
    """Raise `ValueError` unless a tensor is as expected; it may have more rows if not `fixed`."""
    rows_ok = tensor.shape[:1] == expected[:1] or (not fixed and tensor.shape[0] >= expected[0])
    if not rows_ok or tensor.shape[1:] != expected[1:] or tensor.dtype != dtype:
        raise ValueError(
            f"{what} takes {name} as {dtype} {expected}, got {tensor.dtype} {tensor.shape}"
        )


CACHE_PORTS = ("k_cache", "v_cache")
CONTEXT_PORTS = (*CACHE_PORTS, *ops.STATE_PORTS)  # tensors of a context, updated in place
FIXED_PORTS = frozenset({"position", "codes", "score_sums", *CONTEXT_PORTS})
_INT32_PORTS = frozenset({"tokens", "position", "table"})


def takes_panels(op: Op, port: str) -> bool:  # noqa: PLR0911
    """Return whether a port may be the output of a cut matmul, where the device reads `Panels`."""
    match op:
        case ops.RMSNorm() | ops.LayerNorm():
            return port == ("residual" if op.add else "x")
        case ops.Rope():
            return port == "qkv"
        case ops.GatedAct() | ops.Act() | ops.ShortConv() | ops.GatedAdd():
            return port == "x"
        case ops.GatedDelta() | ops.SigmoidGate():
            return port == "gates"
        case ops.Add() | ops.GatedInput():
            return port in ("x", "residual")
        case ops.Outliers():
            return port == "residual"
        case _:
            return False


def whole(operand: Operand) -> Tensor:
    """Return an operand that is one tensor, as `check_tensors` has made sure."""
    assert isinstance(operand, Tensor)
    return operand


def parts_of(operand: Operand) -> tuple[Tensor, ...]:
    """Return the tensors that make an operand: its panels, or itself."""
    return operand.parts if isinstance(operand, Panels) else (operand,)


def tensors_of(operands: Mapping[str, Operand]) -> dict[str, Tensor]:
    """Return the operands that are all one tensor each, as `check_tensors` has made sure."""
    return {port: whole(operand) for port, operand in operands.items()}


def port_dtype(op: Op, port: str) -> np.dtype[Any]:
    """Return the element type of a port's tensor."""
    if isinstance(op, ops.SumScores | ops.AttentionHeads):
        return port_dtype(op.attention, port)
    if isinstance(op, ops.Attention | ops.DecodeChunks) and port in CACHE_PORTS:
        return op.kv.dtype
    if port == "codes":
        return np.dtype(np.uint8)
    return np.dtype(np.int32 if port in _INT32_PORTS else np.float32)


def port_shape(op: Op, port: str, m: int) -> tuple[int, ...]:
    """Return the shape of a port's tensor for m tokens."""
    match port:
        case "tokens":
            return (m,)
        case "position":
            return (1,)
    return (m, *_width(op, port)) if port not in FIXED_PORTS else _width(op, port)


def _width(op: Op, port: str) -> tuple[int, ...]:  # noqa: PLR0911, PLR0912
    match op:
        case ops.MatMul() | ops.Outliers():
            return (op.k,) if port == "x" else (op.n,)
        case ops.Rope():
            return (op.width + op.gates if port == "qkv" else op.width,)
        case ops.SigmoidGate() | ops.GatedInput():
            return (op.width if port in ("gates", "inputs") else op.d,)
        case ops.Attention():
            if port in FIXED_PORTS:
                return op.kv.shape(op.kv_heads, op.capacity, op.head_dim)
            return (op.width,) if port == "qkv" else (op.heads * op.head_dim,)
        case ops.AttentionHeads():
            return _width(op.attention, port)
        case ops.SumScores():
            of = op.attention
            return (of.kv_heads, of.capacity) if port == "score_sums" else _width(of, port)
        case ops.DecodeChunks():
            if port in CACHE_PORTS:
                return op.kv.shape(op.kv_heads, op.capacity, op.head_dim)
            return (op.room,) if port == "codes" else (4,)
        case ops.GatedAct():
            return (2 * op.f,) if port == "x" else (op.f,)
        case ops.Router() if port == "y":
            return (2 * op.chosen,)
        case ops.Experts() if port == "routes":
            return (2 * op.chosen,)
        case ops.GatedDelta():
            if port == "delta_state":
                return (op.v_heads, op.k_dim, op.v_dim)
            return ({"x": op.columns, "gates": op.gates_width}.get(port, op.values),)
        case ops.ShortConv():
            if port == "conv_state":
                return (op.taps - 1, op.d)
            return (max(op.width, op.columns) if port == "x" else op.d,)
        case _:
            return (op.f if isinstance(op, ops.Act) else op.d,)


def memory_owner(devices: Mapping[DeviceKind, Device]) -> Device:
    """Return the device that allocates what all of them use: the one with the stricter needs.

    That is the GPU if its memory is coherent only where it allocates it, else the NPU.
    """
    gpu, npu = devices.get("gpu"), devices.get("npu")
    if gpu is not None and (npu is None or gpu.capabilities.own_memory):
        return gpu
    assert npu is not None
    return npu

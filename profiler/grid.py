"""The shapes to measure, by default or of a model, pruned by stages (paper section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul, OperandOrder
from hetero.backends.protocol import DeviceKind
from hetero.profiler.records import DECODE_TOKENS, DeviceRecord, phase_of

# (n, k) by aspect: square, wide (FFN-up) and tall (FFN-down), from small models to 1-3 B ones.
DEFAULT_PAIRS: Final = (
    (512, 512), (1024, 1024), (2048, 2048), (3072, 3072),
    (3072, 1024), (4864, 896), (8192, 2048), (16384, 2048),
    (1024, 3072), (896, 4864), (2048, 8192), (512, 2048),
)  # fmt: skip
QUICK_PAIRS: Final = ((512, 512), (1024, 4096), (2048, 2048), (4096, 1024), (8192, 2048))
DECODE_SIZES: Final = (1, 2, 3, 4, 6, 8)
PREFILL_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024)
QUICK_SIZES: Final = (1, 4, 32, 128, 256)
WIDE: Final = 1.5  # aspect from which a weight is wide or tall


class Shape(NamedTuple):
    """A named matmul of a model (`qkv`, `down`, …); what the CLI passes for `--model`."""

    name: str
    n: int
    k: int


class Task(NamedTuple):
    """One kernel at one size: what a row of the profile times."""

    device: DeviceKind
    weight_format: WeightFormat
    order: OperandOrder
    m: int
    n: int
    k: int

    @property
    def key(self) -> tuple[str, str, str, int, int, int]:
        """Return the same key as `MatMulRow.key`."""
        return (self.device, self.weight_format.value, self.order, self.m, self.n, self.k)

    @property
    def op(self) -> MatMul:
        """Return the operation record."""
        return MatMul(n=self.n, k=self.k, weight_format=self.weight_format, order=self.order)


@dataclass(frozen=True)
class TaskGrid:
    """Tasks to measure, and the pruned ones: pruned task -> the measured one of its stage."""

    tasks: tuple[Task, ...]
    pruned: dict[Task, Task]


def shape_class(m: int, n: int, k: int) -> str:
    """Return phase and aspect of a matmul, such as `decode-tall`: one canary for each."""
    aspect = "wide" if n >= WIDE * k else "tall" if k >= WIDE * n else "square"
    return f"{phase_of(m)}-{aspect}"


def token_counts(device: DeviceRecord, wanted: Iterable[int]) -> list[int]:
    """Token counts to run: the wanted ones, or the graph sizes among and between them."""
    sizes = device.capabilities.graph_sizes
    wanted = sorted(set(wanted))
    if not (device.capabilities.static_shapes and sizes):
        return wanted
    return [size for size in sorted(sizes) if size <= wanted[-1]] or [min(sizes)]


def pad(value: int, multiple: int) -> int:
    """Return `value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def stage_key(device: DeviceRecord, task: Task) -> Task:
    """Return the task of the largest size in the same stage."""
    sizes = [size for size in sorted(device.capabilities.graph_sizes) if size >= task.m]
    if device.capabilities.static_shapes and sizes:
        tokens = sizes[0]
    else:
        tokens = task.m if task.m <= DECODE_TOKENS else pad(task.m, device.token_stage)
    return task._replace(m=tokens, n=pad(task.n, device.row_stage))


def make_grid(
    kind: DeviceKind,
    device: DeviceRecord,
    pairs: Sequence[tuple[int, int]],
    tokens: Iterable[int],
    formats: Iterable[WeightFormat],
    *,
    heads: Iterable[tuple[int, int]] = (),
) -> TaskGrid:
    """Return all sizes of one device in every format and order it has, one task for each stage.

    `heads` are pairs of output heads, which only ever see the few tokens that are predicted from.
    """
    few = frozenset(heads)
    capabilities = device.capabilities
    orders: tuple[OperandOrder, ...] = capabilities.operand_orders if kind == "npu" else ("plain",)
    wanted = [
        Task(kind, weight_format, order, m, n, k)
        for weight_format in formats
        if weight_format in capabilities.weight_formats
        for order in orders
        for n, k in dict.fromkeys(pairs)
        for m in sorted(set(tokens))
        if m <= DECODE_TOKENS or (n, k) not in few
    ]
    return prune(device, wanted)


def prune(device: DeviceRecord, wanted: Iterable[Task]) -> TaskGrid:
    """Keep the last requested size of each stage; static devices get the graph's size."""
    static = device.capabilities.static_shapes and device.capabilities.graph_sizes
    representative: dict[Task, Task] = {}
    members: list[Task] = []
    for task in wanted:
        if static and task.m > max(device.capabilities.graph_sizes):
            continue
        members.append(task)
        key = stage_key(device, task)
        runnable = key._replace(n=task.n) if static else task
        best = representative.get(key)
        if best is None or (runnable.n, runnable.m) > (best.n, best.m):
            representative[key] = runnable
    tasks = tuple(dict.fromkeys(representative.values()))
    chosen = set(tasks)
    pruned = {t: representative[stage_key(device, t)] for t in members if t not in chosen}
    return TaskGrid(tasks, pruned)


def model_pairs(shapes: Iterable[Shape]) -> tuple[tuple[int, int], ...]:
    """Return distinct (n, k) of a model's matmuls, and for each k a quarter of its fewest rows.

    Cuts are along n: what a call costs with however few rows does not show in whole weights, and
    with one n a slow sample of it would pass for such a cost. A quarter is in whole blocks of 256
    rows.
    """
    pairs = dict.fromkeys((shape.n, shape.k) for shape in shapes)
    fewest: dict[int, int] = {}
    for n, k in pairs:
        fewest[k] = min(n, fewest.get(k, n))
    quarters = ((pad(n // 4, 256), k) for k, n in fewest.items() if n > 256)
    return (*pairs, *quarters)


def head_pairs(shapes: Iterable[Shape]) -> tuple[tuple[int, int], ...]:
    """Return (n, k) that only a model's output head has."""
    others = {(shape.n, shape.k) for shape in shapes if shape.name != "lm_head"}
    return tuple((s.n, s.k) for s in shapes if s.name == "lm_head" and (s.n, s.k) not in others)

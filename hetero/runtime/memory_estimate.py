"""The memory that a model on a plan needs, computed before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetero.backends.host.processor import memory_bytes
from hetero.backends.ops import OUTPUT_PORTS, Experts, MatMul, Outliers
from hetero.backends.protocol import Device, DeviceKind, takes_panels
from hetero.backends.weights import packed_bytes
from hetero.errors import UserError
from hetero.models.config import ModelConfig
from hetero.models.graph import Shadows
from hetero.profiler.model_graph import ModelGraph
from hetero.runtime.holes import MOST_PIECES
from hetero.runtime.kv.kv_cache import CacheLayout
from hetero.runtime.pool import Shape, nbytes_of, slot_shapes
from hetero.runtime.sizes import SCORING_PIECE
from hetero.runtime.slot_refs import SlotRef
from hetero.solver.placement import Placement
from hetero.solver.planned_kernels import all_experts
from hetero.solver.shared_experts import part_widths

if TYPE_CHECKING:
    from hetero.profiler.records import Storage


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the pool, the weights on each device, the contexts, and the largest buffer.

    The pool has the slots and lists of outliers; of the weights' rows `copied_bytes` are in
    addition to one copy as stored; keys and values are of each of so many `contexts`. Of the
    weights the system drops `mapped_bytes` where the machine's memory is short, and reads them
    again from their file; those of `file_bytes`, routed experts, where the budget is.
    """

    pool_bytes: int
    weight_bytes: int
    context_bytes: int
    largest_bytes: int
    copied_bytes: int = 0
    contexts: int = 1
    mapped_bytes: int = 0
    file_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the sum."""
        return self.pool_bytes + self.weight_bytes + self.contexts * self.context_bytes


def estimate_memory(
    slots: Mapping[SlotRef, Shape],
    layout: CacheLayout,
    placement: Placement,
    *,
    weights_in_memory: bool = True,
) -> MemoryEstimate:
    """Return the bytes of the slots, a context and the plan's weights."""
    sizes = [nbytes_of(shape) for shape in slots.values()]
    sizes += [listed_bytes(placement), routed_bytes(placement)]
    weight_bytes = sum(placement.kernels.weight_bytes.values()) if weights_in_memory else 0
    return MemoryEstimate(
        pool_bytes=sum(sizes),
        weight_bytes=weight_bytes,
        copied_bytes=max(weight_bytes - placement.kernels.stored_bytes, 0),
        context_bytes=layout.nbytes,
        largest_bytes=max(*sizes, layout.largest_bytes),
    )


def fitting_window(
    placement: Placement,
    config: ModelConfig,
    layout: CacheLayout,
    devices: Mapping[DeviceKind, Device],
    *,
    most: int,
    shadows: Shadows | None,
    budget_bytes: int | None,
    weights_in_memory: bool = True,
    mapped: Callable[[], bool] = lambda: False,
) -> tuple[int, dict[SlotRef, Shape], MemoryEstimate]:
    """Return how many calls of a prompt may be in flight, with their slots and memory.

    At most `most`. `mapped`: whether the weights are those of a mapped file, asked only where all
    together exceed the machine's memory. Raises `UserError` where not even one fits.
    """
    gathered = gathered_slots(placement, devices)
    for window in range(most, 0, -1):
        slots = slot_shapes(
            config,
            # A second graph may begin where the first ends.
            tokens=placement.longest + placement.written,
            logit_rows=SCORING_PIECE,
            gathered=gathered,
            chunks=window,
            shadows=shadows,
            rows=MOST_PIECES,
            slides=layout.slides,
            parts=part_widths(placement.graph),
        )
        needs = estimate_memory(slots, layout, placement, weights_in_memory=weights_in_memory)
        if _lacking(needs, budget_bytes) is not None and mapped():
            needs = replace(
                needs,
                mapped_bytes=bytes_in_place(placement, devices),
                file_bytes=experts_in_place(placement, devices),
            )
        try:
            check_memory(needs, devices, budget_bytes)
        except UserError:
            if window == 1:
                raise
        else:
            break
    return window, slots, needs


def bytes_in_place(placement: Placement, devices: Mapping[DeviceKind, Device]) -> int:
    """Return the bytes of weights that devices use where they are stored, without a copy."""
    return sum(placement.kernels.weight_bytes.get(kind, 0) for kind in _in_place(devices))


def experts_in_place(placement: Placement, devices: Mapping[DeviceKind, Device]) -> int:
    """Return the bytes of routed experts among these."""
    in_place = _in_place(devices)
    return sum(
        packed_bytes(x.weight_format.storage, x.n, x.k)
        for node in placement.graph.nodes
        if isinstance(node.op, Experts) and placement.devices(node) <= in_place
        for x in all_experts(node.op)
    )


def _in_place(devices: Mapping[DeviceKind, Device]) -> frozenset[DeviceKind]:
    """Return the devices that compute with the packed weights where they are."""
    able = {kind: device.capabilities for kind, device in devices.items()}
    return frozenset(k for k, x in able.items() if x.unified_memory and not x.prepares_rows)


def file_note(
    needs: MemoryEstimate, graph: ModelGraph, budget_bytes: int | None, storage: Storage | None
) -> str:
    """Return what a token reads where routed experts stay in their file; empty where none do.

    With the disk's rate also how fast answers are at most, all experts equally likely.
    """
    if not needs.file_bytes:
        return ""
    ops = [x.op for x in graph.nodes if isinstance(x.op, Experts)]
    used = sum(x.chosen for x in ops) / sum(x.experts for x in ops)
    used_bytes = round(used * needs.file_bytes)
    note = (
        f"{_gib(needs.file_bytes)} of routed experts stay in the model's file, for the memory "
        f"budget has no room for them: a token uses {_gib(used_bytes)}, and "
        "reads what the system does not keep of it, so answers may be as slow as the disk"
    )
    if storage is None or budget_bytes is None:
        return note
    room = max(budget_bytes - (needs.total_bytes - needs.file_bytes), 0)
    read_s = max(1 - room / needs.file_bytes, 0.0) * used_bytes / storage.read_bytes_per_s
    rate = f"{storage.read_bytes_per_s / 1e6:.0f} MB/s"
    return f"{note} ({rate}: at most {1 / read_s:.3g} tokens/s)" if read_s else note


def listed_bytes(placement: Placement) -> int:
    """Return the bytes of the lists in which a GPU puts what the codes of each token cut off.

    That is a column and a value of every feature at most; one buffer for all operations.
    """
    shadows = (node.op for node in placement.graph.nodes if isinstance(node.op, Outliers))
    features = max((op.k for op in shadows if op.excess), default=-1)
    return 4 * placement.written * (1 + 2 * features) if features > 0 else 0


def routed_bytes(placement: Placement) -> int:
    """Return the bytes of the rows that a GPU sorts by expert; one buffer for all layers."""
    routed = (node.op for node in placement.graph.nodes if isinstance(node.op, Experts))
    return max((op.row_bytes(placement.written) for op in routed), default=0)


def check_memory(
    needs: MemoryEstimate, devices: Mapping[DeviceKind, Device], budget_bytes: int | None
) -> None:
    """Raise `UserError` with the numbers where the budget, the machine or a device has too little.

    `budget_bytes` is for everything together, None for the machine's memory.
    """
    if (lacking := _lacking(needs, budget_bytes)) is not None:
        raise UserError(
            f"the model needs {_gib(needs.total_bytes)} ({_gib(needs.weight_bytes)} of weights, "
            f"{_gib(needs.pool_bytes)} of activations and {_gib(needs.context_bytes)} of keys and "
            f"values), {lacking}: open it with a smaller max_seq_len, narrower weights or one "
            "device"
        )
    for device in devices.values():
        largest = device.capabilities.max_allocation_bytes
        if largest is not None and needs.largest_bytes > largest:
            raise UserError(
                f"the largest buffer of this plan has {_gib(needs.largest_bytes)}, "
                f"{device.info.backend} allocates at most {_gib(largest)} at once: open the model "
                "with a smaller max_seq_len"
            )


def check_contexts(needs: MemoryEstimate, count: int, budget_bytes: int | None) -> None:
    """Raise `UserError` with the numbers where that many contexts do not fit next to the model."""
    wanted = replace(needs, contexts=count)
    if (lacking := _lacking(wanted, budget_bytes)) is not None:
        raise UserError(
            f"{count} contexts of {_gib(needs.context_bytes)} each need "
            f"{_gib(wanted.total_bytes)} with the model, {lacking}: close() a context that is no "
            "longer needed, or open the model with a smaller max_seq_len or a larger memory budget"
        )


def _lacking(needs: MemoryEstimate, budget_bytes: int | None) -> str | None:
    """Return the limit that is exceeded, as a clause."""
    if budget_bytes is not None and needs.total_bytes - needs.file_bytes > budget_bytes:
        return f"the memory budget is {_gib(budget_bytes)}"
    memory = memory_bytes()
    if memory is not None and needs.total_bytes - needs.mapped_bytes > memory:
        return f"this machine's memory is {_gib(memory)}"
    return None


def gathered_slots(placement: Placement, devices: Mapping[DeviceKind, Device]) -> dict[str, int]:
    """Return the slots that the control thread gathers, with their widths.

    They are outputs of cut matmuls where the device of the other operations does not read panels,
    or an operation takes none (attention right after qkv, where positions are learned).
    """
    nodes = placement.graph.nodes
    non_matmul = placement.plan.other_devices & set(devices)
    panels = all(devices[kind].capabilities.reads_panels for kind in non_matmul)
    whole = {
        slot
        for node in nodes
        for port, slot in node.slots.items()
        if port not in OUTPUT_PORTS and not (panels and takes_panels(node.op, port))
    }
    return {
        node.slots["y"]: node.op.n
        for node in nodes
        if isinstance(node.op, MatMul)
        and node.plan_op is not None
        and node.slots["y"] in whole
        and placement.kernels.cuts_rows(node)
    }


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"

"""Lowers a phase and token count to a `Step`: a flat list of bound launches and waits.

First the launches of all nodes and their edges (`hetero.runtime.launch_graph`), then an order and
its waits (`hetero.runtime.schedule`), then the program: both bound to kernels and wait points.
The GPU's queue is never drained: its tile of a matmul is submitted before the NPU's tile is waited
for, and the next GPU kernel as soon as the NPU's call is back (paper section 4.2).

How parts meet. The output of a cut matmul is stored in panels of columns in its slot, one for each
run of rows between cut points; each is written by its device and read in place by the next
operation. Only a device that does not read panels gets them gathered (`Step.copied_bytes` counts
that).

Chunks. Several chunks of a prompt can be lowered into one program, each in slots of its own; they
meet in the context's caches, where a chunk's attention reads what those before it have written.

Sampled rows. Nodes that a prompt runs for the rows that are sampled from alone
(`ModelGraph.sampled_nodes`) work on these rows of the same slots, with a position of their own.

Segments. A step's rows can be segments of equal length, runs of tokens of several texts: all of it
is computed for all rows together, but what knows a position (the rotary embedding, learned
positions, attention): that is a launch for each segment, at its position and on its context's
caches. In a step that decodes each row is one. Prompts that start at position 0 may share a
context: a queue runs its launches in order, and each overwrites what it reads of the caches.
A prompt's call can have pieces of several places of one context in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from hetero.backends.memory import HostBuffer, Panels, Tensor
from hetero.backends.ops import (
    OUTPUT_PORTS,
    Attention,
    MatMul,
    Router,
    SumScores,
    describe,
    has_state,
)
from hetero.backends.protocol import (
    CONTEXT_PORTS,
    BoundCall,
    DeviceKind,
    Operand,
    parts_of,
    takes_panels,
)
from hetero.profiler.model_graph import Node
from hetero.runtime.attention_scores import EVERY, HostScores, RowScores, ScoreReader
from hetero.runtime.cache_calls import CacheCall
from hetero.runtime.chunk_slots import ChunkSlots
from hetero.runtime.handover import SHARED_PORTS, Handover
from hetero.runtime.holes import Shape
from hetero.runtime.kernels import Devices, KernelSet
from hetero.runtime.pool import ActivationPool
from hetero.runtime.route_counts import RouteCounts
from hetero.runtime.schedule import Cost, Orders, in_order
from hetero.runtime.slot_refs import SlotRef, position_of
from hetero.runtime.step import BoundLaunches, PendingLaunch, Step
from hetero.runtime.waits import Synchroniser
from hetero.solver.assignments import Heads, Part, Span
from hetero.solver.errors import PlanError
from hetero.solver.node_groups import NodeGroup
from hetero.solver.placement import Placement
from hetero.solver.plan import Phase, PrefillMode

MAX_CACHED_CHUNKS: Final = 32


class _Gather(BoundCall):
    """Copies panels into one tensor on the control thread."""

    def __init__(self, name: str, panels: Panels, target: Tensor, m: int) -> None:
        self.name, self.m = f"{name} (gather)", m
        self._pairs = [
            (target.array[:m, start : start + part.shape[1]], part.array[:m])
            for start, part in zip(panels.starts, panels.parts, strict=True)
        ]

    def run(self) -> None:
        for target, source in self._pairs:
            np.copyto(target, source)


class _LastRow(BoundCall):
    """Copies the last fed token of a chunk to the last row, for the output head.

    A chunk may compute rows after it.
    """

    def __init__(self, pool: ActivationPool, chunk: int, x: Operand, m: int) -> None:
        self.name, self.m = "last row", m
        self._arrays = [part.array for part in parts_of(x)]
        self._fed, self._chunk = pool.fed, chunk

    def run(self) -> None:
        last = self._fed[self._chunk]
        for array in self._arrays if last < self.m else ():
            array[self.m - 1] = array[last - 1]


class StepKey(NamedTuple):
    """The key of a lowered step.

    `position` of a window: about where its context is. `sums_scores`: it sums the attention of its
    sampled rows. `segment`: the tokens of each segment; 0: all are of one text. `band`: of decode's
    (`band_at`). `pieces`: of one context, where they have positions of their own
    (`hetero.runtime.holes`).
    """

    phase: Phase
    chunks: tuple[int, ...]
    logit_rows: int
    wait_values: bool
    position: int = 0
    sums_scores: bool = False
    segment: int = 0
    mode: PrefillMode = "cut"
    band: int = 0
    pieces: Shape = ()


class Lowering:
    """Lowers steps of one model. Owned by the control thread."""

    def __init__(
        self,
        placement: Placement,
        kernels: KernelSet,
        pool: ActivationPool,
        devices: Devices,
        synchroniser: Synchroniser,
        route_counts: RouteCounts | None = None,
    ) -> None:
        self.placement, self.route_counts = placement, route_counts
        self.kernels = kernels
        self.pool = pool
        self.devices = devices
        self.synchroniser = synchroniser
        ops = [x.op for x in placement.graph.nodes]
        attentions = [x for x in ops if isinstance(x, Attention) and not x.reads]
        columns = max((op.capacity for op in attentions), default=0)
        self.row_scores = RowScores(columns, len(attentions), devices)
        self._mirrors: dict[HostBuffer, HostBuffer] = {}
        self._chunks: OrderedDict[_ChunkKey, _Chunk] = OrderedDict()

    def handover(self) -> Handover | None:
        """Return the hand-overs between slots; None where there are none.

        They are for a GPU whose memory is not coherent, and for `--sync copy`.
        """
        gpu = self.devices.get("gpu")
        if gpu is None:
            return None
        if not gpu.capabilities.coherent:
            return Handover(gpu)
        return Handover(gpu, self._mirrors) if self.synchroniser.method == "copy" else None

    def lower(
        self,
        phase: Phase,
        m: int,
        logit_rows: int,
        *,
        wait_values: bool,
        sums_scores: bool = False,
        segment: int = 0,
        band: int = 0,
        pieces: Shape = (),
    ) -> Step:
        """Return the step of m tokens whose last `logit_rows` rows get logits.

        It has `wait_values` where they gain; `segment` and `pieces` are as in `StepKey`. `band` is
        that of the plan's decode steps by the context's depth (`Placement.band_at`).
        """
        placed = self.place(
            phase,
            (m,),
            logit_rows,
            sums_scores=sums_scores,
            segment=segment,
            band=band,
            pieces=pieces,
        )
        schedule = in_order(placed.graph(), eager=self.synchroniser.eager)
        return placed.bound(schedule, self.synchroniser.signals if wait_values else {})

    def lower_chunks(
        self,
        chunks: Sequence[int],
        logit_rows: int,
        *,
        cost: Cost | None = None,
        submit_s: float = 0.0,
        orders: Orders | None = None,
        sums_scores: bool = False,
        mode: PrefillMode = "cut",
    ) -> Step:
        """Return one program for chunks of a prompt (tokens of each) that follow each other.

        The last `logit_rows` tokens of the last one get logits. Chunk i works in the pool's set i
        of slots: its tokens and position are fed there (`ActivationPool.feed`).

        One chunk runs after another; with `cost`, out of order where that is shorter by it (and
        `submit_s` for each submission), but for `finish` and `copy`, which wait for whole queues.
        Raises `ValueError` for more chunks than the pool has sets of slots.
        """
        if not 1 <= len(chunks) <= self.pool.chunks:
            raise ValueError(
                f"{len(chunks)} chunks do not fit a pool with slots for {self.pool.chunks}"
            )
        placed = self.place(
            "prefill", tuple(chunks), logit_rows, sums_scores=sums_scores, mode=mode
        )
        eager = self.synchroniser.eager
        if cost is None or not eager:
            return placed.bound(in_order(placed.graph(), eager=eager), {})
        orders = orders or Orders("best")
        return placed.bound(orders.schedule(placed.specs, cost, submit_s=submit_s), {})

    def place(
        self,
        phase: Phase,
        chunks: tuple[int, ...],
        logit_rows: int,
        *,
        sums_scores: bool = False,
        segment: int = 0,
        mode: PrefillMode = "cut",
        band: int = 0,
        pieces: Shape = (),
    ) -> BoundLaunches:
        """Return the launches of a step's chunks.

        With `sums_scores` those that add up attention scores are among them.
        """
        placed = BoundLaunches(
            phase,
            chunks,
            self.pool,
            self.devices,
            self.synchroniser,
            self.handover(),
            segment=segment,
        )
        for i, m in enumerate(chunks):
            ends = logit_rows if i == len(chunks) - 1 else 0
            key = _ChunkKey(phase, m, ends, i, sums_scores, segment, mode, band, pieces)
            self._chunk(key, placed.handover).place(placed)
        return placed

    def _chunk(self, key: _ChunkKey, handover: Handover | None) -> _Chunk:
        """Bind the chunk once, unless each step has graphs or copies of its own."""
        copies = handover is not None and not handover.in_place
        if copies or self.placement.online:
            return _Chunk(self, key, handover)
        if key not in self._chunks:
            self._chunks[key] = _Chunk(self, key, handover)
            if len(self._chunks) > MAX_CACHED_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]


class _ChunkKey(NamedTuple):
    """The key of a chunk's bound launches.

    `chunk`: in which set of slots; `segment`: as in `StepKey`; `band`: of decode's.
    """

    phase: Phase
    m: int
    logit_rows: int
    chunk: int
    sums_scores: bool
    segment: int
    mode: PrefillMode
    band: int
    pieces: Shape


class _Chunk:
    """The launches of one chunk (`stages`, in order)."""

    def __init__(self, lowering: Lowering, key: _ChunkKey, handover: Handover | None) -> None:
        # Not `lowering` itself, which keeps chunks: a circle would outlive the model's end.
        self.placement = lowering.placement.in_band(key.band)
        self.kernels, self.row_scores = lowering.kernels, lowering.row_scores
        self.mirrors = handover if handover is not None and not handover.in_place else None
        self.in_place = handover is not None and handover.in_place
        self.phase, self.m, self.logit_rows, self.chunk, self.sums_scores = key[:5]
        self.segment, self.mode, self.counts = key.segment, key.mode, lowering.route_counts
        self.pieces: Shape = key.pieces
        if self.segment:
            one = self.segment, self.placement.padded(self.phase, self.segment)
            self.pieces = (one,) * (self.m // self.segment)
        self.devices, self.pool = lowering.devices, lowering.pool
        self.slots = ChunkSlots(self.pool, self.chunk, self.m)
        self.stages: list[tuple[str, int, Sequence[PendingLaunch]]] = []
        self._pads = self.placement.graph.prompt_layers == self.placement.graph.layers
        # Where devices add up columns: of which row, of how many layers.
        self._added: dict[Tensor, tuple[int, int]] = {}
        self.gathered_bytes = 0
        self._bind()

    def place(self, placed: BoundLaunches) -> None:
        """Append all launches to a step, then what the host reads."""
        if placed.handover is not None:
            placed.handover.feed(self._added)
        for node, m, items in self.stages:
            placed.stage(node, self.chunk, m, items)
        placed.copied_bytes += self.gathered_bytes
        if self.logit_rows:
            placed.logits = self.slots.whole("logits")
            placed.hand_over("end", self.chunk, self.m, None, {"x": placed.logits})

    def _bind(self) -> None:
        for assigned, kind, graph, parts, group, heads in self.placement.at(
            self.phase, self.m, self.logit_rows, mode=self.mode
        ):
            rows = self.placement.tokens_of(assigned, self.m, self.logit_rows)
            node = self.slots.begin(assigned, rows)
            if group is not None:
                self._place(group.name, [self._group_item(group, graph)])
            elif kind is not None:
                if self.pieces and "position" in node.slots:
                    self._place(node.name, self._piece_items(node, kind))
                elif heads and not (self.mirrors or self.in_place):
                    self._place(node.name, self._head_items(node, kind, heads))
                else:
                    self._place(node.name, self._other_items(node, kind, graph))
                if self.counts is not None and isinstance(node.op, Router):
                    self._place(*self.counts.launch(node, self.slots))
                if self.sums_scores and isinstance(node.op, Attention) and not node.op.reads:
                    self._place_tap(node, node.op, kind)
            else:
                if node.layer is None and self._pads and self.chunk and self.mirrors is None:
                    self._place("last row", [self._last_row(node.slots["x"])])
                self._place(node.name, self._matmul_items(node, parts))
        self.slots.span = 0, self.m
        for tensor, (row, layers) in self._added.items():
            reader = ScoreReader(self.row_scores.of(row), tensor, layers, self.m)
            slots, summed = frozenset({SlotRef("score_sums")}), {"score_sums": tensor}
            item = PendingLaunch(None, reader, slots, slots, (0, self.m), None, summed)
            self._place("score_sums", [item])

    def _place(self, node: str, items: Sequence[PendingLaunch]) -> None:
        self.stages.append((node, self.slots.span[1] - self.slots.span[0], items))

    def _last_row(self, slot: str) -> PendingLaunch:
        x, both = self.slots.whole(slot), frozenset({self.slots.ref(slot)})
        call = _LastRow(self.pool, self.chunk, x, self.m)
        return PendingLaunch(None, call, both, both, (0, self.m), None, {"x": x, "y": x})

    # --- operands ---------------------------------------------------------------------------

    def _other_items(self, node: Node, kind: DeviceKind, graph: int) -> list[PendingLaunch]:
        operands, reads, writes = self._operands(node, kind)
        call = self._other_call(node, kind, operands, graph)
        return [PendingLaunch(kind, call, reads, writes, self.slots.span, None, operands)]

    def _head_items(
        self, node: Node, kind: DeviceKind, heads: Sequence[Heads]
    ) -> list[PendingLaunch]:
        """Return a launch for the heads of each device, in different places as a matmul's parts.

        Not where memory is not coherent: the caches of a layer are one side's there.
        """
        operands, reads, writes = self._operands(node, kind)
        caches = {port: slot for port, slot in node.slots.items() if port in CONTEXT_PORTS}
        items = []
        for part in heads:
            kernel = self.kernels.heads(node, part)
            call = CacheCall(describe(kernel.op), kernel, operands, caches, part.graph)
            run = (part.first, part.stop)
            items.append(
                PendingLaunch(part.kind, call, reads, writes, self.slots.span, None, operands, run)
            )
        return items

    def _piece_items(self, node: Node, kind: DeviceKind) -> list[PendingLaunch]:
        """Return a launch for each segment or piece, whose heads are all of one device.

        On a device with static shapes one writes rows behind its own, which those after it write
        again.
        """
        operands, reads, writes = self._operands(node, kind)
        items, row = [], 0
        for number, (tokens, graph) in enumerate(self.pieces):
            padded = tokens if has_state(node.op) else graph
            own = {p: x.rows(row, row + padded) for p, x in operands.items() if p != "position"}
            own["position"] = self.pool[position_of(number, node.slots["position"])]
            call = self._other_call(node, kind, own, padded, number if self.segment else 0)
            items.append(PendingLaunch(kind, call, reads, writes, (row, row + tokens), None, own))
            row += tokens
        return items

    def _other_call(
        self,
        node: Node,
        kind: DeviceKind,
        operands: Mapping[str, Operand],
        graph: int,
        row: int = 0,
    ) -> BoundCall:
        caches = {port: slot for port, slot in node.slots.items() if port in CONTEXT_PORTS}
        kernel, own = self.kernels.other(node, kind), self._own(kind, operands)
        if not caches:
            return kernel.bind(own, graph)
        return CacheCall(describe(node.op), kernel, own, caches, graph, row)

    def _operands(
        self, node: Node, kind: DeviceKind
    ) -> tuple[dict[str, Operand], frozenset[SlotRef], frozenset[SlotRef]]:
        """Return the operands of a node other than a matmul, and the slots it reads and writes."""
        capabilities = self.devices[kind].capabilities
        reads, writes = self._slots(node, kind)
        operands: dict[str, Operand] = {}
        for port, slot in node.slots.items():
            if port in CONTEXT_PORTS:
                continue
            operand = self.slots.operand(slot)
            if isinstance(operand, Panels):
                if port in OUTPUT_PORTS:
                    operand = self.slots.tensor(slot)
                elif not (capabilities.reads_panels and takes_panels(node.op, port)):
                    operand = self._gathered(node, slot, operand)
                    reads = self._instead(reads, kind, port, slot)
            if port in OUTPUT_PORTS:
                self.slots.layout.pop(slot, None)
            operands[port] = operand
        return operands, reads, writes

    def _place_tap(self, node: Node, op: Attention, kind: DeviceKind) -> None:
        at = node.slots["position"]
        qkv, position = self.slots.operand(node.slots["qkv"]), self.slots.tensor(at)
        if isinstance(qkv, Panels) or self.mirrors is not None:
            return
        caches = {"k_cache": node.slots["k_cache"]}
        reads = frozenset(map(self.slots.ref, (node.slots["qkv"], at, node.slots["k_cache"])))
        writes = frozenset({SlotRef("score_sums")})
        op = replace(op, sinks=False)
        added = SumScores(attention=op, every=EVERY[self.phase])
        # Rows' scores are the host's, but where it would have to fetch all keys for them.
        own = None if self.segment and not self.in_place else self.row_scores.kernel(kind, added)
        if own is None and self.in_place and kind == "gpu":
            return
        count = self.m if self.segment else 1
        name, m, items = f"{node.name} score sums", self.m // count, []
        for row in range(count):
            scores = self.row_scores.of(row)
            operands: dict[str, Operand] = {"qkv": qkv.rows(row, row + m), "position": position}
            if self.segment:
                operands["position"] = self.pool[position_of(row, at)]
            if own is not None:
                tensor = scores.on(kind, self.devices[kind], op.kv_heads)
                _, layers = self._added.get(tensor, (row, 0))
                self._added[tensor] = row, layers + 1
                operands["score_sums"] = tensor
            kernel = own or HostScores(op, scores, EVERY[self.phase])
            call = CacheCall(name, kernel, operands, caches, m, row)
            summing = None if own is None else kind
            seen = reads if own is None else reads | writes
            span = row, row + m
            items.append(PendingLaunch(summing, call, seen, writes, span, None, operands))
        self._place(name, items)

    def _group_item(self, group: NodeGroup, graph: int) -> PendingLaunch:
        operands: dict[str, Operand] = {}
        reads = frozenset(map(self.slots.ref, (*group.group.inputs, *group.fixed.values())))
        for slot in group.group.inputs:
            operand = self.slots.operand(slot)
            if isinstance(operand, Panels):
                operand = self._gathered(group.nodes[0], slot, operand)
                reads = self._instead(reads, "npu", "x", slot)
            operands[slot] = operand
        handed = dict(operands)
        for port, slot in zip(sorted(OUTPUT_PORTS), group.group.outputs, strict=False):
            self.slots.layout.pop(slot, None)
            handed[port] = operands.setdefault(slot, self.slots.tensor(slot))
        caches = {port: slot for port, slot in group.fixed.items() if port in CONTEXT_PORTS}
        operands |= {
            p: self.slots.tensor(slot) for p, slot in group.fixed.items() if p not in caches
        }
        kernel = self.kernels.group(group)
        name, bind = group.name, kernel.bind
        call = CacheCall(name, kernel, operands, caches, graph) if caches else bind(operands, graph)
        writes = frozenset(map(self.slots.ref, (*caches.values(), *group.group.outputs)))
        return PendingLaunch("npu", call, reads, writes, self.slots.span, None, handed)

    def _gathered(self, node: Node, slot: str, panels: Panels) -> Tensor:
        source = self.slots.ref(slot)
        room = source._replace(gathered=True)
        first, stop = self.slots.span
        target = self.pool[room].rows(first, self.pool[room].shape[0])
        call = _Gather(node.name, panels, target, min(stop - first, panels.shape[0]))
        self.gathered_bytes += 4 * call.m * panels.shape[1]
        operands: dict[str, Operand] = {"x": panels, "y": target}
        slots = frozenset({source}), frozenset({room})
        self._place(node.name, [PendingLaunch(None, call, *slots, self.slots.span, None, operands)])
        return target

    def _matmul_items(self, node: Node, parts: Sequence[Part]) -> list[PendingLaunch]:
        panels = self._panels(node, parts)
        source, gathered = self.slots.operand(node.slots["x"]), False
        if isinstance(source, Panels):
            source, gathered = self._gathered(node, node.slots["x"], source), True
        items = []
        for part in parts:
            start = part.tokens[0]
            x = source.rows(start, part.stop)
            y = panels[part.rows].rows(start, part.stop)
            operands = {"x": x, "y": y}
            kernel = self.kernels.matmul(node, part)
            call = kernel.bind(self._own(part.kind, operands), part.graph)
            reads, writes = self._slots(node, part.kind)
            if gathered:
                reads = self._instead(reads, part.kind, "x", node.slots["x"])
            items.append(
                PendingLaunch(part.kind, call, reads, writes, part.tokens, part.rows, operands)
            )
        return items

    def _panels(self, node: Node, parts: Sequence[Part]) -> dict[Span, Tensor]:
        """Return the panel of each run of rows of the output; note it for the next operation."""
        assert isinstance(node.op, MatMul)
        slot = node.slots["y"]
        spans = sorted({part.rows for part in parts})
        if len(spans) == 1:
            self.slots.layout.pop(slot, None)
            return {spans[0]: self.slots.tensor(slot)}
        tensor, first = self.pool[self.slots.ref(slot)], self.slots.first_row(slot)
        tokens = first + max(part.stop for part in parts)
        if node.layer is not None:  # a padded graph reads rows after the last token, too
            counts = {self.m - first} if self._pads else {self.m - first, self.logit_rows} - {0}
            tokens = max(tokens, *map(self._reach, counts))
            if self.pieces:
                tokens = max(tokens, self.m - self.pieces[-1][0] + self.pieces[-1][1])
        panels = {
            (a, b): Tensor(
                tensor.buffer, (tokens, b - a), offset_bytes=tensor.offset_bytes + 4 * tokens * a
            )
            for a, b in spans
        }
        whole = Panels(tuple(panels[span] for span in spans))
        if whole.shape[1] != node.op.n or whole.nbytes > tensor.nbytes:
            raise PlanError(f"{node.name}: the parts {spans} do not make {node.op.n} rows")
        self.slots.layout[slot] = whole
        return {span: panel.rows(first, tokens) for span, panel in panels.items()}

    def _reach(self, count: int) -> int:
        """Return the row after the last one that a node on the last `count` tokens reads."""
        return self.m - count + self.placement.padded(self.phase, count)

    # --- slots ------------------------------------------------------------------------------

    def _own(
        self, kind: DeviceKind | None, operands: Mapping[str, Operand]
    ) -> Mapping[str, Operand]:
        return operands if self.mirrors is None else self.mirrors.own(kind, operands)

    def _slots(self, node: Node, kind: DeviceKind) -> tuple[frozenset[SlotRef], frozenset[SlotRef]]:
        """Return the slots that a node's launch reads and writes: caches both."""
        slots = {port: self._seen_by(kind, port, slot) for port, slot in node.slots.items()}
        reads = {slot for port, slot in slots.items() if port not in OUTPUT_PORTS}
        writes = {
            slot for port, slot in slots.items() if port in OUTPUT_PORTS or port in CONTEXT_PORTS
        }
        return frozenset(reads), frozenset(writes)

    def _seen_by(self, kind: DeviceKind, port: str, slot: str) -> SlotRef:
        """Return the slot that a device works on; the GPU has its own where hand-overs copy."""
        apart = self.mirrors is not None and kind == "gpu" and port not in SHARED_PORTS
        return self.slots.ref(slot)._replace(owner="gpu" if apart else None)

    def _instead(
        self, reads: frozenset[SlotRef], kind: DeviceKind, port: str, slot: str
    ) -> frozenset[SlotRef]:
        """Return what a launch reads where the panels of a port are gathered."""
        seen = self._seen_by(kind, port, slot)
        return reads - {seen} | {seen._replace(gathered=True)}

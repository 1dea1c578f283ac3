"""From a phase and token count to a `Step`: a flat list of bound launches and the waits between.

What may run when. Calls of one asynchronous device complete in the order of submission. A launch on
another device that reads what such a call writes, or writes what it reads or writes, waits for it;
one wait stands for all before it in that queue. A blocking device has finished when its call
returns. So the GPU's queue is never drained: its tile of a matmul is submitted before the NPU's
tile is waited for, and the next GPU kernel as soon as the NPU's call is back (paper section 4.2).

How parts meet. The output of a cut matmul lies in panels of columns in its slot, one for each run
of rows between cut points; each is written by its device and read in place by the next operation.
Only a device that does not read panels gets them gathered (`Step.copied_bytes` counts that).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hetero.backends.memory import HostBuffer, Panels, Tensor
from hetero.backends.ops import OUTPUT_PORTS, MatMul, describe
from hetero.backends.protocol import (
    CACHE_PORTS,
    BoundCall,
    Completion,
    DeviceKind,
    Doorbell,
    Operand,
    takes_panels,
)
from hetero.contexts.kv_cache import KvCache
from hetero.profiler.model_graph import Node
from hetero.runtime.cache_calls import CacheCall, bind_program
from hetero.runtime.groups import NodeGroup
from hetero.runtime.handover import Handover
from hetero.runtime.kernels import Devices, KernelSet
from hetero.runtime.plan_book import Part, PlanBook, Span
from hetero.runtime.pool import ActivationPool
from hetero.runtime.program import (
    KINDS,
    RUN,
    SUBMIT,
    WAIT,
    Action,
    Launch,
    queue_ahead,
    raise_flags,
)
from hetero.runtime.sync import Site, Synchroniser
from hetero.solver.calls import padded_size
from hetero.solver.plan import Phase, PlanError


@dataclass(eq=False)
class Step:
    """A phase at one token count, lowered for any context: what reads and writes keys and values is
    a `CacheCall`, and `on` gives the step that works on one cache, made when it is first asked for.
    All other calls are shared. A cache's step lives as long as both.

    `logits` is None where none are computed. `launches` keeps everything alive that the program
    uses; `copied_bytes` are gathered in every run. `counts` are the launches of each device. `bell`
    opens the gates of a program that has some. `completions` are those of the last run, by launch:
    each run makes a list of its own.
    """

    phase: Phase
    tokens: int
    program: tuple[Action, ...]
    launches: tuple[Launch, ...]
    sites: tuple[Site, ...]
    logits: Operand | None
    copied_bytes: int = 0
    counts: Mapping[DeviceKind, int] = field(default_factory=dict)
    completions: list[Completion | None] = field(default_factory=list)
    bell: Doorbell | None = None
    bound: weakref.WeakKeyDictionary[KvCache, Step] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def on(self, cache: KvCache) -> Step:
        """The step on a context's keys and values. Raises what binding does."""
        found = self.bound.get(cache)
        if found is None:
            program, launches = bind_program(self.program, self.launches, cache)
            found = dataclasses.replace(
                self,
                program=program,
                launches=launches,
                completions=[None] * len(launches),
                bound=weakref.WeakKeyDictionary(),
            )
            self.bound[cache] = found
        return found


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


@dataclass
class _Use:
    """Last submissions that read and wrote a slot, by asynchronous device."""

    reads: dict[DeviceKind, int] = field(default_factory=dict)
    writes: dict[DeviceKind, int] = field(default_factory=dict)


class _Item(NamedTuple):
    """A launch that is still to be placed: its slots, and how it is bound."""

    kind: DeviceKind | None  # None: on the host
    call: BoundCall
    reads: frozenset[str]
    writes: frozenset[str]
    tokens: Span
    rows: Span | None
    operands: Mapping[str, Operand] = {}  # in the pool, for hand-overs by copying


class Lowering:
    """Lowers steps of one model. Owned by the control thread."""

    def __init__(
        self,
        nodes: Iterable[Node],
        book: PlanBook,
        kernels: KernelSet,
        pool: ActivationPool,
        devices: Devices,
        synchroniser: Synchroniser,
        groups: Mapping[str, NodeGroup] | None = None,
    ) -> None:
        self.nodes = list(nodes)
        self.groups = dict(groups or {})
        self.book = book
        self.kernels = kernels
        self.pool = pool
        self.devices = devices
        self.synchroniser = synchroniser
        self._mirrors: dict[HostBuffer, HostBuffer] = {}

    def handover(self) -> Handover | None:
        """How slots are handed over where that is by copying: `--sync copy`."""
        gpu = self.devices.get("gpu")
        if self.synchroniser.method != "copy" or gpu is None:
            return None
        return Handover(gpu, self._mirrors) if gpu.capabilities.unified_memory else None

    def lower(self, phase: Phase, m: int, logit_rows: int, *, gates: bool) -> Step:
        """The step of m tokens whose last `logit_rows` rows get logits, `gates` where they gain."""
        return _Lowered(self, phase, m, logit_rows).step(gates)


class _Lowered:
    """One step in the making."""

    def __init__(self, lowering: Lowering, phase: Phase, m: int, logit_rows: int) -> None:
        self.lowering, self.phase, self.m, self.logit_rows = lowering, phase, m, logit_rows
        self.devices, self.pool = lowering.devices, lowering.pool
        self.asynchronous = {
            kind: device.capabilities.asynchronous for kind, device in self.devices.items()
        }
        self.eager = lowering.synchroniser.eager
        self.handover = lowering.handover()
        self.layout: dict[str, Operand] = {}
        self.uses: dict[str, _Use] = {}
        self.waited: dict[DeviceKind, int] = {}
        self.submitted: dict[DeviceKind, int] = {}  # last launch of each asynchronous device
        self.program: list[Action] = []
        self.launches: list[Launch] = []
        self.sites: list[Site] = []
        self.copied_bytes = 0

    def step(self, gates: bool) -> Step:
        inside: set[str] = set()  # nodes of groups that are placed
        for node in self.lowering.nodes:
            if node.name in inside or (node.name == "lm_head" and not self.logit_rows):
                continue
            group = self.lowering.groups.get(node.name)
            graph = None if group is None else group.ready(self.lowering.book, self.phase, self.m)
            if group is not None and graph is not None:
                named = dataclasses.replace(node, name=group.name)
                self._place(named, [self._group_item(group, graph)])
                inside.update(member.name for member in group.nodes)
            elif isinstance(node.op, MatMul) and node.plan_op is not None:
                self._place(node, self._matmul_items(node))
            else:
                self._place(node, [self._other_item(node)])
        if self.logit_rows:
            self._hand_over("end", None, {"x": self._operand("logits")})
        for kind in sorted(self.submitted):
            self._wait(kind, self.submitted[kind], "end")
        synchroniser = self.lowering.synchroniser
        bells = synchroniser.bells if gates else {}
        program, bell = queue_ahead(self.program, self.launches, bells)
        program = raise_flags(program, self.launches, synchroniser.flags, bell)
        return Step(
            self.phase,
            self.m,
            tuple(program),
            tuple(self.launches),
            tuple(self.sites),
            self._operand("logits") if self.logit_rows else None,
            self.copied_bytes,
            Counter(launch.kind for launch in self.launches),  # flags count as the GPU's work
            [None] * len(self.launches),
            bell,
        )

    # --- operands ---------------------------------------------------------------------------

    def _operand(self, slot: str) -> Operand:
        return self.layout.get(slot, self.pool[slot])

    def _other_item(self, node: Node) -> _Item:
        kind = self.lowering.book.rest(self.phase)
        capabilities = self.devices[kind].capabilities
        operands: dict[str, Operand] = {}
        caches = {port: slot for port, slot in node.slots.items() if port in CACHE_PORTS}
        for port, slot in node.slots.items():
            if port in caches:
                continue
            operand = self._operand(slot)
            if isinstance(operand, Panels):
                if port in OUTPUT_PORTS:
                    operand = self.pool[slot]
                elif not (capabilities.reads_panels and takes_panels(node.op, port)):
                    operand = self._gathered(node, slot, operand)
            if port in OUTPUT_PORTS:
                self.layout.pop(slot, None)
            operands[port] = operand
        kernel = self.lowering.kernels.other(node, kind)
        own, m = self._own(kind, operands), self._padded()
        name = describe(node.op)
        call = CacheCall(name, kernel, own, caches, m) if caches else kernel.bind(own, m)
        return _Item(kind, call, *self._slots(node, kind), (0, self.m), None, operands)

    def _padded(self) -> int:
        """Tokens that all but the matmuls computes: those of a graph, where shapes are static."""
        capabilities = self.devices[self.lowering.book.rest(self.phase)].capabilities
        return padded_size(self.m, capabilities.graph_sizes if capabilities.static_shapes else ())

    def _group_item(self, group: NodeGroup, graph: int) -> _Item:
        operands: dict[str, Operand] = {}
        for slot in group.group.inputs:
            operand = self._operand(slot)
            if isinstance(operand, Panels):
                operand = self._gathered(group.nodes[0], slot, operand)
            operands[slot] = operand
        handed = dict(operands)
        for port, slot in zip(sorted(OUTPUT_PORTS), group.group.outputs, strict=False):
            self.layout.pop(slot, None)
            handed[port] = operands.setdefault(slot, self.pool[slot])
        caches = {port: slot for port, slot in group.fixed.items() if port in CACHE_PORTS}
        operands |= {p: self.pool[slot] for p, slot in group.fixed.items() if p not in caches}
        kernel = self.lowering.kernels.group(group)
        name, bind = group.name, kernel.bind
        call = CacheCall(name, kernel, operands, caches, graph) if caches else bind(operands, graph)
        writes = frozenset({*caches.values(), *group.group.outputs})
        reads = frozenset({*group.group.inputs, *group.fixed.values()})
        return _Item("npu", call, reads, writes, (0, self.m), None, handed)

    def _gathered(self, node: Node, slot: str, panels: Panels) -> Tensor:
        target = self.pool.gathered(slot)
        call = _Gather(node.name, panels, target, min(self.m, panels.shape[0]))
        self.copied_bytes += 4 * call.m * panels.shape[1]
        slots = frozenset({slot}), frozenset({f"{slot} gathered"})
        operands: dict[str, Operand] = {"x": panels, "y": target}
        self._place(node, [_Item(None, call, *slots, (0, self.m), None, operands)])
        return target

    def _matmul_items(self, node: Node) -> list[_Item]:
        head = node.name == "lm_head"
        m = self.logit_rows if head else self.m
        first = self.m - m
        book, kernels = self.lowering.book, self.lowering.kernels
        cells = [
            (part, rows, kernel)
            for part in _split(node, book.parts(node, self.phase, m), self._static(), kernels)
            for rows, kernel in kernels.matmuls(node, part)
        ]
        _check_spill(node, [part for part, _, _ in cells], m)
        panels = self._panels(node, [(part, rows) for part, rows, _ in cells])
        source = self._operand(node.slots["x"])
        if isinstance(source, Panels):
            source = self._gathered(node, node.slots["x"], source)
        items = []
        for part, rows, kernel in cells:
            start = part.tokens[0]
            x = source.rows(first + start, first + part.stop)
            y = panels[rows].rows(start, part.stop)
            operands = {"x": x, "y": y}
            call = kernel.bind(self._own(part.kind, operands), part.graph)
            slots = self._slots(node, part.kind)
            items.append(_Item(part.kind, call, *slots, part.tokens, rows, operands))
        return items

    def _static(self) -> frozenset[DeviceKind]:
        return frozenset(k for k, d in self.devices.items() if d.capabilities.static_shapes)

    def _panels(self, node: Node, cells: list[tuple[Part, Span]]) -> dict[Span, Tensor]:
        """Where each run of rows of the output lies; notes how the next operation finds it."""
        assert isinstance(node.op, MatMul)
        slot = node.slots["y"]
        spans = sorted({rows for _, rows in cells})
        if len(spans) == 1:
            self.layout.pop(slot, None)
            return {spans[0]: self.pool[slot]}
        tokens = max(part.stop for part, _ in cells)
        if node.name != "lm_head":  # a padded graph reads rows behind the last token, too
            tokens = max(tokens, self._padded())
        tensor = self.pool[slot]
        panels = {
            (a, b): Tensor(
                tensor.buffer, (tokens, b - a), offset_bytes=tensor.offset_bytes + 4 * tokens * a
            )
            for a, b in spans
        }
        whole = Panels(tuple(panels[span] for span in spans))
        if whole.shape[1] != node.op.n or whole.nbytes > tensor.nbytes:
            raise PlanError(f"{node.name}: the parts {spans} do not make {node.op.n} rows")
        self.layout[slot] = whole
        return panels

    # --- order ------------------------------------------------------------------------------

    def _place(self, node: Node, items: list[_Item]) -> None:
        """Append a node's launches: asynchronous ones first, so that both devices work at once."""
        for item in items:
            self._hand_over(node.name, item.kind, item.operands)
        needs = [self._needs(item) for item in items]
        order = sorted(range(len(items)), key=lambda i: not self._submits(items[i]))
        if not self.eager:
            for i in order:
                self._meet(node.name, needs[i])
        for i in order:
            self._meet(node.name, needs[i])
            self._launch(node.name, items[i])
        for item in items:
            self._note(item)
        if self.handover is not None:
            self.handover.after([(item.kind, item.operands) for item in items], self.m)

    def _hand_over(
        self, where: str, kind: DeviceKind | None, operands: Mapping[str, Operand]
    ) -> None:
        """Copy what a launch reads and another device wrote, where hand-overs are by copying."""
        for found in self.handover.before(kind, operands) if self.handover is not None else ():
            slot = self.pool.name_of(found.buffer)
            host, own = frozenset({slot}), frozenset({f"{slot} of the gpu"})
            reads, writes = (host, own) if found.to_gpu else (own, host)
            item = _Item("gpu", found.call, reads, writes, (0, self.m), None)
            self._meet(where, self._needs(item))
            self._launch(f"{where} {found.call.name}", item)
            self._note(item)
            self.copied_bytes += found.nbytes

    def _own(
        self, kind: DeviceKind | None, operands: Mapping[str, Operand]
    ) -> Mapping[str, Operand]:
        return operands if self.handover is None else self.handover.own(kind, operands)

    def _slots(self, node: Node, kind: DeviceKind) -> tuple[frozenset[str], frozenset[str]]:
        """Slots that a node's launch reads and writes; the GPU's own where it has its own."""
        found = _slots(node)
        if self.handover is None or kind != "gpu":
            return found
        reads, writes = (frozenset(f"{slot} of the gpu" for slot in slots) for slots in found)
        return reads, writes

    def _submits(self, item: _Item) -> bool:
        return item.kind is not None and self.asynchronous[item.kind]

    def _needs(self, item: _Item) -> dict[DeviceKind, int]:
        """For each other asynchronous device, the submission that must be complete before."""
        needs: dict[DeviceKind, int] = {}
        for slot in item.reads | item.writes:
            use = self.uses.get(slot)
            if use is None:
                continue
            hazards = [use.writes, use.reads] if slot in item.writes else [use.writes]
            for found in hazards:
                for kind, index in found.items():
                    if kind != item.kind:
                        needs[kind] = max(index, needs.get(kind, -1))
        return needs

    def _meet(self, where: str, needs: Mapping[DeviceKind, int]) -> None:
        for kind, index in sorted(needs.items()):
            self._wait(kind, index, where)

    def _wait(self, kind: DeviceKind, index: int, where: str) -> None:
        if index <= self.waited.get(kind, -1):
            return
        self.waited[kind] = index
        launch = self.launches[index]
        site = self.lowering.synchroniser.site(
            (self.phase, self.m, _role(where), _role(launch.node)), kind, launch.call.name
        )
        self.sites.append(site)
        self.program.append(Action(WAIT, index, KINDS.index(kind), site.wait))

    def _launch(self, name: str, item: _Item) -> None:
        index = len(self.launches)
        kind = item.kind or "npu"  # the control thread's own work counts as the NPU's
        number = KINDS.index(kind)
        outputs = tuple(x for port, x in item.operands.items() if port in OUTPUT_PORTS)
        self.launches.append(Launch(name, kind, item.call, item.tokens, item.rows, outputs))
        if self._submits(item):
            self.program.append(Action(SUBMIT, index, number, item.call.submit))
            self.submitted[kind] = index
        else:
            self.program.append(Action(RUN, index, number, item.call.run))

    def _note(self, item: _Item) -> None:
        """Remember the slots of an asynchronous launch by the last index of its device."""
        if not self._submits(item):
            return
        assert item.kind is not None
        index = self.submitted[item.kind]
        for slot in item.reads:
            self.uses.setdefault(slot, _Use()).reads[item.kind] = index
        for slot in item.writes:
            self.uses.setdefault(slot, _Use()).writes[item.kind] = index


def _slots(node: Node) -> tuple[frozenset[str], frozenset[str]]:
    """Slots that a node reads and writes; caches are both."""
    reads = {slot for port, slot in node.slots.items() if port not in OUTPUT_PORTS}
    writes = {
        slot for port, slot in node.slots.items() if port in OUTPUT_PORTS or port in CACHE_PORTS
    }
    return frozenset(reads), frozenset(writes)


def _role(name: str) -> str:
    """A node's name without its layer: all layers run the same kernels."""
    return name.rsplit(".", maxsplit=1)[-1]


def _split(
    node: Node, parts: Iterable[Part], static: frozenset[DeviceKind], kernels: KernelSet
) -> list[Part]:
    """Parts cut at every edge of rows, then joined along tokens where one device has both.

    Each panel of the output is then written with one row length by every part in it.
    """
    parts = list(parts)
    edges: set[int] = set()
    for part in parts:
        edges.update(part.rows)
        if part.kind in static:
            edges |= kernels.edges(node, part)
    found: list[Part] = []
    for part in parts:
        inside = sorted(e for e in edges if part.rows[0] <= e <= part.rows[1])
        for span in itertools.pairwise(inside):
            _join(found, part.kind in static, dataclasses.replace(part, rows=span))
    return found


def _join(found: list[Part], static: bool, part: Part) -> None:
    """Append a part, or lengthen the one that ends where it begins."""
    for i, other in enumerate(found):
        same = (other.kind, other.rows, other.order, other.precision) == (
            part.kind, part.rows, part.order, part.precision,
        )  # fmt: skip
        if not static and same and other.tokens[1] == part.tokens[0]:
            tokens = (other.tokens[0], part.tokens[1])
            found[i] = dataclasses.replace(other, tokens=tokens, graph=tokens[1] - tokens[0])
            return
    found.append(part)


def _check_spill(node: Node, parts: Iterable[Part], m: int) -> None:
    """A padded graph may write behind the call's last token, never over another part's tokens."""
    for part in parts:
        if part.stop > part.tokens[1] < m:
            raise PlanError(
                f"{node.name}: the graph of {part.graph} tokens at {part.tokens[0]} reaches over "
                f"tokens from {part.tokens[1]} on, which another tile computes: end the tile with "
                "the graph, or at the last token"
            )

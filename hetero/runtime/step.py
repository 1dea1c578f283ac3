"""The launches of a step as they are placed, and the `Step` that a schedule of them makes."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final, NamedTuple, TypeAlias

from hetero.backends.host.gc_pause import gc_paused
from hetero.backends.ops import OUTPUT_PORTS
from hetero.backends.optional import StreamSignal
from hetero.backends.protocol import EVERY_KIND, BoundCall, Completion, DeviceKind, Operand
from hetero.runtime.cache_calls import CacheCall, bind_program, wait_for_layers
from hetero.runtime.fused_launch import fuse_program
from hetero.runtime.handover import Handover
from hetero.runtime.kernels import Devices
from hetero.runtime.kv.cache_sync import Side
from hetero.runtime.kv.kv_cache import KvCache
from hetero.runtime.kv.layer_gate import LayerGate
from hetero.runtime.launch_graph import LaunchGraph, LaunchSpec, Span
from hetero.runtime.pool import ActivationPool
from hetero.runtime.program import (
    RUN,
    SUBMIT,
    WAIT,
    Action,
    Launch,
    prequeue,
    raise_flags,
)
from hetero.runtime.schedule import Schedule, Start
from hetero.runtime.slot_refs import SlotRef
from hetero.runtime.waits import Synchroniser, WaitPoint
from hetero.solver.errors import PlanError
from hetero.solver.plan import Phase

MAX_CACHED_SETS: Final = 8  # of contexts that a step's segments were of
_Caches: TypeAlias = tuple["weakref.ref[KvCache]", ...]


@dataclass(eq=False)
class Step:
    """A phase at one token count, lowered for any context.

    Calls that read and write keys and values are `CacheCall`s, and `on` gives the step that works
    on one cache, made on first use. All other calls are shared. A cache's step lives as long as
    both. `on_segments` is for steps of several texts: those of the last few sets of caches are
    cached.

    `chunks` are its tokens, chunk by chunk.

    `logits` is None where none are computed. `launches` keeps everything alive that the program
    uses; `copied_bytes` are gathered in every run. `counts` are the launches of each device.
    `signal` opens the wait values of a program that has some. `layers` are those of the launches
    that work on keys and values. `completions` are those of the last run, by launch: each run makes
    a list of its own. `kinds` are what an action's `kind` counts.
    """

    phase: Phase
    tokens: int
    program: tuple[Action, ...]
    launches: tuple[Launch, ...]
    wait_points: tuple[WaitPoint, ...]
    logits: Operand | None
    copied_bytes: int = 0
    counts: Mapping[DeviceKind, int] = field(default_factory=dict)
    completions: list[Completion | None] = field(default_factory=list)
    signal: StreamSignal | None = None
    chunks: tuple[int, ...] = ()
    kinds: tuple[DeviceKind, ...] = EVERY_KIND
    layers: Mapping[int, int] = field(default_factory=dict)
    bound: weakref.WeakKeyDictionary[KvCache, Step] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _on_segments: OrderedDict[_Caches, Step] = field(
        default_factory=OrderedDict, init=False, repr=False
    )
    _fused: Step | None = field(default=None, init=False, repr=False)
    _fuse_tried: bool = field(default=False, init=False, repr=False)
    _bindings_finished: bool = field(default=False, init=False, repr=False)

    def on(self, cache: KvCache) -> Step:
        """Return the step on a context's keys and values. Raises what binding does."""
        step = self.bound.get(cache)
        if step is None:
            step = self.bound[cache] = self._bound((cache,))
        return step

    def on_segments(self, caches: Sequence[KvCache]) -> Step:
        """Return the step on the keys and values of a context for each segment.

        Raises what binding does.
        """
        cached = self._on_segments
        key = tuple(map(weakref.ref, caches))
        if (bound := cached.get(key)) is None:
            bound = self._bound(caches)
            forget = partial(_forget, weakref.ref(self))
            key = tuple(weakref.ref(cache, forget) for cache in caches)
            cached[key] = bound
            if len(cached) > MAX_CACHED_SETS:
                cached.popitem(last=False)
        cached.move_to_end(key)
        return bound

    @gc_paused()
    def _bound(self, caches: Sequence[KvCache]) -> Step:
        program, launches = bind_program(self.program, self.launches, caches)
        return replace(
            self,
            program=program,
            launches=launches,
            completions=[None] * len(launches),
            layers={
                index: launch.call.layer
                for index, launch in enumerate(self.launches)
                if isinstance(launch.call, CacheCall)
            },
            bound=weakref.WeakKeyDictionary(),
        )

    @cached_property
    def cache_sides(self) -> Mapping[int, Side]:
        """Return the side that uses the keys and values of each layer, in a bound step.

        Raises `PlanError` where both do.
        """
        sides: dict[int, Side] = {}
        for index, layer in self.layers.items():
            launch = self.launches[index]
            side: Side = "gpu" if launch.kind == "gpu" else "host"
            if sides.setdefault(layer, side) != side:
                raise PlanError(
                    f"{launch.node}: both devices use its keys and values in one step, in memory "
                    "that is not coherent: give attention to one of them"
                )
        return sides

    @cached_property
    def last_wait(self) -> int:
        """Return the launch that is waited for last; -1 where none is."""
        waits = (action.launch for action in reversed(self.program) if action.code == WAIT)
        return next(waits, -1)

    def fused(self, devices: Devices, *, compiles: bool) -> Step:
        """Return a bound step with fused submissions, where the device can fuse.

        It is for runs that are not timed call by call. Made on first use, which compiles a program
        if it `compiles`.
        """
        if not self._fuse_tried:
            self._fuse_tried = True
            program = fuse_program(self.program, self.launches, devices, compiles=compiles)
            if program is not self.program:
                self._fused = replace(self, program=program)
        return self._fused or self

    def finish_binding(self) -> None:
        """Finish the binding of every call that the program runs, once."""
        if not self._bindings_finished:
            for action in self.program:
                call = getattr(action.target, "__self__", None)
                if isinstance(call, BoundCall):
                    call.finish_binding()
            self._bindings_finished = True

    def behind(self, gate: LayerGate) -> Step:
        """Return a bound step that waits for the layers of its cache, for one run."""
        program = wait_for_layers(self.program, self.layers, gate)
        return replace(self, program=program, completions=[None] * len(self.launches))


def _forget(step: weakref.ref[Step], gone: weakref.ref[KvCache]) -> None:
    """Drop what was bound to a cache that no longer exists."""
    owner = step()
    if owner is not None:
        cached = owner._on_segments
        for key in [key for key in cached if any(ref is gone for ref in key)]:
            del cached[key]


class PendingLaunch(NamedTuple):
    """A launch that is still to be placed: its slots, and how it is bound."""

    kind: DeviceKind | None  # None: on the host
    call: BoundCall
    reads: frozenset[SlotRef]
    writes: frozenset[SlotRef]
    tokens: Span
    rows: Span | None
    operands: Mapping[str, Operand] = {}  # in the pool, for hand-overs
    heads: Span | None = None


class BoundLaunches:
    """The launches of one step, bound to kernels, in an order that is right."""

    def __init__(
        self,
        phase: Phase,
        chunks: tuple[int, ...],
        pool: ActivationPool,
        devices: Devices,
        synchroniser: Synchroniser,
        handover: Handover | None,
        *,
        segment: int = 0,
    ) -> None:
        self.phase, self.chunks, self.handover, self.segment = phase, chunks, handover, segment
        self.logits: Operand | None = None
        self.copied_bytes = 0
        self._asynchronous = {
            kind: device.capabilities.asynchronous for kind, device in devices.items()
        }
        self._host: DeviceKind = "npu" if "npu" in devices else "gpu"
        self._pool, self._synchroniser = pool, synchroniser
        if handover is not None:
            handover.feed(pool.inputs(chunks), pool.looked_up(chunks))
        self._specs: list[LaunchSpec] = []
        self._items: list[PendingLaunch] = []
        self._stages = itertools.count()

    def graph(self) -> LaunchGraph:
        """Return the placed launches, with their edges."""
        return LaunchGraph.of(self._specs)

    @property
    def specs(self) -> Sequence[LaunchSpec]:
        """Return the placed launches."""
        return self._specs

    def stage(self, node: str, chunk: int, m: int, items: Sequence[PendingLaunch]) -> None:
        """Append a node's launches, and in front of them the hand-overs of what they read."""
        for item in items:
            self.hand_over(node, chunk, m, item.kind, item.operands)
        self._append(node, node, chunk, items)
        if self.handover is not None:
            self.handover.after([(item.kind, item.operands) for item in items], m)

    def hand_over(
        self,
        node: str,
        chunk: int,
        m: int,
        kind: DeviceKind | None,
        operands: Mapping[str, Operand],
    ) -> None:
        """Hand over what a launch reads and the other side wrote, where memory is not coherent."""
        if self.handover is None:
            return
        for transfer in self.handover.before(kind, operands):
            slot = self._pool.slot_of(transfer.buffer) or SlotRef("score_sums")
            host, own = frozenset({slot}), frozenset({slot._replace(owner="gpu")})
            reads, writes = (host, own) if transfer.to_gpu else (own, host)
            if self.handover.in_place:
                reads = writes = host
            item = PendingLaunch("gpu", transfer.call, reads, writes, (0, m), None)
            self._append(f"{node} {transfer.call.name}", node, chunk, [item])
            if not self.handover.in_place:
                self.copied_bytes += transfer.nbytes

    def _append(self, name: str, node: str, chunk: int, items: Sequence[PendingLaunch]) -> None:
        stage = next(self._stages)
        for item in items:
            self._items.append(item)
            self._specs.append(
                LaunchSpec(
                    name=name,
                    node=node,
                    kind=item.kind,
                    asynchronous=item.kind is not None and self._asynchronous[item.kind],
                    reads=item.reads,
                    writes=item.writes,
                    tokens=item.tokens,
                    rows=item.rows,
                    stage=stage,
                    chunk=chunk,
                    heads=item.heads,
                )
            )

    # --- binding ----------------------------------------------------------------------------

    def bound(self, schedule: Schedule, signals: Mapping[DeviceKind, StreamSignal]) -> Step:
        """Return the step of a schedule of the graph, with wait values if `signals` open them."""
        order = [step.launch for step in schedule if isinstance(step, Start)]
        launches = [self._launch(i) for i in order]
        places = {launch: place for place, launch in enumerate(order)}
        wait_points: list[WaitPoint] = []
        actions: list[Action] = []
        for step in schedule:
            if isinstance(step, Start):
                actions.append(self._start(step.launch, places[step.launch]))
            else:
                site = self._wait_point(step.launch, step.before)
                wait_points.append(site)
                kind = EVERY_KIND.index(site.kind)
                actions.append(Action(WAIT, places[step.launch], kind, site.wait))
        program, signal = prequeue(actions, launches, signals)
        program = raise_flags(program, launches, self._synchroniser.flags, signal)
        return Step(
            self.phase,
            sum(self.chunks),
            tuple(program),
            tuple(launches),
            tuple(wait_points),
            self.logits,
            self.copied_bytes,
            Counter(launch.kind for launch in launches),  # flags count as the GPU's work
            [None] * len(launches),
            signal,
            self.chunks,
        )

    def _launch(self, i: int) -> Launch:
        item, kind = self._items[i], self._account(self._specs[i])
        outputs = tuple(x for port, x in item.operands.items() if port in OUTPUT_PORTS)
        name, chunk = self._specs[i].name, self._specs[i].chunk
        return Launch(name, kind, item.call, item.tokens, item.rows, outputs, chunk)

    def _start(self, i: int, place: int) -> Action:
        spec, call = self._specs[i], self._items[i].call
        number = EVERY_KIND.index(self._account(spec))
        if spec.asynchronous:
            return Action(SUBMIT, place, number, call.submit)
        return Action(RUN, place, number, call.run)

    def _account(self, spec: LaunchSpec) -> DeviceKind:
        """Return the device that a launch counts for: the NPU for the control thread."""
        return spec.kind or self._host

    def _wait_point(self, awaited: int, before: int | None) -> WaitPoint:
        where = "end" if before is None else self._specs[before].node
        spec, call = self._specs[awaited], self._items[awaited].call
        parts = sum(self.chunks) // self.segment if self.segment else 0
        chunks = (self.segment,) * parts or self.chunks
        key = (self.phase, chunks, _role(where), _role(spec.name))
        return self._synchroniser.wait_point(key, self._account(spec), call.name)


def _role(name: str) -> str:
    """Return a node's name without its layer: all layers run the same kernels."""
    return name.rsplit(".", maxsplit=1)[-1]

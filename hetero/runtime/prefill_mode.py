"""The mode in which a prompt's calls run: cut in order, whole out of order, or both (`InFlight`).

Each is predicted by the makespan of its launches: the graph of a window of calls, scheduled as the
runtime schedules it (`hetero.runtime.schedule`), with the profile's seconds of every launch. Layers
are alike, so two and three of them are scheduled, and their difference stands for all others.

Pure: no kernels and no devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from hetero.backends.ops import OUTPUT_PORTS
from hetero.backends.protocol import CONTEXT_PORTS, Capabilities, DeviceKind
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.launch_graph import LaunchSpec, Span
from hetero.runtime.schedule import Order, Orders, windows
from hetero.runtime.slot_refs import SlotRef, slot_of
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.matmul_entries import CapabilitiesByDevice, PlanSource
from hetero.solver.placement import Placement
from hetero.solver.plan import PrefillMode
from hetero.solver.prompt_calls import chunk_size, split
from hetero.solver.report.labels import MODE_NAMES
from hetero.solver.report.units import duration

if TYPE_CHECKING:
    from hetero.profiler.cost import CostModel
    from hetero.profiler.records import DeviceProfile

WINDOW: Final = 4  # calls of a prompt that are in flight together, at most
WHOLE_QUEUES: Final = ("copy", "finish")  # ways to wait that are for whole queues
SAME: Final = 64  # tokens: what is decided for a length holds for those so little shorter
PADDED: Final = 32  # tokens: of a last chunk that is longer, to a multiple of it
SAMPLED: Final = (2, 3)  # layers that are scheduled


def max_in_flight(plan: ExecutionPlan, max_seq_len: int, order: Order) -> int:
    """Return how many calls of a prompt may be in flight in a context of that many tokens.

    One where a device alone computes prompts: there is nothing to overlap.
    """
    alone = len(plan.devices_of("prefill")) == 1
    if order == "fifo" or plan.strategy == "online-prepare" or alone:
        return 1
    longest = plan.step_tokens
    assert longest is not None
    chunk = min(longest, chunk_size(plan.graph_sizes, longest)) if plan.in_flight else longest
    return min(WINDOW, -(-max_seq_len // chunk))


def rounded(position: int) -> int:
    """Return the power of two below, to bind fewer steps: orders hardly depend on the position."""
    return 1 << (position.bit_length() - 1) if position else 0


def padded_chunks(chunks: Sequence[int], room: int) -> tuple[int, ...]:
    """Return the calls of a window whose last one computes some tokens more.

    Prompts of other lengths then reuse its bound launches. The calls stay as they are where `room`
    tokens are too few.
    """
    *first, last = chunks
    padded = -(-last // PADDED) * PADDED
    fits = last > PADDED and padded <= max(chunks) and sum(first) + padded <= room
    return (*first, padded if fits else last)


class PrefillChoice(NamedTuple):
    """A prompt's mode, its calls, and predicted seconds of every mode that it could have."""

    mode: PrefillMode
    calls: tuple[int, ...]
    seconds: Mapping[PrefillMode, float]

    def __str__(self) -> str:
        """Return the choice for people."""
        calls = "one call" if len(self.calls) == 1 else f"{len(self.calls)} calls"
        text = f"{MODE_NAMES[self.mode]}, in {calls} of up to {max(self.calls)} tokens"
        every = ", ".join(f"{MODE_NAMES[mode]} {duration(s)}" for mode, s in self.seconds.items())
        return f"{text} (predicted: {every})" if every else text


class PrefillModes:
    """Decides the modes of one placement's prompts, `window` calls of which may be in flight.

    `able` are the capabilities of the devices. The mode of prompts that need no decision is `cut`,
    as it is of all where a plan has no other, or no `costs` are known. `take` is a mode to take
    whatever is predicted, for comparisons. Control thread only.
    """

    take: PrefillMode | None = None

    def __init__(
        self,
        placement: Placement,
        costs: LaunchCosts | None,
        order: Order,
        able: CapabilitiesByDevice,
        *,
        window: int,
    ) -> None:
        self._placement, self._costs, self._orders = placement, costs, Orders(order)
        self._window = window
        self._asynchronous = {kind for kind, x in able.items() if x.asynchronous}
        self._modes: list[PrefillMode] = []
        if placement.plan.in_flight and costs is not None and order != "fifo" and window > 1:
            self._modes = ["cut", *(flight.mode for flight in placement.plan.in_flight)]
        self.submit_s = 0.0 if costs is None else costs.submit_s(able)
        self._specs_known: dict[tuple[PrefillMode, int, int, int], Sequence[LaunchSpec]] = {}
        sizes = placement.plan.graph_sizes
        self._chunk = min(chunk_size(sizes, placement.longest), placement.longest)
        self._known: dict[tuple[int, int], tuple[PrefillMode, Mapping[PrefillMode, float]]] = {}

    def of(self, tokens: int, position: int = 0) -> PrefillChoice:
        """Return the mode of a prompt after `position` tokens that is predicted to be fastest."""
        mode: PrefillMode = "cut"
        seconds: Mapping[PrefillMode, float] = {}
        if self._modes and tokens > self._chunk:
            mode, seconds = self._decided(tokens, position)
            mode = self.take or mode
        return PrefillChoice(mode, self.calls(mode, tokens), seconds)

    def calls(self, mode: PrefillMode, tokens: int) -> tuple[int, ...]:
        """Return the token counts of a prompt's calls.

        They are the plan's, or chunks that are alike but for the last one, as in mllm-NPU.
        """
        return (
            self._placement.plan.steps(tokens) if mode == "cut" else split(tokens, (), self._chunk)
        )

    def seconds(self, mode: PrefillMode, calls: Sequence[int], position: int = 0) -> float:
        """Return the predicted seconds of a prompt in these calls, as many in flight as may be."""
        total_s, start = 0.0, position
        parts = windows(calls, self._window)
        for i, chunks in enumerate(parts):
            total_s += self._window_s(mode, chunks, start, int(i == len(parts) - 1))
            start += sum(chunks)
        return total_s

    @property
    def priced(self) -> bool:
        """Return whether there are costs to predict by."""
        return self._costs is not None

    def prompt_s(self, tokens: int, position: int = 0) -> float:
        """Return the predicted seconds of a prompt after `position` tokens, as it would run."""
        choice = self.of(tokens, position)
        return self.seconds(choice.mode, choice.calls, position)

    def _decided(
        self, tokens: int, position: int
    ) -> tuple[PrefillMode, Mapping[PrefillMode, float]]:
        key = (-(-tokens // SAME), -(-position // SAME))
        if key not in self._known:
            at, after = key[0] * SAME, key[1] * SAME
            seconds = {x: self.seconds(x, self.calls(x, at), after) for x in self._modes}
            self._known[key] = (min(self._modes, key=seconds.__getitem__), seconds)
        return self._known[key]

    def _window_s(
        self, mode: PrefillMode, chunks: Sequence[int], position: int, logit_rows: int
    ) -> float:
        layers = self._placement.graph.layers
        if layers <= max(SAMPLED) or len(self._placement.graph.kinds) > 1:
            return self._scheduled_s(mode, chunks, position, logit_rows, layers)
        fewer_s, more_s = (
            self._scheduled_s(mode, chunks, position, logit_rows, count) for count in SAMPLED
        )
        return more_s + (layers - max(SAMPLED)) * (more_s - fewer_s)

    def _scheduled_s(
        self, mode: PrefillMode, chunks: Sequence[int], position: int, logit_rows: int, layers: int
    ) -> float:
        launches, costs_s = self.launches(mode, chunks, position, logit_rows, layers)
        return self._orders.shortest(launches, costs_s, self.submit_s)[0]

    def launches(
        self, mode: PrefillMode, chunks: Sequence[int], position: int, logit_rows: int, layers: int
    ) -> tuple[Sequence[LaunchSpec], list[float]]:
        """Return the launches of a window of calls in so many layers, and their seconds."""
        launches = self._specs(mode, chunks, logit_rows, layers)
        assert self._costs is not None
        ends, costs_s = tuple(accumulate(chunks, initial=position)), list[float]()
        sampled = self._placement.graph.sampled_nodes
        for launch in launches:
            m, context = chunks[launch.chunk], ends[launch.chunk]
            if mode == "cut" or launch.node in sampled:
                m = launch.tokens[1] - launch.tokens[0]
            if launch.node in sampled:
                context = ends[launch.chunk + 1] - m
            costs_s.append(self._costs.seconds(launch, m, context, mode))
        return launches, costs_s

    def _specs(
        self, mode: PrefillMode, chunks: Sequence[int], logit_rows: int, layers: int
    ) -> Sequence[LaunchSpec]:
        """Return the launches of calls of a window, the same for all token counts in flight."""
        shape = (mode, len(chunks), logit_rows, layers)
        if mode != "cut" and shape in self._specs_known:
            return self._specs_known[shape]
        specs = list(self._launches(mode, chunks, logit_rows, layers))
        if mode != "cut":
            self._specs_known[shape] = specs
        return specs

    def _launches(
        self, mode: PrefillMode, chunks: Sequence[int], logit_rows: int, layers: int
    ) -> Iterator[LaunchSpec]:
        stage = 0
        for chunk, m in enumerate(chunks):
            rows = logit_rows if chunk == len(chunks) - 1 else 0
            for node, kind, _, parts, _, heads in self._placement.at("prefill", m, rows, mode=mode):
                if node.layer is not None and node.layer >= layers:
                    continue
                stage += 1
                own = m - self._placement.tokens_of(node, m, rows), m
                parts_of: list[tuple[DeviceKind, Span, Span | None, Span | None]]
                if heads:
                    parts_of = [(x.kind, own, None, (x.first, x.stop)) for x in heads]
                elif kind is not None:
                    parts_of = [(kind, own, None, None)]
                else:
                    parts_of = [(part.kind, part.tokens, part.rows, None) for part in parts]
                for kind_of, tokens, span, of in parts_of:
                    yield replace(self._spec(node, kind_of, tokens, span, stage, chunk), heads=of)

    def _spec(
        self,
        node: Node,
        kind: DeviceKind,
        tokens: Span,
        rows: Span | None,
        stage: int,
        chunk: int,
    ) -> LaunchSpec:
        reads, writes = _slots(node, chunk)
        return LaunchSpec(
            name=node.name,
            node=node.name,
            kind=kind,
            asynchronous=kind in self._asynchronous,
            reads=reads,
            writes=writes,
            tokens=tokens,
            rows=rows,
            stage=stage,
            chunk=chunk,
        )


def _slots(node: Node, chunk: int) -> tuple[frozenset[SlotRef], frozenset[SlotRef]]:
    """Return the slots that a node reads and writes: caches both."""
    slots = {port: slot_of(slot, chunk) for port, slot in node.slots.items()}
    reads = {slot for port, slot in slots.items() if port not in OUTPUT_PORTS}
    writes = {x for port, x in slots.items() if port in OUTPUT_PORTS or port in CONTEXT_PORTS}
    return frozenset(reads), frozenset(writes)


def with_modes(
    plan: ExecutionPlan,
    spec: ModelGraph,
    cost: CostModel,
    source: PlanSource | None = None,
    *,
    lengths: Sequence[int] = (),
) -> ExecutionPlan:
    """Return the plan with the prefill mode of each prompt, and predicted seconds of the others.

    Modes that no prompt of these `lengths` (by default the plan's) would use are dropped, since
    their buffers would be wasted.
    """
    if not plan.in_flight:
        return plan
    able = capabilities_of(plan, cost.profile)
    placement = Placement(plan, spec, able, source=source)
    modes = PrefillModes(placement, LaunchCosts(cost, placement), "best", able, window=WINDOW)
    prompts = [total.m for total in plan.totals if total.phase == "prefill"]
    try:
        taken = {m: modes.of(m) for m in lengths or prompts}
    except ProfileError:  # of an operation that no prediction of steps asks for
        return plan.model_copy(update={"in_flight": ()})
    used = {choice.mode for choice in taken.values()}
    in_flight = tuple(x for x in plan.in_flight if x.mode in used)
    totals = tuple(
        total.model_copy(update={"mode": choice.mode, "modes": dict(choice.seconds)})
        if total.phase == "prefill" and (choice := taken.get(total.m)) is not None
        else total
        for total in plan.totals
    )
    return plan.model_copy(update={"totals": totals, "in_flight": in_flight})


def capabilities_of(plan: ExecutionPlan, profile: DeviceProfile) -> dict[DeviceKind, Capabilities]:
    """Return the capabilities of a profile's devices, with the plan's graphs."""
    capabilities: dict[DeviceKind, Capabilities] = {}
    for kind, device in profile.devices.items():
        record = device.capabilities
        if kind == "npu" and record.static_shapes and plan.graph_sizes:
            record = record.model_copy(update={"graph_sizes": plan.graph_sizes})
        capabilities[kind] = record.on(kind)
    return capabilities

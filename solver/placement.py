"""`Placement`: the one translation of a plan, without devices and without weights.

Who computes which tokens and rows of which node, in which calls, with which kernels, and what bytes
those hold. The engine, the compiler, the adapter, predictions and the choice of devices ask it;
only the report reads a plan's tiles besides, to draw them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from hetero.backends.ops import Attention, MatMul, has_state, is_mapped
from hetero.backends.protocol import KINDS, DeviceKind, prepared_sizes
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.solver.assignments import Assignment, Heads, Part
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.matmul_entries import (
    CapabilitiesByDevice,
    MatmulEntries,
    PlanSource,
    share_heads,
)
from hetero.solver.matmul_launches import MatmulLaunches, no_graph
from hetero.solver.node_groups import NodeGroup, node_groups
from hetero.solver.non_matmul_devices import device_of_other
from hetero.solver.plan import HeadCounts, OpPlan, Phase, PrefillMode, check_heads
from hetero.solver.planned_kernels import PlannedKernels
from hetero.solver.prompt_calls import padded_size
from hetero.solver.shared_experts import check_experts, experts_device, with_shared_experts


class Placement:
    """Answers for one plan of a model on devices with the given capabilities.

    `plan` is the one that was given, in calls that the devices' graphs can run (`fitted`). A token
    count that it does not list takes the entry of the next larger one, its tiles cut off at the
    call's end, unless `source` gives a plan for it. Decoding several tokens at once (verification)
    takes the entry of one token. `bands` are the placements of decode steps from the depths of the
    plan's bands on. `kernels` are those that are prepared, of this plan unless given ones of a plan
    with the same cuts. Raises `PlanError` for what cannot run.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        graph: ModelGraph,
        capabilities: CapabilitiesByDevice,
        *,
        source: PlanSource | None = None,
        kernels: PlannedKernels | None = None,
    ) -> None:
        self.plan = fitted(plan, capabilities, solved=source is not None)
        check_experts(self.plan, graph)
        self.graph = with_shared_experts(graph, plan)
        self._capabilities = dict(capabilities)
        self._source = source
        self._entries = MatmulEntries(plan, self._capabilities, source)
        self.kernels = kernels or PlannedKernels(
            self.plan, self.graph, self._capabilities, self._entries, source
        )
        self._launches = MatmulLaunches(
            self._entries, self.kernels, self._capabilities, online=self.online
        )
        self._check_graphs()
        self._check_heads()
        self._check_experts()
        self.bands = tuple(
            Placement(
                self.plan.in_band(x), graph, capabilities, source=source, kernels=self.kernels
            )
            for x in self.plan.bands
        )

    def with_plan(self, plan: ExecutionPlan, source: PlanSource) -> Placement:
        """Return the same devices and kernels with another plan within the same cuts."""
        return Placement(plan, self.graph, self._capabilities, source=source, kernels=self.kernels)

    def _check_graphs(self) -> None:
        """Check that the device has every graph that the plan prepares ahead."""
        for entry in self.plan.ops:
            for tile in entry.tiles:
                able = self._capabilities.get(tile.device)
                late = self.online and tile.graph_size not in self.plan.graph_sizes
                if able is None or not able.static_shapes or tile.graph_size is None or late:
                    continue
                if tile.graph_size not in able.graph_sizes:
                    raise no_graph(entry.op, tile.graph_size, tile.device, able)

    def _check_heads(self) -> None:
        """Check that devices that share attention are able to."""
        if not self.plan.shares_attention:
            return
        check_heads(self.plan, self.graph)
        for kind, able in self._capabilities.items():
            if kind in KINDS and not able.attention_heads:
                raise PlanError(
                    f"the plan shares the heads of attention between both devices, and the {kind} "
                    "computes all of them or none: make a plan with a profile of this device"
                )

    def _check_experts(self) -> None:
        """Check that the device of routed experts has kernels of them."""
        for kind in self.plan.expert_devices:
            if kind not in self._capabilities or not self._capabilities[kind].experts:
                raise PlanError(
                    f"the plan has routed experts on the {kind}, which has no kernels of them: "
                    "make a plan with a profile of this device"
                )

    def graph_sizes(self, kind: DeviceKind) -> tuple[int, ...]:
        """Return the token counts of a device's graphs, rising; none where it takes any."""
        return prepared_sizes(self._capabilities[kind])

    @property
    def online(self) -> bool:
        """Return whether graphs are prepared while a prompt waits."""
        return self.plan.strategy == "online-prepare"

    @property
    def longest(self) -> int:
        """Return the tokens of the longest call."""
        assert self.plan.step_tokens is not None
        return self.plan.step_tokens

    @property
    def written(self) -> int:
        """Return the tokens that the longest call writes, padding included."""
        return reach(self.plan, self._capabilities)

    def band_at(self, depth: int) -> int:
        """Return how many of the plan's bands begin within so many tokens of context."""
        return sum(band.depth_from <= depth for band in self.plan.bands)

    def in_band(self, band: int) -> Placement:
        """Return the placement of steps that `band_at` gives this number."""
        return self.bands[band - 1] if band else self

    def non_matmul(self, phase: Phase) -> DeviceKind:
        """Return the device of everything that is not a matmul."""
        return self.plan.non_matmul.prefill if phase == "prefill" else self.plan.non_matmul.decode

    def at(
        self, phase: Phase, m: int, logit_rows: int = 1, *, mode: PrefillMode = "cut"
    ) -> Iterator[Assignment]:
        """Yield what computes a call of m tokens, in the model's order.

        Tables that are mapped are the control thread's. What sees sampled rows alone sees the last
        `logit_rows` tokens, and is left out where that is none. Tokens of several texts are such a
        call, too; but what knows a position runs for each text, on the same device.
        `mode`: of calls in flight.
        """
        inside: set[str] = set()  # nodes of groups that were yielded
        for node in self.graph.nodes:
            tokens = self.tokens_of(node, m, logit_rows)
            if node.name in inside or not tokens:
                continue
            group = self.groups.get(node.name) if mode == "cut" else None
            graph = None if group is None else self.fused(group, phase, tokens)
            if group is not None and graph is not None:
                inside.update(member.name for member in group.nodes)
                yield Assignment(node, "npu", graph, group=group)
            elif node.plan_op is not None:
                yield Assignment(node, parts=self.parts(node, phase, tokens, mode))
            else:
                heads = self.heads(phase, tokens, mode) if isinstance(node.op, Attention) else ()
                yield Assignment(node, *self._other(node, phase, tokens), heads=heads)

    def tokens_of(self, node: Node, m: int, logit_rows: int) -> int:
        """Return how many of the last tokens of a call of m a node computes; 0: it does not run."""
        if is_mapped(node.op):
            return 0
        return logit_rows if node.name in self.graph.sampled_nodes else m

    def parts(
        self, node: Node, phase: Phase, m: int, mode: PrefillMode = "cut"
    ) -> tuple[Part, ...]:
        """Return the launches of a matmul node at m tokens (`MatmulLaunches.parts`)."""
        return self._launches.parts(node, phase, m, mode)

    def heads(self, phase: Phase, m: int, mode: PrefillMode = "cut") -> tuple[Heads, ...]:
        """Return the launches of an attention of m tokens that both devices share.

        The NPU has the first key/value heads. None where the device of the other operators has all;
        it has in decoding, of calls that are cut for being in flight together, and where no graph
        holds m tokens.
        """
        if phase != "prefill" or mode != "cut" or not share_heads(self._capabilities):
            return ()
        counts = self._head_counts(m)
        if counts is None or not counts.shared:
            return ()
        able, count = self._capabilities["npu"], counts.npu
        sizes = prepared_sizes(able)
        if sizes and m > sizes[-1]:
            return ()
        graph = padded_size(m, sizes)
        return (Heads("gpu", count, count + counts.gpu, m), Heads("npu", 0, count, graph))

    def _head_counts(self, m: int) -> HeadCounts | None:
        """Return what holds for the attention of a call of m tokens."""
        known = {x.m for x in self.plan.attention}
        if self._source is not None and not known & {m, None}:
            return self._source.plan_for(m).heads(m) if self._source.npu_head_counts else None
        return self.plan.heads(m)

    def _other(self, node: Node, phase: Phase, m: int) -> tuple[DeviceKind, int]:
        """Return device and tokens of a node that is no matmul."""
        kind = device_of_other(
            node.op,
            self.non_matmul(phase),
            self._capabilities,
            experts_device(node, self.plan),
        )
        # As many tokens as the rest, for a padded graph reads what is written here; but a state is
        # that after the last token.
        return kind, m if has_state(node.op) else self.padded(phase, m)

    def padded(self, phase: Phase, m: int) -> int:
        """Return the tokens that all operations but the matmuls compute.

        They are those of a graph, where shapes are static.
        """
        kind = self.non_matmul(phase)
        able = self._capabilities[kind]
        try:
            return padded_size(m, able.graph_sizes if able.static_shapes else ())
        except ValueError as error:
            raise PlanError(f"{phase} on the {kind}: {error}") from None

    @cached_property
    def joins(self) -> bool:
        """Return whether rows of several contexts can decode in one step (`joins_at`)."""
        return self.joins_at("decode", 1)

    def joins_at(self, phase: Phase, m: int) -> bool:
        """Return whether m tokens of one step can be of several texts.

        Not where attention is inside the graph of a whole block, which knows one position.
        """
        return not any(
            group.fixed and self.fused(group, phase, m) is not None
            for group in self.groups.values()
        )

    def entries(self, phase: Phase, m: int) -> tuple[OpPlan, ...]:
        """Return what computes the matmuls of a call of m tokens, in order.

        One row is sampled.
        """
        sampled = self.graph.sampled_in(phase)
        first = {node.plan_op: node for node in reversed(self.graph.nodes) if node.plan_op}
        return tuple(
            entry
            for node in reversed(first.values())
            for entry, _ in self._entries.at(node, phase, 1 if node.plan_op in sampled else m)
        )

    def block_entries(self, phase: Phase, m: int) -> tuple[OpPlan, ...]:
        """Do the same as `entries`, without the matmuls of sampled rows alone."""
        sampled = self.graph.sampled_in(phase)
        return tuple(entry for entry in self.entries(phase, m) if entry.op not in sampled)

    def is_prepared(self, phase: Phase, m: int) -> bool:
        """Return whether the rows that a call of m tokens asks for are prepared.

        A plan for other speeds may want other formats or operand orders than were prepared.
        """
        sampled = self.graph.sampled_in(phase)
        parts = (
            (node, part)
            for node in self.graph.nodes
            if node.plan_op is not None
            for part in self.parts(node, phase, 1 if node.plan_op in sampled else m)
        )
        return all(
            part.segment in self.kernels.segments(node, part.kind)
            for node, part in parts
            if self._capabilities[part.kind].prepares_rows
        )

    def working(self, m: int) -> frozenset[DeviceKind]:
        """Return the devices that work in a prompt's call of m tokens, sampled rows aside."""
        tiles = {tile.device for x in self.block_entries("prefill", m) for tile in x.tiles}
        heads = {part.kind for part in self.heads("prefill", m)}
        return frozenset({self.non_matmul("prefill"), *tiles, *heads})

    def devices(self, node: Node) -> frozenset[DeviceKind]:
        """Return the devices that run a node in any phase."""
        if is_mapped(node.op):
            return frozenset()
        if node.plan_op is None:
            able, experts = self._capabilities, experts_device(node, self.plan)
            return frozenset(
                device_of_other(node.op, kind, able, experts) for kind in self.plan.other_devices
            )
        return frozenset(tile.device for _, tile, _ in self._entries.listed(node))

    @cached_property
    def groups(self) -> dict[str, NodeGroup]:
        """Return the nodes that may run as one graph on the NPU, by their first node's name."""
        return node_groups(self.graph.nodes, self.plan.fused) if "npu" in self._capabilities else {}

    def fused(self, group: NodeGroup, phase: Phase, m: int) -> int | None:
        """Return the tokens of a group's graph if the plan has all of it, whole, on the NPU.

        Else None.
        """
        if self.non_matmul(phase) != "npu":
            return None
        parts = [self._launches.tiles(node, phase, m) for node in group.matmuls]
        graphs = {part.graph for launches in parts for part in launches}
        whole = all(map(_is_whole_on_npu, group.matmuls, parts))
        return graphs.pop() if whole and len(graphs) == 1 else None


def fitted(
    plan: ExecutionPlan, capabilities: CapabilitiesByDevice, *, solved: bool = False
) -> ExecutionPlan:
    """Return the plan in calls that devices can run; `solved` as in `ExecutionPlan.for_graphs`."""
    return plan.for_graphs(
        {kind: prepared_sizes(x) for kind, x in capabilities.items()}, solved=solved
    )


def reach(plan: ExecutionPlan, capabilities: CapabilitiesByDevice) -> int:
    """Return the tokens that the longest call of a fitted plan writes, padding included."""
    assert plan.step_tokens is not None
    longest = plan.step_tokens
    resident = [
        [size for size in prepared_sizes(x) if size >= longest] for x in capabilities.values()
    ]
    return max([longest, *(min(sizes) for sizes in resident if sizes)])


def _is_whole_on_npu(node: Node, parts: Sequence[Part]) -> bool:
    """Return whether these are one graph of all rows, as groups are prepared."""
    assert isinstance(node.op, MatMul)
    first = parts[0]
    plain = first.order == "plain" and first.precision is None
    return plain and len(parts) == 1 and (first.kind, first.rows) == ("npu", (0, node.op.n))

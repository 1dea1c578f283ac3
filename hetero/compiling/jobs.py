"""The NPU graphs of a placement, and which of them the calls of a prompt share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hetero.backends.groups import Group
from hetero.backends.ops import Attention, Embed, Experts, MatMul, Op
from hetero.backends.qnn.npu_capabilities import LAYOUT_OVERHEAD
from hetero.backends.weights import packed_bytes
from hetero.models.sliding import Sliding
from hetero.profiler.model_graph import Node
from hetero.runtime.sizes import LONGEST_VERIFIED, SCORING_PIECE
from hetero.solver.assignments import Assignment, Heads, Segment
from hetero.solver.errors import PlanError
from hetero.solver.node_groups import NodeGroup
from hetero.solver.placement import Placement
from hetero.solver.plan import Phase, PrefillMode
from hetero.solver.prompt_calls import chunk_size, padded_size

if TYPE_CHECKING:
    from hetero.backends.qnn.catalog import GraphShape

FILE_BYTES = 48 << 10  # of a compiled graph besides its weight, measured (qnn.md)


@dataclass(frozen=True)
class Job:
    """Graphs of `op` for calls of these token counts, which serve all `nodes`.

    They serve one node where weights are constants of a graph, else all that compute the same.
    `segment` are the rows of a matmul; of routed experts `op` has one. With `group`, graphs of all
    its nodes.
    """

    nodes: tuple[Node, ...]
    op: Op
    segment: Segment | None
    sizes: tuple[int, ...]
    weight_bytes: int
    group: NodeGroup | None = None
    shapes: tuple[GraphShape, ...] = field(default=(), compare=False)

    @property
    def node(self) -> Node:
        """Return the first of its nodes."""
        return self.nodes[0]

    @property
    def graphs(self) -> int:
        """Return the number of graphs."""
        return len(self.shapes)

    @property
    def name(self) -> str:
        """Return a name for people: `layer3.qkv`, `layer3.qkv[0:256]`, `layer3.experts[7]`."""
        return self._name(self.node)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all its nodes, each once."""
        return tuple(dict.fromkeys(map(self._name, self.nodes)))

    def _name(self, node: Node) -> str:
        if self.group is not None:
            return self.group.name
        if isinstance(self.op, Experts):
            return f"{node.name}[{self.op.own[0]}]"
        if self.segment is None or self.segment.rows == (0, getattr(node.op, "n", None)):
            return node.name
        return f"{node.name}[{self.segment.rows[0]}:{self.segment.rows[1]}]"

    @property
    def shareable(self) -> bool:
        """Return whether its graphs may be one context, which has the weight once."""
        return self.graphs > 0 and self.weight_bytes > 0 and self.group is None

    @property
    def layout_bytes(self) -> int:
        """Return the estimated size of the weight in the compiler's layout."""
        return int(self.weight_bytes * LAYOUT_OVERHEAD)

    @property
    def file_bytes(self) -> int:
        """Return the estimated size of one compiled graph."""
        return self.layout_bytes + FILE_BYTES

    def for_sizes(self, sizes: Sequence[int]) -> Job:
        """Return the job for the calls of these token counts alone."""
        return _with_shapes(replace(self, sizes=tuple(s for s in self.sizes if s in sizes)))


UseKey: TypeAlias = tuple[str, Segment | None, bool, int]


class _Use(NamedTuple):
    """The NPU's part of an assignment: a group, a node, rows of a matmul or heads of attention."""

    node: Node
    segment: Segment | None
    group: NodeGroup | None
    graph: int
    heads: Heads | None = None

    @property
    def key(self) -> UseKey:
        """Return what identifies its graphs, whatever the token count."""
        count = 0 if self.heads is None else self.heads.stop - self.heads.first
        return self.node.name, self.segment, self.group is not None, count

    @property
    def op(self) -> Op:
        """Return the operation of its graphs; of a group the first one."""
        if self.heads is not None:
            assert isinstance(self.node.op, Attention)
            return self.heads.op(self.node.op)
        if self.segment is None:
            return self.node.op
        assert isinstance(self.node.op, MatMul)
        return self.segment.op(self.node.op)


def _uses(assignment: Assignment) -> Iterator[_Use]:
    """Yield the graphs of an assignment that are prepared ahead."""
    node, kind, graph, parts, group, heads = assignment
    yield from (_Use(node, None, None, x.graph, x) for x in heads if x.kind == "npu")
    if kind == "npu" and not heads:
        yield _Use(node, None, group, graph)
    for part in parts:
        if part.kind == "npu" and not part.online:
            yield _Use(node, part.segment, None, part.graph)


def all_jobs(placement: Placement, max_seq_len: int, every_size: Sequence[int] = ()) -> list[Job]:
    """Return every graph that a prompt of any length in the context, scoring and verification run.

    With `every_size` (graph sizes) the rows of a matmul that the NPU has are in graphs of all of
    them, as plans with the same cuts for devices of other speeds need them. Raises `PlanError`
    where the plan lacks what a prompt or a decode step needs.
    """
    jobs_by_key: dict[UseKey, tuple[_Use, set[int]]] = {}
    longest = min(placement.longest, max_seq_len)
    chunk = min(chunk_size(placement.plan.graph_sizes, longest), longest)
    in_flight = placement.plan.in_flight if max_seq_len > chunk else ()  # else never chosen
    modes: tuple[PrefillMode, ...] = tuple(flight.mode for flight in in_flight)
    for phase, m, logit_rows, mode in _calls(longest, chunk, modes):
        placements = (placement, *placement.bands) if phase == "decode" else (placement,)
        try:
            at = [y for x in placements for y in x.at(phase, m, logit_rows, mode=mode)]
            called = [use for assignment in at for use in _uses(assignment)]
        except PlanError:
            if logit_rows == 1:
                raise
            continue  # the engine refuses to score or verify on such a plan
        for use in called:
            jobs_by_key.setdefault(use.key, (use, set()))[1].update(_sizes(placement, use))
    for use in (*_segments(placement), *_heads(placement)) if every_size else ():
        own = every_size
        if use.node.name in placement.graph.sampled_nodes:  # as many tokens as are verified
            own = sorted({padded_size(m, every_size) for m in range(1, LONGEST_VERIFIED + 1)})
        jobs_by_key.setdefault(use.key, (use, set()))[1].update(own)
    order = {node.name: i for i, node in enumerate(placement.graph.nodes)}
    uses = sorted(jobs_by_key.values(), key=lambda x: (order[x[0].node.name], str(x[0].segment)))
    return _merged(job for use, counts in uses for job in _jobs(use, counts))


def _sizes(placement: Placement, use: _Use) -> set[int]:
    """Return the token counts of the calls that graphs are prepared for.

    An expert's are of its own tokens, of which there may be fewer than the call has.
    """
    from hetero.backends.qnn import catalog

    if not isinstance(use.op, Experts):
        return {use.graph}
    return {*catalog.expert_sizes(use.op, placement.graph_sizes("npu"), use.graph)}


def _calls(
    longest: int, chunk: int, modes: Sequence[PrefillMode]
) -> Iterator[tuple[Phase, int, int, PrefillMode]]:
    """Yield phase, tokens, rows of logits and mode of every call that the engine makes."""
    yield from (("prefill", m, 1, "cut") for m in range(1, longest + 1))
    yield from (("prefill", m, m, "cut") for m in range(2, min(SCORING_PIECE, longest) + 1))
    yield from (("decode", m, m, "cut") for m in range(1, LONGEST_VERIFIED + 1))
    yield from (("prefill", m, 1, mode) for mode in modes for m in range(1, chunk + 1))


def _segments(placement: Placement) -> Iterator[_Use]:
    """Yield the rows of every matmul that the NPU has."""
    for node in placement.graph.nodes:
        if node.plan_op is not None:
            for segment in placement.kernels.segments(node, "npu"):
                yield _Use(node, segment, None, 0)


def _heads(placement: Placement) -> Iterator[_Use]:
    """Yield the heads of every attention that the NPU has in some prompt."""
    counts = {x.heads.npu for x in placement.plan.attention if x.heads.shared}
    for node in placement.graph.nodes:
        if isinstance(node.op, Attention):
            for count in sorted(counts):
                yield _Use(node, None, None, 0, Heads("npu", 0, count, 0))


def _jobs(use: _Use, sizes: set[int]) -> list[Job]:
    """Return the graphs of a use; each routed expert has its own."""
    counts = tuple(sorted(sizes))
    job = _with_shapes(Job((use.node,), use.op, use.segment, counts, _weight_bytes(use), use.group))
    if not isinstance(use.op, Experts):
        return [job]
    return [replace(job, op=replace(use.op, subset=(expert,))) for expert in use.op.own]


def _with_shapes(job: Job) -> Job:
    from hetero.backends.qnn import catalog

    return replace(job, shapes=tuple(catalog.shapes(_subject(job), job.sizes)))


def _merged(jobs: Iterable[Job]) -> list[Job]:
    """Return one job for all nodes whose graphs are the same, and for all their token counts."""
    merged: dict[object, Job] = {}
    for job in jobs:
        key = _file(job), _attention(job.node, job.group)
        if key in merged:
            same = merged[key]
            sizes = tuple(sorted({*same.sizes, *job.sizes}))
            merged[key] = _with_shapes(replace(same, nodes=same.nodes + job.nodes, sizes=sizes))
        else:
            merged[key] = job
    return list(merged.values())


def _file(job: Job) -> object:
    """Return what is equal where graphs of the same shape share a file.

    That is the operation if no weights are in them.
    """
    from hetero.backends.qnn import catalog

    if job.group is not None:
        return job.name
    operation = catalog.all_graphs(job.op, (1,), {}, "")[0].identity.operation
    return (job.name, operation) if catalog.has_constants(job.op) else operation


def _attention(node: Node, group: NodeGroup | None) -> Attention | None:
    """Return the attention among the operations of a job."""
    ops = (x.op for x in (group.nodes if group is not None else (node,)))
    return next((op for op in ops if isinstance(op, Attention)), None)


def _row(use: _Use, start: int) -> int:
    """Return the row of its caches where a call after `start` tokens begins.

    The rows of a window may have slid.
    """
    nodes = use.group.nodes if use.group is not None else (use.node,)
    attention = _attention(use.node, use.group)
    if attention is None or not any("cache_row" in node.slots.values() for node in nodes):
        return start
    sliding = Sliding(layers=frozenset(), window=attention.window, rows=attention.capacity)
    return start - sliding.base(start)


def _subject(job: Job) -> Op | Group:
    return job.op if job.group is None else job.group.group


def _weight_bytes(use: _Use) -> int:
    """Return the bytes of the weights that are constants of a graph."""
    ops = [node.op for node in use.group.nodes] if use.group is not None else [use.op]
    return sum(map(_constant_bytes, ops))


def _constant_bytes(op: Op) -> int:
    match op:
        case MatMul():
            return packed_bytes(op.weight_format.storage, op.n, op.k)
        case Embed():
            return 2 * op.vocab * op.d  # rows are gathered in fp16
        case Experts():
            return sum(map(_constant_bytes, op.matmuls.values()))  # of one
        case _:
            return 0


# --- what calls share -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sharing:
    """Graphs of a prompt in several calls, after mllm-NPU (section 3.2).

    Graphs of linear layers and norms depend on a call's length alone, those of attention on the
    context as well. `graphs` are those of the nodes of the first call, of which all calls of its
    length share `shared`. `built` graphs serve all calls; `apart` would be needed if each call had
    graphs of its own. Bytes are estimates, of files: nodes without weights share them.
    """

    calls: tuple[int, ...]
    graphs: int
    shared: int
    built: int
    built_bytes: int
    apart: int
    apart_bytes: int

    def describe(self) -> str:
        """Return one paragraph for people."""
        return (
            f"A prompt of {sum(self.calls)} tokens runs in {len(self.calls)} calls of up to "
            f"{max(self.calls)}. {self.shared} of the {self.graphs} graphs of a call "
            f"({self.shared / self.graphs:.0%}) are shared by all of its length: {self.built} "
            f"graphs of nodes in all, about {mib(self.built_bytes)}; with graphs of its own for "
            f"each call, {self.apart} and {mib(self.apart_bytes)} (estimates)."
        )

    def document(self) -> dict[str, object]:
        """Return the object for `--json`."""
        return {"tokens": sum(self.calls), **asdict(self)}


def sharing(placement: Placement, tokens: int) -> Sharing | None:
    """Return what the calls of a prompt share; None if the NPU computes none of it."""
    calls = placement.plan.steps(tokens)
    starts = list(accumulate(calls, initial=0))
    each = [
        _graphs_of_call(placement, m, start, last=start + m == tokens)
        for m, start in zip(calls, starts, strict=False)
    ]
    if not each[0]:
        return None
    union: dict[_Graph, int] = {}
    for graphs in each:
        union |= graphs
    return Sharing(
        calls=tuple(calls),
        graphs=len(each[0]),
        shared=sum(not graph.shape.context for graph in each[0]),
        built=len(union),
        built_bytes=_bytes_of_files(union),
        apart=sum(map(len, each)),
        apart_bytes=sum(map(_bytes_of_files, each)),
    )


class _Graph(NamedTuple):
    """A node's graph; `file` is equal where nodes share one."""

    name: str
    file: object
    shape: GraphShape


def _graphs_of_call(
    placement: Placement, m: int, start: int, *, last: bool
) -> Mapping[_Graph, int]:
    """Return the graphs of a call after `start` tokens, and the bytes of their files."""
    from hetero.backends.qnn import catalog

    graphs: dict[_Graph, int] = {}
    for assignment in placement.at("prefill", m, int(last)):
        for use in _uses(assignment):
            for job in _jobs(use, _sizes(placement, use)):
                shapes = catalog.shapes_at(_subject(job), use.graph, _row(use, start))
                for shape in job.shapes if isinstance(job.op, Experts) else shapes:
                    graphs[_Graph(job.name, _file(job), shape)] = job.file_bytes
    return graphs


def _bytes_of_files(graphs: Mapping[_Graph, int]) -> int:
    return sum({(graph.file, graph.shape): size for graph, size in graphs.items()}.values())


def mib(nbytes: float) -> str:
    """Return a size for people."""
    return f"{nbytes / 2**20:,.0f} MiB"

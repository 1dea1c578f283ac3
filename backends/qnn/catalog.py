"""The graphs of each operation, and how to build them, to run and to compile ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hetero.backends import checks, ops
from hetero.backends.formats import WeightFormat
from hetero.backends.groups import Group
from hetero.backends.ops import Op
from hetero.backends.protocol import WeightValue
from hetero.backends.qnn import delta_matmuls, graphs, integer
from hetero.backends.qnn.graph_store import GraphIdentity, weight_digest
from hetero.backends.qnn.graphs import is_static


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """Token counts and context lengths that graphs are made for.

    Longer calls run in chunks, because activations that leave VTCM are written to DRAM and read
    again (docs/explanation/qnn.md has the compiler's figures):

    rows          most tokens of a graph
    delta_rows    of a gated delta rule, whose pairs of tokens are products too
    large_k       input features from which half as many spill less. A large n does not spill
    scaled_rows   with integer activations and a scale for each row of the weight, of which less is
                  spilled; with groups, which QNN computes in fp16, `rows`
    large_int_k   input features from which half as many do, of 16 bits

    Attention graphs are made for context lengths; a call runs the smallest that holds it:

    context       the first of them
    context_step  and the factor from one to the next
    """

    rows: int = 256
    delta_rows: int = 64
    large_k: int = 4096
    scaled_rows: int = 512
    large_int_k: int = 8192
    context: int = 128
    context_step: int = 4


SIZES: Final = GraphSizes()


class Graph(NamedTuple):
    """A static graph: what it is, and how its ONNX model is built."""

    identity: GraphIdentity
    build: Callable[[], bytes]


class GraphShape(NamedTuple):
    """Static sizes of a graph; `context` is 0 without attention."""

    tokens: int
    context: int = 0


def chunk_rows(op: Op) -> int:
    """Return most tokens of one graph."""
    if is_static(op):
        return SIZES.scaled_rows
    if isinstance(op, ops.GatedDelta):
        return SIZES.delta_rows
    widest = op.k if isinstance(op, ops.MatMul) else 0
    if isinstance(op, ops.Experts):
        widest = max(op.d, op.f)
    return SIZES.rows // 2 if widest >= SIZES.large_k else SIZES.rows


def expert_sizes(op: ops.Experts, sizes: Sequence[int], m: int) -> tuple[int, ...]:
    """Return the token counts of an expert's graphs in calls of m tokens, rising.

    Any number of the call's tokens may choose it: they run in the smallest graph that holds them,
    more than the largest in several. `sizes` are the device's graph sizes.
    """
    own = sorted({min(size, chunk_rows(op)) for size in sizes})
    return tuple(size for i, size in enumerate(own) if i == 0 or own[i - 1] < m)


def launch_tokens(weight_format: WeightFormat) -> tuple[tuple[int, int], ...]:
    """Return (k, tokens): most tokens of one graph of a matmul, from so many input features on.

    With float16 activations, or a format's own codes.
    """
    steps = {
        k: chunk_rows(ops.MatMul(n=1, k=k, weight_format=weight_format)) for k in (1, SIZES.large_k)
    }
    return tuple(steps.items())


def integer_chunk_rows(op: ops.MatMul, activations: integer.Activations, *, groups: bool) -> int:
    """Return most tokens of one graph with integer activations.

    `groups` have scales of their own: QNN computes with those in fp16.
    """
    rows = SIZES.rows if groups else SIZES.scaled_rows
    return rows // 2 if activations == "int16" and op.k >= SIZES.large_int_k else rows


def contexts(capacity: int, m: int) -> list[int]:
    """Return the context lengths that attention graphs of m tokens are made for, ascending."""
    lengths, context = [], SIZES.context
    while context < capacity:
        if context >= m:
            lengths.append(context)
        context *= SIZES.context_step
    return [*lengths, capacity]


def graph(op: Op, m: int, weights: Mapping[str, WeightValue], digest: str) -> Graph:
    """Return the graph of m tokens of an operation other than attention.

    `digest` names the weights that are constants of the graph (`constants_digest`).
    """
    if isinstance(op, ops.MatMul) and is_static(op):
        return integer_graph(op, m, weights, digest, "int8")
    if isinstance(op, ops.Experts):
        one = alone(op)
        return Graph(
            GraphIdentity(repr(one), m, weights=digest), lambda: graphs.expert(one, m, weights)
        )
    if isinstance(op, ops.GatedDelta):
        rule = replace(op, width=0)  # the host gives the graph its gates
        return Graph(
            GraphIdentity(repr(rule), m),
            lambda: delta_matmuls.gated_delta(rule, m, graphs.OPSET),
        )
    plain = replace(op, order="plain") if isinstance(op, ops.MatMul) else op
    return Graph(
        GraphIdentity(repr(plain), m, weights=digest), lambda: graphs.single(plain, m, weights)
    )


def alone(op: ops.Experts) -> ops.Experts:
    """Return one expert, whichever it is, whose weights `each_expert` gives."""
    return replace(op, experts=1, chosen=1, subset=())


def each_expert(
    op: ops.Experts, weights: Mapping[str, WeightValue]
) -> list[Mapping[str, WeightValue]]:
    """Return the weights of each own expert, as views, by the names of all experts' weights."""
    by_name = {name: checks.expert_weights(op, name, weights) for name in op.matmuls}
    return [
        {
            name if key == "weight" else f"{name}_{key}": value
            for name, of_experts in by_name.items()
            for key, value in of_experts[i].items()
        }
        for i in range(len(op.own))
    ]


def integer_graph(
    op: ops.MatMul,
    m: int,
    weights: Mapping[str, WeightValue],
    digest: str,
    activations: integer.Activations,
) -> Graph:
    """Return the graph of m tokens of a matmul with integer activations."""
    plain = replace(op, order="plain")
    return Graph(
        GraphIdentity(f"{plain!r} {activations}", m, weights=digest),
        lambda: integer.matmul(plain, m, checks.packed(weights), activations),
    )


def attention_graph(op: ops.Attention, m: int, context: int) -> Graph:
    """Return the graph of m tokens over `context` positions.

    The capacity and the window are in the caller's buffers and masks, not in the graph.
    """
    same = replace(op, capacity=0, window=0)
    identity = GraphIdentity(repr(same), m, context)
    return Graph(identity, lambda: graphs.single(same, m, {}, context))


def group_graph(
    fused: Group, m: int, weights: Sequence[Mapping[str, WeightValue]], digest: str, context: int
) -> Graph:
    """Return the graph of m tokens of a group; `context` is 0 without attention."""
    return Graph(
        GraphIdentity(repr(fused), m, context, digest),
        lambda: graphs.group(fused, m, weights, context),
    )


def all_group_graphs(
    fused: Group, sizes: Sequence[int], weights: Sequence[Mapping[str, WeightValue]], digest: str
) -> list[Graph]:
    """Return every graph of a group that calls of these token counts run."""
    return [group_graph(fused, m, weights, digest, context) for m, context in shapes(fused, sizes)]


def group_digest(weights: Sequence[Mapping[str, WeightValue]]) -> str:
    """Return the digest of all weights of a group, which are constants of its graph."""
    return weight_digest(*(values[name] for values in weights for name in sorted(values)))


def group_chunk_rows(fused: Group) -> int:
    """Return most tokens of one graph of a group."""
    return min(chunk_rows(step.op) for step in fused.steps)


def has_constants(op: Op) -> bool:
    """Return whether weights are part of the graph.

    Each set of weights has graphs of its own then.
    """
    return isinstance(op, ops.MatMul | ops.Embed | ops.Experts)


def constants_digest(op: Op, weights: Mapping[str, WeightValue]) -> str:
    """Return the digest of the weights that are constants of the graph; "" if none are.

    Of experts they are one's.
    """
    if not has_constants(op):
        return ""
    if isinstance(op, ops.Experts):
        return weight_digest(*(weights[name] for name in ops.weight_names(op)))
    return weight_digest(*(weights.get(name) for name in ("weight", "bias")))


def all_graphs(
    op: Op, sizes: Sequence[int], weights: Mapping[str, WeightValue], digest: str
) -> list[Graph]:
    """Return every graph that calls of these token counts run."""
    sizes_of = shapes(op, sizes)
    op = op.alone if isinstance(op, ops.AttentionHeads) else op
    if isinstance(op, ops.Attention):
        return [attention_graph(op, *shape) for shape in sizes_of]
    return [graph(op, m, weights, digest) for m, _ in sizes_of]


def shapes(operation: Op | Group, sizes: Sequence[int]) -> list[GraphShape]:
    """Return the shapes of every graph that calls of these token counts run."""
    attention = _attention_of(operation)
    return [
        GraphShape(m, context)
        for m in sorted({rows for size in sizes for rows in chunks(operation, size)})
        for context in (contexts(attention.capacity, m) if attention else [0])
    ]


def shapes_at(operation: Op | Group, m: int, position: int) -> list[GraphShape]:
    """Return the shapes of the graphs of one call of m tokens from `position` on."""
    attention, made = _attention_of(operation), []
    for rows in chunks(operation, m):
        position += rows
        lengths = contexts(attention.capacity, rows) if attention else [0]
        made.append(GraphShape(rows, next(c for c in lengths if not c or c >= position)))
    return made


def _attention_of(operation: Op | Group) -> ops.Attention | None:
    if isinstance(operation, Group):
        return operation.attention
    if isinstance(operation, ops.AttentionHeads):
        return operation.alone
    return operation if isinstance(operation, ops.Attention) else None


def chunks(operation: Op | Group, m: int) -> list[int]:
    """Return the token counts of the graphs that a call of m tokens runs."""
    step = group_chunk_rows(operation) if isinstance(operation, Group) else chunk_rows(operation)
    return [min(step, m - start) for start in range(0, m, step)]

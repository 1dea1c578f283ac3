"""KL divergence of a GGUF model some of whose tensors have other types, alone or together.

A variant may also round the inputs of some matmuls to int8, as `gguf-a8` does.

Variants run side by side with the model through its layers, on the same token sequences, in float32
and otherwise in the arithmetic of `hetero.backends.reference`. A variant is the model itself until
the first tensor in which they differ, so that a variant of a late tensor costs little, and each
layer's weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import CONTEXT_PORTS, port_dtype, port_shape
from hetero.backends.reference.compute import program, quantized_activations
from hetero.backends.weights import Float32Array
from hetero.compiling.walk import Progress, Slots, drop_slots, fresh_slots, live_slots, role_of
from hetero.models.gguf.float_rows import GgufRows
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.requantising import rounded
from hetero.models.gguf.tensors import GgufTensor
from hetero.models.graph import model_graph
from hetero.profiler.model_graph import Node, OpName
from hetero.runtime.kernels import node_weights

Float64Array: TypeAlias = npt.NDArray[np.float64]
Variant: TypeAlias = Mapping[str, Kind]  # the tensors that are not as the model has them
# Of the tensors of a matrix: another type, and whether their input is rounded to int8.
Kinds: TypeAlias = tuple[tuple[Kind | None, bool], ...]
# A tensor's rows, in the order of the computation, in another type.
Rows: TypeAlias = Callable[[GgufTensor, Float32Array, Kind], Float32Array]
Multiply: TypeAlias = Callable[[Float32Array], Float32Array]
# What is called with a matmul's tensor, its rows, and the model's inputs of all sequences.
AtTensor: TypeAlias = Callable[[str, Float32Array, Sequence[Float32Array]], None]
UNSCORED: Final = 4  # the first quarter of a sequence has little before it, and is not scored
TOKENS_AT_ONCE: Final = 2048
HEAD_ROWS: Final = 64  # tokens whose logits are in memory
_NEAR: Final = 20.0  # differences of logits for which sums of exp in float32 are precise


def divergences(
    weights: GgufRows,
    sequences: Sequence[Sequence[int]],
    variants: Sequence[Variant],
    *,
    int8: Sequence[Set[str]] = (),
    rows: Rows = lambda _, values, kind: rounded(values, kind),
    at_tensor: AtTensor | None = None,
    progress: Progress | None = None,
) -> Float64Array:
    """Return the divergence of each variant from the model at each scored token, in nats.

    `int8` are the tensors of each variant whose matmuls' inputs are rounded (empty: none).
    """
    inputs = list(int8) or [frozenset[str]()] * len(variants)
    return _SideBySide(weights, sequences, variants, inputs, rows, at_tensor, progress).run()


def matmul_tensors(weights: GgufRows) -> list[str]:
    """Return the tensors of one matmul each, and of the embedding and the output head."""
    counts: dict[str, int] = {}
    for node in _nodes(weights, 1):
        for name in dict.fromkeys(x.name for x in _sources(weights, node)):
            counts[name] = counts.get(name, 0) + (role_of(node) != "lm_head" or not _tied(weights))
    return [name for name, count in counts.items() if count == 1]


def end_tensors(weights: GgufRows) -> set[str]:
    """Return the tensors of embeddings and of the output head."""
    ends = [x for x in _nodes(weights, 1) if isinstance(x.op, ops.Embed) or role_of(x) == "lm_head"]
    return {x.name for node in ends for x in _sources(weights, node)}


def planned_rows(weights: GgufRows) -> dict[str, tuple[OpName, int]]:
    """Return the plan's name of each tensor's matmul, and how many of its rows are the tensor's."""
    return {
        source.name: (node.plan_op, source.shape[0])
        for node in _nodes(weights, 1)
        if node.plan_op is not None
        for source in _sources(weights, node)
    }


def operations(
    weights: GgufRows, variants: Sequence[Variant], int8: Sequence[Set[str]] = ()
) -> int:
    """Return the floating-point operations of `divergences` for each token of a text."""
    total, forked = 0, set[int]()
    inputs = list(int8) or [frozenset[str]()] * len(variants)
    for node in _nodes(weights, 1):
        names = {x.name for x in _sources(weights, node)}
        multiplied = names if isinstance(node.op, ops.MatMul) else frozenset[str]()
        forked |= {
            i
            for i, (x, y) in enumerate(zip(variants, inputs, strict=True))
            if not (names.isdisjoint(x) and multiplied.isdisjoint(y))
        }
        total += _flops(node) * (1 + len(forked))
    return max(total, 1)


def _tied(weights: GgufRows) -> bool:
    return weights.config.tie_word_embeddings


def _nodes(weights: GgufRows, capacity: int) -> tuple[Node, ...]:
    return model_graph(weights.config, WeightFormat.F32, capacity=capacity).nodes


def _sources(weights: GgufRows, node: Node) -> list[GgufTensor]:
    """Return the tensors of a node's matrix."""
    role = role_of(node)
    if role == "lm_head" and _tied(weights):
        role = "embed"
    if not isinstance(node.op, ops.MatMul | ops.Embed):
        return []
    return weights.sources(role if node.layer is None else f"blk.{node.layer}.{role}")


def _flops(node: Node) -> int:
    return node.op.flops(1) if isinstance(node.op, ops.MatMul) else 0


def _plain(sources: Sequence[GgufTensor]) -> Kinds:
    return ((None, False),) * len(sources)


class _SideBySide:
    """The model's states, `base`, and those of the variants that differ from it by now, `forks`.

    A state has the slots of one sequence that are still needed.
    """

    def __init__(
        self,
        weights: GgufRows,
        sequences: Sequence[Sequence[int]],
        variants: Sequence[Variant],
        int8: Sequence[Set[str]],
        rows: Rows,
        at_tensor: AtTensor | None,
        progress: Progress | None,
    ) -> None:
        self.weights, self.variants, self.int8 = weights, variants, int8
        self.rows, self.at_tensor = rows, at_tensor
        self.nodes = _nodes(weights, max(len(x) for x in sequences))
        self.base = [fresh_slots(x) for x in sequences]
        self.forks: dict[int, list[Slots]] = {}
        self.progress, self.done, self.total = progress, 0, operations(weights, variants, int8)

    def run(self) -> Float64Array:
        """Return the divergences [variants, scored tokens]."""
        last = {node.layer: node for node in self.nodes}
        for node, live in zip(self.nodes[:-1], live_slots(self.nodes), strict=False):
            self._step(node)
            for state in (*self.base, *(x for fork in self.forks.values() for x in fork)):
                drop_slots(state, live)
            if node.layer is not None and node is last[node.layer]:
                self.weights.release(node.layer)
            self._advance(_flops(node) * (1 + len(self.forks)))
        return self._head(self.nodes[-1])

    def _advance(self, flops: int) -> None:
        self.done += flops
        if self.progress is not None:
            self.progress(min(100 * self.done // self.total, 100), 100)

    def _kinds(self, node: Node, sources: Sequence[GgufTensor], index: int) -> Kinds:
        kinds, int8 = self.variants[index], self.int8[index]
        multiplied = isinstance(node.op, ops.MatMul)
        return tuple((kinds.get(x.name), multiplied and x.name in int8) for x in sources)

    def _step(self, node: Node) -> None:
        sources = _sources(self.weights, node)
        values = [x.rows(0, x.shape[0]) for x in sources if isinstance(node.op, ops.MatMul)]
        if self.at_tensor is not None and isinstance(node.op, ops.MatMul):
            inputs = [x[node.slots["x"]] for x in self.base]
            for source, given in zip(sources, values, strict=True):
                self.at_tensor(source.name, given, inputs)
        plain = _plain(sources)
        by_kinds: dict[Kinds, list[Slots]] = {plain: list(self.base)}
        for index in range(len(self.variants)):
            kinds = self._kinds(node, sources, index)
            if kinds != plain and index not in self.forks:
                self.forks[index] = [dict(x) for x in self.base]
            by_kinds.setdefault(kinds, []).extend(self.forks.get(index, ()))
        for kinds, states in by_kinds.items():
            match node.op:
                case ops.MatMul():
                    self._multiply_all(node, self._multiply(node, sources, values, kinds), states)
                case ops.Embed():
                    self._embed(node, sources[0], kinds[0][0], states)
                case _:
                    self._run(node, states)

    def _run(self, node: Node, states: Sequence[Slots]) -> None:
        """Run a node without a matrix."""
        block = None if node.layer is None else self.weights.block(node.layer)
        run, _ = program(node.op, node_weights(node, block, self.weights))
        for state in states:
            arrays: dict[str, npt.NDArray[Any]] = {}
            for port, slot in node.slots.items():
                if slot in node.writes or slot not in state:
                    shape = port_shape(node.op, port, len(state["tokens"]))
                    state[slot] = np.zeros(shape, port_dtype(node.op, port))
                elif port in CONTEXT_PORTS:
                    state[slot] = state[slot].copy()  # it may be several variants'
                arrays[port] = state[slot]
            run(arrays)

    def _multiply_all(self, node: Node, multiply: Multiply, states: Sequence[Slots]) -> None:
        """Multiply the inputs of many states at once, some thousand tokens at a time."""
        each = max(1, TOKENS_AT_ONCE // max(len(x["tokens"]) for x in states))
        for start in range(0, len(states), each):
            some = states[start : start + each]
            y = multiply(np.concatenate([x[node.slots["x"]] for x in some]))
            stops = np.cumsum([len(x["tokens"]) for x in some])[:-1]
            for state, part in zip(some, np.split(y, stops), strict=True):
                state[node.slots["y"]] = part

    def _parts(
        self, sources: Sequence[GgufTensor], values: Sequence[Float32Array], kinds: Kinds
    ) -> list[tuple[Float32Array, bool]]:
        """Return runs of the matrix's rows, and whether their input is rounded."""
        parts: list[tuple[list[Float32Array], bool]] = []
        for source, given, (kind, int8) in zip(sources, values, kinds, strict=True):
            own = given if kind is None else self.rows(source, given, kind)
            if parts and parts[-1][1] is int8:
                parts[-1][0].append(own)
            else:
                parts.append(([own], int8))
        return [(x[0] if len(x) == 1 else np.concatenate(x), int8) for x, int8 in parts]

    def _multiply(
        self,
        node: Node,
        sources: Sequence[GgufTensor],
        values: Sequence[Float32Array],
        kinds: Kinds,
    ) -> Multiply:
        """Return x · Wᵀ + bias with the soft cap of a matmul."""
        parts = self._parts(sources, values, kinds)
        op, role = node.op, role_of(node)
        assert isinstance(op, ops.MatMul)
        bias: Float32Array | None = None
        if op.bias and node.layer is not None:
            bias = self.weights.block(node.layer).vectors[f"{role}_bias"]
        elif op.bias:
            bias = self.weights.model_vector(f"{role}_bias")

        def multiply(x: Float32Array) -> Float32Array:
            seen = {False: x}
            if any(int8 for _, int8 in parts):
                seen[True] = quantized_activations(x).astype(np.float32)
            products = [seen[int8] @ part.T for part, int8 in parts]
            y: Float32Array = products[0] if len(products) == 1 else np.concatenate(products, 1)
            if bias is not None:
                y += bias
            return op.softcap * np.tanh(y / op.softcap) if op.softcap > 0 else y

        return multiply

    def _embed(
        self, node: Node, source: GgufTensor, kind: Kind | None, states: Sequence[Slots]
    ) -> None:
        assert isinstance(node.op, ops.Embed)
        table = self.weights.table(role_of(node))
        for state in states:
            values, ids = table(state["tokens"]), state["tokens"].astype(np.int64)
            if kind is not None:
                wanted = GgufTensor(self.weights.file, source.name, order=ids)
                values = self.rows(wanted, values, kind)
            state[node.slots["y"]] = np.float32(node.op.scale) * values

    def _head(self, node: Node) -> Float64Array:
        sources = _sources(self.weights, node)
        values = [x.rows(0, x.shape[0]) for x in sources]
        model = self._multiply(node, sources, values, _plain(sources))
        by_kinds: dict[Kinds, list[int]] = {}
        for index in range(len(self.variants)):
            by_kinds.setdefault(self._kinds(node, sources, index), []).append(index)
        hidden = self._scored(self.base, node)
        lost = np.zeros((len(self.variants), len(hidden)))
        for kinds, indices in by_kinds.items():
            own = self._multiply(node, sources, values, kinds)
            given = {i: self._scored(self.forks.get(i, self.base), node) for i in indices}
            for start in range(0, len(hidden), HEAD_ROWS):
                part = slice(start, start + HEAD_ROWS)
                exact = model(hidden[part])
                for i in indices:
                    lost[i, part] = kl(exact, own(given[i][part]))
            self._advance(_flops(node) * len(indices))
        self._advance(_flops(node))
        return lost

    def _scored(self, states: Sequence[Slots], node: Node) -> Float32Array:
        slots = [x[node.slots["x"]] for x in states]
        return np.concatenate([x[len(x) // UNSCORED :] for x in slots])


def kl(exact: Float32Array, other: Float32Array) -> Float64Array:
    """Return Σ p·ln(p/q) of logits [m, vocabulary], precise also where p and q hardly differ.

    With the differences d of the logits it is ln Σ p·exp(d) - Σ p·d, whatever is added to d.
    """
    p = np.exp(exact - exact.max(axis=1, keepdims=True))
    total = p.sum(axis=1, dtype=np.float64)
    d = other - exact
    d -= ((p * d).sum(axis=1, dtype=np.float64) / total).astype(np.float32)[:, None]
    mean = (p * d).sum(axis=1, dtype=np.float64) / total  # what rounding has left
    near = d.max(axis=1) < _NEAR
    values = np.empty(len(d))
    sums = (p[near] * np.expm1(d[near])).sum(axis=1, dtype=np.float64)
    values[near] = np.log1p(sums / total[near]) - mean[near]
    far = exact[~near] + d[~near]  # where p is 0, exp(d) may not be
    values[~near] = _log_sum(far) - _log_sum(exact[~near]) - mean[~near]
    return np.maximum(values, 0.0)


def _log_sum(x: Float32Array) -> Float64Array:
    top = x.max(axis=1, keepdims=True, initial=-np.inf).astype(np.float64)
    values: Float64Array = np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]
    return values

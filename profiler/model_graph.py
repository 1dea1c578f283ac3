"""`ModelGraph`: what a model computes, operation by operation (docs: model-graph.md); no weights.

Written from model files by `hetero.models.graph`. The profiler times its operations, the solver
prices its layers, the runtime and the compiler lower its nodes: no other code defines a block.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic.dataclasses import dataclass as checked_dataclass

from hetero.backends.extensible import document
from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.ops import (
    OUTPUT_PORTS,
    Attention,
    Embed,
    Experts,
    MatMul,
    Op,
    Rope,
    has_state,
)
from hetero.backends.protocol import CONTEXT_PORTS, port_shape
from hetero.backends.weights import packed_bytes

SCHEMA_VERSION: Final = 1
HIDDEN: Final = "hidden"  # slot of another model's hidden state, behind its final norm
MAX_NODES: Final = 1 << 17
MAX_LAYERS: Final = 4096
LARGEST: Final = 2**31 - 1  # sizes are int32 on devices
MAY_BE_ZERO: Final = frozenset(
    {"hot", "window", "rotary_dim", "offset", "first", "original_max_position", "width", "subset"}
)

# Matmuls that plans may cut, and the members of fused ones.
MATMUL_ROLES: Final = (
    "qkv",
    "q_only",
    "o",
    "conv_in",
    "conv_out",
    "delta_in",
    "delta_out",
    "gate_up",
    "down",
    "input_in",
    "input_gate",
    "input_out",
    "lm_head",
)
ROLES: Final = (*MATMUL_ROLES, "q", "k", "v", "gate", "up")
_OP_NAME: Final = re.compile(rf"({'|'.join(ROLES)})(\.([2-9]|[1-9][0-9]{{1,3}}))?", re.ASCII)
Name = Annotated[str, Field(min_length=1, max_length=64)]


def _check_op_name(name: str) -> str:
    if _OP_NAME.fullmatch(name) is None:
        raise ValueError(
            f"a matmul is one of {', '.join(ROLES)}, with a number from 2 on for another kind of "
            f"layers (down.2), got {name[:64]!r}"
        )
    return name


# The plan's name of a matmul: its role, numbered where layers of several kinds have one (`down.2`).
OpName: TypeAlias = Annotated[
    str,
    AfterValidator(_check_op_name),
    WithJsonSchema({"type": "string", "pattern": f"^{_OP_NAME.pattern}$"}),
]
MatMulName: TypeAlias = str


def role_of_op(name: OpName) -> str:
    """Return what a matmul does in its layer: its plan name without the number of its kind."""
    return name.partition(".")[0]


def _read_op(value: Any) -> Op:
    """Return an operation from its record or its document. Raises `ValueError`."""
    if isinstance(value, _OPS):
        given: Op = value
        return given
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in _KINDS:
        raise ValueError(f"an operation is of a kind of {', '.join(_KINDS)}, got {kind!r}")
    fields = {name: field for name, field in value.items() if name != "kind"}
    _refuse_unknown(_KINDS[kind], fields)
    op: Op = TypeAdapter(_KINDS[kind]).validate_python(fields)
    _check_numbers(op)
    return op


def _write_op(op: Op) -> dict[str, Any]:
    return {"kind": type(op).__name__, **document(op)}


def _refuse_unknown(kind: Any, fields: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)}")
    scaling = fields.get("scaling")
    if isinstance(scaling, dict):
        _refuse_unknown(type(_KINDS["Rope"].__dataclass_fields__["scaling"].default), scaling)


def _check_numbers(record: Any) -> None:
    record_is_rope = isinstance(record, Rope)
    for field in dataclasses.fields(record):
        value, zero = getattr(record, field.name), field.name in MAY_BE_ZERO
        if dataclasses.is_dataclass(value):
            _check_numbers(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} must be finite, got {value}")
        elif isinstance(value, tuple) and not all(0 < x < math.inf for x in value if x or not zero):
            raise ValueError(f"{field.name} must have positive numbers, got {value}")
        elif isinstance(value, int) and not isinstance(value, bool):
            least = 0 if zero or (record_is_rope and field.name == "kv_heads") else 1
            if not least <= value <= LARGEST:
                raise ValueError(f"{field.name} is from {least} to {LARGEST}, got {value}")


_OPS: Final = get_args(Op)
_KINDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in _OPS}
AnyOp = Annotated[Op, PlainValidator(_read_op), PlainSerializer(_write_op)]


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(defer_build=True, extra="forbid"))
class Node:
    """One operation of the model.

    `name` is unique and for people (`layer3.qkv`); its last part is also the key of the weights
    by. `slots` maps the operation's ports to slots of the activation pool. `plan_op` is the plan's
    name of a matmul that may be cut, None for everything else. `layer` is None before and after the
    layers. `members` are the plan's names for runs of the weight's rows (q, k and v of qkv), with
    the first row of each.
    """

    name: Name
    op: AnyOp
    slots: dict[Name, Name]
    plan_op: OpName | None = None
    layer: Annotated[int, Field(ge=0, lt=MAX_LAYERS)] | None = None
    members: tuple[tuple[OpName, Annotated[int, Field(ge=0, le=LARGEST)]], ...] = ()

    def __post_init__(self) -> None:
        if set(self.slots) != set(self.op.ports):
            kind = type(self.op).__name__
            raise ValueError(f"{self.name}: {kind} has the ports {self.op.ports}")
        starts = [start for _, start in self.members]
        if self.plan_op is None and not self.members:
            return
        if not isinstance(self.op, MatMul) or self.plan_op is None:
            raise ValueError(f"{self.name}: only a matmul has a place in plans")
        if starts and (starts[0] or starts != sorted(set(starts)) or starts[-1] >= self.op.n):
            raise ValueError(f"{self.name}: members begin at rising rows from 0 on, got {starts}")

    @property
    def writes(self) -> set[str]:
        """Return the slots that it writes, without its caches."""
        return {slot for port, slot in self.slots.items() if port in OUTPUT_PORTS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatMulSpec:
    """A matmul `y[m, n] = x[m, k] · W[n, k]ᵀ` that occurs `count` times in the model."""

    name: MatMulName
    n: int
    k: int
    count: int
    bias: bool = False


class Share(NamedTuple):
    """An operation, and how often a layer (before the layers: a step) launches it on average.

    `sampled`: prompts run it for sampled rows alone (`ModelGraph.sampled_nodes`).
    """

    op: Op
    times: float
    sampled: bool = False


class Stage(NamedTuple):
    """A matmul of a plan, the members that it may be cut into, and the operators after it.

    They run before the next matmul.
    """

    name: OpName
    members: tuple[OpName, ...]
    after: tuple[Share, ...]

    @property
    def attends(self) -> bool:
        """Return whether attention follows it."""
        return any(isinstance(share.op, Attention) for share in self.after)


class LayerKind(NamedTuple):
    """The matmuls of a layer of one kind, and the number of such layers.

    `sampled` as in `Share`.
    """

    stages: tuple[Stage, ...]
    layers: int
    sampled: bool = False


class ModelGraph(BaseModel):
    """Operations of a decoder-only model in the order in which they run, and no weights.

    `also` are formats in which its matrices are stored besides; `base`, in a graph of one of these,
    is the model's own (`in_format`). `max_position` is in tokens. Layers are of one kind or of
    several: those of a kind have the same matmuls in the same order, those of two kinds have no
    name of a matmul in common. What runs between the matmuls may differ within a kind (sliding
    windows). Nodes read what a node before them wrote.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    architecture: str
    max_position: int = Field(ge=1, le=LARGEST)
    weight_format: WeightFormat
    nodes: tuple[Node, ...] = Field(min_length=1, max_length=MAX_NODES)
    also: tuple[WeightFormat, ...] = ()
    base: WeightFormat | None = None

    @model_validator(mode="after")
    def _sound(self) -> Self:
        twice = [name for name, count in Counter(x.name for x in self.nodes).items() if count > 1]
        if twice:
            raise ValueError(f"every node has a name of its own, got {twice[0]} twice")
        _check_layers([node.layer for node in self.nodes])
        _check_matmuls(self.nodes)
        _check_slots(self.nodes)
        return self

    def model_copy(
        self,
        *,
        update: Mapping[str, Any] | None = None,
        deep: bool = False,  # noqa: ARG002  (nothing in it can be changed)
    ) -> Self:
        """Return a copy that is validated, and derives everything again."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**fields | dict(update or {}))

    def with_capacity(self, capacity: int) -> Self:
        """Return the same with KV caches of `capacity` tokens."""

        def fit(op: Op) -> Op:
            match op:
                case Attention():
                    return dataclasses.replace(op, capacity=capacity)
                case Rope():
                    return dataclasses.replace(op, max_position=capacity)
            return op

        return self.model_copy(update={"nodes": tuple(_with_op(x, fit(x.op)) for x in self.nodes)})

    def with_caches(self, kv: CacheFormat) -> Self:
        """Return the same with KV caches of a format."""
        if self._attention.kv is kv:
            return self

        def fit(op: Op) -> Op:
            return dataclasses.replace(op, kv=kv) if isinstance(op, Attention) else op

        return self.model_copy(update={"nodes": tuple(_with_op(x, fit(x.op)) for x in self.nodes)})

    def with_weight_format(self, weight_format: WeightFormat) -> Self:
        """Return the same with weights of another format."""

        def fit(op: Op) -> Op:
            if isinstance(op, MatMul | Embed | Experts):
                return dataclasses.replace(op, weight_format=weight_format)
            return op

        nodes = tuple(_with_op(x, fit(x.op)) for x in self.nodes)
        return self.model_copy(update={"nodes": nodes, "weight_format": weight_format})

    def in_format(self, weight_format: WeightFormat) -> Self:
        """Return the same on matrices that are stored in another of its formats.

        What is planned for it says so of every tile.
        """
        if weight_format is self.weight_format:
            return self
        others = tuple(x for x in (self.weight_format, *self.also) if x is not weight_format)
        graph = self.with_weight_format(weight_format)
        return graph.model_copy(update={"also": others, "base": self.base or self.weight_format})

    @cached_property
    def layers(self) -> int:
        """Return the number of layers."""
        return 1 + max((x.layer for x in self.nodes if x.layer is not None), default=-1)

    @cached_property
    def matmuls(self) -> tuple[MatMulSpec, ...]:
        """Return what a plan may cut, in the order in which it runs."""
        return tuple(
            MatMulSpec(name=name, n=op.n, k=op.k, count=count, bias=op.bias)
            for name, (op, count) in self._plan_ops.items()
        )

    def matmul(self, name: MatMulName) -> MatMulSpec:
        """Return the matmul of that name. Raises `KeyError` if the model has none."""
        return next((x for x in self.matmuls if x.name == name), None) or _raise(name)

    @cached_property
    def shapes(self) -> dict[OpName, tuple[int, int]]:
        """Return (n, k) of every matmul and of the members of fused ones."""
        shapes: dict[OpName, tuple[int, int]] = {}
        for node in self.nodes:
            if node.plan_op is None or node.plan_op in shapes:
                continue
            assert isinstance(node.op, MatMul)
            shapes[node.plan_op] = (node.op.n, node.op.k)
            stops = [*(start for _, start in node.members[1:]), node.op.n]
            for (name, start), stop in zip(node.members, stops, strict=False):
                shapes[name] = (stop - start, node.op.k)
        return shapes

    @cached_property
    def head(self) -> tuple[Share, ...]:
        """Return what runs once, before the first matmul."""
        return _shares(self._ops_after[None], 1)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of layers in the order of their first layers."""
        return tuple(
            LayerKind(
                tuple(self._stage(name, count) for name in names), count, names[0] in self.sampled
            )
            for names, count in self._layers_by_matmuls.items()
        )

    @cached_property
    def block(self) -> tuple[Stage, ...]:
        """Return the matmuls of a layer of each kind, each with the operators after it."""
        return tuple(stage for block in self.kinds for stage in block.stages)

    @cached_property
    def tail(self) -> tuple[Stage, ...]:
        """Return the matmuls after the layers."""
        in_layers = {stage.name for stage in self.block}
        return tuple(self._stage(x, 1) for x in self._plan_ops if x not in in_layers)

    @cached_property
    def counts(self) -> dict[OpName, int]:
        """Return how often each matmul, or member of a fused one, occurs."""
        return {
            name: self._plan_ops[stage.name][1]
            for stage in (*self.block, *self.tail)
            for name in (stage.name, *stage.members)
        }

    @cached_property
    def sampled_nodes(self) -> frozenset[str]:
        """Return the names of the nodes that a prompt runs for rows that are sampled from alone.

        These are all nodes after the last layer that writes keys, values or a state, and in any
        model the matmuls after the layers.
        """
        written = [x.layer for x in self.nodes if _is_remembered(x.op) and x.layer is not None]
        last = max(written, default=self.layers)
        first = next((i for i, x in enumerate(self.nodes) if (x.layer or 0) > last), None)
        if first is not None:
            before, after = self.nodes[:first], self.nodes[first:]
            if {x.plan_op for x in before} & {x.plan_op for x in after} <= {None}:
                return frozenset(x.name for x in after)  # a plan says one thing of a name
        return frozenset(x.name for x in self.nodes if x.layer is None and x.plan_op is not None)

    @cached_property
    def sampled(self) -> frozenset[OpName]:
        """Return the plan's names of the matmuls among `sampled_nodes`, and of their members."""
        nodes = [x for x in self.nodes if x.name in self.sampled_nodes]
        members = (name for node in nodes for name, _ in node.members)
        return frozenset([*(x.plan_op for x in nodes if x.plan_op is not None), *members])

    def sampled_in(self, phase: str) -> frozenset[OpName]:
        """Return the matmuls of a phase that see sampled rows alone, however many are fed.

        All rows of a decode step are sampled: there it is the matmuls after the layers.
        """
        return self.sampled if phase == "prefill" else frozenset(x.name for x in self.tail)

    def tokens_of(self, name: OpName, m: int) -> int:
        """Return the rows of a matmul in a call of m tokens with one sampled row."""
        return 1 if name in self.sampled else m

    @cached_property
    def prompt_layers(self) -> int:
        """Return the number of layers that all tokens of a prompt pass through."""
        return self.layers - sum(kind.layers for kind in self.kinds if kind.sampled)

    @cached_property
    def others(self) -> tuple[Op, ...]:
        """Return the distinct operations that no plan cuts, in order of their first run."""
        return tuple(dict.fromkeys(node.op for node in self.nodes if node.plan_op is None))

    @cached_property
    def stateful(self) -> bool:
        """Return whether some layers have a state, which cannot be cut at a token."""
        return any(has_state(op) for op in self.others)

    @property
    def matmul_weight_bytes(self) -> int:
        """Return the bytes of packed weights that one decode step reads.

        All matmuls, lm_head included, and the experts that a token chooses.
        """
        return sum(
            x.count * packed_bytes(self.weight_format.storage, x.n, x.k) for x in self.matmuls
        ) + sum(op.chosen * self._expert_bytes(op) for op in self._experts)

    @cached_property
    def expert_weight_bytes(self) -> int:
        """Return the bytes of all routed experts' packed weights."""
        return sum(len(op.own) * self._expert_bytes(op) for op in self._experts)

    @property
    def _experts(self) -> list[Experts]:
        return [node.op for node in self.nodes if isinstance(node.op, Experts)]

    def _expert_bytes(self, op: Experts) -> int:
        storage = self.weight_format.storage
        return sum(packed_bytes(storage, x.n, x.k) for x in op.matmuls.values())

    def _stage(self, name: OpName, count: int) -> Stage:
        members = next(x.members for x in self.nodes if x.plan_op == name)
        return Stage(name, tuple(x for x, _ in members), _shares(self._ops_after[name], count))

    @cached_property
    def _plan_ops(self) -> dict[OpName, tuple[MatMul, int]]:
        """Return every matmul of plans by name, and how often it occurs."""
        counted: dict[OpName, tuple[MatMul, int]] = {}
        for node in self.nodes:
            if node.plan_op is not None:
                assert isinstance(node.op, MatMul)
                count = counted[node.plan_op][1] if node.plan_op in counted else 0
                counted[node.plan_op] = (node.op, count + 1)
        return counted

    @cached_property
    def _layers_by_matmuls(self) -> dict[tuple[OpName, ...], int]:
        """Return the matmuls of each kind of layers, and the number of these layers."""
        return Counter(_matmuls_by_layer(self.nodes).values())

    @cached_property
    def _ops_after(self) -> dict[OpName | None, list[tuple[Op, bool]]]:
        """Return operations by the matmul that they follow, and whether rows of them are sampled.

        None: before all matmuls.
        """
        followers: dict[OpName | None, list[tuple[Op, bool]]] = {None: []}
        last: OpName | None = None
        for node in self.nodes:
            if node.plan_op is None:
                followers[last].append((node.op, node.name in self.sampled_nodes))
            else:
                last = node.plan_op
                followers.setdefault(last, [])
        return followers

    # What is read off the sizes of single operations, for files of other programs.

    @property
    def hidden_size(self) -> int:
        """Return the features of the residual stream."""
        return self._embed.d

    @property
    def vocab_size(self) -> int:
        """Return token ids."""
        return self._embed.vocab

    @property
    def intermediate_size(self) -> int:
        """Return the features of the feed-forward, or of an expert's."""
        return self._experts[0].f if self._experts else self.shapes["down"][1]

    @property
    def heads(self) -> int:
        """Return query heads."""
        return self._attention.heads

    @property
    def kv_heads(self) -> int:
        """Return key and value heads."""
        return self._attention.kv_heads

    @property
    def head_dim(self) -> int:
        """Return the features of a head."""
        return self._attention.head_dim

    @property
    def _embed(self) -> Embed:
        return next(op for op in self.others if isinstance(op, Embed))

    @property
    def _attention(self) -> Attention:
        return next(op for op in self.others if isinstance(op, Attention))


def slot_shapes(nodes: Iterable[Node], m: int = 1) -> dict[str, tuple[int, ...]]:
    """Return the shape of every slot's tensor for m tokens.

    Raises `ValueError` where nodes disagree.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        for port, slot in node.slots.items():
            shape = port_shape(node.op, port, m)
            if shapes.setdefault(slot, shape) != shape:
                raise ValueError(
                    f"{node.name}: {port} has the shape {shape} for {m} tokens, slot {slot} has "
                    f"{shapes[slot]}"
                )
    return shapes


def _check_layers(layers: Sequence[int | None]) -> None:
    """Check that layers' numbers rise one by one, with nodes of no layer before and after."""
    numbered = [layer for layer in layers if layer is not None]
    first = next((i for i, layer in enumerate(layers) if layer is not None), 0)
    steps = {b - a for a, b in pairwise(numbered)}
    whole = None not in layers[first : first + len(numbered)]
    if not numbered or numbered[0] or not whole or not steps <= {0, 1}:
        raise ValueError("the nodes of layers 0, 1, 2, … follow each other without others between")


def _check_matmuls(nodes: Sequence[Node]) -> None:
    """Check that plans say one thing of a matmul for all layers."""
    known: dict[str, tuple[Op, Any]] = {}
    layered = False
    for node in nodes:
        layered = layered or node.layer is not None
        if node.plan_op is None:
            continue
        if known.setdefault(node.plan_op, (node.op, node.members)) != (node.op, node.members):
            raise ValueError(f"{node.name}: {node.plan_op} differs from layer to layer")
        if not layered:
            raise ValueError(f"{node.name}: a matmul of plans is part of a layer or after them")
    tail = tuple(x.plan_op for x in nodes if x.layer is None and x.plan_op is not None)
    kinds = dict.fromkeys(_matmuls_by_layer(nodes).values())
    names = [name for names in (*kinds, tail) for name in names]
    if () in kinds or len(set(names)) < len(names):
        raise ValueError(
            "every layer has matmuls, each once, and layers with one in common have all of them in "
            "the same order"
        )


def _matmuls_by_layer(nodes: Iterable[Node]) -> dict[int, tuple[OpName, ...]]:
    """Return the plan's names of every layer's matmuls, in order."""
    names: dict[int, list[OpName]] = {}
    for node in nodes:
        if node.layer is not None:
            own = names.setdefault(node.layer, [])
            own += [node.plan_op] if node.plan_op is not None else []
    return {layer: tuple(own) for layer, own in names.items()}


def _check_slots(nodes: Sequence[Node]) -> None:
    """Check that what is read was written before and has one shape.

    Tokens, position, caches, states and the hidden state of another graph are inputs.
    """
    slot_shapes(nodes)
    written: set[str] = set()
    for node in nodes:
        for port, slot in node.slots.items():
            given = port in ("tokens", "position", *CONTEXT_PORTS) or slot == HIDDEN
            if port not in OUTPUT_PORTS and not given and slot not in written:
                raise ValueError(f"{node.name}: nothing wrote slot {slot} before it is read")
        written |= node.writes


def _is_remembered(op: Op) -> bool:
    """Return whether an operation writes what later tokens read."""
    return has_state(op) or (isinstance(op, Attention) and not op.reads)


def _shares(operations: Iterable[tuple[Op, bool]], count: int) -> tuple[Share, ...]:
    """Return distinct operations by their kinds' order; of one kind (windows) by their sizes."""
    ops = Counter(operations)
    kinds = list(dict.fromkeys(type(op) for op, _ in ops))
    ordered = sorted(ops, key=lambda x: (kinds.index(type(x[0])), repr(x[0]), x[1]))
    return tuple(Share(op, ops[op, sampled] / count, sampled) for op, sampled in ordered)


def _with_op(node: Node, op: Op) -> Node:
    return node if op is node.op else dataclasses.replace(node, op=op)


def _raise(name: str) -> Any:
    raise KeyError(name)

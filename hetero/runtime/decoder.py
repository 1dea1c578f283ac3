"""The decoder as a flat list of nodes: operations, the slots they work on, the weights they take.

Notation as in `hetero.backends.ops`. One list serves every phase, token count and plan; one decoder
serves every architecture, which only says in its `ModelConfig` what differs.

    serial     h = norm(x);  x += attention(h);  h = norm(x);  x += feed_forward(h)
    parallel   h = norm(x);  x += attention(h) + feed_forward(h)
    out_norms  what is added to x is normed once more before

The residual stream alternates between the slots `x` and `x2`; a norm adds what is in `t` (or where
`_Stream.added` says) to it, writes the sum to the other slot, and the normed sum to `h`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.backends.ops import Add, Op, WeightFormat
from hetero.models.config import ModelConfig
from hetero.solver.model_spec import MatMulName, ModelSpec
from hetero.solver.plan import OpName


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation of the model.

    `name` is unique and for people (`layer3.qkv`); `plan_op` is the plan's name of a matmul, None
    for everything else; `slots` maps the operation's ports to slots of the activation pool.
    `layer` is None before and after the blocks. `members` are the plan's names for runs of the
    weight's rows (q, k and v of qkv), with the first row of each.
    """

    name: str
    op: Op
    slots: dict[str, str]
    plan_op: OpName | None = None
    layer: int | None = None
    members: tuple[tuple[OpName, int], ...] = ()


def decoder_nodes(config: ModelConfig, weight_format: WeightFormat, capacity: int) -> list[Node]:
    """Nodes in execution order, from token ids in slot `tokens` to `logits`."""
    return _Decoder(config, weight_format, capacity).nodes()


def slot_widths(config: ModelConfig) -> dict[str, int]:
    """Features per token of every float32 slot but `logits` and the caches."""
    d, qkv = config.hidden_size, config.qkv_width
    widths = {
        "x": d,
        "x2": d,
        "h": d,
        "t": d,
        "qkv": qkv,
        "attended": config.heads * config.head_dim,
        "gate_up": (2 if config.gated else 1) * config.intermediate_size,
        "activated": config.intermediate_size,
    }
    if not config.positions:
        widths["rotated"] = qkv
    if config.out_norms or config.parallel:
        widths["added"] = d
    if config.parallel:
        widths["t2"] = d
    return widths


class _Decoder:
    """The nodes in the making."""

    def __init__(self, config: ModelConfig, weight_format: WeightFormat, capacity: int) -> None:
        self.config = config
        self.spec: ModelSpec = config.spec(weight_format)
        self.capacity = capacity
        self.stream = "x"
        self.layer: int | None = None
        self.found: list[Node] = []

    def nodes(self) -> list[Node]:
        """See `decoder_nodes`."""
        self._embed()
        for layer in range(self.config.num_layers):
            self.layer = layer
            if layer == 0:
                self._add("input_norm", self.spec.norm_op(), x=self.stream, y="h")
            self._block()
            last = layer == self.config.num_layers - 1
            self.layer = None if last else layer + 1
            self._norm("final_norm" if last else "input_norm")
        self._matmul("lm_head", "h", "logits")
        return self.found

    def _embed(self) -> None:
        if not self.config.positions:
            self._add("embed", self.spec.embed_op(), tokens="tokens", y="x")
            return
        positions = self.spec.positions_op(self.config.position_offset)
        self._add("embed", self.spec.embed_op(), tokens="tokens", y="x2")
        self._add("positions", positions, x="x2", position="position", y="x")

    def _block(self) -> None:
        """Everything between a block's input norm and the norm that follows it."""
        if self.config.parallel:
            self._attention("t")
            self._feed_forward("t2")
            self._add("join", Add(d=self.config.hidden_size), x="t", residual="t2", y="added")
            return
        self._attention("t")
        self._out_norm("o_norm")
        self._norm("post_norm")
        self._feed_forward("t")
        self._out_norm("down_norm")

    def _attention(self, target: str) -> None:
        self._matmul("qkv", "h", "qkv")
        turned = "qkv"
        if not self.config.positions:
            turned = "rotated"
            rope = self.spec.rope_op(self.capacity)
            self._add("rope", rope, qkv="qkv", position="position", out=turned)
        assert self.layer is not None
        self._add(
            "attention",
            self.spec.attention_op(self.capacity, self.config.windows[self.layer]),
            qkv=turned,
            position="position",
            out="attended",
            k_cache=f"k_cache.{self.layer}",
            v_cache=f"v_cache.{self.layer}",
        )
        self._matmul("o", "attended", target)

    def _feed_forward(self, target: str) -> None:
        self._matmul("gate_up", "h", "gate_up")
        self._add("activation", self.spec.activation_op(), x="gate_up", y="activated")
        self._matmul("down", "activated", target)

    def _out_norm(self, name: str) -> None:
        if self.config.out_norms:
            self._add(name, self.spec.norm_op(), x="t", y="added")

    def _norm(self, name: str) -> None:
        """Add to the residual stream, and norm the sum into `h`."""
        added = "added" if self.config.out_norms or self.config.parallel else "t"
        before, self.stream = self.stream, "x2" if self.stream == "x" else "x"
        norm = self.spec.norm_op(add=True)
        self._add(name, norm, x=before, residual=added, sum=self.stream, y="h")

    def _matmul(self, name: MatMulName, source: str, target: str) -> None:
        self._add(name, self.spec.matmul_op(name), plan_op=name, x=source, y=target)

    def _add(self, name: str, op: Op, *, plan_op: OpName | None = None, **slots: str) -> None:
        full = name if self.layer is None else f"layer{self.layer}.{name}"
        members = _members(name, self.config)
        self.found.append(
            Node(name=full, op=op, slots=slots, plan_op=plan_op, layer=self.layer, members=members)
        )


def _members(name: str, config: ModelConfig) -> tuple[tuple[OpName, int], ...]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    match name:
        case "qkv":
            return (("q", 0), ("k", queries), ("v", queries + keys))
        case "gate_up" if config.gated:
            return (("gate", 0), ("up", config.intermediate_size))
        case _:
            return ()

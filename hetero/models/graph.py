"""The decoder as a graph of nodes: operations, the slots they work on, the weights they take.

Notation as in `hetero.backends.ops`. One list serves every phase, token count and plan; one decoder
serves every architecture, whose `ModelConfig` says only what differs.

    serial     h = norm(x);  x += mix(h);  h = norm(x);  x += feed_forward(h)
    parallel   h = norm(x);  x += mix(h) + feed_forward(h)
    out_norms  what is added to x is normed once more before; without in_norms only then:
               x += norm(mix(x));  x += norm(feed_forward(x))

`mix` is attention, or in some layers a short convolution or a gated delta net.

A factor r on what is added to x (`residual_scale`) costs no operation: the stream holds x / r,
whose embedding is divided by r, and norms of it have eps / r², which gives the norms of x. A factor
on the logits (`logit_scale`) is in the weights of the final norm (`ModelWeights`).

A layer may attend to the keys and values of a layer before it (`kv_source`): it has queries only.
With `layer_inputs` it also has inputs of its own, which are gated by the stream after its
feed-forward; p are columns of a second embedding of the token, e is its first one:

    x += norm(out · (act(gate · x) ⊙ (norm(in · e) + p)))

With `layer_scale` x is then multiplied by a number.

The head of a model that predicts one token more (`mtp`) begins with the embedding e of the next
token and the hidden state in slot `hidden`, which the model's final norm has written; what its own
final norm writes to `h` is the `hidden` of the token after that:

    x = W · [norm(e), norm(hidden)]

The residual stream alternates between the slots `x` and `x2`; a norm adds what is in `t` (or in
`added`) to it, writes the sum to the other slot, and the normed sum to `h`.

A matmul of integers may have a shadow (`Outliers`). Where its output is added to the residual
stream, the shadow is added to the stream as well, into `x3`, which the norm reads instead: it
precedes its matmul, so that the GPU computes it while the NPU computes the matmul, without a wait
(mllm-NPU, section 3.3). The shadows of other matmuls are added to their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.ops import (
    Act,
    Add,
    AddPositions,
    Attention,
    Embed,
    Experts,
    GatedAct,
    GatedAdd,
    GatedDelta,
    GatedInput,
    LayerNorm,
    MatMul,
    Op,
    Outliers,
    RMSNorm,
    Rope,
    Router,
    ShortConv,
    SigmoidGate,
)
from hetero.backends.protocol import CONTEXT_PORTS, port_shape
from hetero.models.config import ModelConfig
from hetero.models.expert_config import ExpertConfig
from hetero.models.layout import MTP_HALVES
from hetero.models.sliding import Sliding
from hetero.profiler.model_graph import HIDDEN, MatMulName, ModelGraph, Node, OpName, slot_shapes

SHADOW: Final = "_shadow"  # of a node, behind the name of its matmul
UNROTATED: Final = RopeScaling(kind="zero")
Shadows: TypeAlias = Mapping[str, Outliers]  # by block and matmul, `blocks.3.down`
OF_THE_POOL = frozenset({"tokens", "position", "cache_row", "logits"})  # not [tokens, features]


def model_graph(
    config: ModelConfig,
    weight_format: WeightFormat | str,
    name: str = "",
    *,
    capacity: int | None = None,
    shadows: Shadows | None = None,
    kv: CacheFormat = CacheFormat.F32,
    sliding: Sliding | None = None,
) -> ModelGraph:
    """Return the graph of a model, from token ids in slot `tokens` to `logits`.

    KV caches have `capacity` tokens (None: all positions) in the format `kv`; those of `sliding`
    have room for its `rows`, and attention appends to them at the slot `cache_row`. Caches and
    states are numbered by `ModelConfig.cache_numbers`.
    """
    stored = WeightFormat(weight_format)
    decoder = _Decoder(
        config, stored, capacity or config.max_position, shadows or {}, kv=kv, sliding=sliding
    )
    return ModelGraph(
        name=name or config.architecture,
        architecture=config.architecture,
        max_position=config.max_position,
        weight_format=stored,
        nodes=tuple(_numbered_by_kind(_of_one_shape(decoder.nodes()))),
    )


def slot_widths(config: ModelConfig, shadows: Shadows | None = None) -> dict[str, int]:
    """Return the features per token of every float32 slot but `logits` and the caches."""
    kinds = {(config.mixers[i], config.routed(i)) for i in range(config.num_layers)}
    own = config.layer_ropes or config.layer_sizes or config.kv_source
    alike = not shadows and len(kinds) == 1 and not own
    layers = 1 if alike else None
    nodes = _Decoder(config, WeightFormat.F32, 1, shadows or {}, layers=layers).nodes()
    return {
        slot: shape[-1]
        for slot, shape in slot_shapes(_of_one_shape(nodes)).items()
        if slot not in OF_THE_POOL and slot.partition(".")[0] not in CONTEXT_PORTS
    }


def rope_of(config: ModelConfig, layer: int, capacity: int | None = None) -> Rope | None:
    """Return the operation of a layer's rotary embedding, with the query/key norm if there is one.

    It rotates by nothing where a layer has the norm alone, and is None where it has neither.
    """
    rope, config, reads = config.rope_at(layer), config.at(layer), config.reads(layer)
    if config.positions or (rope is None and not config.qk_norm and not config.v_norm):
        return None
    return Rope(
        heads=config.heads,
        kv_heads=0 if reads else config.kv_heads,
        head_dim=config.head_dim,
        theta=rope.theta if rope else config.rope_theta,
        max_position=capacity or config.max_position,
        rotary_dim=config.rotary_dim,
        scaling=rope.scaling if rope else UNROTATED,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        qk_norm_row=config.qk_norm_row,
        qk_norm_after=config.qk_norm_after,
        v_norm_eps=config.rms_norm_eps if config.v_norm and not reads else None,
        gated=config.output_gate,
    )


def movable_ropes(config: ModelConfig) -> tuple[Rope | None, ...] | None:
    """Return the rotary embedding by which a layer's cached keys move, by the keys' number.

    None where they cannot be moved to other positions: these are learned, the weights of the norm
    of keys came after, or layers have states.
    """
    if config.qk_norm_after or not config.shifts:
        return None
    return tuple(rope_of(config, i) for i in config.cached_layers)


class _Decoder:
    """A builder of the nodes."""

    def __init__(
        self,
        config: ModelConfig,
        weight_format: WeightFormat,
        capacity: int,
        shadows: Shadows,
        layers: int | None = None,
        kv: CacheFormat = CacheFormat.F32,
        sliding: Sliding | None = None,
    ) -> None:
        self.config, self.weight_format, self.capacity = config, weight_format, capacity
        self.shadows, self.kv, self.sliding = shadows, kv, sliding
        self.shadowed: str | None = None  # the residual stream with shadows added to it
        self.layers = layers or config.num_layers
        self.stream = "embedded" if config.mtp else "x"
        self.layer: int | None = None
        self.built: list[Node] = []

    def nodes(self) -> list[Node]:
        """Return the nodes of `model_graph`."""
        self._embed()
        if self.config.mtp:
            _join(self)
        for layer in range(self.layers):
            self.layer = layer
            if self.config.in_norms and (layer == 0 or self.config.layer_scale):
                self.add("input_norm", self.norm_op(), x=self.stream, y="h")
            self._block(layer)
            last = layer == self.layers - 1
            if self.config.layer_scale:
                self._sum("layer_scale", scaled=True)
            self.layer = None if last else layer + 1
            if not self.config.layer_scale:
                self._norm("final_norm" if last else "input_norm")
        if self.config.layer_scale:
            self.add("final_norm", self.norm_op(), x=self.stream, y="h")
        self._matmul("lm_head", "h", "logits")
        return self.built

    def _embed(self) -> None:
        config = self.config
        embed = Embed(
            vocab=config.vocab_size,
            d=config.hidden_size,
            weight_format=self.weight_format,
            scale=config.embed_scale / config.residual_scale,
        )
        if config.layer_inputs:
            width = config.num_layers * config.layer_inputs
            scale = (config.layer_inputs / 2) ** 0.5
            inputs = replace(embed, d=width, scale=scale, mapped=True)
            self.add("embed_inputs", inputs, tokens="tokens", y="inputs")
            self.stream = "embedded"
        if not config.positions:
            self.add("embed", embed, tokens="tokens", y=self.stream)
            return
        positions = AddPositions(
            d=config.hidden_size, rows=config.positions, offset=config.position_offset
        )
        self.add("embed", embed, tokens="tokens", y="x2")
        self.add("positions", positions, x="x2", position="position", y="x")

    def _block(self, layer: int) -> None:
        """Add everything from a block's input norm up to the norm that follows the block."""
        read = "h" if self.config.in_norms else self.stream
        if self.config.parallel:
            self._mix(layer, read, "t")
            self._feed_forward(read, "t2")
            self.add("join", Add(d=self.config.hidden_size), x="t", residual="t2", y="added")
            return
        self._mix(layer, read, "t")
        self._out_norm("o_norm")
        self._norm("post_norm")
        self._feed_forward("h" if self.config.in_norms else self.stream, "t")
        self._out_norm("down_norm")
        if self.config.layer_inputs:
            self._sum("down_add")
            self._layer_inputs(layer)
            self._out_norm("input_out_norm")

    def _mix(self, layer: int, source: str, target: str) -> None:
        mixers = {"attention": self._attention, "conv": self._convolution, "delta": self._delta}
        mixers[self.config.mixers[layer]](layer, source, target)

    def _convolution(self, layer: int, source: str, target: str) -> None:
        config = self.config
        self._matmul("conv_in", source, "conv_in")
        conv = ShortConv(
            d=config.hidden_size, taps=config.conv_taps, gated=True, bias=config.conv_bias
        )
        slots = {"position": "position", "conv_state": f"conv_state.{config.cache_numbers[layer]}"}
        self.add("conv", conv, x="conv_in", y="convolved", **slots)
        self._matmul("conv_out", "convolved", target)

    def _delta(self, layer: int, source: str, target: str) -> None:
        config, net = self.config, self.config.delta
        assert net is not None
        self._matmul("delta_in", source, "delta_in")
        width = sum(net.projections)
        conv = ShortConv(
            d=net.channels, taps=config.conv_taps, activation=config.activation, width=width
        )
        delta = GatedDelta(
            k_heads=net.k_heads,
            v_heads=net.v_heads,
            k_dim=net.k_dim,
            v_dim=net.v_dim,
            eps=config.rms_norm_eps,
            width=width,
        )
        number = config.cache_numbers[layer]
        conv_slots = {"position": "position", "conv_state": f"conv_state.{number}"}
        slots = {"position": "position", "delta_state": f"delta_state.{number}"}
        self.add("conv", conv, x="delta_in", y="convolved", **conv_slots)
        self.add("delta", delta, x="convolved", gates="delta_in", y="recalled", **slots)
        self._matmul("delta_out", "recalled", target)

    def _layer_inputs(self, layer: int) -> None:
        """Add what a layer makes of its own inputs, in `t`."""
        config, width = self.config, self.config.layer_inputs
        eps = config.rms_norm_eps * config.hidden_size  # the product has a factor d^-0.5
        gate = GatedInput(
            d=width,
            first=layer * width,
            width=config.num_layers * width,
            activation=config.activation,
        )
        self._matmul("input_in", "embedded", "input_in")
        self.add("input_in_norm", RMSNorm(d=width, eps=eps), x="input_in", y="input_normed")
        self._matmul("input_gate", self.stream, "input_gate")
        ports = {"x": "input_gate", "residual": "input_normed", "inputs": "inputs"}
        self.add("gated_input", gate, **ports, y="input_gated")
        self._matmul("input_out", "input_gated", "t")

    def _attention(self, layer: int, source: str, target: str) -> None:
        config = self.config.at(layer)
        reads = config.reads(layer)
        self._matmul("q_only" if reads else "qkv", source, "qkv")
        turned, rope = "qkv", rope_of(config, layer, self.capacity)
        if rope is not None:
            turned = "rotated"
            self.add("rope", rope, qkv="qkv", position="position", out=turned)
        number = config.cache_numbers[layer]
        slides = self.sliding is not None and number in self.sliding.layers
        attention = Attention(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            capacity=self.sliding.rows if slides and self.sliding else self.capacity,
            window=config.windows[layer],
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            kv=self.kv,
            sinks=config.sinks,
            reads=reads,
        )
        self.add(
            "attention",
            attention,
            qkv=turned,
            position="cache_row" if slides else "position",
            out="attended",
            k_cache=f"k_cache.{number}",
            v_cache=f"v_cache.{number}",
        )
        attended = "attended"
        if config.output_gate:
            width = config.heads * config.head_dim
            gate = SigmoidGate(d=width, first=width, width=config.qkv_width)
            attended = "gated"
            self.add("output_gate", gate, x="attended", gates="qkv", y=attended)
        self._matmul("o", attended, target)

    def _experts(self, experts: ExpertConfig, source: str, target: str, routed: str = "") -> None:
        """Add experts of `source`, which are chosen by `routed` if that is given."""
        config = self.config
        router = Router(
            experts=experts.count,
            chosen=experts.chosen,
            d=config.hidden_size,
            scores=experts.scores,
            bias=experts.router_bias,
            choice_bias=experts.choice_bias,
            renormalised=experts.renormalised,
            eps=experts.eps,
            scale=experts.scale,
            expert_scale=experts.parallel,
        )
        op = Experts(
            experts=experts.count,
            chosen=experts.chosen,
            d=config.hidden_size,
            f=experts.width,
            weight_format=self.weight_format,
            activation=experts.activation or config.activation,
            bias=experts.bias,
        )
        self.add("router", router, x=routed or source, y="routes")
        self.add("experts", op, x=source, routes="routes", y=target)

    def _feed_forward(self, source: str, target: str) -> None:
        assert self.layer is not None
        experts = self.config.routed(self.layer)
        if experts is None:
            self._plain_feed_forward(source, target)
        elif experts.parallel:
            self._parallel_experts(experts, source, target)
        elif not experts.shared:
            self._experts(experts, source, target)
        else:
            self._experts(experts, source, "chosen")
            self._plain_feed_forward(source, "shared")
            slots = {"x": "shared", "gates": source, "residual": "chosen", "y": target}
            self.add("shared_gate", GatedAdd(d=self.config.hidden_size), **slots)

    def _parallel_experts(self, experts: ExpertConfig, source: str, target: str) -> None:
        """Add experts parallel to the plain feed-forward, each in norms of its own."""
        norm = self.norm_op()
        self.add("router_norm", norm, x=self.stream, y="router_in")
        self.add("experts_norm", norm, x=self.stream, y="experts_in")
        self._experts(experts, "experts_in", "chosen", routed="router_in")
        self.add("chosen_norm", norm, x="chosen", y="chosen_normed")
        self._plain_feed_forward(source, "plain")
        self.add("plain_norm", norm, x="plain", y="plain_normed")
        add = Add(d=self.config.hidden_size)
        self.add("experts_add", add, x="plain_normed", residual="chosen_normed", y=target)

    def _plain_feed_forward(self, source: str, target: str) -> None:
        assert self.layer is not None
        self._matmul("gate_up", source, "gate_up")
        kind, sizes = GatedAct if self.config.gated else Act, self.config.at(self.layer)
        activation = kind(f=sizes.intermediate_size, activation=self.config.activation)
        self.add("activation", activation, x="gate_up", y="activated")
        self._matmul("down", "activated", target)

    def _out_norm(self, name: str) -> None:
        if self.config.out_norms:
            self.add(name, self.norm_op(), x="t", y="added")

    def _norm(self, name: str) -> None:
        """Add to the residual stream, and norm the sum into `h`, if what follows is normed."""
        added = "added" if self.config.out_norms or self.config.parallel else "t"
        if name != "final_norm" and not self.config.in_norms:
            self._sum(name.replace("norm", "add"))
            return
        before = self._next_stream()
        self.add(name, self.norm_op(add=True), x=before, residual=added, sum=self.stream, y="h")

    def _sum(self, name: str, *, scaled: bool = False) -> None:
        """Add to the residual stream, and norm nothing."""
        added = "added" if self.config.out_norms or self.config.parallel else "t"
        add = Add(d=self.config.hidden_size, scaled=scaled)
        before = self._next_stream()
        self.add(name, add, x=before, residual=added, y=self.stream)

    def _next_stream(self) -> str:
        """Return the slot of the residual stream, which continues in another one."""
        before = self.shadowed or self.stream
        self.shadowed, self.stream = None, "x2" if self.stream == "x" else "x"
        return before

    def norm_op(self, *, add: bool = False) -> RMSNorm | LayerNorm:
        config = self.config
        kind = LayerNorm if config.norm == "layer" else RMSNorm
        return kind(
            d=config.hidden_size, eps=config.rms_norm_eps / config.residual_scale**2, add=add
        )

    def _matmul(self, name: MatMulName, source: str, target: str) -> None:
        every = (
            self.config.matmuls() if self.layer is None else self.config.block_matmuls(self.layer)
        )
        spec = next(x for x in every if x.name == name)
        shadow = self.shadows.get(f"blocks.{self.layer}.{name}")
        of_stream = name in ("o", "conv_out", "delta_out", "down") and not self.config.out_norms
        if shadow is not None and of_stream:
            stream = self.shadowed or self.stream
            self.shadowed = "x4" if self.shadowed == "x3" else "x3"
            self.add(name + SHADOW, shadow, x=source, residual=stream, y=self.shadowed)
        product = f"{target}_codes" if shadow is not None and not of_stream else target
        op = MatMul(
            n=spec.n,
            k=spec.k,
            weight_format=self.weight_format,
            bias=spec.bias,
            softcap=self.config.logit_softcap if name == "lm_head" else 0.0,
        )
        self.add(name, op, plan_op=name, x=source, y=product)
        if shadow is not None and not of_stream:
            self.add(name + SHADOW, shadow, x=source, residual=product, y=target)

    def add(self, name: str, op: Op, *, plan_op: OpName | None = None, **slots: str) -> None:
        full = name if self.layer is None else f"layer{self.layer}.{name}"
        members = _members(name, self.config if self.layer is None else self.config.at(self.layer))
        self.built.append(
            Node(name=full, op=op, slots=slots, plan_op=plan_op, layer=self.layer, members=members)
        )


def _join(decoder: _Decoder) -> None:
    """Begin a head for multi-token prediction with the product of embedding and hidden state."""
    d = decoder.config.hidden_size
    half = MatMul(n=d, k=d, weight_format=decoder.weight_format)
    for name, source, target in zip(MTP_HALVES, ("embedded", HIDDEN), ("x", "t"), strict=True):
        decoder.add(f"{name}_norm", decoder.norm_op(), x=source, y="h")
        decoder.add(name, half, x="h", y=target)
    decoder.add("join", Add(d=d), x="x", residual="t", y="x2")
    decoder.stream = "x2"


def _numbered_by_kind(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes with the plan's names of their matmuls.

    Layers are of one kind where they have the same matmuls. The first kind to have a role (`down`)
    has its name, another one is numbered: `down.2` in the second kind of layers.
    """
    by_layer: dict[int | None, list[Node]] = {}
    for node in nodes:
        if node.plan_op is not None and node.layer is not None:
            by_layer.setdefault(node.layer, []).append(node)
    numbers: dict[tuple[tuple[str | None, Op], ...], int] = {}
    kind_of = {
        layer: numbers.setdefault(tuple((x.plan_op, x.op) for x in own), 1 + len(numbers))
        for layer, own in by_layer.items()
    }
    first: dict[str, int] = {}  # the first kind that has a role
    for layer, own in by_layer.items():
        for role in (role for x in own for role in (x.plan_op or "", *dict(x.members))):
            first.setdefault(role, kind_of[layer])
    for node in nodes:
        number = kind_of.get(node.layer)
        if node.plan_op is None or number in (None, first.get(node.plan_op)):
            yield node
        else:
            members = tuple((f"{name}.{number}", start) for name, start in node.members)
            yield replace(node, plan_op=f"{node.plan_op}.{number}", members=members)


def _of_one_shape(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with slots of one shape each: what is wider in some layers is numbered."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def named(node: Node, port: str, slot: str) -> str:
        known, shape = shapes.setdefault(slot, []), port_shape(node.op, port, 1)
        if shape not in known:
            known.append(shape)
        number = 1 + known.index(shape)
        return slot if number == 1 else f"{slot}.{number}"

    renamed = [{port: named(x, port, slot) for port, slot in x.slots.items()} for x in nodes]
    return [replace(node, slots=slots) for node, slots in zip(nodes, renamed, strict=True)]


def _members(name: str, config: ModelConfig) -> tuple[tuple[OpName, int], ...]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    match name:
        case "qkv":
            first = 2 * queries if config.output_gate else queries
            return (("q", 0), ("k", first), ("v", first + keys))
        case "gate_up" if config.gated:
            return (("gate", 0), ("up", config.intermediate_size))
        case _:
            return ()

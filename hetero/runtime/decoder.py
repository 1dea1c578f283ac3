"""The decoder as a flat list of nodes: operations, the slots they work on, the weights they take.

Notation as in `hetero.backends.ops`. One list serves every phase, token count and plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.backends.ops import Attention, Embed, GatedAct, MatMul, Op, RMSNorm, Rope, WeightFormat
from hetero.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation of the model.

    `name` is unique and for people (`layer3.qkv`); `plan_op` is the plan's name of a matmul, None
    for everything else; `slots` maps the operation's ports to slots of the activation pool.
    `layer` is None before and after the blocks.
    """

    name: str
    op: Op
    slots: dict[str, str]
    plan_op: str | None = None
    layer: int | None = None


def decoder_nodes(config: ModelConfig, weight_format: WeightFormat, capacity: int) -> list[Node]:
    """Nodes in execution order, from token ids in slot `tokens` to `logits`.

    The residual stream alternates between the slots `x` and `x2`; every norm but the first adds the
    preceding matmul's output to it.
    """
    nodes = [
        Node(
            name="embed",
            op=Embed(vocab=config.vocab_size, d=config.hidden_size, weight_format=weight_format),
            slots={"tokens": "tokens", "y": "x"},
        ),
        Node(
            name="layer0.input_norm",
            op=RMSNorm(d=config.hidden_size, eps=config.rms_norm_eps),
            slots={"x": "x", "y": "h"},
            layer=0,
        ),
    ]
    for layer in range(config.num_layers):
        nodes += _attention_nodes(config, weight_format, capacity, layer)
        nodes += _feed_forward_nodes(config, weight_format, layer)
    nodes.append(_matmul("lm_head", None, "h", "logits", config, weight_format))
    return nodes


def slot_widths(config: ModelConfig) -> dict[str, int]:
    """Features per token of every float32 slot but `logits` and the caches."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    return {
        "x": config.hidden_size,
        "x2": config.hidden_size,
        "h": config.hidden_size,
        "t": config.hidden_size,
        "qkv": qkv,
        "rotated": qkv,
        "attended": config.heads * config.head_dim,
        "gate_up": 2 * config.intermediate_size,
        "activated": config.intermediate_size,
    }


def _attention_nodes(
    config: ModelConfig, weight_format: WeightFormat, capacity: int, layer: int
) -> list[Node]:
    heads = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }
    rope = Rope(
        **heads,
        theta=config.rope_theta,
        max_position=capacity,
        scaling=config.rope_scaling,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
    )
    attention = Attention(
        **heads, capacity=capacity, window=config.windows[layer] if config.windows else 0
    )
    caches = {"k_cache": f"k_cache.{layer}", "v_cache": f"v_cache.{layer}"}
    return [
        _matmul("qkv", layer, "h", "qkv", config, weight_format),
        Node(
            name=f"layer{layer}.rope",
            op=rope,
            slots={"qkv": "qkv", "position": "position", "out": "rotated"},
            layer=layer,
        ),
        Node(
            name=f"layer{layer}.attention",
            op=attention,
            slots={"qkv": "rotated", "position": "position", "out": "attended", **caches},
            layer=layer,
        ),
        _matmul("o", layer, "attended", "t", config, weight_format),
        _norm(config, layer, "post_norm", "x", "x2"),
    ]


def _feed_forward_nodes(config: ModelConfig, weight_format: WeightFormat, layer: int) -> list[Node]:
    activation = GatedAct(f=config.intermediate_size, activation=config.activation)
    last = layer == config.num_layers - 1
    following = _norm(
        config, None if last else layer + 1, "final_norm" if last else "input_norm", "x2", "x"
    )
    return [
        _matmul("gate_up", layer, "h", "gate_up", config, weight_format),
        Node(
            name=f"layer{layer}.activation",
            op=activation,
            slots={"x": "gate_up", "y": "activated"},
            layer=layer,
        ),
        _matmul("down", layer, "activated", "t", config, weight_format),
        following,
    ]


def _norm(config: ModelConfig, layer: int | None, name: str, before: str, after: str) -> Node:
    """Add slot `t` to the residual stream in `before`, giving `after`, and norm it into `h`."""
    return Node(
        name=name if layer is None else f"layer{layer}.{name}",
        op=RMSNorm(d=config.hidden_size, eps=config.rms_norm_eps, add=True),
        slots={"x": before, "residual": "t", "sum": after, "y": "h"},
        layer=layer,
    )


def _matmul(
    op: str,
    layer: int | None,
    source: str,
    target: str,
    config: ModelConfig,
    weight_format: WeightFormat,
) -> Node:
    shape = next(m for m in config.spec(weight_format).matmuls if m.name == op)
    return Node(
        name=op if layer is None else f"layer{layer}.{op}",
        op=MatMul(n=shape.n, k=shape.k, weight_format=weight_format, bias=shape.bias),
        slots={"x": source, "y": target},
        plan_op=op,
        layer=layer,
    )

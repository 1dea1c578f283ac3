"""`ModelGraph`: the nodes of every architecture, what is derived from them, and the document."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from hetero.backends.formats import WeightFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.ops import (
    Add,
    Attention,
    Embed,
    GatedAct,
    MatMul,
    Op,
    RMSNorm,
    Rope,
)
from hetero.backends.rope_tables import tables
from hetero.models import model_spec
from hetero.models.config import ModelConfig
from hetero.models.graph import model_graph, slot_widths
from hetero.models.published import PUBLISHED
from hetero.models.random_models import KNOWN_MODELS, RandomWeights
from hetero.profiler.model_graph import MatMulSpec, ModelGraph, Node, Share
from tests.models.model_helpers import small_config

WINDOWED = small_config(
    architecture="qwen3", qk_norm=True, windows=(0, 8, 8), activation="gelu_tanh"
)
PARALLEL = small_config(architecture="phi", parallel=True, gated=False, norm="layer")


def roles(graph: ModelGraph, layer: int | None) -> list[str]:
    """Nodes of a layer by the last part of their names."""
    return [node.name.rpartition(".")[2] for node in graph.nodes if node.layer == layer]


def op_of(graph: ModelGraph, name: str) -> Op:
    return next(node.op for node in graph.nodes if node.name.endswith(name))


def test_the_matmuls_of_a_known_model() -> None:
    graph = model_spec("qwen2.5-0.5b")
    assert graph.matmuls == (
        MatMulSpec(name="qkv", n=1152, k=896, count=24, bias=True),
        MatMulSpec(name="o", n=896, k=896, count=24),
        MatMulSpec(name="gate_up", n=9728, k=896, count=24),
        MatMulSpec(name="down", n=896, k=4864, count=24),
        MatMulSpec(name="lm_head", n=151936, k=896, count=1),
    )
    assert op_of(graph, "qkv") == MatMul(n=1152, k=896, weight_format=WeightFormat.W4A16, bias=True)
    assert graph.shapes["v"] == (2 * 64, 896)
    assert graph.shapes["up"] == (4864, 896)
    with pytest.raises(KeyError):
        graph.matmul("gate")  # type: ignore[arg-type]


def test_the_nodes_of_a_serial_block() -> None:
    graph = model_graph(WINDOWED, "f16", capacity=32)
    serial = ["qkv", "rope", "attention", "o", "post_norm", "gate_up", "activation", "down"]
    assert roles(graph, None) == ["embed", "final_norm", "lm_head"]
    for layer in range(3):
        assert roles(graph, layer) == ["input_norm", *serial]
    records = {node.name: node.op for node in graph.nodes}
    assert records["embed"] == Embed(vocab=301, d=24, weight_format=WeightFormat.F16)
    assert records["layer0.input_norm"] == RMSNorm(d=24, eps=1e-6)
    assert records["layer1.input_norm"] == RMSNorm(d=24, eps=1e-6, add=True)
    assert records["layer0.activation"] == GatedAct(f=43, activation="gelu_tanh")
    assert records["layer2.rope"] == Rope(
        heads=4, kv_heads=2, head_dim=6, theta=1e4, max_position=32, qk_norm_eps=1e-6
    )
    assert [op for op in graph.others if isinstance(op, Attention)] == [
        Attention(heads=4, kv_heads=2, head_dim=6, capacity=32, window=window) for window in (0, 8)
    ]


def test_a_parallel_block_and_one_with_norms_behind_its_matmuls() -> None:
    parallel = ["qkv", "rope", "attention", "o", "gate_up", "activation", "down", "join"]
    assert roles(model_graph(PARALLEL, "f32"), 1) == ["input_norm", *parallel]
    normed = model_graph(small_config(architecture="gemma2", out_norms=True), "f32")
    after = [roles(normed, 1)[i : i + 3] for i in (4, 9)]
    assert after == [["o", "o_norm", "post_norm"], ["down", "down_norm"]]


def test_stages_are_what_runs_behind_each_matmul() -> None:
    """With how often a layer has it: of three layers two have a window."""
    graph = model_graph(WINDOWED, "f16")
    assert [type(share.op).__name__ for share in graph.head] == ["Embed", "RMSNorm"]
    assert [(x.name, x.members) for x in graph.block] == [
        ("qkv", ("q", "k", "v")), ("o", ()), ("gate_up", ("gate", "up")), ("down", ()),
    ]  # fmt: skip
    (rope, whole, windowed), norm, activation, last = (stage.after for stage in graph.block)
    assert (rope.times, whole.times, windowed.times) == pytest.approx((1, 1 / 3, 2 / 3))
    assert norm == last == (Share(RMSNorm(d=24, eps=1e-6, add=True), 1.0),)
    assert [share.times for share in activation] == [1.0]
    assert [stage.name for stage in graph.block if stage.attends] == ["qkv"]
    assert [(stage.name, stage.after) for stage in graph.tail] == [("lm_head", ())]


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_stages_have_every_node_once(name: str) -> None:
    graph = model_spec(name)
    launches = sum(share.times for share in graph.head)
    for kind in graph.kinds:
        once = sum(1 + sum(x.times for x in stage.after) for stage in kind.stages)
        launches += kind.layers * once
    launches += sum(1 + sum(x.times for x in stage.after) for stage in graph.tail)
    assert launches == pytest.approx(len(graph.nodes))


@pytest.mark.full
@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_graph_reads_back_the_same(name: str) -> None:
    graph = model_spec(name)
    loaded = ModelGraph.model_validate_json(graph.model_dump_json())
    assert loaded == graph
    assert loaded.others == graph.others
    for op in loaded.others:
        if isinstance(op, Rope):
            assert isinstance(op.scaling, RopeScaling)
            assert tables(op)[0].shape == (graph.max_position, op.rotated // 2)


def test_copies_have_other_caches_and_formats() -> None:
    graph = model_graph(WINDOWED, "w4a16")
    assert graph.block  # is remembered, and not by the copies
    small = graph.with_capacity(16)
    assert small == model_graph(WINDOWED, "w4a16", capacity=16) != graph
    wide = graph.with_weight_format(WeightFormat.F32)
    assert wide == model_graph(WINDOWED, "f32")
    assert op_of(wide, "o").weight_format is WeightFormat.F32
    assert graph.model_copy(update={"name": "elsewhere"}).name == "elsewhere"


@pytest.mark.parametrize("weights", [x for x in WeightFormat if not x.of_file])
def test_bytes_are_those_of_the_weights(weights: WeightFormat) -> None:
    config = small_config()
    model = RandomWeights(config, weights)
    blocks = [model.block(i) for i in range(3)]
    total = sum(x.nbytes for b in blocks for x in b.matrices.values())
    assert model_graph(config, weights).matmul_weight_bytes == total + model.lm_head().nbytes


def test_slots_are_as_wide_as_their_nodes_say() -> None:
    widths = {"x": 24, "x2": 24, "h": 24, "t": 24, "qkv": 48, "rotated": 48, "attended": 24}
    assert slot_widths(small_config()) == widths | {"gate_up": 86, "activated": 43}
    others = {"gate_up": 43, "activated": 43, "t2": 24, "added": 24}
    assert slot_widths(PARALLEL) == widths | others


def test_a_graph_is_frozen() -> None:
    graph = model_spec("llama-3-8b")
    with pytest.raises(ValidationError):
        graph.max_position = 3


def node_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(node for node in raw["nodes"] if node["name"] == name)
    return found


BROKEN = {
    "another version": lambda raw: raw.update(schema_version=2),
    "an unknown field": lambda raw: raw.update(surprise=1),
    "no nodes": lambda raw: raw.update(nodes=[]),
    "no positions": lambda raw: raw.update(max_position=0),
    "an unknown field of a node": lambda raw: raw["nodes"][0].update(surprise=1),
    "an unknown field of an operation": lambda raw: raw["nodes"][0]["op"].update(surprise=1),
    "an unknown field of a scaling": lambda raw: node_of(raw, "layer0.rope")["op"][
        "scaling"
    ].update(surprise=1),
    "an unknown operation": lambda raw: raw["nodes"][0]["op"].update(kind="Convolve"),
    "a size of nothing": lambda raw: raw["nodes"][0]["op"].update(d=0),
    "a size beyond int32": lambda raw: raw["nodes"][0]["op"].update(vocab=2**31),
    "heads that do not divide": lambda raw: node_of(raw, "layer0.attention")["op"].update(heads=3),
    "a name twice": lambda raw: raw["nodes"].append(raw["nodes"][-1]),
    "ports of another operation": lambda raw: raw["nodes"][0].update(slots={"x": "x", "y": "x"}),
    "layers out of order": lambda raw: raw["nodes"].reverse(),
    "a missing layer": lambda raw: raw.update(
        nodes=[node for node in raw["nodes"] if node["layer"] != 1]
    ),
    "a layer without a matmul": lambda raw: raw["nodes"].remove(node_of(raw, "layer1.o")),
    "a matmul that differs": lambda raw: node_of(raw, "layer1.o")["op"].update(bias=True),
    "a plan's name on a norm": lambda raw: node_of(raw, "layer1.post_norm").update(plan_op="o"),
    "members beyond the weight": lambda raw: node_of(raw, "layer1.o").update(members=[["q", 99]]),
    "a slot that nobody wrote": lambda raw: node_of(raw, "layer0.post_norm")["slots"].update(
        residual="nowhere"
    ),
    "a slot of two widths": lambda raw: node_of(raw, "layer0.o")["slots"].update(y="gate_up"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_document_is_refused(what: str) -> None:
    raw = json.loads(model_graph(small_config(), "w4a16").model_dump_json())
    assert ModelGraph.model_validate(raw).layers == 3
    BROKEN[what](raw)
    with pytest.raises(ValidationError):
        ModelGraph.model_validate(raw)


def test_another_kind_of_node_is_data() -> None:
    """A second contribution to what a matmul gives, in one layer: only the nodes say so."""
    graph = model_graph(small_config(), "f32")
    nodes = list(graph.nodes)
    at = 1 + next(i for i, node in enumerate(nodes) if node.name == "layer1.o")
    shadow = MatMul(n=24, k=24, weight_format=WeightFormat.F32)
    added = {"x": "t", "residual": "shadow", "y": "sum"}
    nodes[at : at + 1] = [
        Node(name="layer1.shadow", op=shadow, slots={"x": "attended", "y": "shadow"}, layer=1),
        Node(name="layer1.shadow_add", op=Add(d=24), slots=added, layer=1),
        replace(nodes[at], slots=nodes[at].slots | {"residual": "sum"}),
    ]
    longer = graph.model_copy(update={"nodes": tuple(nodes)})
    after = {stage.name: {x.op: x.times for x in stage.after} for stage in longer.block}
    norm = RMSNorm(d=24, eps=1e-6, add=True)
    assert after["o"] == pytest.approx({shadow: 1 / 3, Add(d=24): 1 / 3, norm: 1.0})
    assert longer.matmuls == graph.matmuls


def test_slots_of_layers_that_are_not_like_the_first_have_room() -> None:
    """A first layer without a rotary embedding has no slot for what is rotated."""
    config = ModelConfig.from_dict(PUBLISHED["smollm3-3b"] | {"no_rope_layers": [0] + [1] * 35})
    assert slot_widths(config)["rotated"] == config.qkv_width

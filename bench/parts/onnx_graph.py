"""A model of the llama family as one ONNX graph, as ONNX Runtime's own model builder has it.

`MatMulNBits` (4 bits, blocks of 32, int8 activations), `GroupQueryAttention` with RoPE and a cache,
fused norms, logits of the last token only. Weights are the Q4_0 blocks of a GGUF file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import DATA
from onnx import TensorProto, helper, numpy_helper

from hetero.profiler.model_graph import ModelGraph

MS = "com.microsoft"
THETA = 500000.0
NORM = {"epsilon": 1e-5}
F32, I32, I64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
Array = np.ndarray[Any, Any]


class Graph:
    """Nodes and weights in the making."""

    def __init__(self, tensors: dict[str, Array]) -> None:
        self.tensors = tensors
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, kind: str, inputs: list[str], *outputs: str, **options: Any) -> str:
        """Append one; its first output."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], **options))
        return outputs[0]

    def constant(self, name: str, value: Array) -> str:
        """A weight."""
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def matmul(self, name: str, x: str, out: str) -> str:
        """`x` times a Q4_0 weight: [n, k/32, 16] nibbles and [n·k/32] scales here.

        GGUF keeps element j and j + 16 of a block in byte j, ONNX Runtime elements 2j and 2j + 1.
        """
        scales, values = split_q4(self.tensors[f"{name}.weight"])
        packed = values[..., 0::2] | (values[..., 1::2] << 4)
        inputs = [x, self.constant(f"{name}.q4", packed)]
        inputs.append(self.constant(f"{name}.scales", scales.astype(np.float32).reshape(-1)))
        sizes = {"K": packed.shape[1] * 32, "N": packed.shape[0], "bits": 4, "block_size": 32}
        return self.node("MatMulNBits", inputs, out, domain=MS, accuracy_level=4, **sizes)

    def skip_norm(self, weight: str, x: str, added: str, out: str, total: str) -> None:
        """`total` = x + added, `out` its norm."""
        name = self.constant(f"{out}.norm", self.tensors[weight])
        kind = "SkipSimplifiedLayerNormalization"
        self.node(kind, [x, added, name], out, "", "", total, domain=MS, **NORM)


def split_q4(blocks: Array) -> tuple[Array, Array]:
    """Of Q4_0 rows: float16 scales [n, k/32, 1] and codes [n, k/32, 32]."""
    raw = blocks.reshape(blocks.shape[0], -1, 18)
    codes = np.concatenate((raw[..., 2:] & 15, raw[..., 2:] >> 4), axis=-1)
    return raw[..., :2].copy().view(np.float16), codes


def write_onnx(spec: ModelGraph, tensors: dict[str, Array], folder: Path, context: int) -> Path:
    """Write the model with external weights, and ONNX Runtime GenAI's configuration."""
    graph = Graph(tensors)
    _beginning(graph, spec, context)
    for layer in range(spec.layers):
        _block(graph, spec, layer)
    graph.node("Slice", ["final", "minus1", "end", "axis1"], "last")
    graph.matmul("token_embd", "last", "logits")
    kinds = [f"{i}.{kind}" for i in range(spec.layers) for kind in ("key", "value")]
    cache = [1, spec.kv_heads, None, spec.head_dim]
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", I64, [1, "tokens"]), info("attention_mask", I64, [1, "all"])]
    inputs += [info(f"past_key_values.{kind}", F32, cache) for kind in kinds]
    outputs = [info("logits", F32, [1, 1, spec.vocab_size])]
    outputs += [info(f"present.{kind}", F32, cache) for kind in kinds]
    whole = helper.make_graph(graph.nodes, "model", inputs, outputs, graph.weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
    model, path = helper.make_model(whole, opset_imports=opsets, ir_version=10), "model.onnx"
    onnx.save_model(model, folder / path, save_as_external_data=True, location="model.onnx.data")
    settings = json.loads((DATA / "genai_config.json").read_text())
    settings["model"] |= {"context_length": context, "vocab_size": spec.vocab_size}
    settings["search"]["max_length"] = context
    settings["model"]["decoder"] |= {
        "head_size": spec.head_dim, "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.heads, "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
    }  # fmt: skip
    (folder / "genai_config.json").write_text(json.dumps(settings))
    return folder / path


def _beginning(graph: Graph, spec: ModelGraph, context: int) -> None:
    """Embedding, rotary tables, lengths, the first norm."""
    for name, value in (("minus1", [-1]), ("end", [2**31]), ("axis1", [1]), ("one", 1)):
        graph.constant(name, np.array(value, np.int64))
    scales, codes = split_q4(graph.tensors["token_embd.weight"])
    dense = (codes.astype(np.float32) - 8) * scales
    graph.constant("table", dense.reshape(spec.vocab_size, -1).astype(np.float16))
    graph.node("Gather", ["table", "input_ids"], "embedded16")
    graph.node("Cast", ["embedded16"], "x", to=F32)
    graph.node("ReduceSum", ["attention_mask", "axis1"], "count", keepdims=1)
    graph.node("Sub", ["count", "one"], "count1")
    graph.node("Cast", ["count1"], "seqlens", to=I32)
    graph.node("Shape", ["attention_mask"], "mask_shape")
    graph.node("Gather", ["mask_shape", "one"], "total64")
    graph.node("Cast", ["total64"], "total", to=I32)
    half = spec.head_dim // 2
    angles = np.outer(np.arange(context), THETA ** (-np.arange(half) / half))
    graph.constant("cos", np.cos(angles).astype(np.float32))
    graph.constant("sin", np.sin(angles).astype(np.float32))
    weight = graph.constant("norm0", graph.tensors["blk.0.attn_norm.weight"])
    graph.node("SimplifiedLayerNormalization", ["x", weight], "h0", axis=-1, **NORM)


def _block(graph: Graph, spec: ModelGraph, i: int) -> None:
    """Attention and feed-forward of a layer, and the norm that follows."""
    q, k, v = (graph.matmul(f"blk.{i}.attn_{x}", f"h{i}", f"{x}{i}") for x in ("q", "k", "v"))
    past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
    heads = {"num_heads": spec.heads, "kv_num_heads": spec.kv_heads}
    graph.node(
        "GroupQueryAttention", [q, k, v, *past, "seqlens", "total", "cos", "sin"], f"attended{i}",
        f"present.{i}.key", f"present.{i}.value", domain=MS, do_rotary=1, rotary_interleaved=1,
        **heads,
    )  # fmt: skip
    graph.matmul(f"blk.{i}.attn_output", f"attended{i}", f"o{i}")
    stream = "x" if i == 0 else f"s{i}"
    graph.skip_norm(f"blk.{i}.ffn_norm.weight", stream, f"o{i}", f"f{i}", f"m{i}")
    gate = graph.matmul(f"blk.{i}.ffn_gate", f"f{i}", f"gate{i}")
    up = graph.matmul(f"blk.{i}.ffn_up", f"f{i}", f"up{i}")
    graph.node("Sigmoid", [gate], f"sigmoid{i}")
    graph.node("Mul", [gate, f"sigmoid{i}"], f"silu{i}")
    graph.node("Mul", [f"silu{i}", up], f"act{i}")
    graph.matmul(f"blk.{i}.ffn_down", f"act{i}", f"d{i}")
    last = i == spec.layers - 1
    weight = "output_norm.weight" if last else f"blk.{i + 1}.attn_norm.weight"
    graph.skip_norm(weight, f"m{i}", f"d{i}", "final" if last else f"h{i + 1}", f"s{i + 1}")

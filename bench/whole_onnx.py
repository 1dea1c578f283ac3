"""A GGUF model of the llama family as one ONNX graph, as ONNX Runtime's own model builder has it.

`MatMulNBits` (4 bits, blocks of 32, int8 activations), `GroupQueryAttention` with RoPE and a cache,
fused norms, logits of the last token only. `write_onnx` writes `model.onnx` with external weights
and the `genai_config.json` of ONNX Runtime GenAI; weights are the GGUF's own Q4_0 blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hetero.profiler.model_graph import ModelGraph

MS = "com.microsoft"
BLOCK = 32
THETA = 500000.0
F32, I64 = TensorProto.FLOAT, TensorProto.INT64
Array = np.ndarray[Any, Any]


class Graph:
    """Nodes and weights in the making."""

    def __init__(self, tensors: dict[str, Array], context: int) -> None:
        self.tensors, self.context = tensors, context
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, kind: str, inputs: list[str], outputs: list[str], **options: Any) -> str:
        """Append one; its first output."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], **options))
        return outputs[0]

    def constant(self, name: str, value: Array) -> str:
        """A weight."""
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def matmul(self, name: str, x: str, out: str) -> str:
        """`x` times a Q4_0 weight of the GGUF."""
        packed, scales, k = onnx_q4(self.tensors[f"{name}.weight"])
        inputs = [
            x,
            self.constant(f"{name}.q4", packed),
            self.constant(f"{name}.scales", scales),
        ]
        sizes = {"K": k, "N": packed.shape[0], "bits": 4, "block_size": BLOCK}
        return self.node("MatMulNBits", inputs, [out], domain=MS, accuracy_level=4, **sizes)


def onnx_q4(blocks: Array) -> tuple[Array, Array, int]:
    """Q4_0 rows [n, k/32·18] as `MatMulNBits` has them: [n, k/32, 16], scales [n·k/32], and k.

    GGUF keeps element j and j + 16 of a block in byte j, ONNX Runtime elements 2j and 2j + 1.
    """
    n = blocks.shape[0]
    raw = blocks.reshape(n, -1, 18)
    scales = raw[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    low, high = raw[..., 2:] & 15, raw[..., 2:] >> 4
    values = np.concatenate((low, high), axis=-1)
    packed = values[..., 0::2] | (values[..., 1::2] << 4)
    return packed, scales.reshape(-1), raw.shape[1] * BLOCK


def dequantised(blocks: Array) -> Array:
    """Q4_0 rows as float16 [n, k]."""
    n = blocks.shape[0]
    raw = blocks.reshape(n, -1, 18)
    scales = raw[..., :2].copy().view(np.float16).astype(np.float32)
    values = np.concatenate((raw[..., 2:] & 15, raw[..., 2:] >> 4), axis=-1).astype(np.float32) - 8
    return (values * scales).reshape(n, -1).astype(np.float16)


def write_onnx(spec: ModelGraph, tensors: dict[str, Array], folder: Path, context: int) -> Path:
    """Write the model and GenAI's configuration to a folder; returns the model's path."""
    graph = Graph(tensors, context)
    _ends_in(graph, spec)
    for layer in range(spec.layers):
        _block(graph, spec, layer)
    graph.node("Slice", ["final", "minus1", "end", "axis1"], ["last"])
    graph.matmul("token_embd", "last", "logits")
    model = helper.make_model(
        helper.make_graph(graph.nodes, "model", _inputs(spec), _outputs(spec), graph.weights),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)],
        ir_version=10,
    )
    path = folder / "model.onnx"
    onnx.save_model(model, str(path), save_as_external_data=True, location="model.onnx.data")
    (folder / "genai_config.json").write_text(json.dumps(_genai(spec, context)))
    return path


def _ends_in(graph: Graph, spec: ModelGraph) -> None:
    """Embedding, rotary tables, lengths, the first norm."""
    for name, value in (("minus1", [-1]), ("end", [2**31]), ("axis1", [1]), ("one", 1)):
        graph.constant(name, np.array(value, np.int64))
    graph.constant("table", dequantised(graph.tensors["token_embd.weight"]))
    graph.node("Gather", ["table", "input_ids"], ["embedded16"])
    graph.node("Cast", ["embedded16"], ["x"], to=F32)
    graph.node("ReduceSum", ["attention_mask", "axis1"], ["count"], keepdims=1)
    graph.node("Sub", ["count", "one"], ["count1"])
    graph.node("Cast", ["count1"], ["seqlens"], to=TensorProto.INT32)
    graph.node("Shape", ["attention_mask"], ["mask_shape"])
    graph.node("Gather", ["mask_shape", "one"], ["total64"])
    graph.node("Cast", ["total64"], ["total"], to=TensorProto.INT32)
    half = spec.head_dim // 2
    angles = np.outer(np.arange(graph.context), THETA ** (-np.arange(half) / half))
    graph.constant("cos", np.cos(angles).astype(np.float32))
    graph.constant("sin", np.sin(angles).astype(np.float32))
    weight = graph.constant("norm0", graph.tensors["blk.0.attn_norm.weight"])
    norm = {"epsilon": 1e-5, "axis": -1}
    graph.node("SimplifiedLayerNormalization", ["x", weight], ["h0"], **norm)


def _block(graph: Graph, spec: ModelGraph, i: int) -> None:
    """Attention and feed-forward of a layer, and the norm that follows."""
    stream = "x" if i == 0 else f"s{i}"
    q, k, v = (
        graph.matmul(f"blk.{i}.attn_{name}", f"h{i}", f"{name}{i}") for name in ("q", "k", "v")
    )
    past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
    graph.node(
        "GroupQueryAttention",
        [q, k, v, *past, "seqlens", "total", "cos", "sin"],
        [f"attended{i}", f"present.{i}.key", f"present.{i}.value"],
        domain=MS,
        num_heads=spec.heads,
        kv_num_heads=spec.kv_heads,
        do_rotary=1,
        rotary_interleaved=1,
    )
    graph.matmul(f"blk.{i}.attn_output", f"attended{i}", f"o{i}")
    _skip_norm(graph, f"blk.{i}.ffn_norm.weight", stream, f"o{i}", f"f{i}", f"m{i}")
    gate = graph.matmul(f"blk.{i}.ffn_gate", f"f{i}", f"gate{i}")
    up = graph.matmul(f"blk.{i}.ffn_up", f"f{i}", f"up{i}")
    graph.node("Sigmoid", [gate], [f"sigmoid{i}"])
    graph.node("Mul", [gate, f"sigmoid{i}"], [f"silu{i}"])
    graph.node("Mul", [f"silu{i}", up], [f"act{i}"])
    graph.matmul(f"blk.{i}.ffn_down", f"act{i}", f"d{i}")
    last = i == spec.layers - 1
    weight = "output_norm.weight" if last else f"blk.{i + 1}.attn_norm.weight"
    _skip_norm(graph, weight, f"m{i}", f"d{i}", "final" if last else f"h{i + 1}", f"s{i + 1}")


def _skip_norm(graph: Graph, weight: str, x: str, added: str, out: str, total: str) -> None:
    name = graph.constant(f"{out}.norm", graph.tensors[weight])
    graph.node(
        "SkipSimplifiedLayerNormalization", [x, added, name], [out, "", "", total],
        domain=MS, epsilon=1e-5,
    )  # fmt: skip


def _inputs(spec: ModelGraph) -> list[Any]:
    cache = ["1", spec.kv_heads, "past", spec.head_dim]
    return [
        helper.make_tensor_value_info("input_ids", I64, [1, "tokens"]),
        helper.make_tensor_value_info("attention_mask", I64, [1, "all"]),
        *(
            helper.make_tensor_value_info(f"past_key_values.{i}.{kind}", F32, [1, *cache[1:]])
            for i in range(spec.layers)
            for kind in ("key", "value")
        ),
    ]


def _outputs(spec: ModelGraph) -> list[Any]:
    return [
        helper.make_tensor_value_info("logits", F32, [1, 1, spec.vocab_size]),
        *(
            helper.make_tensor_value_info(
                f"present.{i}.{kind}", F32, [1, spec.kv_heads, "present", spec.head_dim]
            )
            for i in range(spec.layers)
            for kind in ("key", "value")
        ),
    ]


def _genai(spec: ModelGraph, context: int) -> dict[str, Any]:
    """GenAI's description of the graph, for two threads."""
    options = {"log_id": "genai", "provider_options": [], "intra_op_num_threads": 2}
    return {
        "model": {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "context_length": context,
            "type": "llama",
            "vocab_size": spec.vocab_size,
            "decoder": {
                "session_options": options,
                "filename": "model.onnx",
                "head_size": spec.head_dim,
                "hidden_size": spec.hidden_size,
                "num_attention_heads": spec.heads,
                "num_hidden_layers": spec.layers,
                "num_key_value_heads": spec.kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": context,
            "past_present_share_buffer": True,
            "top_k": 1,
        },
    }

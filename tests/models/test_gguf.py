"""GGUF files: the same numbers, tokens and text as the Hugging Face directory they were made of."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from hetero import LLM
from hetero.backends.formats import StorageFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.rope_tables import attention_factor, inverse_frequencies
from hetero.models import DEMO_DIRECTORY, LoadedModel, open_model
from hetero.models.gguf import GgufFile, GgufWeights, kinds
from hetero.models.gguf.model_config import _divisors
from hetero.models.gguf.tensors import GgufTensor
from hetero.models.layout import block_matrices, model_vectors
from hetero.models.packing import pack_rows
from hetero.models.quantized import save
from tests.models.gguf_files import convert, tensor_file, write, write_large
from tests.models.model_helpers import first_rope
from tests.support.checkpoints import CASES, make_checkpoint

TEXTS = (
    "Once upon a time, there was a little café.",
    "  two  spaces\n\nand\ttabs 12345 don't",
    "多言語 Привет 😀!",
    "a",
)
# GGUF has no OPT; Mistral's window is not written to it.
SHARED = [
    case
    for case in CASES
    if case.kind not in ("OPT", "Mistral") and "rope_scaling" not in case.changes
]


def check_same_weights(ours: LoadedModel, theirs: LoadedModel) -> None:
    """Every number of two opened models is the same."""
    for index in range(ours.config.num_layers):
        a, b = ours.weights.block(index), theirs.weights.block(index)
        for matrix in block_matrices(ours.config, index):
            np.testing.assert_array_equal(
                a.matrix(matrix.name).dequantize(), b.matrix(matrix.name).dequantize()
            )
        for vector in ours.weights.vectors(index):
            np.testing.assert_array_equal(a.vectors[vector.name], b.vectors[vector.name])
    for name in ("embed", "lm_head"):
        one, other = (getattr(x.weights, name)().dequantize() for x in (ours, theirs))
        np.testing.assert_array_equal(one, other)
    for vector in model_vectors(ours.config, ours.weights.weight_format.storage):
        np.testing.assert_array_equal(
            ours.weights.model_vector(vector.name), theirs.weights.model_vector(vector.name)
        )


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_an_architecture_as_gguf_is_the_same_model(case: Any, tmp_path: Path) -> None:
    make_checkpoint(case, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf")
    ours = open_model(tmp_path / "model.gguf", weights="f32")
    theirs = open_model(tmp_path, weights="f32")
    same = ("heads", "kv_heads", "head_dim", "rotary_dim", "windows", "rope_theta", "activation")
    for field in (*same, "tie_word_embeddings", "embed_scale", "norm", "rms_norm_eps"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    check_same_weights(ours, theirs)


def test_gemma2_scales_scores_by_the_head_size(tmp_path: Path) -> None:
    make_checkpoint(next(x for x in CASES if x.name == "gemma2"), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf")
    config = open_model(tmp_path / "model.gguf", weights="f32").config
    assert config.attention_scale == 32**-0.5  # what llama.cpp takes for all but the 27B model
    assert (config.attention_softcap, config.logit_softcap) == (2.0, 3.0)
    assert config.windows == (24, 0, 24)


@pytest.mark.parametrize("name", ["demo", "stories"])
def test_the_tokenizer_is_the_same(name: str, request: Any, tmp_path: Path) -> None:
    source = DEMO_DIRECTORY if name == "demo" else request.getfixturevalue("stories")
    convert(float_checkpoint(source, tmp_path), tmp_path / "model.gguf")
    ours, theirs = open_model(tmp_path / "model.gguf").tokenizer, open_model(source).tokenizer
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    if theirs.chat_template is not None:
        messages = [{"role": "user", "content": "Hello"}]
        assert ours.encode_chat(messages) == theirs.encode_chat(messages)


def float_checkpoint(source: Path, target: Path) -> Path:
    """A Hugging Face directory in floats: the demo ships quantised, so its numbers are unpacked."""
    if (source / "model.safetensors").is_file():
        return source
    model = open_model(source)
    config = model.config
    found: dict[str, Any] = {
        "model.embed_tokens.weight": model.weights.embed().dequantize(),
        "model.norm.weight": np.asarray(model.weights.final_norm()),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = model.weights.lm_head().dequantize()
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for i in range(config.num_layers):
        block, prefix = model.weights.block(i), f"model.layers.{i}."
        dense = {name: x.dequantize() for name, x in block.matrices.items()}
        parts = [*np.split(dense["qkv"], [q, q + kv]), dense["o"]]
        for name, value in zip("qkvo", parts, strict=True):
            found[f"{prefix}self_attn.{name}_proj.weight"] = np.ascontiguousarray(value)
        parts = [*np.split(dense["gate_up"], 2), dense["down"]]
        for name, value in zip(("gate", "up", "down"), parts, strict=True):
            found[f"{prefix}mlp.{name}_proj.weight"] = np.ascontiguousarray(value)
        found[f"{prefix}input_layernorm.weight"] = np.asarray(block.vectors["input_norm"])
        found[f"{prefix}post_attention_layernorm.weight"] = np.asarray(block.vectors["post_norm"])
    save_file(found, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def rounded_checkpoint(source: Path, target: Path, kind: Kind) -> Path:
    """A copy of a checkpoint with every matrix as `kind` stores it."""
    tensors = load_file(source / "model.safetensors")
    for name, value in tensors.items():
        if value.ndim > 1 and (value.shape[-1] % 32 == 0 or kind is Kind.F16):
            data = gguf.quants.quantize(value.astype(np.float32), kind)
            tensors[name] = np.ascontiguousarray(gguf.quants.dequantize(data, kind))
    save_file(tensors, target / "model.safetensors")
    for path in source.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize(
    ("kind", "weights"), [(Kind.Q4_0, "w4a16"), (Kind.Q8_0, "w8a16"), (Kind.F16, "f16")]
)
def test_the_same_tokens_from_both_formats(
    kind: Kind, weights: str, stories: Path, tmp_path: Path
) -> None:
    """The Hugging Face directory holds the numbers that the GGUF file rounds to."""
    convert(stories, tmp_path / "model.gguf", kind)
    rounded = rounded_checkpoint(stories, tmp_path, kind)
    found = []
    for model in (rounded, tmp_path / "model.gguf"):
        with LLM(str(model), weights=weights, device="npu") as llm:
            found.append(llm.generate("Once upon a time", max_tokens=40).tokens)
    assert found[0] == found[1]
    assert len(found[0]) == 40


@pytest.mark.parametrize(
    ("kind", "storage"), [(Kind.Q4_0, StorageFormat.Q4), (Kind.Q8_0, StorageFormat.Q8)]
)
@pytest.mark.parametrize("rows", [16, 37])
def test_codes_are_taken_as_they_are(
    kind: Kind, storage: StorageFormat, rows: int, tmp_path: Path
) -> None:
    """Also codes that round-to-nearest would not choose: no group has to reach its lowest code."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (rows, 3, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    blocks[..., :2] = rng.normal(0, 0.1, (rows, 3, 1)).astype(np.float16).view(np.uint8)
    data = blocks.reshape(rows, -1)
    file = GgufFile(tensor_file(tmp_path / "x.gguf", data, kind))
    packed = pack_rows([GgufTensor(file, "x")], storage)
    np.testing.assert_array_equal(packed.dequantize(), gguf.quants.dequantize(data, kind))


KINDS = [
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.MXFP4,
]


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_are_read_as_the_library_reads_them(kind: Kind, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (64, 512 // elements * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, kind)
    data = data[np.isfinite(wanted).all(axis=1)]  # half floats among random bytes may be anything
    assert len(data) > 8
    file = GgufFile(tensor_file(tmp_path / "x.gguf", data, kind))
    packed = pack_rows([GgufTensor(file, "x")], StorageFormat.F32)
    np.testing.assert_array_equal(packed.dequantize(), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_what_quantising_again_costs_is_measured(kind: Kind, stories: Path, tmp_path: Path) -> None:
    tensors = convert(stories, tmp_path / "model.gguf", kind)
    weights = open_model(tmp_path / "model.gguf", weights="w4a16").weights
    assert isinstance(weights, GgufWeights)
    stored = weights.block(0).matrix("o").dequantize()
    quantised = gguf.quants.quantize(tensors["blk.0.attn_output.weight"], kind)
    exact = gguf.quants.dequantize(quantised, kind)
    error = float(np.linalg.norm(stored - exact) / np.linalg.norm(exact))
    assert 0.02 < error < 0.2
    assert weights.loss.by_kind()[kind.name] == pytest.approx(error, rel=0.3)  # of the whole block


def test_llama3_frequencies_come_from_their_tensor(tmp_path: Path) -> None:
    make_checkpoint(next(x for x in CASES if x.name == "llama3-rope"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    raw["rope_parameters"] = {"rope_type": "llama3", **scaling}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = open_model(tmp_path, weights="f32").config
    tensors = convert(tmp_path, tmp_path / "plain.gguf")
    entries = GgufFile(tmp_path / "plain.gguf").metadata
    known = {k: v for k, v in entries.items() if k.startswith("llama.")}
    divisors = _divisors(theirs, theirs.rope_scaling).astype(np.float32)
    write(tmp_path / "m.gguf", "llama", known, {**tensors, "rope_freqs.weight": divisors})
    assert open_model(tmp_path / "m.gguf", weights="f32").config.rope_scaling == theirs.rope_scaling
    write(tmp_path / "w.gguf", "llama", known, {**tensors, "rope_freqs.weight": divisors + 1})
    config = open_model(tmp_path / "w.gguf", weights="f32").config
    plain = inverse_frequencies(first_rope(replace(config, rope_scaling=RopeScaling())))
    np.testing.assert_allclose(inverse_frequencies(first_rope(config)), plain / (divisors + 1))
    assert attention_factor(config.rope_scaling) == 1


def test_a_quantised_directory_from_gguf(stories: Path, tmp_path: Path) -> None:
    convert(stories, tmp_path / "model.gguf", Kind.Q4_0)
    source = open_model(tmp_path / "model.gguf", weights="w4a16")
    save(source.weights, tmp_path / "out", name=source.name)
    copy = open_model(tmp_path / "out", verify=True)
    check_same_weights(copy, source)
    assert copy.tokenizer.encode(TEXTS[0]) == source.tokenizer.encode(TEXTS[0])


@pytest.mark.full
def test_four_gigabytes_open_at_once(tmp_path: Path) -> None:
    """Mapped, not read: the file is sparse, and reading it would take longer than the limit."""
    path = write_large(tmp_path / "large.gguf")
    assert path.stat().st_size > 4e9
    start = time.process_time()
    model = open_model(path)
    assert time.process_time() - start < 3.0
    assert model.config.num_layers == 8


def test_kinds_are_those_of_the_library() -> None:
    assert {x.name: x.value for x in kinds.Kind} == {x.name: x.value for x in Kind}
    assert dict(kinds.SIZES) == gguf.GGML_QUANT_SIZES

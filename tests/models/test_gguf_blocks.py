"""The types of GGUF files as they are stored: bit by bit, mixed in one file, up to the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.errors import ModelError
from hetero.models import default_weights, open_model
from hetero.models.gguf import GgufFile, GgufWeights
from hetero.models.gguf.block_types import STORED
from hetero.models.gguf.tensors import GgufTensor, stored_as
from hetero.models.layout import block_matrices
from hetero.models.packing import pack_rows
from tests.models.gguf_files import random_blocks, tensor_file, write_mixed

KINDS = list(STORED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [16, 37])
def test_what_is_stored_is_what_the_library_reads(kind: Kind, rows: int, tmp_path: Path) -> None:
    """Random bytes, so that every code and every scale occurs."""
    data = random_blocks(np.random.default_rng(rows), kind, rows, 768)
    file = GgufFile(tensor_file(tmp_path / "x.gguf", data, kind))
    packed = pack_rows([GgufTensor(file, "x")], stored_as(kind))
    np.testing.assert_array_equal(packed.dequantize(), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_1])
@pytest.mark.parametrize("at", [0, 2])
def test_scales_that_are_not_finite_are_refused(kind: Kind, at: int, tmp_path: Path) -> None:
    data = random_blocks(np.random.default_rng(0), kind, 16, 256)
    data[3, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    file = GgufFile(tensor_file(tmp_path / "x.gguf", data, kind))
    with pytest.raises(ModelError, match="tensor x holds a value that is not finite"):
        pack_rows([GgufTensor(file, "x")], stored_as(kind))


@pytest.mark.parametrize("exponent", [103, 144, 255])
def test_powers_of_two_that_fp16_lacks_are_refused(exponent: int, tmp_path: Path) -> None:
    """But where all values are zero, as in blocks of padding."""
    data = random_blocks(np.random.default_rng(0), Kind.MXFP4, 16, 64, 1.0)
    data[3, 0] = exponent
    file = GgufFile(tensor_file(tmp_path / "x.gguf", data, gguf.GGMLQuantizationType.MXFP4))
    with pytest.raises(ModelError, match="tensor x holds scales beyond fp16's"):
        pack_rows([GgufTensor(file, "x")], stored_as(Kind.MXFP4))
    data[3, 1:17] = 0
    file = GgufFile(tensor_file(tmp_path / "y.gguf", data, gguf.GGMLQuantizationType.MXFP4))
    packed = pack_rows([GgufTensor(file, "x")], stored_as(Kind.MXFP4))
    assert not packed.dequantize()[3, :32].any()


def exact(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    info = file.tensors[name]
    data = file.raw(name).reshape(int(np.prod(info.shape[:-1])), -1)
    return np.asarray(gguf.quants.dequantize(data, info.kind), np.float32)


def test_a_file_of_many_types_keeps_every_number(tmp_path: Path) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(3))
    loaded = open_model(path, weights="gguf-a16")
    weights = loaded.weights
    assert isinstance(weights, GgufWeights)
    assert weights.weight_format is WeightFormat.GGUF_A16
    file, stored = weights.file, []
    for layer in range(loaded.config.num_layers):
        block, prefix = weights.block(layer), f"blk.{layer}."
        np.testing.assert_array_equal(
            block.matrix("o").dequantize(), exact(file, f"{prefix}attn_output.weight")
        )
        both = [exact(file, f"{prefix}{x}.weight") for x in ("ffn_gate", "ffn_up")]
        np.testing.assert_array_equal(block.matrix("gate_up").dequantize(), np.concatenate(both))
        matrices = [block.matrix(x.name) for x in block_matrices(loaded.config, 0)]
        assert len({part.storage for matrix in matrices for part in matrix.parts}) > 2
        stored += matrices
    np.testing.assert_array_equal(weights.embed().dequantize(), exact(file, "token_embd.weight"))
    stored += [weights.embed(), weights.lm_head()]
    vectors = sum(4 * x.shape[0] for x in file.tensors.values() if len(x.shape) == 1)
    assert weights.nbytes == vectors + sum(x.nbytes for x in stored)
    assert weights.requantised() == {}


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ((Kind.Q4_0,), "w4a16"),
        ((Kind.Q8_0,), "w8a16"),
        ((Kind.F16,), "w4a16"),
        ((Kind.Q4_0, Kind.Q6_K), "gguf-a16"),
        ((Kind.Q5_0,), "gguf-a16"),
    ],
    ids=str,
)
def test_the_default_keeps_what_is_stored(kinds: Any, wanted: str, tmp_path: Path) -> None:
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(3), kinds)
    assert default_weights(path) == wanted
    assert open_model(path).weights.weight_format == wanted


@pytest.mark.parametrize("model", ["demo", "random:llama-3.2-1b"])
def test_other_models_have_no_format_of_a_file(model: str) -> None:
    with pytest.raises(ModelError, match=r"gguf-a8 is what a GGUF file stores; give a \.gguf file"):
        open_model(model, weights="gguf-a8")


def test_rows_that_are_no_whole_blocks_are_held_as_floats(tmp_path: Path) -> None:
    """One head of 8: values would begin in the middle of a block of 16 rows."""
    path = write_mixed(tmp_path / "m.gguf", np.random.default_rng(3), head_dim=8, kv=1)
    loaded = open_model(path, weights="gguf-a16")
    assert [x.storage for x in loaded.weights.block(0).matrix("qkv").parts] == [StorageFormat.F32]
    assert isinstance(loaded.weights, GgufWeights)
    v = exact(loaded.weights.file, "blk.0.attn_v.weight")
    np.testing.assert_array_equal(loaded.weights.block(0).matrix("qkv").dequantize()[-len(v) :], v)

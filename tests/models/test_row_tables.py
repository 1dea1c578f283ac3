"""Embeddings of layers' inputs: rows are read from the model's file, the table is never copied."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from hetero import LLM
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.quantized import save
from tests.models.gguf_files import convert
from tests.models.test_gguf_store import anonymous_bytes
from tests.support.checkpoints import GEMMA4, make_checkpoint

IDS = np.asarray([262, 0, 17, 17, 100], np.int32)
INPUTS = {"hidden_size_per_layer_input": 32}  # rows of whole blocks of 32
TABLE = "model.embed_tokens_per_layer.weight"
LARGE = 1 << 16  # tokens


def shared_model(folder: Path, **changes: object) -> Path:
    make_checkpoint(replace(GEMMA4, changes=GEMMA4.changes | INPUTS | changes), folder)
    return folder


@pytest.mark.parametrize("weights", ["f32", "w4a16", "w8a16"])
def test_rows_of_a_directory_are_its_numbers(tmp_path: Path, weights: str) -> None:
    table = load_file(shared_model(tmp_path) / "model.safetensors")[TABLE]
    rows = open_model(tmp_path, weights=weights).weights.table("embed_inputs")
    np.testing.assert_array_equal(rows(IDS), table[IDS])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q5_1, Kind.Q8_0])
def test_rows_of_a_gguf_file_are_its_numbers(tmp_path: Path, kind: Kind) -> None:
    convert(shared_model(tmp_path), tmp_path / "model.gguf", kind)
    weights = open_model(tmp_path / "model.gguf", weights="f32").weights
    whole = weights.outer_matrix("embed_inputs").dequantize()
    np.testing.assert_array_equal(weights.table("embed_inputs")(IDS), whole[IDS])
    stored = open_model(tmp_path / "model.gguf").weights.table("embed_inputs")
    np.testing.assert_array_equal(stored(IDS), whole[IDS])


@pytest.mark.parametrize("weights", ["f32", "w4a16"])
def test_rows_of_a_quantised_directory_are_as_stored(tmp_path: Path, weights: str) -> None:
    save(open_model(shared_model(tmp_path), weights=weights).weights, tmp_path / "stored")
    stored = open_model(tmp_path / "stored").weights
    whole = stored.outer_matrix("embed_inputs").dequantize()
    np.testing.assert_array_equal(stored.table("embed_inputs")(IDS), whole[IDS])


@pytest.mark.full
def test_a_row_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    tensors = load_file(shared_model(tmp_path) / "model.safetensors")
    tensors[TABLE][17, 3] = np.inf
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path, tmp_path / "model.gguf")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with LLM(str(path), device="npu", weights="f32", kv="f32") as llm:
            fine = llm.logits([5, 6, 7])
            with pytest.raises(ModelError, match=r"holds a value that is not finite"):
                llm.logits([5, 17, 7])
            np.testing.assert_array_equal(llm.logits([5, 6, 7]), fine)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize("filed", [False, True])
def test_the_table_takes_no_memory(tmp_path: Path, filed: bool) -> None:
    """It has 160 MiB as float32, ten times as much as the other weights."""
    wide = {"vocab_size": LARGE, "vocab_size_per_layer_input": LARGE}
    shared_model(tmp_path, **wide, hidden_size_per_layer_input=128)
    path = tmp_path
    if filed:
        path = tmp_path / "model.gguf"
        convert(tmp_path, path, Kind.F16)
    gc.collect()
    before = anonymous_bytes()
    with LLM(str(path), device="npu", weights="f32", kv="f32") as llm:
        llm.logits([5, 6, LARGE - 1])
        taken = anonymous_bytes() - before
    assert taken < 2 * LARGE * 5 * 128, f"{taken / 2**20:.0f} MiB"

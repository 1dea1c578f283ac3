"""Experts in one tensor of all, as Qwen3.5-MoE is published: in a model of text and pictures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufFile
from hetero.models.stacked_experts import StackedTensor
from tests.models.gguf_files import convert, write
from tests.runtime.test_routed_logits import QWEN3_5_GGUF, drawn

EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The tiny checkpoint with its experts stacked, under the names of the wrapper."""
    folder, _ = drawn("Qwen3_5Moe", QWEN3_5_GGUF)
    target = tmp_path / "wrapped"
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    parts: dict[tuple[str, str], dict[int, Any]] = {}
    for name in list(tensors):
        if match := EXPERT.fullmatch(name):
            prefix, number, part = match.groups()
            parts.setdefault((prefix, part), {})[int(number)] = tensors.pop(name)
    matrices = {key: np.stack([x[i] for i in sorted(x)]) for key, x in parts.items()}
    for prefix in {prefix for prefix, _ in matrices}:
        both = [matrices[prefix, part] for part in ("gate", "up")]
        tensors[f"{prefix}gate_up_proj"] = np.concatenate(both, axis=1)
        tensors[f"{prefix}down_proj"] = matrices[prefix, "down"]
    renamed = {x.replace("model.", "model.language_model.", 1): y for x, y in tensors.items()}
    save_file(renamed, target / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wrapper = {"model_type": "qwen3_5_moe", "text_config": raw}
    (target / "config.json").write_text(json.dumps(wrapper), encoding="utf-8")
    return target


def test_stacked_experts_are_those_of_a_module_each(published: Path) -> None:
    folder, _ = drawn("Qwen3_5Moe", QWEN3_5_GGUF)
    ours, theirs = (open_model(x, weights="f32").weights for x in (published, folder))
    for i in range(2):
        one, other = ours.block(i), theirs.block(i)
        assert set(one.matrices) == set(other.matrices)
        for name, matrix in one.matrices.items():
            np.testing.assert_array_equal(matrix.data, other.matrix(name).data)
        for name, vector in one.vectors.items():
            np.testing.assert_array_equal(vector, other.vectors[name])


def test_what_is_wrong_with_tensors_is_said(published: Path) -> None:
    file = published / "model.safetensors"
    tensors = load_file(file)
    both = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    gate = "model.language_model.layers.0.mlp.shared_expert_gate.weight"
    own = "model.layers.1.mlp.experts.gate_up_proj"
    for changes, rule in (
        ({both: tensors[both][:7]}, rf"tensor {own} must have the shape \[8, 128, 64\]"),
        ({both: tensors[both][:, :96]}, rf"tensor {own} must have the shape \[8, 128, 64\]"),
        ({gate: None}, "mlp.shared_expert_gate.weight is missing"),
    ):
        kept = {key: x for key, x in (tensors | changes).items() if x is not None}
        save_file(kept, file)
        with pytest.raises(ModelError, match=rule):
            open_model(published)


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("ffn_gate_inp_shexp.weight", None, "ffn_gate_inp_shexp.weight is missing"),
        ("ffn_down_shexp.weight", None, "ffn_down_shexp.weight is missing"),
        ("ffn_up_shexp.weight", np.zeros((32, 64)), r"must have the shape \[96, 64\]"),
        ("ffn_down_exps.weight", np.zeros((5, 64, 64)), r"must have the shape \[8, 64, 64\]"),
    ],
)
def test_what_a_gguf_file_lacks_is_said(name: str, change: Any, rule: str, tmp_path: Path) -> None:
    folder, _ = drawn("Qwen3_5Moe", QWEN3_5_GGUF)
    tensors = convert(folder, tmp_path / "m.gguf") | {f"blk.0.{name}": change}
    entries = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in GgufFile(tmp_path / "m.gguf").metadata.items()
        if key.partition(".")[0] in ("qwen35moe", "tokenizer")
    }
    kept = {key: x for key, x in tensors.items() if x is not None}
    write(tmp_path / "bad.gguf", "qwen35moe", entries, kept)
    with pytest.raises(ModelError, match=rule):
        open_model(tmp_path / "bad.gguf")


def test_a_shared_gate_may_be_a_row(tmp_path: Path) -> None:
    """Some converters write it as a matrix of one row."""
    folder, _ = drawn("Qwen3_5Moe", QWEN3_5_GGUF)
    tensors = convert(folder, tmp_path / "m.gguf")
    entries = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in GgufFile(tmp_path / "m.gguf").metadata.items()
        if key.partition(".")[0] in ("qwen35moe", "tokenizer")
    }
    gates = {x: y for x, y in tensors.items() if x.endswith("ffn_gate_inp_shexp.weight")}
    for shape in ((-1,), (1, -1)):
        changed = {name: gate.reshape(shape) for name, gate in gates.items()}
        write(tmp_path / "other.gguf", "qwen35moe", entries, tensors | changed)
        vectors = open_model(tmp_path / "other.gguf").weights.block(0).vectors
        np.testing.assert_array_equal(
            vectors["shared_gate"], gates["blk.0.ffn_gate_inp_shexp.weight"].reshape(-1)
        )


@pytest.mark.full
@given(st.data())
def test_rows_of_any_experts(data: st.DataObject) -> None:
    """Rows go on from expert to expert."""
    values = np.arange(3 * 5 * 2, dtype=np.float32).reshape(3, 5, 2)
    start = data.draw(st.integers(0, 14))
    stop = data.draw(st.integers(start + 1, 15))
    rows = StackedTensor("x", ["x"], values).rows(start, stop)
    np.testing.assert_array_equal(rows, values.reshape(15, 2)[start:stop])

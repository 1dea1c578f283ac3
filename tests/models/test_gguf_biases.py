"""Biases and fused weights of GGUF files, in every combination that llama.cpp takes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from hetero.errors import ModelError
from hetero.models import open_model
from tests.models.gguf_files import write_tiny

ROWS = {
    "attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 64, "ffn_up": 64,
    "ffn_down": 32,
}  # fmt: skip
QKV = ("attn_q", "attn_k", "attn_v")
Tensors = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None]


def biases(*names: str) -> Tensors:
    rng = np.random.default_rng(5)
    every = {name: rng.normal(0, 1, n).astype(np.float32) for name, n in ROWS.items()}
    return {f"blk.0.{name}.bias": every[name] for name in names}


def weights(path: Path) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """The matrices and biases of the first block as they are computed with."""
    model = open_model(path, weights="f32")
    block = model.weights.block(0)
    found = {name: block.matrix(name).dequantize() for name in ("qkv", "o", "gate_up", "down")}
    found |= {x.name: np.asarray(block.vectors[x.name]) for x in model.weights.vectors(0)}
    return found


@pytest.mark.parametrize("given", [("attn_q",), QKV, ("attn_v", "ffn_up"), ("attn_output",),
                                   ("ffn_gate",), ("ffn_down",), tuple(ROWS)])  # fmt: skip
def test_a_bias_that_is_missing_is_zero(given: tuple[str, ...], tmp_path: Path) -> None:
    zeros: Tensors = {f"blk.0.{name}.bias": np.zeros(n, np.float32) for name, n in ROWS.items()}
    some = weights(write_tiny(tmp_path / "some.gguf", tensors=biases(*given)))
    every = weights(write_tiny(tmp_path / "every.gguf", tensors=zeros | biases(*given)))
    for name in some:
        np.testing.assert_array_equal(some[name], every[name])
    assert any(np.any(some[name]) for name in some if name.endswith("_bias"))


@pytest.mark.parametrize("architecture", ["llama", "internlm2", "qwen2"])
def test_a_fused_weight_is_its_three_parts(architecture: str, tmp_path: Path) -> None:
    """Queries and keys of `llama` and `internlm2` lie pair by pair, in one tensor as in three."""
    path = write_tiny(tmp_path / "three.gguf", arch=architecture, tensors=biases(*QKV))
    three = {x.name: x.data for x in gguf.GGUFReader(path).tensors}
    none: Tensors = dict.fromkeys([f"blk.0.{name}.weight" for name in QKV])
    fused: Tensors = {
        f"blk.0.attn_qkv.{suffix}": np.concatenate([three[f"blk.0.{x}.{suffix}"] for x in QKV])
        for suffix in ("weight", "bias")
    }
    wanted = weights(path)
    whole = write_tiny(tmp_path / "one.gguf", arch=architecture, tensors=none | fused)
    del fused["blk.0.attn_qkv.bias"]
    mixed = write_tiny(
        tmp_path / "mixed.gguf", arch=architecture, tensors=none | fused | biases(*QKV)
    )
    for other in (weights(whole), weights(mixed)):
        for name in wanted:
            np.testing.assert_array_equal(wanted[name], other[name])


def test_a_bias_of_another_size_is_refused(tmp_path: Path) -> None:
    wrong: Tensors = {"blk.0.attn_k.bias": np.zeros(32, np.float32)}
    path = write_tiny(tmp_path / "m.gguf", tensors=wrong)
    with pytest.raises(ModelError, match=r"attn_k\.bias must have the shape \[16\]"):
        open_model(path)


def test_a_bias_that_the_architecture_has_not_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch="gemma", tensors=biases("attn_q"))
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_q\.bias does not belong to a gemma"):
        open_model(path)

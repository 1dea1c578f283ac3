"""GGUF files of LFM2: llama.cpp reads them alike, and what a file cannot say is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hetero import LLM
from hetero.errors import ModelError
from hetero.models import open_model
from tests.models.gguf_files import convert
from tests.support.checkpoints import CASES, make_checkpoint, relative_error

LFM2 = next(x for x in CASES if x.name == "lfm2")
LLAMA_CPP = """
import json, sys
import llama_cpp, numpy
path, found, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = llama_cpp.Llama(
    path, n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
)
model.eval(tokens)
numpy.save(found, numpy.array(model.scores[: len(tokens)]))
"""  # in a process of its own: it leaves files open
KEY_VALUE_HEADS = "lfm2.attention.head_count_kv"


@pytest.mark.full
def test_llama_cpp_gives_the_same_logits(tmp_path: Path) -> None:
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    make_checkpoint(replace(LFM2, changes={**LFM2.changes, **sizes}), tmp_path)
    path, found = tmp_path / "model.gguf", tmp_path / "logits.npy"
    convert(tmp_path, path)
    tokens = np.random.default_rng(3).integers(3, 263, 24).tolist()
    arguments = [str(path), str(found), json.dumps(tokens)]
    subprocess.run([sys.executable, "-c", LLAMA_CPP, *arguments], check=True, timeout=120)
    wanted = np.load(found)
    with LLM(str(path), device="gpu", weights="f32", kv="f32") as llm:
        assert relative_error(llm.logits(tokens), wanted) < 2e-3  # its caches are float16


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        ([0, 0, 0], "must be above 0 for a layer, got 3 zeros; choose another model"),
        ([0, 4, 2], "differs from layer to layer, which is not supported; choose another model"),
        ([0, 4], "must be one number or a list of 3, one for each layer, got 2; download"),
    ],
)
def test_layers_that_cannot_be_are_refused(heads: list[int], sentence: str, tmp_path: Path) -> None:
    make_checkpoint(LFM2, tmp_path)
    path = tmp_path / "model.gguf"
    convert(tmp_path, path, **{KEY_VALUE_HEADS.replace(".", "__"): heads})
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert f"{path}: {KEY_VALUE_HEADS} {sentence}" in str(caught.value)


def test_a_file_without_the_taps_of_a_layer_is_refused(tmp_path: Path) -> None:
    """The layer attends by its tensors, and is a convolution by its metadata."""
    make_checkpoint(LFM2, tmp_path)
    path = tmp_path / "model.gguf"
    convert(tmp_path, path, **{KEY_VALUE_HEADS.replace(".", "__"): [0, 0, 4]})
    with pytest.raises(ModelError, match=r"blk\.1\.shortconv\.in_proj\.weight is missing"):
        open_model(path)

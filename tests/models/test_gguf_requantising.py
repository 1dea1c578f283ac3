"""Copies of GGUF files with tensors in other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hetero import LLM
from hetero.errors import ModelError
from hetero.models.gguf import GgufFile
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.requantising import (
    PREDICTED,
    WRITTEN,
    check_copy,
    quantised,
    rounded,
    write_copy,
)
from tests.models.gguf_files import PIECES, write_tiny

CHANGED = {"blk.0.attn_q.weight": Kind.Q4_0, "blk.0.ffn_down.weight": Kind.F16}
OWN = {"general.file_type", "general.quantization_version", PREDICTED}


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(np.all(a == b))


def dequantised(path: Path, name: str) -> np.ndarray[Any, Any]:
    file = GgufFile(path)
    info = file.tensors[name]
    raw = file.raw(name).reshape(info.shape[0], -1)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(info.kind))


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_type_is_quantised_as_the_library_does(kind: Kind) -> None:
    rows = np.random.default_rng(0).standard_normal((37, 96), np.float32)
    rows[3] = 0
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(kind))
    assert (quantised(rows, kind) == theirs).all()
    exact = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType(kind))
    assert (rounded(rows, kind) == exact).all()


@pytest.mark.parametrize("split", [0, 5])
def test_everything_but_the_named_tensors_is_copied(tmp_path: Path, split: int) -> None:
    tokens: list[Any] = [*PIECES[:-1], b"\xff"]  # some files have words that are no UTF-8
    own: dict[str, Any] = {"general__name": "Grüße", "general__x": [1, 2], "general__y": [True]}
    write_tiny(tmp_path / "m.gguf", tokens=tokens, split=split, **own)
    source = next(iter(sorted(tmp_path.glob("m*.gguf"))))
    file, out = GgufFile(source), tmp_path / "out.gguf"
    write_copy(file, out, CHANGED, {PREDICTED: 0.25})
    copy = GgufFile(out)
    left = {x: y for x, y in file.metadata.items() if not x.startswith("split.")}
    assert left.keys() <= copy.metadata.keys() <= left.keys() | OWN
    assert all(same(y, copy.metadata[x]) for x, y in left.items() if x not in OWN)
    assert copy.metadata[PREDICTED] == 0.25
    assert list(copy.tensors) == list(file.tensors)
    for name, info in file.tensors.items():
        assert copy.tensors[name].kind is CHANGED.get(name, info.kind)
        assert copy.tensors[name].shape == info.shape
        if name not in CHANGED:
            assert (copy.raw(name) == file.raw(name)).all()
    wanted = rounded(dequantised(source, "blk.0.attn_q.weight"), Kind.Q4_0)
    assert (dequantised(out, "blk.0.attn_q.weight") == wanted).all()


def test_the_copy_opens_here_and_in_the_library(tmp_path: Path) -> None:
    file = GgufFile(write_tiny(tmp_path / "m.gguf"))
    kinds = dict.fromkeys((x for x, y in file.tensors.items() if len(y.shape) > 1), Kind.Q8_0)
    write_copy(file, tmp_path / "out.gguf", kinds)
    assert len(gguf.GGUFReader(tmp_path / "out.gguf").tensors) == len(file.tensors)
    assert GgufFile(tmp_path / "out.gguf").metadata["general.file_type"] == 7  # MOSTLY_Q8_0
    with LLM(str(tmp_path / "out.gguf"), device="npu") as llm:
        assert llm.model.weights.weight_format == "w8a16"
        assert len(llm.generate("abc", max_tokens=3, temperature=0).tokens) > 0


def test_a_copy_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile(write_tiny(tmp_path / "m.gguf"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(ModelError, match="No space left on device"):
        write_copy(file, tmp_path / "out.gguf", CHANGED)
    assert [x.name for x in tmp_path.iterdir()] == ["m.gguf"]


def test_where_a_copy_is_not_written(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    file, other = GgufFile(source), write_tiny(tmp_path / "other.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for out, sentence in (
        (tmp_path / "out", "a name that ends in .gguf"),
        (tmp_path / "none" / "out.gguf", "create it first"),
        (tmp_path / "folder.gguf", "is no file"),
        (other, "exists already"),
        (source, "is the model that is quantised"),
    ):
        with pytest.raises(ModelError, match=sentence):
            check_copy(file, out, overwrite=False)
    with pytest.raises(ModelError, match="hetero quantize did not write it"):
        check_copy(file, other, overwrite=True)
    write_copy(file, tmp_path / "out.gguf", CHANGED, {PREDICTED: 0.1})
    check_copy(file, tmp_path / "out.gguf", overwrite=True)

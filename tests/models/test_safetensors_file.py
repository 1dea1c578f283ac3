"""Malformed safetensors files: every fault is found before a tensor is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hetero.errors import ModelError
from hetero.models.safetensors_file import SafetensorsFile
from tests.support.selection import examples

DATA = bytes(range(24))
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def raw_file(path: Path, header: Any, data: bytes = DATA, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint32])
def test_tensors_are_views_of_the_file(tmp_path: Path, dtype: Any) -> None:
    tensors = {"a": np.arange(12).reshape(3, 4).astype(dtype), "b": np.ones((2, 1), dtype)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    for name, values in tensors.items():
        np.testing.assert_array_equal(file.array(name), values)
        assert not file.array(name).flags.writeable
        assert np.shares_memory(file.array(name), file.array(name))


def test_tensors_that_lie_unaligned_are_copied(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    values = np.array([1.5, -2.5], dtype=np.float32)
    for spaces in range(4):
        text = json.dumps(header).encode() + b" " * spaces
        path = raw_file(tmp_path / f"{spaces}", text, b"\0" + values.tobytes())
        found = SafetensorsFile(path).array("b")
        assert found.flags.aligned  # x86 reads what is not, other processors do not
        np.testing.assert_array_equal(found, values)


def test_forgetting_pages_changes_no_value(tmp_path: Path) -> None:
    tensors = {f"{i}": np.random.default_rng(i).random(5000) for i in range(4)}
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    views = {name: file.array(name) for name in tensors}
    file.forget(["0", "1", "3"])
    for name, values in tensors.items():
        np.testing.assert_array_equal(views[name], values)


BROKEN: list[tuple[Any, str]] = [
    ({"a": ENTRY | {"data_offsets": [0, 20]}},
     "tensor a of shape [2, 3] in F32 has 24 bytes, got 20; download the file again"),
    ({"a": ENTRY | {"data_offsets": [8, 32]}},
     "tensor a starts at byte {8} instead of {0}; download the file again"),
    ({"a": ENTRY | {"shape": [1], "data_offsets": [0, 4]}},
     "tensors end at byte {4}, but the file has {24} bytes; download the file again"),
    ({"a": ENTRY, "b": ENTRY},
     "tensor b starts at byte {0} instead of {24}; download the file again"),
    ({"a": ENTRY | {"dtype": "F8_E4M3"}},
     "tensor a has the data type F8_E4M3, supported are F32, F16, BF16; convert the model"),
    ({"a": ENTRY | {"dtype": ["F32"]}},
     "tensor a has the data type ['F32'], supported are F32, F16, BF16; convert the model"),
    ({"a": ENTRY | {"shape": [2, -3]}},
     "tensor a has the shape [2, -3] at bytes [0, 24), which are not sizes; download the file "
     "again"),
    ({"a": ENTRY | {"shape": "23"}},
     "tensor a has the shape 23 at bytes [0, 24), which are not sizes; download the file again"),
    ({"a": ENTRY | {"data_offsets": [0, 24, 1]}},
     "tensor a needs dtype, shape and data_offsets; download the file again"),
    ({"a": {"dtype": "F32"}},
     "tensor a needs dtype, shape and data_offsets; download the file again"),
    ({"a": 3}, "tensor a needs dtype, shape and data_offsets; download the file again"),
    ([], "header must be a JSON object; download the file again"),
    (b'{"a": {}, "a": {}}',
     "header is not valid JSON (a name occurs twice); download the file again"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "sentence"), BROKEN)
def test_a_malformed_header(tmp_path: Path, header: Any, sentence: str) -> None:
    path = raw_file(tmp_path / "x.safetensors", header)
    base = path.stat().st_size - len(DATA)
    for offset in (0, 4, 8, 24):  # {n} in the sentence is n bytes into the data
        sentence = sentence.replace(f"{{{offset}}}", str(base + offset))
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(path)
    assert str(caught.value) == f"{path}: {sentence}"


@pytest.mark.parametrize("length", [10_000, 2**40, 2**64 - 1])
def test_an_absurd_header_length(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"a": ENTRY}, length=length)
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(path)
    assert str(caught.value) == (
        f"{path}: header of {length} bytes does not fit the file of {path.stat().st_size} bytes; "
        "download the file again"
    )


def test_a_truncated_file(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"a": ENTRY})
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(path)
    assert str(caught.value) == (
        f"{path}: tensors end at byte {size}, but the file has {size - 5} bytes; download the file "
        "again"
    )


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_too_short_for_a_length(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(tmp_path / "x.safetensors")
    assert str(caught.value) == (
        f"{tmp_path / 'x.safetensors'}: a safetensors file has at least 8 bytes, got "
        f"{len(content)}; download the file again"
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"x: cannot be read \(No such file or directory\); check"):
        SafetensorsFile(tmp_path / "x")


@settings(deadline=None, max_examples=examples(200))
@given(place=st.integers(0, 120), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_any_damage_gives_tensors_or_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    content = bytearray(raw_file(path, {"a": ENTRY}).read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content[: len(content) - cut])
    try:
        file = SafetensorsFile(path)
    except ModelError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
    else:
        assert all(file.array(name).size <= 24 for name in file.entries)
